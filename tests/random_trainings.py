"""Random networks trained under random strategies, on all devices and on one.

    tools/fuzz-training 0 500            # seeds; a line for each that is not equal
    tools/fuzz-training 17 --keep DIR    # also writes model, strategy and directory to DIR

A case is one seed: a network of `layered_models.py`, a strategy, and how it is trained. Its
training on all devices must equal that on one as `onnxpar verify` compares them: losses, gradients,
moments, parameters and running statistics of each step, within tolerances by the arithmetic of each
type, with clipped gradients and accumulation over micro-batches. A case that fails is printed again
as small as it could be made. A refusal by `shard` (`OnnxparError`), or of sizes
(`SymbolValueError`), is a result of its own; how often each message came is printed at the end. A
case that ends the process or takes over two minutes is a failure, too.
"""

import argparse
import multiprocessing
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from traceback import format_exc
from typing import Any

import onnx

from onnxpar.api.runtime import verify
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import OnnxparError
from onnxpar.strategy import Strategy
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.errors import OnnxparRuntimeError, SymbolValueError
from tests.layered_models import CROSS_ENTROPY, Network, drawn_network, model_of

STEPS = 2
"""One with one micro-batch (or those of the pipeline), one with one more and clipped gradients."""
EQUAL, REFUSED, DIFFERENT = "equal", "refused", "different"
FAILED, CRASHED, ENDED = "failed", "crashed", "ended"
"""A rank failed; an exception that is not the project's; the process died, or took too long."""
LONGEST_S = 120.0
MESHES = (
    {"dp": 2}, {"tp": 2}, {"dp": 3}, {"tp": 3}, {"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 3}, {"tp": 2, "dp": 2}, {"dp": 2, "sp": 2}, {"dp": 2, "tp": 2, "sp": 2},
)  # fmt: skip
MOST_DEVICES = 8


@dataclass(frozen=True)
class Training:
    """A case.

    Attributes:
        network: What is trained.
        strategy: A strategy file's contents.
        optimizer: As `shard --optimizer` takes it.
        compute: The type of products; None for float32.
        ignore_index: The label that does not count, for cross-entropy.
        sizes: Values of the symbols.
    """

    network: Network
    strategy: Mapping[str, Any]
    optimizer: str
    compute: str | None
    ignore_index: int | None
    sizes: Mapping[str, int]

    def spec(self) -> TrainingSpec:
        """Returns how it is trained."""
        loss = parse_loss(self.network.loss, ignore_index=self.ignore_index)
        return TrainingSpec(loss, parse_optimizer(self.optimizer), compute=self.compute)


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        result: `EQUAL` or what else.
        text: The differences, or the message of the refusal.
        seconds: How long it took.
    """

    result: str
    text: str
    seconds: float


def training_of(seed: int) -> Training:
    """Returns the case of a seed."""
    draw = random.Random(f"training {seed}")
    network = drawn_network(draw)
    sizes = {"batch": draw.choice([2, 3, 4, 5, 8])}
    if any("seq" in str(d.dim_param) for d in _dims(model_of(network))):
        sizes["seq"] = draw.choice([2, 3, 5, 8])
    cross = network.loss == CROSS_ENTROPY
    return Training(
        network,
        _strategy(draw, model_of(network), sizes),
        draw.choice(["sgd", "momentum", "adam", "adamw", "lamb"]),
        "float16" if draw.random() < 0.15 else None,
        -100 if cross and draw.random() < 0.3 else None,
        sizes,
    )


def _dims(model: onnx.ModelProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    for value in model.graph.input:
        yield from value.type.tensor_type.shape.dim


def _strategy(
    draw: random.Random, model: onnx.ModelProto, sizes: Mapping[str, int]
) -> dict[str, Any]:
    mesh = draw.choice(MESHES)
    devices, axes = 1, list(mesh)
    for size in mesh.values():
        devices *= size
    data: dict[str, Any] = {"mesh": mesh}
    if draw.random() < 0.3:
        most = min(3, MOST_DEVICES // devices)
        data["pipeline"] = _pipeline(draw, draw.randint(1, most))
    if draw.random() < 0.3:
        data["parameter_axes"] = draw.sample(axes, draw.randint(0, len(axes)))
    way = draw.randrange(4)
    if way == 0:
        data["dataset"] = "full_batch"
    elif way == 1:
        rank = len(model.graph.input[0].type.tensor_type.shape.dim)
        data["dataset"] = {"x": _entry(draw, axes, rank)}
    chance = draw.choice([0.0, 0.2, 0.5])
    parameters = {
        t.name: _entry(draw, axes, len(t.dims))
        for t in model.graph.initializer
        if t.name[0] == "w" and t.dims and draw.random() < chance
    }
    data |= {"parameters": parameters} if parameters else {}
    if draw.random() < 0.4:
        level = draw.randint(1, 3)
        data["optimizer_parallel"] = {"level": level, "threshold": 1}
        if draw.random() < 0.2:
            data["optimizer_parallel"]["group"] = 2
    if draw.random() < 0.4:
        chosen = [n.name for n in model.graph.node if draw.random() < 0.4]
        entry: dict[str, Any] = {"nodes": draw.choice([["*"], chosen or ["*"]])}
        data["recompute"] = entry | {"communication": draw.choice(["recompute", "keep"])}
    if draw.random() < 0.2 and sizes["batch"] % 2 == 0:
        data["symbols"] = {"batch": {"divisor": 2}}
    if draw.random() < 0.1:
        data["rest"] = draw.choice(["data_parallel", "replicate"])
    return data


def _pipeline(draw: random.Random, stages: int) -> dict[str, Any]:
    schedule = draw.choice(["gpipe", "1f1b", "interleaved", "zb-h1"])
    entry: dict[str, Any] = {"stages": stages, "schedule": schedule}
    if schedule == "interleaved":
        entry["chunks"] = 2
    return entry | {"micro_batches": stages * draw.randint(1, 2)}


def _entry(draw: random.Random, axes: list[str], rank: int) -> list[Any]:
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw.sample(axes, draw.randint(0, len(axes))):
        draw.choice(dims).append(axis)
    return [d or None for d in dims]


def outcome(case: Training, folder: Path | None = None) -> Outcome:
    """Runs a case.

    Args:
        case: The case.
        folder: A new folder for model, strategy and directory; a temporary one by default.
    """
    began = perf_counter()
    with TemporaryDirectory(prefix="onnxpar-training-") as temporary:
        try:
            result, text = _compared(case, folder or Path(temporary))
        except (OnnxparError, SymbolValueError) as error:
            result, text = REFUSED, str(error)
        except OnnxparRuntimeError as error:
            result, text = FAILED, str(error).replace(temporary, "FOLDER")
        except Exception:
            result, text = CRASHED, format_exc()
    return Outcome(result, text, perf_counter() - began)


def _compared(case: Training, folder: Path) -> tuple[str, str]:
    path, out = folder / "model.onnx", folder / "out"
    onnx.save(model_of(case.network), path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shard_model(path, Strategy.from_dict(case.strategy), out, training=case.spec())
        at = ",".join(f"{name}={size}" for name, size in case.sizes.items())
        found = verify(out, path, [at], options=VerifyOptions(steps=STEPS))
    problems = [problem for one in found for problem in one.problems]
    if all(one.ok for one in found):
        return EQUAL, ""
    return DIFFERENT, "; ".join(problems)


def kind(found: Outcome) -> str:
    """Returns what the failures of one cause have in common: the message without names."""
    if found.result == DIFFERENT:
        return ""
    last = found.text.strip().rpartition("\n")[2]
    return "".join(c for c in last.split("'")[0] if c.isalpha())[-40:]


def shrunk(case: Training, found: Outcome, apart: "Apart") -> Training:
    """Returns the smallest case found that ends in the same result."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(case):
            ends = apart.outcome(candidate)
            if (ends.result, kind(ends)) == (found.result, kind(found)):
                case, smaller = candidate, True
                break
    return case


def _simpler(case: Training) -> Iterator[Training]:
    """Yields cases with one thing less, those with less to read first."""
    layers = case.network.layers
    for i in range(len(layers)):
        rest = layers[:i] + layers[i + 1 :]
        names = {t.name for t in model_of(replace(case.network, layers=rest)).graph.initializer}
        # Weights are numbered, so entries may name others now; those that name none are dropped.
        strategy = dict(case.strategy)
        if "parameters" in strategy:
            strategy["parameters"] = {n: e for n, e in strategy["parameters"].items() if n in names}
        if "recompute" in strategy:
            strategy["recompute"] = {**strategy["recompute"], "nodes": ["*"]}
        yield replace(case, network=replace(case.network, layers=rest), strategy=strategy)
    for i, layer in enumerate(layers):
        if layer.residual:
            plain = (*layers[:i], replace(layer, residual=False), *layers[i + 1 :])
            yield replace(case, network=replace(case.network, layers=plain))
    for key in case.strategy:
        if key != "mesh":
            yield replace(case, strategy={k: v for k, v in case.strategy.items() if k != key})
    for name in case.strategy.get("parameters", {}):
        rest_of = {n: e for n, e in case.strategy["parameters"].items() if n != name}
        yield replace(case, strategy={**case.strategy, "parameters": rest_of})
    if case.strategy["mesh"] != {"dp": 2} and len(case.strategy) == 1:
        yield replace(case, strategy={"mesh": {"dp": 2}})
    if case.compute is not None:
        yield replace(case, compute=None)
    if case.ignore_index is not None:
        yield replace(case, ignore_index=None)
    if case.optimizer != "sgd":
        yield replace(case, optimizer="sgd")


def text_of(case: Training) -> str:
    """Returns a case for people."""
    layers = ", ".join(
        f"{layer.kind}({layer.seed}){' + its operand' if layer.residual else ''}"
        for layer in case.network.layers
    )
    rest = {k: v for k, v in asdict(case).items() if k not in ("network", "strategy")}
    made = {k: v for k, v in vars(case.network).items() if k != "layers"}
    return f"{made} {layers} | {dict(case.strategy)} | {rest}"


# -- many cases, in processes of their own --------------------------------------------------------


class Apart:
    """Runs cases in another process, which may die."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def outcome(self, case: Training) -> Outcome:
        """Runs a case as `outcome` does; a process that ends or takes too long is a result."""
        began = perf_counter()
        if self._pool is None:
            # Sessions leave memory behind, so a process runs a limited number of cases.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, max_tasks_per_child=50)
        try:
            return self._pool.submit(outcome, case).result(LONGEST_S)
        except BrokenProcessPool:
            text = "the process died"
        except TimeoutError:
            text = f"no result after {LONGEST_S:g} s"
        self.close()
        return Outcome(ENDED, text, perf_counter() - began)

    def close(self) -> None:
        """Ends the process."""
        if self._pool is None:
            return
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self._pool.shutdown()
        self._pool = None


def main() -> int:
    """Runs a range of seeds; prints a line for each that fails, and how many are what."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?", help="not included; default: one seed")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the files of each case")
    parser.add_argument("--verbose", action="store_true", help="a line for each seed")
    options = parser.parse_args()
    last = options.first + 1 if options.last is None else options.last
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    apart = Apart()
    for seed in range(options.first, last):
        case = training_of(seed)
        if options.keep is not None:
            folder = options.keep / str(seed)
            folder.mkdir(parents=True)
            found = outcome(case, folder)
        else:
            found = apart.outcome(case)
        counts[found.result] += 1
        if found.result == REFUSED:
            refusals[found.text[:200]] += 1
        failed = found.result not in (EQUAL, REFUSED)
        if failed or options.verbose:
            text = f"{found.result}: seed {seed}: {found.text.strip()[-600:]}"
            print(f"{text} [{found.seconds:.1f} s]", flush=True)
        if failed:
            print(f"  smallest: {text_of(shrunk(case, found, apart))}", flush=True)
    apart.close()
    print(", ".join(f"{n} {what}" for what, n in counts.most_common()))
    for text, n in refusals.most_common():
        print(f"  {n} refused: {text}")
    return 0 if set(counts) <= {EQUAL, REFUSED} else 1


if __name__ == "__main__":
    sys.exit(main())
