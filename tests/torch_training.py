"""Random PyTorch networks exported, sharded and trained, beside PyTorch's own training of them.

    export PYTHONPATH=models
    python -m tests.torch_training 0 500       # seeds; a line for each that is not equal
    python -m tests.torch_training 17 --verbose

A case is one seed: a network (`random_networks.py`), one of three exporters, one of four
strategies, an optimizer and three batches. Equal means:

- as many tensors and elements are trained as PyTorch has parameters that get a gradient;
- the loss of each step and the norm of all its gradients are PyTorch's, but for rounding.

A refusal (`OnnxparError`, `OnnxparRuntimeError`) is a result of its own, never a pass.
"""

import argparse
import copy
import functools
import importlib
import logging
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter
from traceback import format_exc
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import OnnxparError
from onnxpar_format.options import Settings
from onnxpar_runtime.errors import OnnxparRuntimeError
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.training.hyper import hyperparameters
from tests.random_networks import CLASSES, EXAMPLE, Network, network

EXPORTERS = ("ours", "folded", "plain")
"""`models/export_torch.py`; PyTorch's with `optimize=True`, its default, and without."""
STRATEGIES = ("dp=1", "dp=2", "tp=2", "dp=2,tp=2")
EQUAL, REFUSED, NOTICED, DIFFERENT, CRASHED, INEXACT = (
    "equal", "refused", "noticed", "different", "crashed", "exported otherwise",
)  # fmt: skip
"""Noticed: not equal, and a notice of `shard_model` names parameters that the file lacks. The last:
onnxruntime computes something else of the exported file than PyTorch of the module."""

RATE, DECAY = 1e-2, 0.1
TOLERANCE = 1e-5
"""Relative, of losses: some 100 units of float32's rounding (6e-8), which sums of up to 10^3 terms
and three steps make. A parameter that is not trained, or one that should not be, moves a loss by
about the learning rate, 1e-2, times its share: 1e-3 or more."""
NORM_TOLERANCE = 1e-4
"""Of norms of gradients, which are sums of products of such numbers, some of which cancel."""
SLACK = 8
"""How many times further than PyTorch's float32 run is from its float64 run ours may be: both round
in another order, so their errors are independent draws of one size; of eight times the size is one
of many thousands."""


@dataclass(frozen=True)
class Case:
    """What a seed decides.

    Attributes:
        seed: The seed.
        network: The network.
        exporter: One of `EXPORTERS`.
        strategy: One of `STRATEGIES`.
        optimizer: `adamw` or `sgd`.
    """

    seed: int
    network: Network
    exporter: str
    strategy: str
    optimizer: str

    def __str__(self) -> str:
        made = f"{self.exporter}, {self.strategy}, {self.optimizer}"
        return f"seed {self.seed} ({made}): {'; '.join(self.network.layers)}"


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        case: The case.
        result: `EQUAL` or what else.
        text: What is not equal, or the message of the refusal.
        seconds: How long it took.
    """

    case: Case
    result: str
    text: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """What training came to: of each step the loss and the norm; what is trained; notices."""

    losses: Sequence[float]
    norms: Sequence[float]
    tensors: int
    elements: int
    notices: tuple[str, ...] = ()


def case_of(seed: int) -> Case:
    """Returns the case of a seed."""
    draw = random.Random(f"case {seed}")
    return Case(
        seed,
        network(seed),
        draw.choice(EXPORTERS),
        draw.choice(STRATEGIES),
        draw.choice(["adamw", "adamw", "sgd"]),
    )


def outcome(seed: int) -> Outcome:
    """Runs a case."""
    began = perf_counter()
    case = case_of(seed)
    try:
        with tempfile.TemporaryDirectory(prefix="onnxpar-torch-") as folder:
            result, text = _compared(case, Path(folder))
    except (OnnxparError, OnnxparRuntimeError) as error:
        result, text = REFUSED, str(error)
    except Exception:
        result, text = CRASHED, format_exc()
    return Outcome(case, result, text, perf_counter() - began)


def _compared(case: Case, folder: Path) -> tuple[str, str]:
    path, net = folder / "model.onnx", case.network
    exported(case, path)
    generator = torch.Generator().manual_seed(case.seed)
    inputs = [net.draw(sizes, generator) for sizes in net.batches]
    labels = _labels(case, inputs)
    if text := _computes_otherwise(net, path, inputs[0]):
        return INEXACT, text
    spec = TrainingSpec(
        parse_loss(net.loss), parse_optimizer(case.optimizer), freeze=_frozen(case, path)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shard_model(path, case.strategy, folder / "out", training=spec)
    ours = _ours(case, folder / "out", inputs, labels)
    theirs = _pytorch(case, inputs, labels, torch.float32)
    problems = []
    if (ours.tensors, ours.elements) != (theirs.tensors, theirs.elements):
        problems.append(
            f"trained: expected {theirs.elements} elements in {theirs.tensors} tensors, got "
            f"{ours.elements} in {ours.tensors}"
        )
    exact = _pytorch(case, inputs, labels, torch.float64)
    for what, got, single, double, tolerance in (
        ("loss", ours.losses, theirs.losses, exact.losses, TOLERANCE),
        ("norm", ours.norms, theirs.norms, exact.norms, NORM_TOLERANCE),
    ):
        for step, (a, b, c) in enumerate(zip(got, single, double, strict=True), 1):
            bound = max(tolerance * abs(c), SLACK * abs(b - c))
            if not abs(a - c) <= bound:
                problems.append(
                    f"{what} of step {step}: expected {c:.7g} ± {bound:.1g}, got {a:.7g}"
                )
    if not problems:
        return EQUAL, ""
    return NOTICED if _is_noticed(net.module, ours.notices) else DIFFERENT, "; ".join(problems)


def _is_noticed(module: nn.Module, notices: Sequence[str]) -> bool:
    """Whether a notice names a trained parameter, and no other name of one, as what is missing."""
    lacking = [notice.split(" of the PyTorch")[0] for notice in notices if "file lacks" in notice]
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    return any(name in re.split(r"[ ,]+", text) for text in lacking for name in trained)


def _frozen(case: Case, path: Path) -> tuple[str, ...]:
    """What the user must name: PyTorch's exporter does not tell which parameters are frozen.

    A weight that it has transposed has another name in the file, where the user finds it.
    """
    if case.exporter == "ours":
        return ()
    arrays = {i.name: numpy_helper.to_array(i) for i in onnx.load(path).graph.initializer}
    found = []
    for name, parameter in case.network.module.named_parameters():
        if parameter.requires_grad:
            continue
        wanted = np.sort(parameter.detach().numpy().ravel())
        moved = [
            other
            for other, array in arrays.items()
            if name not in arrays
            and array.size == wanted.size
            and wanted[0] != wanted[-1]
            and np.array_equal(np.sort(array.ravel()), wanted)
        ]
        # What it has merged with equal ones has its own name again; what it has computed with is
        # not in the file at all.
        found += moved or ([name] if name in arrays or wanted[0] == wanted[-1] else [])
    return tuple(found)


def exported(case: Case, path: Path) -> None:
    """Writes the module of a case as its exporter does."""
    # Found only once `main` has said where, when this file is run.
    from onnxpar.api.pytorch.export_module import Example, export, save

    net = case.network
    generator = torch.Generator().manual_seed(0)
    inputs, dims = {"x": net.draw(EXAMPLE, generator)}, {"x": net.dims}
    module = copy.deepcopy(net.module)
    if case.exporter == "ours":
        save(export(Example(module, inputs, dims, net.outputs)), path)
        return
    shapes = {"x": {axis: torch.export.Dim(name) for axis, name in net.dims.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (),
            kwargs=inputs,
            dynamic_shapes=shapes,
            output_names=list(net.outputs),
            dynamo=True,
            optimize=case.exporter == "folded",
            verbose=False,
        )
    assert program is not None
    program.save(path)


def _computes_otherwise(net: Network, path: Path, x: Tensor) -> str:
    """How what the file computes differs from the module after `eval()`; empty if it does not."""
    module = copy.deepcopy(net.module).eval()
    with torch.no_grad():
        result = module(x)
    expected = (result[0] if isinstance(result, tuple) else result).numpy()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    got = session.run(["logits"], {"x": x.numpy()})[0]
    if got.shape != expected.shape:
        return f"expected the shape {expected.shape}, got {got.shape}"
    # Activations are about 1, though what is left of them may be the mean of a norm's results, 0.
    scale = max(1.0, float(np.abs(expected).max()))
    apart = float(np.abs(got - expected).max()) / scale
    return f"differs by {apart:.1e}" if apart > 1e-4 else ""


def _ours(
    case: Case, directory: Path, inputs: Sequence[Tensor], labels: Sequence[Tensor | None]
) -> Run:
    """Trains the ranks."""
    scalars = hyperparameters(case.optimizer, Settings(weight_decay=DECAY))
    losses, norms = [], []
    with TrainerGroup(directory) as group:
        training = group.manifest.trained()
        trained = [s for s in training.states.values() if s.kind == "gradient"]
        for step, (x, wanted) in enumerate(zip(inputs, labels, strict=True), 1):
            feeds = {"x": x.numpy()}
            if wanted is not None:
                feeds["labels"] = wanted.numpy()
            result = group.train_step([feeds], scalars.at(step, RATE))
            losses.append(result.loss)
            norms.append(result.grad_norm)
    elements = sum(prod(s.shape) for s in trained)
    return Run(losses, norms, len(trained), elements, training.notices)


def _labels(case: Case, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns random labels for each input."""
    rng = np.random.default_rng(case.seed)
    module = copy.deepcopy(case.network.module).eval()
    drawn: list[Tensor | None] = []
    for x in inputs:
        with torch.no_grad():
            result = module(x)
        if case.network.loss == "mse":
            drawn.append(torch.tensor(rng.standard_normal(result.shape).astype(np.float32)))
        elif case.network.loss == "softmax_cross_entropy":
            drawn.append(torch.tensor(rng.integers(0, CLASSES, result.shape[:-1])))
        else:
            drawn.append(None)
    return drawn


def _pytorch(
    case: Case, inputs: Sequence[Tensor], labels: Sequence[Tensor | None], dtype: torch.dtype
) -> Run:
    """Trains a copy of the module in that type."""
    module = _of_type(copy.deepcopy(case.network.module), dtype).train()
    used = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in used if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in used if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, RATE)
        if case.optimizer == "adamw"
        else torch.optim.SGD(groups, RATE)
    )
    losses, norms = [], []
    for x, wanted in zip(inputs, labels, strict=True):
        optimizer.zero_grad()
        loss = _loss(case.network.loss, module(_typed(x, dtype)), wanted)
        loss.backward()
        gradients = [p.grad for p in used if p.grad is not None]
        norms.append(torch.stack([g.double().norm() for g in gradients]).norm().item())
        losses.append(loss.item())
        optimizer.step()
    reached = [p for p in used if p.grad is not None]
    return Run(losses, norms, len(reached), sum(p.numel() for p in reached))


def _loss(kind: str, result: Any, labels: Tensor | None) -> Tensor:
    if kind == "output:loss":
        return result[1]
    assert labels is not None
    if kind == "mse":
        return functional.mse_loss(result, labels.to(result.dtype))
    return functional.cross_entropy(result.flatten(0, -2), labels.flatten())


def _of_type(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module in that type, with tensors that are neither parameters nor buffers."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                setattr(part, name, _typed(value, dtype))
    return module.to(dtype)


def _typed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


@contextmanager
def quick_exports() -> Iterator[None]:
    """Reads PyTorch's table of translations once, which takes longer than most exports."""
    owner = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    own = vars(owner)["from_torchlib"]
    owner.from_torchlib = staticmethod(functools.cache(own.__get__(None, owner)))
    try:
        yield
    finally:
        owner.from_torchlib = own


def main() -> int:
    """Runs a range of seeds; prints a line for each that is not equal, and how many are what."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?", help="not included; default: one seed")
    parser.add_argument("--verbose", action="store_true", help="a line for each seed, tracebacks")
    parser.add_argument("--exporter", choices=EXPORTERS, help="only cases of this one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # of PyTorch's exporter, which misses what no module needs
    with quick_exports():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    last = options.first + 1 if options.last is None else options.last
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    for seed in range(options.first, last):
        if options.exporter and case_of(seed).exporter != options.exporter:
            continue
        found = outcome(seed)
        counts[found.result] += 1
        if found.result == REFUSED:
            refusals[found.text] += 1
        if found.result != EQUAL or options.verbose:
            text = found.text if options.verbose else found.text.strip().rpartition("\n")[2]
            print(f"{found.result}: {found.case}: {text[:400]} [{found.seconds:.1f} s]", flush=True)
    print(", ".join(f"{n} {what}" for what, n in counts.most_common()))
    for text, n in refusals.most_common():
        print(f"  {n} refused: {text}")
    return 0 if set(counts) <= {EQUAL} else 1


if __name__ == "__main__":
    sys.exit(main())
