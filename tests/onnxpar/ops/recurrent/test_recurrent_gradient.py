"""The gradients of RNN, GRU and LSTM, in float64 against PyTorch."""

from typing import Any

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import GradCase, chosen

# PyTorch's gates are i f g o and r z n, ONNX's are i o f c and z r h.
ORDER = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}
SMALL = {"N": 3, "S": 4}


def _gates(torch: Any, kind: str, w: Any) -> Any:
    parts = torch.chunk(w, len(ORDER[kind]))
    return torch.cat([parts[i] for i in ORDER[kind]])


def _weights(torch: Any, kind: str, operands: dict[str, Any], d: int) -> list[Any]:
    made = [_gates(torch, kind, operands[name][d]) for name in ("w", "r")]
    bias = operands.get("b")
    if bias is not None:
        made += [_gates(torch, kind, part) for part in torch.chunk(bias[d], 2)]
    return made


def network(kind: str, directions: int = 1, reverse: bool = False) -> Any:
    """The same in PyTorch."""

    def run(torch: Any, x: Any, **operands: Any) -> Any:
        hidden = operands["r"].shape[2]
        zero = torch.zeros(directions, x.shape[1], hidden, dtype=x.dtype)
        weights = [w for d in range(directions) for w in _weights(torch, kind, operands, d)]
        begin = operands.get("h0", zero)
        options = ("b" in operands, 1, 0.0, False, directions == 2, False)
        x = torch.flip(x, (0,)) if reverse else x
        if kind == "LSTM":
            y, *last = torch.lstm(x, [begin, operands.get("c0", zero)], weights, *options)
        else:
            function = {"RNN": torch.rnn_tanh, "GRU": torch.gru}[kind]
            y, *last = function(x, begin, weights, *options)
        y = torch.flip(y, (0,)) if reverse else y
        return y.reshape(*y.shape[:2], directions, hidden).transpose(1, 2), *last

    return run


def ragged(torch: Any, x: Any, w: Any, r: Any, h0: Any) -> Any:
    """An RNN whose rows have the lengths 4, 1 and 3."""
    states, rows = h0[0], []
    lengths = torch.tensor([4, 1, 3])
    for t in range(4):
        new = torch.tanh(x[t] @ w[0].T + states @ r[0].T)
        going = (t < lengths)[:, None]
        states = torch.where(going, new, states)
        rows.append(torch.where(going, new, torch.zeros_like(new)))
    return torch.stack(rows)[:, None], states[None]


def peepholes(torch: Any, x: Any, w: Any, r: Any, p: Any) -> Any:
    """An LSTM whose gates see the cell."""
    h = c = torch.zeros(x.shape[1], 2, dtype=x.dtype)
    pi, po, pf = torch.chunk(p[0], 3)
    rows = []
    for t in range(x.shape[0]):
        i, o, f, g = torch.chunk(x[t] @ w[0].T + h @ r[0].T, 4, dim=1)
        i, f = torch.sigmoid(i + pi * c), torch.sigmoid(f + pf * c)
        c = f * c + i * torch.tanh(g)
        h = torch.sigmoid(o + po * c) * torch.tanh(c)
        rows.append(h)
    return torch.stack(rows)[:, None], h[None], c[None]


def affine_relu(torch: Any, x: Any, w: Any, r: Any) -> Any:
    """A GRU that resets before its product, its activations others than usual, clipped."""
    h = torch.zeros(x.shape[1], 2, dtype=x.dtype)
    rz, rr, rh = torch.chunk(r[0], 3)
    rows = []
    for t in range(x.shape[0]):
        xz, xr, xh = torch.chunk(x[t] @ w[0].T, 3, dim=1)
        gate = [0.25 * torch.clamp(v, -2, 2) + 0.125 for v in (xz + h @ rz.T, xr + h @ rr.T)]
        new = torch.tanh(0.5 * torch.clamp(xh + (gate[1] * h) @ rh.T, -2, 2)) * 1.5
        h = (1 - gate[0]) * new + gate[0] * h
        rows.append(h)
    return torch.stack(rows)[:, None], h[None]


def operands(gates: int, directions: int, *names: str, shape: str = "S,N") -> dict[str, str]:
    """The types of some operands, hidden size 2 and input size 3."""
    state = f"double[{directions},N,2]"
    texts = {
        "x": f"double[{shape},3]",
        "w": f"double[{directions},{2 * gates},3]",
        "r": f"double[{directions},{2 * gates},2]",
        "b": f"double[{directions},{4 * gates}]",
        "h0": state,
        "c0": state,
        "p": f"double[{directions},6]",
    }
    return {name: texts[name] for name in ("x", "w", "r", *names)}


def case(node: str, inputs: dict[str, str], torch: Any, **more: Any) -> GradCase:
    """A node that neither onnxruntime nor onnx.reference computes in float64."""
    return GradCase(node, inputs, torch, sizes=SMALL, reference=False, alone=False, **more)


CASES = [
    case("y, h = RNN<hidden_size=2>(x, w, r)", operands(1, 1), network("RNN")),
    case(
        'y, h = RNN<hidden_size=2, direction="reverse">(x, w, r, b, , h0)',
        operands(1, 1, "b", "h0"),
        network("RNN", reverse=True),
    ),
    case(
        "y, h = RNN<hidden_size=2>(x, w, r, , l, h0)",
        {**operands(1, 1, shape="4,3"), "h0": "double[1,3,2]"},
        ragged,
        consts={"l": np.array([4, 1, 3], np.int32)},
    ),
    case(
        "y, h = GRU<hidden_size=2, linear_before_reset=1>(x, w, r, b, , h0)",
        operands(3, 1, "b", "h0"),
        network("GRU"),
    ),
    case(
        'y, h = GRU<hidden_size=2, linear_before_reset=1, direction="bidirectional">(x, w, r)',
        operands(3, 2),
        network("GRU", 2),
    ),
    case(
        """y, h = GRU<hidden_size=2, clip=2.0, activations=["Affine", "ScaledTanh"],
            activation_alpha=[0.25, 1.5], activation_beta=[0.125, 0.5]>(x, w, r)""",
        operands(3, 1),
        affine_relu,
    ),
    case(
        "y, h, c = LSTM<hidden_size=2>(x, w, r, b, , h0, c0)",
        operands(4, 1, "b", "h0", "c0"),
        network("LSTM"),
    ),
    case(
        'y, h, c = LSTM<hidden_size=2, direction="bidirectional">(x, w, r, b)',
        operands(4, 2, "b"),
        network("LSTM", 2),
    ),
    case("y, h, c = LSTM<hidden_size=2>(x, w, r, , , , , p)", operands(4, 1, "p"), peepholes),
]


@pytest.mark.parametrize("case", chosen(CASES), ids=lambda c: c.nodes)
def test_gradients(case: GradCase) -> None:
    case.check()
