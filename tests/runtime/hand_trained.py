"""Training directories made by hand: ONNX text for each program and rank, weights, a manifest."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import parser

from onnxpar_format.boxes import SizedSharding
from onnxpar_format.checkpoint import Progress
from onnxpar_format.records import to_json
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.checkpoint.writer import Checkpointer
from onnxpar_runtime.tensor_file import Entry, write_tensors
from tests.runtime.hand_made import FREE, HEADER, Dims, tensor

Array = NDArray[Any]
Json = dict[str, Any]


@dataclass
class Program:
    """A program: the ONNX text of each rank that has one, and its entry in the manifest."""

    graphs: Sequence[str | None]
    inputs: Sequence[Json] = ()
    outputs: Sequence[Json] = ()
    system_inputs: Sequence[Json] = ()
    state_inputs: Sequence[str] = ()
    state_outputs: Mapping[str, str] = field(default_factory=dict)
    handed_in: Sequence[Json] = ()
    handed_out: Sequence[Json] = ()


def state(name: str, kind: str, parameter: str, spec: Json, partial: Sequence[int] = ()) -> Json:
    """Returns the manifest's entry of a state that is sharded like the parameter's `spec`."""
    return {**spec, "name": name, "kind": kind, "parameter": parameter, "partial": list(partial)}


def weight(name: str) -> Json:
    """Returns the manifest's entry of a system input that is the weight of the loss."""
    return {"name": name, "kind": "loss_weight"}


def hyper(*names: str) -> list[Json]:
    """Returns the manifest's entries of hyperparameters, each an input of the same name."""
    return [
        {"name": f"onnxpar.hyper.{n}", "kind": "hyperparameter", "hyperparameter": n} for n in names
    ]


def _boxes(spec: Json, atoms: Sequence[int], rank: int) -> Any:
    dims = tuple(tuple((n["size"], tuple(n["atoms"])) for n in dim) for dim in spec["dims"])
    sharding = SizedSharding(tuple(atoms), dims)
    return to_json(sharding.boxes(rank % prod(atoms), padded=True))


def write(
    directory: Path,
    programs: Mapping[str, Program],
    *,
    atoms: Sequence[int],
    states: Sequence[Json],
    loss: Json,
    shards: Mapping[str, tuple[Json, Sequence[Array | None]]],
    symbols: Mapping[str, Json] | None = None,
    optimizer: str = "sgd",
    pipeline: Json | None = None,
) -> Path:
    """Writes a directory.

    Args:
        directory: Where.
        programs: By name.
        atoms: Sizes of the mesh's atoms.
        states: Entries made by `state`.
        loss: Entry of the loss.
        shards: Of each parameter, its spec and what each rank holds of it, None for nothing.
        symbols: Constraints by name.
        optimizer: Kind of the optimizer.
        pipeline: Entry of the pipeline, or None.
    """
    directory.mkdir(parents=True)
    ranks = len(next(iter(programs.values())).graphs)
    entries: Json = {}
    for name, program in programs.items():
        graphs = [
            None if text is None else parser.parse_model(HEADER + text) for text in program.graphs
        ]
        names = [None if g is None else f"rank{r:04d}.{name}.onnx" for r, g in enumerate(graphs)]
        for graph, file in zip(graphs, names, strict=True):
            if graph is not None and file is not None:
                onnx.save(graph, directory / file)
        entries[name] = {
            "files": names,
            "inputs": list(program.inputs),
            "outputs": list(program.outputs),
            "system_inputs": list(program.system_inputs),
            "collectives": [],
            "state_inputs": list(program.state_inputs),
            "state_outputs": [{"name": n, "state": s} for n, s in program.state_outputs.items()],
            "handed_in": list(program.handed_in),
            "handed_out": list(program.handed_out),
        }
    for rank in range(ranks):
        parts = [
            (n, s["dtype"], part)
            for n, (s, held) in shards.items()
            if (part := held[rank]) is not None
        ]
        write_tensors(
            directory / f"weights.{rank:04d}.safetensors",
            [Entry(name, dtype, array.shape) for name, dtype, array in parts],
            [array for _, _, array in parts],
        )
    parameters = {
        name: {
            **spec,
            "shards": [
                {
                    "ranks": [rank],
                    "file": f"weights.{rank:04d}.safetensors",
                    "boxes": _boxes(spec, atoms, rank),
                    "local_shape": list(part.shape),
                }
                for rank, part in enumerate(held)
                if part is not None
            ],
        }
        for name, (spec, held) in shards.items()
    }
    files = {}
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        files[path.name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    manifest = {
        "schema": 1,
        "generator": "by hand",
        "model": "test",
        "mesh": {"axes": [["dp", prod(atoms)]], "atoms": list(atoms)},
        "devices": ranks,
        "symbols": {k: {**FREE, **v} for k, v in (symbols or {}).items()},
        "programs": entries,
        "parameters": parameters,
        "files": files,
        "strategy": {},
        "replicated": [],
        "training": {
            "loss": loss,
            "optimizer": {"kind": optimizer},
            "states": list(states),
            "tensors": [
                {
                    "name": name,
                    "elements": int(np.prod(spec["shape"])),
                    "trained": True,
                    "reason": "",
                    "parameter": True,
                    "rule": "",
                    "used_by": [],
                }
                for name, (spec, _) in shards.items()
            ],
            "notices": [],
            "spec": {},
        },
    }
    if pipeline is not None:
        manifest["pipeline"] = pipeline
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


# -- y = x w with momentum, by data ranks --------------------------------------------------------

INPUTS = 3
OUTPUTS = 2
SPLIT: Dims = [[("batch", [0])], [(INPUTS, [])]]


def start() -> Array:
    """Returns the initial weight, float64 [3, 2]."""
    return np.random.default_rng(7).standard_normal((INPUTS, OUTPUTS))


def batch_of(count: int, seed: int = 0) -> dict[str, Array]:
    """Returns `count` random samples, float64."""
    rng = np.random.default_rng([count, seed])
    return {
        "x": rng.standard_normal((count, INPUTS)),
        "labels": rng.standard_normal((count, OUTPUTS)),
    }


def added(gradient: str, micro: str) -> str:
    """Returns the node that adds up a gradient over micro-batches."""
    return (
        " none = Constant<value: tensor = uint8[1] none {0}>()"
        f' added = onnxpar.Accumulate(none, "onnxpar.accumulate", "{gradient}", "{micro}")'
    )


ADDED: Json = {"name": "onnxpar.accumulate", "kind": "accumulate"}


def _states(spec: Json, partial: Sequence[int]) -> list[Json]:
    """The weight, and its gradients, which are partial over some atoms."""
    return [
        state("w", "parameter", "w", spec),
        state("onnxpar.grad.w", "gradient", "w", spec, partial),
        state("onnxpar.micro.w", "micro_gradient", "w", spec, partial),
    ]


def regression(directory: Path, ranks: int = 2, symbol: Json | None = None) -> Path:
    """Writes linear regression with momentum and clipping, the batch split over a prime of ranks.

    The loss is mean((x w - labels)^2) over batch and outputs. Gradients stay partial over the data
    ranks until the optimizer program.
    """
    members = ", ".join(map(str, range(ranks)))
    reduce = f'onnxpar.AllReduce<reduction: string = "sum", group: ints = [{members}]>'
    # Rows beyond the global batch are padding, which must not count.
    forward = (
        " r = Shape<start: int = 0, end: int = 1>(x)  rows = Squeeze(r)"
        " zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()"
        " i = Range(zero, rows, one)  first = Mul(c, r)  at = Add(i, first)"
        " within = Less(at, batch)  m = Cast<to: int = 11>(within)"
        " axis = Constant<value_ints = [1]>()  mask = Unsqueeze(m, axis)"
        " p = MatMul(x, w)  e = Sub(p, labels)  error = Mul(e, mask)"
        " square = Mul(error, error)  total = ReduceSum<keepdims: int = 0>(square)"
        f" outs = Constant<value_int = {OUTPUTS}>()  n1 = Mul(batch, outs)"
        " n = Cast<to: int = 11>(n1)  count = Squeeze(n)  mean = Div(total, count)"
    )
    head = f"double[n, {INPUTS}] x, double[n, {OUTPUTS}] labels, double[{INPUTS}, {OUTPUTS}] w"
    system = "int64[1] batch, int64[1] c"
    training = (
        f'g ({head}, {system}, float "onnxpar.loss_weight", int64[1] "onnxpar.accumulate",'
        f' double[{INPUTS}, {OUTPUTS}] "onnxpar.micro.w")'
        f' => (double[{INPUTS}, {OUTPUTS}] "onnxpar.grad.w", double "onnxpar.loss") {{ {forward}'
        ' lw = Cast<to: int = 11>("onnxpar.loss_weight")  mine = Mul(mean, lw)'
        f' "onnxpar.loss", t0 = {reduce}(mine)'
        " two = Constant<value_float = 2.0>()  two_d = Cast<to: int = 11>(two)"
        " s1 = Mul(two_d, lw)  s = Div(s1, count)  d = Mul(error, s)"
        ' xt = Transpose<perm = [1, 0]>(x)  "onnxpar.grad.w" = MatMul(xt, d)'
        f"{added('onnxpar.grad.w', 'onnxpar.micro.w')} }}"
    )
    evaluation = (
        f'g ({head}, {system}) => (double "onnxpar.loss", double[n, {OUTPUTS}] p) {{ {forward}'
        f' "onnxpar.loss", t0 = {reduce}(mean) }}'
    )
    names = ("lr", "momentum", "momentum_first", "clip_norm")
    scalars = ", ".join(f'double "onnxpar.hyper.{n}"' for n in names)
    grid = f"double[{INPUTS}, {OUTPUTS}]"
    optimizer = (
        f'g ({grid} w, {grid} "onnxpar.grad.w", {grid} "onnxpar.moment1.w", {scalars}) =>'
        f' ({grid} "onnxpar.new.w", double "onnxpar.grad_norm", {grid} "onnxpar.new.moment1") {{'
        f' sum, t0 = {reduce}("onnxpar.grad.w")  sq = Mul(sum, sum)'
        ' total = ReduceSum<keepdims: int = 0>(sq)  "onnxpar.grad_norm" = Sqrt(total)'
        " tiny = Constant<value_float = 1e-6>()  tiny_d = Cast<to: int = 11>(tiny)"
        ' below = Add("onnxpar.grad_norm", tiny_d)  ratio = Div("onnxpar.hyper.clip_norm", below)'
        " one = Constant<value_float = 1.0>()  one_d = Cast<to: int = 11>(one)"
        " coefficient = Min(one_d, ratio)  g = Mul(sum, coefficient)"
        ' not_first = Sub(one_d, "onnxpar.hyper.momentum_first")'
        ' factor = Mul(not_first, "onnxpar.hyper.momentum")  old = Mul("onnxpar.moment1.w", factor)'
        ' "onnxpar.new.moment1" = Add(old, g)'
        ' step = Mul("onnxpar.new.moment1", "onnxpar.hyper.lr")  "onnxpar.new.w" = Sub(w, step) }'
    )
    w = start()
    spec = tensor("w", "float64", w.shape, [[(INPUTS, [])], [(OUTPUTS, [])]])
    inputs = [
        tensor("x", "float64", ["batch", INPUTS], SPLIT),
        tensor("labels", "float64", ["batch", OUTPUTS], [[("batch", [0])], [(OUTPUTS, [])]]),
    ]
    scalar = tensor("onnxpar.loss", "float64", [], [])
    counts = [
        {"name": "batch", "kind": "symbol", "symbol": "batch"},
        {"name": "c", "kind": "coordinate", "atom": 0},
    ]
    programs = {
        "training_model": Program(
            [training] * ranks,
            inputs,
            [scalar],
            [*counts, weight("onnxpar.loss_weight"), ADDED],
            ["w", "onnxpar.micro.w"],
            {"onnxpar.grad.w": "onnxpar.grad.w"},
        ),
        "eval_model": Program(
            [evaluation] * ranks,
            inputs,
            [scalar, {**inputs[1], "name": "p"}],
            counts,
            ["w"],
        ),
        "optimizer_model": Program(
            [optimizer] * ranks,
            outputs=[tensor("onnxpar.grad_norm", "float64", [], [])],
            system_inputs=hyper(*names),
            state_inputs=["w", "onnxpar.grad.w", "onnxpar.moment1.w"],
            state_outputs={"onnxpar.new.w": "w", "onnxpar.new.moment1": "onnxpar.moment1.w"},
        ),
    }
    return write(
        directory,
        programs,
        atoms=[ranks] if ranks > 1 else [],
        states=[*_states(spec, [0]), state("onnxpar.moment1.w", "moment1", "w", spec)],
        loss={"kind": "mse", "labels": "labels", "ignore_index": None, "count": f"{OUTPUTS}*batch"},
        shards={"w": (spec, [w] * ranks)},
        symbols={"batch": symbol or {}},
        optimizer="momentum",
    )


class Reference:
    """The same training in numpy, in float64, on one device."""

    def __init__(self) -> None:
        """Begins with the directory's weight."""
        self.w = start()
        self.velocity = np.zeros_like(self.w)
        self.first = True

    def gradient(self, batch: Mapping[str, Array]) -> tuple[float, Array]:
        """Returns the mean loss and its gradient."""
        error = batch["x"] @ self.w - batch["labels"]
        return float((error**2).mean()), batch["x"].T @ error * (2 / error.size)

    def step(self, batch: Mapping[str, Array], hyper: Mapping[str, float]) -> tuple[float, float]:
        """Returns loss and gradient norm of one step on all samples at once."""
        loss, gradient = self.gradient(batch)
        norm = float(np.sqrt((gradient**2).sum()))
        gradient = gradient * min(1.0, hyper["clip_norm"] / (norm + 1e-6))
        self.velocity = (0 if self.first else hyper["momentum"]) * self.velocity + gradient
        self.first = False
        self.w = self.w - hyper["lr"] * self.velocity
        return loss, norm


# -- one weight, and any loss ----------------------------------------------------------------------

ONE = tensor("w", "float64", [1], [[(1, [])]])


def one_weight(
    directory: Path,
    forward: str,
    *,
    ranks: int = 2,
    head: str,
    inputs: Sequence[Json] = (),
    system_inputs: Sequence[Json] = (),
    loss: Json,
    symbols: Mapping[str, Json] | None = None,
    weighed: bool = True,
) -> Path:
    """Writes a model with the weight w = [1.5] and SGD.

    Args:
        directory: Where.
        forward: Nodes that compute `mine`, the rank's part of the loss (a double scalar), and
            `slope`, its part of the loss's derivative (double [1]); they may read `lw`, the loss
            weight as a double, and w.
        ranks: Number of data ranks, a prime.
        head: Declarations of the graph's inputs but for the weights.
        inputs: Entries of its inputs.
        system_inputs: Entries of its system inputs but for the loss weight.
        loss: Entry of the loss.
        symbols: Constraints by name.
        weighed: Whether the evaluation program takes the loss weight as well.
    """
    members = ", ".join(map(str, range(ranks)))
    reduce = f'onnxpar.AllReduce<reduction: string = "sum", group: ints = [{members}]>'
    text = (
        f'g ({head}, double[1] w, int64[1] "onnxpar.accumulate", double[1] "onnxpar.micro.w",'
        ' float "onnxpar.loss_weight") => (double "onnxpar.loss", double[1] "onnxpar.grad.w")'
        f' {{ lw = Cast<to: int = 11>("onnxpar.loss_weight") {forward}'
        f' "onnxpar.loss", t0 = {reduce}(mine)  "onnxpar.grad.w" = Identity(slope)'
        f"{added('onnxpar.grad.w', 'onnxpar.micro.w')} }}"
    )
    update = (
        'g (double[1] w, double[1] "onnxpar.grad.w", double "onnxpar.hyper.lr")'
        ' => (double[1] "onnxpar.new.w", double "onnxpar.grad_norm") {'
        f' sum, t0 = {reduce}("onnxpar.grad.w")  size = Abs(sum)'
        ' "onnxpar.grad_norm" = ReduceSum<keepdims: int = 0>(size)'
        ' step = Mul(sum, "onnxpar.hyper.lr")  "onnxpar.new.w" = Sub(w, step) }'
    )
    scalar = tensor("onnxpar.loss", "float64", [], [])
    system = [*system_inputs, weight("onnxpar.loss_weight"), ADDED]
    forwards = Program(
        [text] * ranks,
        inputs,
        [scalar],
        system,
        ["w", "onnxpar.micro.w"],
        {"onnxpar.grad.w": "onnxpar.grad.w"},
    )
    evaluation = forwards
    if not weighed:
        one = "{ one = Constant<value_float = 1.0>()  lw = Cast<to: int = 11>(one)"
        unweighed = text.replace(', float "onnxpar.loss_weight")', ")", 1)
        unweighed = unweighed.replace('{ lw = Cast<to: int = 11>("onnxpar.loss_weight")', one)
        evaluation = Program(
            [unweighed] * ranks,
            inputs,
            [scalar],
            [*system_inputs, ADDED],
            ["w", "onnxpar.micro.w"],
            {"onnxpar.grad.w": "onnxpar.grad.w"},
        )
    programs = {
        "training_model": forwards,
        "eval_model": evaluation,
        "optimizer_model": Program(
            [update] * ranks,
            outputs=[tensor("onnxpar.grad_norm", "float64", [], [])],
            system_inputs=hyper("lr"),
            state_inputs=["w", "onnxpar.grad.w"],
            state_outputs={"onnxpar.new.w": "w"},
        ),
    }
    return write(
        directory,
        programs,
        atoms=[ranks] if ranks > 1 else [],
        states=_states(ONE, [0] if ranks > 1 else []),
        loss=loss,
        shards={"w": (ONE, [np.array([1.5])] * ranks)},
        symbols=symbols,
    )


def checkpoint(folder: Path) -> Path:
    """Writes a checkpoint of `regression` after step 7, by all ranks; returns its folder."""
    with TrainerGroup(regression(folder / "a")) as group:

        def write(rank: int) -> None:
            member = group.members[rank]
            run = {"seed": 3, "batch_size": 4}
            with Checkpointer(
                member.rank, group.manifest, folder / "ck", member.states, run
            ) as writer:
                writer.save(Progress(7, 2, 3, 3, 0.5, 0.1))

        group.each(write)
    return folder / "ck" / "step-00000007"
