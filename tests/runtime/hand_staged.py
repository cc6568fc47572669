"""A pipeline made by hand: a chain of matrices, its stages' programs as ONNX text, and numpy.

Virtual stage s computes h_s = tanh(h_{s-1} w_s), with h_{-1} = x·(1 + micro_batch/10); the last
one p = h_{s-1} w_s + h_0 and the loss mean((p - labels)^2). So h_0 skips stages, what a stage reads
is read again by its backward, and a micro-batch's number counts. Virtual stage 0 keeps a running
statistic: seen = seen/2 + batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.runtime.hand_made import tensor
from tests.runtime.hand_trained import ADDED, Program, added, hyper, state, weight, write

Array = NDArray[Any]
Json = dict[str, Any]
N = 3
_GRID = f"double[{N}, {N}]"
_ROWS = f"double[rows, {N}]"
_LW = "onnxpar.loss_weight"
_FACTOR = (
    " ten = Constant<value_float = 10.0>()  ten_d = Cast<to: int = 11>(ten)"
    " k1 = Cast<to: int = 11>(micro)  k2 = Div(k1, ten_d)"
    " one = Constant<value_float = 1.0>()  one_d = Cast<to: int = 11>(one)  k = Add(k2, one_d)"
    " xk = Mul(x, k)"
)


@dataclass(frozen=True)
class Shape:
    """The shape of the pipeline.

    Attributes:
        stages: Number of stages.
        chunks: Virtual stages of each.
        size: Data ranks of a stage, 1 or a prime.
        split: Whether gradients of parameters are computed by a program of their own.
        tied: Whether the last virtual stage uses the parameter of the first.
        micro_batches: What the manifest says.
        schedule: Likewise.
    """

    stages: int = 2
    chunks: int = 1
    size: int = 1
    split: bool = False
    tied: bool = False
    micro_batches: int = 2
    schedule: str = "1f1b"

    @property
    def count(self) -> int:
        """Number of virtual stages."""
        return self.stages * self.chunks

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.stages * self.size

    def parameter(self, virtual: int) -> str:
        """Returns the parameter of a virtual stage."""
        return "w0" if self.tied and virtual == self.count - 1 else f"w{virtual}"

    def own(self, stage: int) -> list[str]:
        """Returns the parameters of a stage."""
        virtual = range(stage, self.count, self.stages)
        return list(dict.fromkeys(self.parameter(v) for v in virtual))


def weights(shape: Shape) -> dict[str, Array]:
    """Returns the initial parameters, float64."""
    rng = np.random.default_rng(3)
    made = {f"w{v}": rng.standard_normal((N, N)) for v in range(shape.count)}
    return {shape.parameter(v): made[shape.parameter(v)] for v in range(shape.count)}


def batch_of(count: int, seed: int = 0) -> dict[str, Array]:
    """Returns `count` random samples, float64."""
    rng = np.random.default_rng([count, seed])
    return {name: rng.standard_normal((count, N)) for name in ("x", "labels")}


def staged(directory: Path, shape: Shape) -> Path:
    """Writes the directory."""
    last = shape.count - 1
    split = [[("batch", [0] if shape.size > 1 else [])], [(N, [])]]
    x, labels = (tensor(n, "float64", ["batch", N], split) for n in ("x", "labels"))
    loss = tensor("onnxpar.loss", "float64", [], [])
    p = {**x, "name": "p"}
    counts = [
        {"name": "batch", "kind": "symbol", "symbol": "batch"},
        {"name": "c", "kind": "coordinate", "atom": 0},
    ][: 2 if shape.size > 1 else 1]
    rows = "batch" if shape.size == 1 else f"ceil(batch/{shape.size})"
    # Sizes that do not follow from symbols are sent first.
    unknown = {"h0", "dskip"}

    def handed(name: str, source: str | None = None) -> Json:
        entry: Json = {"name": name, "dtype": "float64"}
        entry["shape"] = None if name in unknown else [rows, N]
        return entry if source is None else {**entry, "from": source}

    def on(stage: int, text_of: Any) -> list[str | None]:
        return [
            text_of(rank) if rank // shape.size == stage else None for rank in range(shape.ranks)
        ]

    programs: dict[str, Program] = {}
    listed: dict[str, list[Json]] = {n: [] for n in ("training_model", "eval_model")}
    listed["optimizer_model"] = []
    for virtual in range(shape.count):
        stage, w = virtual % shape.stages, shape.parameter(virtual)
        before, here = f"h{virtual - 1}", f"h{virtual}"
        micro = {"name": "micro", "kind": "counter", "counter": "micro_batch"}
        for kind in ("forward", "eval"):
            name = f"{kind}_model.{virtual}"
            train = kind == "forward"
            maker = f"{kind}_model.{virtual - 1}"
            if not virtual:
                text = f"xh = MatMul(xk, {w})  h0 = Tanh(xh)"
                gives, kept = [("h0", _ROWS)], ["h0"]
                state_outputs = {}
                if train:
                    text += (
                        " b = Cast<to: int = 11>(batch)  half = Div(seen, two)  new = Add(half, b)"
                    )
                    state_outputs = {"new": "seen"}
                    gives += [("new", "double[1]")]
                head = f"{_ROWS} x, {_GRID} {w}, double[1] seen, int64[1] micro, int64[1] batch"
                text = (
                    "{"
                    + _FACTOR
                    + " t = Constant<value_float = 2.0>()  two = Cast<to: int = 11>(t) "
                    + text
                )
                programs[name] = Program(
                    on(stage, lambda _, h=head, g=gives, t=text: _graph(h, g, t)),
                    [x],
                    [],
                    [micro, counts[0]],
                    [w, "seen"],
                    state_outputs,
                    (),
                    [handed(n) for n in kept],
                )
            elif virtual < last:
                head = f"{_ROWS} {before}, {_GRID} {w}"
                text = f"{{ xh = MatMul({before}, {w})  {here} = Tanh(xh)"
                programs[name] = Program(
                    on(stage, lambda _, h=head, g=[(here, _ROWS)], t=text: _graph(h, g, t)),
                    state_inputs=[w],
                    handed_in=[handed(before, maker)],
                    handed_out=[handed(here)],
                )
            else:
                read = list(dict.fromkeys([before, "h0"]))
                head = ", ".join(f"{_ROWS} {n}" for n in read)
                head += f", {_ROWS} labels, {_GRID} {w}, int64[1] batch"
                head += ", int64[1] c" if shape.size > 1 else ""
                head += f', float "{_LW}"' if train else ""
                gives = [("onnxpar.loss", "double")]
                gives += [("error", _ROWS)] if train else [("p", _ROWS)]
                programs[name] = Program(
                    on(
                        stage,
                        lambda r, h=head, g=gives, w=w, b=before, t=train: _graph(
                            h, g, _loss(shape, r, w, b, t)
                        ),
                    ),
                    [labels],
                    [loss] if train else [p, loss],
                    [*counts, *([weight(_LW)] if train else [])],
                    [w],
                    {},
                    [handed(n, f"{kind}_model.{n[1:]}") for n in read],
                    [handed("error")] if train else [],
                )
            if not train:
                listed["eval_model"].append({"forward": name})
        _backward(programs, shape, virtual, x, handed, on)
        entry = {"forward": f"forward_model.{virtual}", "backward": f"backward_model.{virtual}"}
        entry["weight"] = f"weight_model.{virtual}" if shape.split else None  # type: ignore[assignment]
        listed["training_model"].append(entry)
    for stage in range(shape.stages):
        name = f"optimizer_model.{stage}"
        own = shape.own(stage)
        programs[name] = Program(
            on(stage, lambda r, own=own: _update(shape, r, own)),
            outputs=[tensor("onnxpar.grad_norm", "float64", [], [])],
            system_inputs=hyper("lr"),
            state_inputs=[*own, *(f"onnxpar.grad.{w}" for w in own)],
            state_outputs={f"new.{w}": w for w in own},
        )
        listed["optimizer_model"].append({"update": name})
    nobody: list[str | None] = [None] * shape.ranks
    programs["training_model"] = Program(nobody, [x, labels], [loss])
    programs["eval_model"] = Program(nobody, [x, labels], [p, loss])
    spec = tensor("w", "float64", [N, N], [[(N, [])], [(N, [])]])
    held = {w: [s for s in range(shape.stages) if w in shape.own(s)] for w in weights(shape)}
    states, partial = [], [0] if shape.size > 1 else []
    for w, stages in held.items():
        more: Json = {"stages": stages}
        states.append({**state(w, "parameter", w, spec), **more})
        if len(stages) > 1:
            more["partial_stages"] = True
        for prefix, kind in (("grad", "gradient"), ("micro", "micro_gradient")):
            states.append({**state(f"onnxpar.{prefix}.{w}", kind, w, spec, partial), **more})
    one = tensor("seen", "float64", [1], [[(1, [])]])
    states.append({**state("seen", "statistic", "seen", one), "stages": [0]})

    def parts(array: Array, stages: Sequence[int]) -> list[Array | None]:
        return [array if rank // shape.size in stages else None for rank in range(shape.ranks)]

    shards = {w: (spec, parts(array, held[w])) for w, array in weights(shape).items()}
    return write(
        directory,
        programs,
        atoms=[shape.size] if shape.size > 1 else [],
        states=states,
        loss={"kind": "mse", "labels": "labels", "ignore_index": None, "count": f"{N}*batch"},
        shards={**shards, "seen": (one, parts(np.zeros(1), [0]))},
        symbols={"batch": {}},
        pipeline={
            "stages": shape.stages,
            "chunks": shape.chunks,
            "schedule": shape.schedule,
            "micro_batches": shape.micro_batches,
            "programs": listed,
        },
    )


def _graph(head: str, gives: Sequence[tuple[str, str]], body: str) -> str:
    outputs = ", ".join(f'{kind} "{name}"' for name, kind in gives)
    return f"g ({head}) => ({outputs}) {body} }}"


def _reduce(ranks: Sequence[int]) -> str:
    return f'onnxpar.AllReduce<reduction: string = "sum", group: ints = {list(ranks)}>'


def _mesh(shape: Shape, rank: int) -> range:
    first = rank // shape.size * shape.size
    return range(first, first + shape.size)


def _loss(shape: Shape, rank: int, w: str, before: str, train: bool) -> str:
    """Returns the nodes of the last virtual stage's forward."""
    body = (
        f"{{ q = MatMul({before}, {w})  p = Add(q, h0)  e = Sub(p, labels)"
        f" outs = Constant<value_int = {N}>()  n1 = Mul(batch, outs)"
        " n = Cast<to: int = 11>(n1)  count = Squeeze(n)"
    )
    if shape.size > 1:
        # Rows beyond the global batch are padding, which must not count.
        body += (
            " r = Shape<start: int = 0, end: int = 1>(labels)  rows_ = Squeeze(r)"
            " zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()"
            " i = Range(zero, rows_, one)  first = Mul(c, r)  at = Add(i, first)"
            " within = Less(at, batch)  m = Cast<to: int = 11>(within)"
            " axis = Constant<value_ints = [1]>()  mask = Unsqueeze(m, axis)  error = Mul(e, mask)"
        )
    else:
        body += " error = Identity(e)"
    body += (
        " square = Mul(error, error)  total = ReduceSum<keepdims: int = 0>(square)"
        " mean = Div(total, count)"
    )
    mine = "mean"
    if train:
        body += f' lw = Cast<to: int = 11>("{_LW}")  mine = Mul(mean, lw)'
        mine = "mine"
    if shape.size > 1:
        return body + f' "onnxpar.loss", t0 = {_reduce(_mesh(shape, rank))}({mine})'
    return body + f' "onnxpar.loss" = Identity({mine})'


def _backward(
    programs: dict[str, Program], shape: Shape, virtual: int, x: Json, handed: Any, on: Any
) -> None:
    """Adds the backward of a virtual stage, and the part that computes the parameter's gradient."""
    last, stage, w = shape.count - 1, virtual % shape.stages, shape.parameter(virtual)
    before, here, grad = f"h{virtual - 1}", f"h{virtual}", f"onnxpar.grad.{w}"
    back = f"backward_model.{virtual}"
    source = f"forward_model.{virtual - 1}"
    system: list[Json] = []
    inputs: list[Json] = []
    if virtual == last:
        reads = [("error", f"forward_model.{virtual}")]
        head = f'{_ROWS} error, int64[1] batch, float "{_LW}"'
        body = (
            f'{{ lw = Cast<to: int = 11>("{_LW}")  outs = Constant<value_int = {2 * N}>()'
            f" half = Constant<value_int = {N}>()  n1 = Mul(batch, half)"
            " n = Cast<to: int = 11>(n1)  two = Constant<value_float = 2.0>()"
            " two_d = Cast<to: int = 11>(two)  f1 = Mul(two_d, lw)  f = Div(f1, n)"
            " d = Mul(error, f)"
        )
        system = [{"name": "batch", "kind": "symbol", "symbol": "batch"}, weight(_LW)]
        body += f" wt = Transpose<perm = [1, 0]>({w})"
        if before == "h0":
            # One cotangent for both uses.
            body += " dm = MatMul(d, wt)  dh0 = Add(dm, d)"
            gives = ["dh0"]
        else:
            body += f" d{before} = MatMul(d, wt)  dskip = Identity(d)"
            gives = [f"d{before}", "dskip"]
    else:
        reads = [(here, f"forward_model.{virtual}"), (f"d{here}", f"backward_model.{virtual + 1}")]
        head = f"{_ROWS} {here}, {_ROWS} d{here}"
        body = (
            f"{{ hh = Mul({here}, {here})  t = Constant<value_float = 1.0>()"
            " td = Cast<to: int = 11>(t)  slope = Sub(td, hh)"
        )
        upper = f"d{here}"
        if not virtual and last > 1:
            reads.append(("dskip", f"backward_model.{last}"))
            head += f", {_ROWS} dskip"
            body += f" both = Add({upper}, dskip)"
            upper = "both"
        body += f" d = Mul({upper}, slope)"
        gives = []
        if virtual:
            body += f" wt = Transpose<perm = [1, 0]>({w})  d{before} = MatMul(d, wt)"
            gives = [f"d{before}"]
    head += f", {_GRID} {w}" if virtual else ""
    operand = before if virtual else "xk"
    total = f"onnxpar.micro.{w}"
    gradient = f' at_ = Transpose<perm = [1, 0]>({operand})  "{grad}" = MatMul(at_, d)'
    gradient += added(grad, total)
    operands = [(before, source)] if virtual else []
    extra = f"{_ROWS} {before}" if virtual else f"{_ROWS} x, int64[1] micro"
    extra += f', int64[1] "onnxpar.accumulate", {_GRID} "{total}"'
    factor = "" if virtual else _FACTOR
    micro = [] if virtual else [{"name": "micro", "kind": "counter", "counter": "micro_batch"}]
    given = [(name, _ROWS) for name in gives]
    if not virtual:
        inputs = [x]
    if shape.split:
        d = f"d{virtual}"
        text = body + f" {d} = Identity(d)"
        programs[back] = Program(
            on(stage, lambda _: _graph(head, [*given, (d, _ROWS)], text)),
            [],
            [],
            system,
            [w] if virtual else [],
            {},
            [handed(n, s) for n, s in reads],
            [handed(n) for n in (*gives, d)],
        )
        renamed = gradient.replace("(at_, d)", f"(at_, {d})")
        programs[f"weight_model.{virtual}"] = Program(
            on(
                stage,
                lambda _: _graph(f"{extra}, {_ROWS} {d}", [(grad, _GRID)], "{" + factor + renamed),
            ),
            inputs,
            [],
            [*micro, ADDED],
            [total],
            {grad: grad},
            [handed(n, s) for n, s in [*operands, (d, back)]],
        )
        return
    programs[back] = Program(
        on(
            stage,
            lambda _: _graph(
                f"{head}, {extra}",
                [*given, (grad, _GRID)],
                body.replace("{", "{" + factor, 1) + gradient,
            ),
        ),
        inputs,
        [],
        [*system, *micro, ADDED],
        [*([w] if virtual else []), total],
        {grad: grad},
        [handed(n, s) for n, s in [*reads, *(o for o in operands if o not in reads)]],
        [handed(n) for n in gives],
    )


def _update(shape: Shape, rank: int, own: Sequence[str]) -> str:
    """Returns the optimizer's graph of a rank: SGD, and the norm of the gradients of all stages."""
    counterparts = [stage * shape.size + rank % shape.size for stage in range(shape.stages)]
    stage = rank // shape.size
    head = [f'{_GRID} {w}, {_GRID} "onnxpar.grad.{w}"' for w in own]
    gives = [(f"new.{w}", _GRID) for w in own] + [("onnxpar.grad_norm", "double")]
    body, token, number = "{ z = Constant<value_float = 0.0>()  all0 = Cast<to: int = 11>(z)", "", 0

    def reduce(value: str, to: str, ranks: Sequence[int]) -> None:
        nonlocal body, token, number
        number += 1
        after = f", {token}" if token else ""
        token = f"t{number}"
        body += f" {to}, {token} = {_reduce(ranks)}({value}{after})"

    total = "all0"
    for w in own:
        shared = [s for s in range(shape.stages) if w in shape.own(s)]
        places = _mesh(shape, rank) if shape.size > 1 else [rank]
        ranks = sorted(s * shape.size + r % shape.size for s in shared for r in places)
        if len(ranks) > 1:
            reduce(f'"onnxpar.grad.{w}"', f"g_{w}", ranks)
        else:
            body += f' g_{w} = Identity("onnxpar.grad.{w}")'
        body += f' st_{w} = Mul(g_{w}, "onnxpar.hyper.lr")  "new.{w}" = Sub({w}, st_{w})'
        if shared[0] == stage:
            body += f" sq_{w} = Mul(g_{w}, g_{w})  s_{w} = ReduceSum<keepdims: int = 0>(sq_{w})"
            body += f" sum_{w} = Add({total}, s_{w})"
            total = f"sum_{w}"
    if shape.stages > 1:
        reduce(total, "total", counterparts)
        total = "total"
    body += f' "onnxpar.grad_norm" = Sqrt({total})'
    return _graph(", ".join([*head, 'double "onnxpar.hyper.lr"']), gives, body)


class Reference:
    """The same training in numpy, in float64, on one device."""

    def __init__(self, shape: Shape) -> None:
        """Begins with the directory's parameters."""
        self.shape = shape
        self.weights = {w: array.copy() for w, array in weights(shape).items()}
        self.seen = np.zeros(1)

    def forward(self, batch: Mapping[str, Array], number: int = 0) -> tuple[list[Array], Array]:
        """Returns x and the h of all virtual stages but the last, and p."""
        values = [batch["x"] * (1 + number / 10)]
        last = self.shape.count - 1
        for virtual in range(last):
            values.append(np.tanh(values[-1] @ self.weights[self.shape.parameter(virtual)]))
        return values, values[-1] @ self.weights[self.shape.parameter(last)] + values[1]

    def gradients(self, batches: Sequence[Mapping[str, Array]]) -> tuple[float, dict[str, Array]]:
        """Returns mean loss and gradients over all that the micro-batches hold."""
        total = sum(len(b["x"]) for b in batches) * N
        grads = {w: np.zeros((N, N)) for w in self.weights}
        loss, last = 0.0, self.shape.count - 1
        for number, batch in enumerate(batches):
            self.seen = self.seen / 2 + len(batch["x"])
            values, p = self.forward(batch, number)
            error = p - batch["labels"]
            loss += float((error**2).sum()) / total
            skip = d = 2 * error / total
            for virtual in range(last, -1, -1):
                w = self.shape.parameter(virtual)
                if virtual < last:
                    up = d + skip if not virtual else d
                    d = up * (1 - values[virtual + 1] ** 2)
                grads[w] += values[virtual].T @ d
                d = d @ self.weights[w].T
        return loss, grads

    def step(self, batches: Sequence[Mapping[str, Array]], rate: float) -> tuple[float, float]:
        """Returns loss and gradient norm of one step."""
        loss, grads = self.gradients(batches)
        for w, gradient in grads.items():
            self.weights[w] = self.weights[w] - rate * gradient
        return loss, float(np.sqrt(sum((g**2).sum() for g in grads.values())))
