#!/usr/bin/env python3
"""Divides the networks of `models/zoo.py`, verifies them and compares their training with PyTorch.

    tools/zoo_table.py                            # all networks, prints a markdown table
    tools/zoo_table.py gpt2 llama --strategy tp=2

For each network and strategy:
- `verify` of the forward program, and of three AdamW steps, at two settings of the symbols;
- five AdamW steps on the same weights and batches as PyTorch: each loss within 1e-4 of PyTorch's,
  and then each running statistic (PyTorch mixes the unbiased variance in, ONNX that of the batch,
  so PyTorch's is rescaled);
- that as many parameters are trained as the module has and uses.

PyTorch's module is in training mode, with Dropout off. Embeddings that leave out a padding token
(`padding_idx`) have no gradient there in PyTorch, which the exported graph does not say: batches
have no padding tokens.

ResNet-50 has larger batches and a lower learning rate than the rest (`OWN`): a network that has
fifty norms over few numbers carries rounding on. With the settings of the others PyTorch's losses
in 32 and in 64 bits are 1e-2 apart after one step, and no comparison could tell anything. That they
are within 1e-4 with its own is part of what must hold.

Each network has a process of its own and a time limit. Needs the extra `zoo`. Exit code 1 where
anything does not hold.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from export_torch import Example

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("dp=2", "tp=2", "dp=2,tp=2")
SETTINGS: tuple[Mapping[str, int], ...] = (
    {"batch": 4, "seq": 8, "target": 6},
    {"batch": 3, "seq": 5, "target": 7},
)
VERIFIED_STEPS = 3
STEPS = 5
LOSS_TOLERANCE = 1e-4
DECAY = 1e-2
FIRST_TOKEN = 3  # what comes before are special tokens, padding among them
LIMITS = {"token_type_ids": 2}
"""Integers of inputs that are not tokens are below these."""


@dataclass(frozen=True)
class Settings:
    """With what a network is trained.

    Attributes:
        symbols: Sizes of the batches, in turn, and of the cases of `verify`.
        rate: Learning rate.
    """

    symbols: tuple[Mapping[str, int], ...] = SETTINGS
    rate: float = 1e-3


OWN = {"resnet50": Settings(({"batch": 8}, {"batch": 7}), 3e-5)}
"""Settings of networks that are ill conditioned with those of the rest."""


@dataclass
class Row:
    """What is found of one network under one strategy; see `HEADER`."""

    model: str
    strategy: str
    nodes: int = 0
    replicated: str = ""
    forward: str = ""
    training: str = ""
    bytes: str = ""
    seconds: float = 0.0
    loss: str = ""
    problem: str = ""

    def text(self) -> str:
        """Returns the row of the markdown table."""
        held = "yes" if not self.problem else f"no: {self.problem}"
        cells = [
            self.model, self.strategy, str(self.nodes or ""), self.replicated, self.forward,
            self.training, self.bytes, f"{self.seconds:.1f}" if self.seconds else "", self.loss,
            held,
        ]  # fmt: skip
        return "| " + " | ".join(cells) + " |"


HEADER = (
    "| model | strategy | nodes | without a rule | collectives forward | in a micro-batch | bytes "
    "| shard, s | loss | holds |\n|" + " --- |" * 10
)
"""Bytes: sent by a device forward and in a micro-batch, at the first setting. Seconds: `shard` with
training. Loss: largest relative difference of a loss from PyTorch's."""


def table(names: Sequence[str], strategies: Sequence[str], limit: float, opset: int) -> bool:
    """Prints the table; returns whether everything holds."""
    print(HEADER, flush=True)
    held = True
    for name in names:
        rows = measure(name, strategies, limit, opset)
        for row in rows:
            print(row.text(), flush=True)
            held &= not row.problem
    return held


def measure(name: str, strategies: Sequence[str], limit: float, opset: int) -> list[Row]:
    """Runs one network in a process of its own; returns a row for each strategy."""
    command = [sys.executable, __file__, name, "--task", "--opset", str(opset)]
    command += [part for s in strategies for part in ("--strategy", s)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        out, problem = done.stdout, ""
        if done.returncode:
            problem = (done.stderr.strip().splitlines() or ["it was killed"])[-1][:200]
            problem = f"exit code {done.returncode}: {problem}"
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode()
        problem = f"not done in {limit:.0f} s"
    rows = [Row(**json.loads(line)) for line in out.splitlines() if line.startswith("{")]
    missing = [s for s in strategies if s not in {row.strategy for row in rows}]
    return rows + [Row(name, s, problem=problem) for s in missing]


def task(name: str, strategies: Sequence[str], opset: int) -> None:
    """Prints a JSON line for each strategy."""
    sys.path.insert(0, str(ROOT / "models"))
    import zoo
    from export_torch import export, save

    made = zoo.example(name)
    with tempfile.TemporaryDirectory(prefix="onnxpar-zoo-") as folder:
        path = Path(folder) / f"{name}.onnx"
        save(export(made, opset), path)
        for strategy in strategies:
            row = Row(name, strategy)
            for check in (check_forward, check_training):
                try:
                    check(row, made, path)
                except Exception as error:
                    text = str(error).splitlines() or [""]
                    row.problem = f"{type(error).__name__}: {text[0][:300]}".replace("|", "\\|")
                    break
            print(json.dumps(asdict(row)), flush=True)


def check_forward(row: Row, made: "Example", path: Path) -> None:
    """Divides the forward program and verifies it."""
    from onnxpar import execute
    from onnxpar.pipeline import shard

    out = path.with_name("forward")
    summary = shard(path, row.strategy, out, force=True)
    totals = summary.report["totals"]
    row.nodes = totals["nodes"]
    row.forward = _counts(totals["collectives_by_op"])
    kinds = Counter(item["op_type"] for item in summary.report["replicated"])
    row.replicated = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    cases = execute.verify(out, path, cases=_cases(out, _settings(row.model)))
    row.bytes = str(cases[0].bytes_expected)
    _demand(cases)


def check_training(row: Row, made: "Example", path: Path) -> None:
    """Divides training, verifies three steps, and compares five losses with PyTorch's."""
    from onnxpar import execute
    from onnxpar.pipeline import shard
    from onnxpar.training.loss import parse_loss
    from onnxpar.training.optimizer import parse_optimizer
    from onnxpar.training.prepare import TrainingSpec

    out = path.with_name("training")
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"))
    began = perf_counter()
    summary = shard(path, row.strategy, out, force=True, training=spec)
    row.seconds = perf_counter() - began
    first = summary.report["totals"]
    row.training = _counts(first["collectives_by_op"])
    settings = _settings(row.model)
    chosen = _cases(out, settings)
    cases = execute.verify(out, path, cases=chosen, steps=VERIFIED_STEPS, lr=settings.rate)
    row.bytes += f" / {cases[0].bytes_expected}"
    _demand(cases)
    worst, statistic = _from_pytorch(out, made, settings, own=row.model in OWN)
    row.loss = f"{worst:.0e}"
    if worst > LOSS_TOLERANCE:
        row.problem = f"losses differ by {worst:.1e} from PyTorch's"
    elif statistic > LOSS_TOLERANCE:
        row.problem = f"running statistics differ by {statistic:.1e} from PyTorch's"


def _settings(name: str) -> Settings:
    return OWN.get(name, Settings())


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none"


def _cases(directory: Path, settings: Settings) -> list[str]:
    """Returns the settings as options of `verify`, symbols that there are only."""
    from onnxpar_runtime.manifest import Manifest

    manifest = Manifest.load(directory)
    program = next(iter(manifest.programs.values()))
    names = {d for s in program.inputs for d in s.shape if isinstance(d, str)}
    chosen = [{n: v for n, v in s.items() if n in names} for s in settings.symbols]
    return [",".join(f"{n}={v}" for n, v in values.items()) for values in chosen]


def _demand(cases: Sequence[Any]) -> None:
    """Raises AssertionError with the first problem of a case that does not hold."""
    for case in cases:
        if not case.ok:
            symbols = ", ".join(f"{n}={v}" for n, v in case.symbols.items())
            raise AssertionError(f"verify at {symbols}: {(case.problems or ('',))[0]}")


@dataclass(frozen=True)
class Trained:
    """What training came to.

    Attributes:
        losses: The loss of each step.
        statistics: Running statistics after the last, by name.
        parameters: Names of the parameters that have a gradient.
    """

    losses: Sequence[float]
    statistics: Mapping[str, Any]
    parameters: frozenset[str]


def _from_pytorch(
    directory: Path, made: "Example", settings: Settings, *, own: bool
) -> tuple[float, float]:
    """Returns how far losses and running statistics are from PyTorch's, the furthest, relative.

    Args:
        directory: The artifacts.
        made: The network.
        settings: With what both are trained.
        own: Whether PyTorch's losses must be near its own in 64 bits.

    Raises:
        AssertionError: They are not, or other parameters are trained than in PyTorch.
    """
    import torch

    ours, batches = _ranks(directory, settings)
    theirs = _pytorch(made, batches, settings.rate, torch.float32)
    if ours.parameters != theirs.parameters:
        raise AssertionError(
            f"trained or not, unlike in PyTorch: {sorted(ours.parameters ^ theirs.parameters)}"
        )
    if own:
        exact = _pytorch(made, batches, settings.rate, torch.float64)
        if (apart := _apart(theirs.losses, exact.losses)) > LOSS_TOLERANCE:
            raise AssertionError(f"PyTorch's losses differ by {apart:.1e} from its own in 64 bits")
        if (apart := _furthest(theirs, exact)) > LOSS_TOLERANCE:
            raise AssertionError(f"PyTorch's statistics differ by {apart:.1e} from its own so")
    if ours.statistics.keys() != theirs.statistics.keys():
        names = sorted(ours.statistics.keys() ^ theirs.statistics.keys())
        raise AssertionError(f"running statistics or not, unlike in PyTorch: {names}")
    return _apart(ours.losses, theirs.losses), _furthest(ours, theirs)


def _apart(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def _furthest(found: Trained, expected: Trained) -> float:
    """Returns how far a running statistic is off, of its largest element."""
    return max(
        (
            float(np.abs(found.statistics[name] - array).max() / np.abs(array).max())
            for name, array in expected.statistics.items()
        ),
        default=0.0,
    )


def _ranks(directory: Path, settings: Settings) -> tuple[Trained, list[dict[str, Any]]]:
    """Trains the ranks; returns what came of it, and the batches."""
    from onnxpar_runtime.training.group import TrainerGroup
    from onnxpar_runtime.training.hyper import Settings as Optimizer
    from onnxpar_runtime.training.hyper import hyperparameters

    rng = np.random.default_rng(0)
    scalars = hyperparameters("adamw", Optimizer(weight_decay=DECAY))
    with TrainerGroup(directory) as group:
        states = group.manifest.trained().states
        kept = [n for n, state in states.items() if state.kind == "statistic"]
        trained = frozenset(s.parameter for s in states.values() if s.kind == "gradient")
        turns = [settings.symbols[step % len(settings.symbols)] for step in range(1, STEPS + 1)]
        batches = [_batch(group.manifest, rng, symbols) for symbols in turns]
        losses = [
            group.train_step([batch], scalars.at(step, settings.rate)).loss
            for step, batch in enumerate(batches, 1)
        ]
        return Trained(losses, {name: group.gather(name) for name in kept}, trained), batches


def _pytorch(
    made: "Example", batches: Sequence[Mapping[str, Any]], rate: float, dtype: Any
) -> Trained:
    """Trains a copy of the module in that type; variances are those of the batches."""
    import torch

    module = copy.deepcopy(made.module).to(dtype).train()
    norms = {n: m for n, m in module.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    for norm in norms.values():
        norm.register_forward_pre_hook(_keep)
        norm.register_forward_hook(_of_the_batch)
    used = list(module.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in used if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in used if p.ndim <= 1], "weight_decay": 0.0},
        ],
        rate,
    )
    losses = []
    for batch in batches:
        tensors = {n: torch.tensor(a) for n, a in batch.items()}
        labels = tensors.pop("labels")
        inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        optimizer.zero_grad()
        loss = _loss(module(**inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    statistics = {
        f"{name}.{kind}": getattr(norm, kind).numpy()
        for name, norm in norms.items()
        for kind in ("running_mean", "running_var")
    }
    reached = frozenset(n for n, p in module.named_parameters() if p.grad is not None)
    return Trained(losses, statistics, reached)


def _keep(norm: Any, _: Any) -> None:
    norm.variance_before = norm.running_var.clone()


def _of_the_batch(norm: Any, inputs: Any, _: Any) -> None:
    """Replaces what was mixed in, the unbiased variance, by that of the batch."""
    count = inputs[0].numel() / inputs[0].shape[1]
    kept = norm.variance_before * (1 - norm.momentum)
    # A new tensor, since the backward pass keeps the old one.
    norm.running_var = kept + (norm.running_var - kept) * (count - 1) / count


def _loss(result: Any, labels: Any) -> Any:
    import torch

    logits = result if isinstance(result, torch.Tensor) else result.logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _batch(manifest: Any, rng: np.random.Generator, symbols: Mapping[str, int]) -> dict[str, Any]:
    """Returns random inputs, and labels below 10, which every network has as classes."""
    feeds = {}
    for spec in manifest.program("training_model").inputs:
        shape = [symbols[d] if isinstance(d, str) else d for d in spec.shape]
        if spec.dtype != "int64":
            feeds[spec.name] = rng.standard_normal(shape).astype(spec.dtype)
        elif spec.name == "labels" or spec.name in LIMITS:
            feeds[spec.name] = rng.integers(0, LIMITS.get(spec.name, 10), shape)
        else:
            feeds[spec.name] = rng.integers(FIRST_TOKEN, 96, shape)
    return feeds


def main() -> int:
    """Prints the table, or runs one network of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="networks; default: all")
    parser.add_argument("--strategy", action="append", help="may be repeated; default: three")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each network")
    parser.add_argument("--opset", type=int, default=20, help="of the export")
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    strategies = tuple(options.strategy or STRATEGIES)
    if options.task:
        task(options.names[0], strategies, options.opset)
        return 0
    listed = subprocess.run(
        [sys.executable, str(ROOT / "models" / "zoo.py"), "--list"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        sys.exit(f"models/zoo.py: {(listed.stderr.strip().splitlines() or ['failed'])[-1]}")
    known = [line.split()[0] for line in listed.stdout.splitlines()]
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"{unknown[0]}: expected one of {', '.join(known)}")
    held = table(options.names or known, strategies, options.limit, options.opset)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
