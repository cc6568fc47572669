"""Measured memory: exact bytes of small graphs on each rank, and refused requests."""

from pathlib import Path

import numpy as np
import pytest

from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.session import Session
from onnxpar_runtime.training.trainer import Trainer
from tests.runtime import hand_made
from tests.runtime.hand_trained import batch_of, regression

COLUMNS = 64


def directory_of(path: Path, *bodies: str) -> Path:
    """A directory whose rank r computes y from x, both float32 [n, 64], by `bodies[r]`."""
    dims = [[("b", [])], [(COLUMNS, [])]]
    x, y = (hand_made.tensor(name, "float32", ["b", COLUMNS], dims) for name in "xy")
    types = f"(float[n, {COLUMNS}] x) => (float[n, {COLUMNS}] y)"
    graphs = [f"g {types} {{ {body} }}" for body in bodies]
    atoms = [len(bodies)] if len(bodies) > 1 else []
    return hand_made.write(path, graphs, atoms=atoms, inputs=[x], outputs=[y])


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("y = Exp(x)", 0),
        ("a = Exp(x) y = Cos(a)", 1),
        # Each value is live with the one before it, and the first is freed before the third.
        ("a = Exp(x) b = Sin(a) c = Cos(b) y = Sin(c)", 2),
        # The first is read again at the end.
        ("a = Exp(x) b = Sin(a) c = Cos(b) y = Sub(c, a)", 3),
        # The kernel writes over its operand.
        ("a = Exp(x) b = Softmax(a) y = Cos(b)", 1),
    ],
)
def test_peak_is_what_is_alive(tmp_path: Path, body: str, values: int) -> None:
    rows = 5000
    with Session(directory_of(tmp_path / "a", body), device="cpu", measured=True) as session:
        x = np.ones((rows, COLUMNS), np.float32)
        session.run({"x": x}, {"b": rows})
        session.peak_bytes(reset=True)
        for _ in range(2):
            session.run({"x": x}, {"b": rows})
            # Input and output are kept between runs.
            assert session.peak_bytes(reset=True) == (2 + values) * x.nbytes


def test_a_new_peak_begins(tmp_path: Path) -> None:
    with Session(
        directory_of(tmp_path / "a", "y = Exp(x)"), device="cpu", measured=True
    ) as session:
        peaks = []
        for rows in (10, 4000, 20):
            session.run({"x": np.ones((rows, COLUMNS), np.float32)}, {"b": rows})
            peaks.append(session.peak_bytes(reset=rows == 4000))
        size = COLUMNS * 4
        # Bindings are kept, with their inputs and outputs, for shapes that come again.
        assert peaks == [2 * 10 * size, 2 * 4010 * size, 2 * 4030 * size]


def test_ranks_are_counted_apart(tmp_path: Path) -> None:
    longer = "a = Exp(x) b = Sin(a) c = Cos(b) y = Sub(c, a)"
    directory = directory_of(tmp_path / "a", "y = Exp(x)", longer, "a = Exp(x) y = Cos(a)")
    x = np.ones((3000, COLUMNS), np.float32)
    with Ranks(directory, Session, measured=True) as group:
        for _ in range(2):  # outputs are there before the second run
            group.on_each(lambda member: member.run({"x": x}, {"b": len(x)}))
        assert [m.peak_bytes() // x.nbytes for m in group.members] == [2, 5, 3]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_counts_states_and_batch(tmp_path: Path, ranks: int) -> None:
    directory = regression(tmp_path / "a", ranks)
    batch = batch_of(6000, 1)
    hyper = {"lr": 0.1, "momentum": 0.9, "clip_norm": float("inf"), "momentum_first": 1.0}

    with Ranks(directory, Trainer, measured=True) as group:
        group.on_each(lambda member: member.train_step([batch], hyper))
        for member in group.members:
            states = sum(member.state(name).nbytes for name in member.training.states)
            part = sum(a.nbytes for a in batch.values()) // ranks
            # Between the nodes there are the residuals and what is made of them.
            assert states + part < member.peak_bytes() < states + 3 * part


def test_without_measuring_there_is_no_peak(tmp_path: Path) -> None:
    with (
        Session(directory_of(tmp_path / "a", "y = Exp(x)"), device="cpu") as session,
        pytest.raises(LaunchError, match="measured=True"),
    ):
        session.peak_bytes()
