#!/usr/bin/env python3
"""Divides the networks of `models/zoo.py`, verifies them and compares their training with PyTorch.

    tools/zoo_table.py                            # all networks, prints a markdown table
    tools/zoo_table.py gpt2 llama --strategy tp=2

For each network and strategy:
- `verify` of the forward program, and of three AdamW steps, at two settings of the symbols;
- five AdamW steps on the same weights and batches as PyTorch: each loss within 1e-4 of PyTorch's;
- that as many parameters are trained as the module has and uses.

PyTorch's module is in training mode, with Dropout off. Embeddings that leave out a padding token
(`padding_idx`) have no gradient there in PyTorch, which the exported graph does not say: batches
have no padding tokens.

Each network has a process of its own and a time limit. Needs the extra `zoo`. Exit code 1 where
anything does not hold.
"""

import argparse
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
RATE, DECAY = 1e-3, 1e-2
FIRST_TOKEN = 3  # what comes before are special tokens, padding among them
LIMITS = {"token_type_ids": 2}
"""Integers of inputs that are not tokens are below these."""


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
    cases = execute.verify(out, path, cases=_cases(out))
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
    cases = execute.verify(out, path, cases=_cases(out), steps=VERIFIED_STEPS)
    row.bytes += f" / {cases[0].bytes_expected}"
    _demand(cases)
    worst = max(_losses(out, made))
    row.loss = f"{worst:.0e}"
    if worst > LOSS_TOLERANCE:
        row.problem = f"losses differ by {worst:.1e} from PyTorch's"


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none"


def _cases(directory: Path) -> list[str]:
    """Returns the settings as options of `verify`, symbols that there are only."""
    from onnxpar_runtime.manifest import Manifest

    manifest = Manifest.load(directory)
    program = next(iter(manifest.programs.values()))
    names = {d for s in program.inputs for d in s.shape if isinstance(d, str)}
    chosen = [{n: s[n] for n in SETTINGS[0] if n in names} for s in SETTINGS]
    return [",".join(f"{n}={v}" for n, v in values.items()) for values in chosen]


def _demand(cases: Sequence[Any]) -> None:
    """Raises AssertionError with the first problem of a case that does not hold."""
    for case in cases:
        if not case.ok:
            symbols = ", ".join(f"{n}={v}" for n, v in case.symbols.items())
            raise AssertionError(f"verify at {symbols}: {(case.problems or ('',))[0]}")


def _losses(directory: Path, made: "Example") -> list[float]:
    """Returns the relative difference of each loss from PyTorch's."""
    import torch

    from onnxpar_runtime.training.group import TrainerGroup
    from onnxpar_runtime.training.hyper import Settings, hyperparameters

    module = made.module.train()
    used = list(module.parameters())
    kept = [parameter.detach().clone() for parameter in used]
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in used if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in used if p.ndim <= 1], "weight_decay": 0.0},
        ],
        RATE,
    )
    rng = np.random.default_rng(0)
    scalars = hyperparameters("adamw", Settings(weight_decay=DECAY))
    apart = []
    try:
        with TrainerGroup(directory) as group:
            states = group.manifest.trained().states.values()
            trained = {state.parameter for state in states if state.kind == "gradient"}
            for step in range(1, STEPS + 1):
                batch = _batch(group.manifest, rng, SETTINGS[step % 2])
                labels = torch.tensor(batch["labels"])
                inputs = {n: torch.tensor(a) for n, a in batch.items() if n != "labels"}
                optimizer.zero_grad()
                loss = _loss(module(**inputs), labels)
                loss.backward()
                optimizer.step()
                ours = group.train_step([batch], scalars.at(step, RATE)).loss
                apart.append(abs(ours - loss.item()) / abs(loss.item()))
        reached = {n for n, p in module.named_parameters() if p.grad is not None}
        if trained != reached:
            raise AssertionError(f"trained or not, unlike in PyTorch: {sorted(trained ^ reached)}")
    finally:
        with torch.no_grad():
            for parameter, value in zip(used, kept, strict=True):
                parameter.copy_(value)
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
        module.eval()
    return apart


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
