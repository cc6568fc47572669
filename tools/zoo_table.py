#!/usr/bin/env python3
"""Compares training of the networks in `models/zoo.py` with PyTorch, or verifies them.

    tools/zoo_table.py                                          # all networks
    tools/zoo_table.py gpt2 llama --exporter ours --strategy tp=2
    tools/zoo_table.py --results zoo.jsonl --models exported    # continues an interrupted table
    tools/zoo_table.py --verify gpt2                            # the other table

For each network, exporter and strategy, it compares with PyTorch: the outputs of the undivided
model at two settings of the symbols, what is trained, and three losses of AdamW from the same
weights and batches. The exporters are `ours` (`models/export_torch.py`), `plain`
(`torch.onnx.export`) and `unoptimised` (the same with `optimize=False`). It checks that
- each output is within 2e-5 of PyTorch's, relative to its largest element;
- as many elements are trained as have a gradient in PyTorch, and as many have weight decay, which
  applies to tensors with more than one dim (PyTorch makes one tensor of two biases of an LSTM);
- each loss is within a relative 1e-5 of PyTorch's, or, if the network is ill conditioned, within
  four times the distance between PyTorch's losses in 32 and in 64 bits: both sides round in their
  own order, so PyTorch's rounding shows only the size of ours;
- with `ours`, trained tensors have the names that they have in PyTorch.

With `--verify`, for each network and strategy, exported by `ours`:
- `verify` of the forward program, and of three AdamW steps, at two settings of the symbols;
- five AdamW steps on the same weights and batches as PyTorch: each loss, and then each running
  statistic, within 1e-4 of PyTorch's.

PyTorch's module is in training mode, with Dropout off. In PyTorch, an embedding with `padding_idx`
has no gradient at that token; the exported graph does not say this, so batches have no padding.

ResNet-50 has larger batches and a lower learning rate than the others (`OWN`), because fifty norms
over few numbers amplify rounding. With the other settings, PyTorch's losses in 32 and in 64 bits
are 1e-2 apart after one step, and a comparison would show nothing. With its own settings they must
be within 1e-4.

Each network has its own process and a time limit. This needs the extra `zoo`. The exit code is 1 if
a condition does not hold.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from _zoo import Network
    from zoo_pytorch import Arrays, Trained

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("dp=2", "tp=2", "dp=2,tp=2")
EXPORTERS = ("ours", "plain", "unoptimised")
SETTINGS: tuple[Mapping[str, int], ...] = (
    {"batch": 4, "seq": 8, "target": 6, "nodes": 6, "edges": 10},
    {"batch": 3, "seq": 5, "target": 7, "nodes": 5, "edges": 7},
)
VERIFIED_STEPS = 3
STEPS = 5
LOSS_TOLERANCE = 1e-4
COMPARED_STEPS = 3
COMPARED_TOLERANCE = 1e-5
FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
"""Metadata key of PyTorch's optimizer: the values from which it computed an initializer."""
FORWARD_TOLERANCE = 2e-5
ROUNDING = 4.0
"""Losses may differ from PyTorch's by this factor times PyTorch's own distance from 64 bits."""


@dataclass(frozen=True)
class Settings:
    """The settings with which a network is trained.

    Attributes:
        symbols: Sizes of the batches, in turn, and of the cases of `verify`.
        rate: Learning rate.
    """

    symbols: tuple[Mapping[str, int], ...] = SETTINGS
    rate: float = 1e-3


OWN = {"resnet50": Settings(({"batch": 8}, {"batch": 7}), 3e-5)}
"""Settings for networks that are ill conditioned with the usual settings."""


@dataclass
class Compared:
    """A comparison of one exporter and one strategy with PyTorch; see `COMPARED`."""

    model: str
    exporter: str
    strategy: str
    forward: str = ""
    trained: str = ""
    frozen: int = 0
    expected: str = ""
    loss: str = ""
    bound: str = ""
    seconds: float = 0.0
    problem: str = ""

    def text(self) -> str:
        """Returns the row of the markdown table."""
        cells = [
            self.model, self.exporter, self.strategy, self.forward,
            self.trained + (f", {self.frozen} frozen" if self.frozen else ""), self.expected,
            self.loss, self.bound, f"{self.seconds:.1f}", _held(self.problem),
        ]  # fmt: skip
        return "| " + " | ".join(cells) + " |"


COMPARED = (
    "| model | exporter | strategy | forward | trained | PyTorch | loss | bound | s | holds |\n|"
    + " --- |" * 10
)
"""Forward: largest difference of an output from PyTorch's, relative to its largest element.
Trained: elements / tensors, and the number that the user must freeze. Loss: largest relative
difference of a loss from PyTorch's. Seconds: the time of `shard`."""


@dataclass
class Verified:
    """The results of one network with one strategy; see `VERIFIED`."""

    model: str
    strategy: str
    exporter: str = "ours"
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
        cells = [
            self.model, self.strategy, str(self.nodes or ""), self.replicated, self.forward,
            self.training, self.bytes, f"{self.seconds:.1f}" if self.seconds else "", self.loss,
            _held(self.problem),
        ]  # fmt: skip
        return "| " + " | ".join(cells) + " |"


VERIFIED = (
    "| model | strategy | nodes | without a rule | collectives forward | in a micro-batch | bytes "
    "| shard, s | loss | holds |\n|" + " --- |" * 10
)
"""Bytes: sent by a device forward and in a micro-batch, at the first setting. Seconds: `shard` for
training. Loss: largest relative difference of a loss from PyTorch's."""

Row = Compared | Verified


def _held(problem: str) -> str:
    return f"no: {problem}" if problem else "yes"


@dataclass(frozen=True)
class Wanted:
    """The contents of a table.

    Attributes:
        exporters: Names of `EXPORTERS`.
        strategies: Presets.
        opset: Opset of the exports by `ours`; PyTorch chooses that of the others.
        verify: Whether the table is that of `--verify`.
        models: Folder in which exported networks are kept, if any.
    """

    exporters: tuple[str, ...]
    strategies: tuple[str, ...]
    opset: int
    verify: bool
    models: Path | None

    def rows(self, name: str) -> list[Row]:
        """Returns the rows of one network, empty."""
        if self.verify:
            return [Verified(name, s) for s in self.strategies]
        return [Compared(name, e, s) for e in self.exporters for s in self.strategies]

    def read(self, line: str) -> Row:
        """Returns the row of a line of JSON."""
        return (Verified if self.verify else Compared)(**json.loads(line))


def table(names: Sequence[str], wanted: Wanted, limit: float, results: Path | None) -> bool:
    """Prints the table; returns whether all conditions hold.

    Args:
        names: The networks.
        wanted: The contents of the table.
        limit: Seconds for each network.
        results: File that keeps rows as lines of JSON; rows without a problem are not made again.
    """
    print(VERIFIED if wanted.verify else COMPARED, flush=True)
    kept: list[Row] = []
    if results is not None and results.exists():
        kept = [wanted.read(line) for line in results.read_text().splitlines()]
    holding = {_key(row): row for row in kept if not row.problem}
    held = True
    for name in names:
        rows = wanted.rows(name)
        for row in rows:
            if (old := holding.get(_key(row))) is not None:
                print(old.text(), flush=True)
        for row in measure(name, [r for r in rows if _key(r) not in holding], wanted, limit):
            print(row.text(), flush=True)
            held &= not row.problem
            if results is not None:
                with results.open("a") as file:
                    print(json.dumps(asdict(row)), file=file)
    return held


def _key(row: Row) -> tuple[str, str, str]:
    return row.model, row.exporter, row.strategy


def measure(name: str, rows: Sequence[Row], wanted: Wanted, limit: float) -> Iterator[Row]:
    """Makes rows of one network in a separate process, and yields each as it comes."""
    if not rows:
        return
    pairs = [part for row in rows for part in ("--pair", f"{row.exporter}:{row.strategy}")]
    command = [sys.executable, __file__, name, *pairs, "--opset", str(wanted.opset)]
    command += ["--verify"] if wanted.verify else []
    command += ["--models", str(wanted.models)] if wanted.models is not None else []
    missing = {_key(row): row for row in rows}
    places = [str(ROOT / "models"), os.environ.get("PYTHONPATH", "")]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        timer = Timer(limit, process.kill)
        began = perf_counter()
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                row = wanted.read(line)
                del missing[_key(row)]
                yield row
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["it was killed"])[-1][:200]
    late = perf_counter() - began >= limit
    for row in missing.values():
        row.problem = f"not done in {limit:.0f} s" if late else f"exit code {code}: {last}"
        yield row


@dataclass(frozen=True)
class Exported:
    """An exported network.

    Attributes:
        path: The file.
        loss: The loss, as an option of `shard`.
        forward: Largest difference of an output from PyTorch's, relative to its largest element.
        freeze: Parameters that the user must freeze, because PyTorch's exporters do not store that
            they require no gradient.
    """

    path: Path
    loss: str
    forward: float
    freeze: tuple[str, ...]


class Bench:
    """One network, which is exported and trained in PyTorch once for all rows.

    Attributes:
        name: Its name.
        made: The network.
        settings: The settings of its training.
        folder: Folder for files.
        opset: Opset of the exports by `ours`.
        models: Folder in which exported networks are kept, if any.
    """

    def __init__(self, name: str, folder: Path, opset: int, models: Path | None) -> None:
        """Makes the network."""
        import zoo

        self.name = name
        self.made: Network = zoo.example(name)
        self.settings = OWN.get(name, Settings())
        self.folder = folder
        self.opset = opset
        self.models = models
        self._exported: dict[str, Exported | Exception] = {}

    def exported(self, exporter: str) -> Exported:
        """Returns the network as one exporter writes it; each exporter runs once."""
        if exporter not in self._exported:
            try:
                self._exported[exporter] = self._export(exporter)
            except Exception as error:
                self._exported[exporter] = error
        found = self._exported[exporter]
        if isinstance(found, Exception):
            raise found
        return found

    def _export(self, exporter: str) -> Exported:
        from onnxpar.api.pytorch.export_module import export, plain_export, save

        opset = f"{self.opset}." if exporter == "ours" else ""
        path = (self.models or self.folder) / f"{self.name}.{opset}{exporter}.onnx"
        if not path.exists():
            if exporter == "ours":
                made = export(self.made, self.opset)
            else:
                made = plain_export(self.made, optimize=exporter == "plain")
            save(made, path)
        model = ir.load(path)
        kind, colon, _ = self.made.loss.partition(":")
        loss = kind + colon + ((model.graph.outputs[0].name or "") if colon else "")
        there = set(model.graph.initializers)
        for value in model.graph.initializers.values():
            there.update(re.findall(r"'(.*?)'", value.metadata_props.get(FOLDED_FROM, "")))
        still = [n for n, p in self.made.module.named_parameters() if not p.requires_grad]
        frozen = tuple(name for name in still if name in there)
        return Exported(path, loss, self._forward(path), () if exporter == "ours" else frozen)

    def _forward(self, path: Path) -> float:
        from onnxruntime import InferenceSession
        from zoo_pytorch import outputs, random_inputs

        session = InferenceSession(path, providers=["CPUExecutionProvider"])
        apart = []
        for symbols in self.settings.symbols:
            feeds = random_inputs(self.made, symbols, np.random.default_rng(1))
            found, wanted = session.run(None, feeds), outputs(self.made, feeds)
            pairs = list(zip(found, wanted, strict=True))
            if any(f.shape != w.shape for f, w in pairs):
                shapes = [(f.shape, w.shape) for f, w in pairs]
                raise AssertionError(f"outputs and PyTorch's have the shapes {shapes}")
            apart.append(_of_largest(pairs))
        return float(np.max(apart))

    @cached_property
    def batches(self) -> "list[Arrays]":
        """The batches of five steps, with the sizes in turn."""
        from zoo_pytorch import random_batch

        rng = np.random.default_rng(0)
        turns = self.settings.symbols
        sizes = [turns[step % len(turns)] for step in range(1, STEPS + 1)]
        return [random_batch(self.made, symbols, rng) for symbols in sizes]

    @cached_property
    def theirs(self) -> "Trained":
        """The results of training in PyTorch."""
        from zoo_pytorch import train

        return train(self.made, self.batches, self.settings.rate)

    @cached_property
    def exact(self) -> "Trained":
        """The results of training in PyTorch in 64 bits."""
        import torch
        from zoo_pytorch import train

        return train(self.made, self.batches, self.settings.rate, torch.float64)

    def shard(self, row: Row, out: Path) -> Any:
        """Shards the network for training with AdamW; returns the summary."""
        from onnxpar.api.shard_model import shard_model
        from onnxpar.autodiff.append_loss import parse_loss
        from onnxpar.autodiff.optimizer import parse_optimizer
        from onnxpar.autodiff.training_program import TrainingSpec

        exported = self.exported(row.exporter)
        spec = TrainingSpec(
            parse_loss(exported.loss), parse_optimizer("adamw"), freeze=exported.freeze
        )
        summary = shard_model(exported.path, row.strategy, out, force=True, training=spec)
        row.seconds = sum(summary.seconds.values())
        return summary

    def ranks(self, directory: Path, steps: int) -> "Trained":
        """Trains the ranks."""
        from zoo_ranks import train

        return train(directory, self.batches[:steps], self.settings.rate)


def task(name: str, pairs: Sequence[str], opset: int, verify: bool, models: Path | None) -> None:
    """Prints a line of JSON for each pair of exporter and strategy."""
    with tempfile.TemporaryDirectory(prefix="onnxpar-zoo-") as folder:
        bench = Bench(name, Path(folder), opset, models)
        for pair in pairs:
            exporter, strategy = pair.split(":")
            row = Verified(name, strategy) if verify else Compared(name, exporter, strategy)
            try:
                if isinstance(row, Verified):
                    check_forward(row, bench)
                    check_training(row, bench)
                else:
                    compare(row, bench)
            except Exception as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                text = f"{type(error).__name__}: {' '.join(lines)[:400]}"
                row.problem = text.replace("|", "\\|")
            print(json.dumps(asdict(row)), flush=True)


def compare(row: Compared, bench: Bench) -> None:
    """Compares training of an exported graph with PyTorch."""
    out = bench.folder / "compared"
    exported, theirs = bench.exported(row.exporter), bench.theirs
    row.forward = f"{exported.forward:.0e}"
    row.frozen = len(exported.freeze)
    row.expected = f"{theirs.elements:,} / {len(theirs.parameters)}"
    bench.shard(row, out)
    ours = bench.ranks(out, COMPARED_STEPS)
    row.trained = f"{ours.elements:,} / {len(ours.parameters)}"
    expected = theirs.losses[:COMPARED_STEPS]
    worst = _apart(ours.losses, expected)
    row.loss = f"{worst:.0e}"
    bound = COMPARED_TOLERANCE
    if not worst <= bound:
        noise = _apart(expected, bench.exact.losses[:COMPARED_STEPS])
        bound = max(bound, ROUNDING * noise)
    row.bound = f"{bound:.0e}"
    problems = []
    if not exported.forward <= FORWARD_TOLERANCE:
        problems.append(f"outputs differ by {exported.forward:.1e} from PyTorch's")
    if ours.elements != theirs.elements:
        problems.append(f"{ours.elements:,} elements train, but {theirs.elements:,} in PyTorch")
    if ours.decayed != theirs.decayed:
        problems.append(f"{ours.decayed:,} elements decay, but {theirs.decayed:,} in PyTorch")
    if row.exporter == "ours" and (names := ours.parameters.keys() ^ theirs.parameters.keys()):
        problems.append(f"trained only here or only in PyTorch: {sorted(names)[:8]}")
    if not worst <= bound:
        problems.append(f"losses differ by {worst:.1e} from PyTorch's")
    row.problem = "; ".join(problems)


def check_forward(row: Verified, bench: Bench) -> None:
    """Shards the forward program and verifies it."""
    from onnxpar.api import runtime
    from onnxpar.api.shard_model import shard_model

    path = bench.exported(row.exporter).path
    out = bench.folder / "forward"
    summary = shard_model(path, row.strategy, out, force=True)
    totals = summary.report["totals"]
    row.nodes = totals["nodes"]
    row.forward = _counts(totals["collectives_by_op"])
    kinds = Counter(item["op_type"] for item in summary.report["replicated"])
    row.replicated = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    cases = runtime.verify(out, path, cases=_cases(out, bench.settings))
    row.bytes = str(cases[0].bytes_expected)
    _demand(cases)


def check_training(row: Verified, bench: Bench) -> None:
    """Shards training, verifies three steps, and compares five losses with PyTorch's."""
    from onnxpar.api import runtime

    path = bench.exported(row.exporter).path
    out = bench.folder / "training"
    row.training = _counts(bench.shard(row, out).report["totals"]["collectives_by_op"])
    settings = bench.settings
    chosen = _cases(out, settings)
    options = runtime.VerifyOptions(steps=VERIFIED_STEPS, lr=settings.rate)
    cases = runtime.verify(out, path, cases=chosen, options=options)
    row.bytes += f" / {cases[0].bytes_expected}"
    _demand(cases)
    ours, theirs = bench.ranks(out, STEPS), bench.theirs
    _same_names("trained", ours.parameters, theirs.parameters)
    if row.model in OWN:
        if (apart := _apart(theirs.losses, bench.exact.losses)) > LOSS_TOLERANCE:
            raise AssertionError(f"PyTorch's losses differ by {apart:.1e} from its own in 64 bits")
        if (apart := _furthest(theirs, bench.exact)) > LOSS_TOLERANCE:
            raise AssertionError(
                f"PyTorch's statistics differ by {apart:.1e} from those in 64 bits"
            )
    _same_names("running statistics", ours.statistics, theirs.statistics)
    worst, statistic = _apart(ours.losses, theirs.losses), _furthest(ours, theirs)
    row.loss = f"{worst:.0e}"
    if not worst <= LOSS_TOLERANCE:
        row.problem = f"losses differ by {worst:.1e} from PyTorch's"
    elif not statistic <= LOSS_TOLERANCE:
        row.problem = f"running statistics differ by {statistic:.1e} from PyTorch's"


def _same_names(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises AssertionError with the names that only one side has."""
    if ours.keys() != theirs.keys():
        raise AssertionError(
            f"{what} only here or only in PyTorch: {sorted(ours.keys() ^ theirs.keys())}"
        )


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none"


def _cases(directory: Path, settings: Settings) -> list[str]:
    """Returns the settings as options of `verify`, with only the symbols of the program."""
    from onnxpar_runtime.manifest import Manifest

    manifest = Manifest.load(directory)
    program = next(iter(manifest.programs.values()))
    names = {d for s in program.inputs for d in s.shape if isinstance(d, str)}
    chosen = [{n: v for n, v in s.items() if n in names} for s in settings.symbols]
    return [",".join(f"{n}={v}" for n, v in values.items()) for values in chosen]


def _demand(cases: Sequence[Any]) -> None:
    """Raises AssertionError with the first problem of a case that failed."""
    for case in cases:
        if not case.ok:
            symbols = ", ".join(f"{n}={v}" for n, v in case.symbols.items())
            raise AssertionError(f"verify at {symbols}: {(case.problems or ('',))[0]}")


def _apart(losses: Sequence[float], expected: Sequence[float]) -> float:
    # `np.max` gives NaN if a loss is NaN; `max` might not.
    return float(np.max([abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]))


def _furthest(found: "Trained", expected: "Trained") -> float:
    """Returns the largest difference of a running statistic, relative to its largest element."""
    return _of_largest((found.statistics[name], a) for name, a in expected.statistics.items())


def _of_largest(pairs: Iterable[tuple[Any, Any]]) -> float:
    """Returns the largest difference within a pair, relative to the second's largest element."""
    apart = [np.abs(found - wanted).max() / np.abs(wanted).max() for found, wanted in pairs]
    return float(np.max(apart, initial=0.0))


def main() -> int:
    """Prints the table, or makes rows of one network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="networks; default: all")
    parser.add_argument("--strategy", action="append", help="may be repeated; default: three")
    parser.add_argument("--exporter", action="append", choices=EXPORTERS, help="may be repeated")
    parser.add_argument("--verify", action="store_true", help="verify the networks instead")
    parser.add_argument("--results", type=Path, help="file of rows; good ones are not run again")
    parser.add_argument("--models", type=Path, help="folder that keeps exported networks")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each network")
    parser.add_argument("--opset", type=int, default=20, help="opset of the exporter ours")
    parser.add_argument("--pair", action="append", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pair:
        task(options.names[0], options.pair, options.opset, options.verify, options.models)
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
    wanted = Wanted(
        tuple(options.exporter or EXPORTERS),
        tuple(options.strategy or STRATEGIES),
        options.opset,
        options.verify,
        options.models,
    )
    if options.models is not None:
        options.models.mkdir(parents=True, exist_ok=True)
    return 0 if table(options.names or known, wanted, options.limit, options.results) else 1


if __name__ == "__main__":
    sys.exit(main())
