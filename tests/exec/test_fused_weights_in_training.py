"""Training of weights that are divided into parts: as of the complete weights, and stored as them.

The reference is a directory for one device whose weights are not divided.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from onnxpar.api import runtime
from onnxpar.cli import main
from onnxpar.core.errors import ModelError
from onnxpar.frontend.fused_weights import FusedWeights
from onnxpar.strategy import Strategy
from onnxpar_format.options import TrainingRun
from onnxpar_format.records import FormatError
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.checkpoint.reshard import merge, reshard
from onnxpar_runtime.errors import DirectoryError, InputError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.training import run
from tests.exec.test_fused_weights import CASES, model
from tests.tiers import covering
from tests.training_cases import after_training, batch_of, hyper, shard

Array = NDArray[Any]
STEPS = 3


def make(out: Path, case: str, strategy: str | Strategy, **more: Any) -> Path:
    return shard(out, ir.from_proto(model(CASES[case])), strategy, loss="mse", **more)


def undivided(out: Path, case: str, patch: pytest.MonkeyPatch, **more: Any) -> Path:
    """A directory for one device whose weights are as in the file."""
    with patch.context() as inside:
        inside.setattr(FusedWeights, "__init__", _find_none)
        made = make(out, case, "dp=1", **more)
    assert all(state.part is None for state in Manifest.load(made).trained().states.values())
    return made


def _find_none(self: FusedWeights, program: Any, kept: object = ()) -> None:
    from onnxpar.frontend.fused_weights import _Finder

    self._finder, self._regions = _Finder(program), []


def states_after(directory: Path, optimizer: str) -> dict[str, Array]:
    """The tensors of all states after some steps, by the names that checkpoints have."""
    draw = np.random.default_rng(0)
    with TrainerGroup(directory) as group:
        for step in range(1, STEPS + 1):
            batches = [batch_of(directory, draw, batch=3, seq=2) for _ in range(2)]
            group.train_step(batches, hyper(optimizer, step, clip_norm=1.0))
        tensors = Manifest.load(directory).trained().by_tensor
        return {name: group.gather(name) for name in tensors}


@pytest.mark.parametrize(
    ("strategy", "case", "optimizer"),
    covering(
        ["tp=2", "dp=2,tp=2", "tp=3"],
        ["heads", "split", "convolved"],
        ["sgd", "adamw", "momentum"],
    ),
)
def test_equals_complete_weights(
    tmp_path: Path, case: str, optimizer: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, gradients and moments after three clipped steps of two micro-batches."""
    divided = make(tmp_path / "divided", case, strategy, optimizer=optimizer)
    complete = undivided(tmp_path / "whole", case, monkeypatch, optimizer=optimizer)
    got, wanted = states_after(divided, optimizer), states_after(complete, optimizer)
    assert set(got) == set(wanted)
    assert any(state.part for state in Manifest.load(divided).trained().states.values())
    for name, array in wanted.items():
        # Sums of float32 in another order.
        np.testing.assert_allclose(
            got[name], array, rtol=0, atol=2e-5 * max(np.abs(array).max(), 1e-3), err_msg=name
        )


MORE: dict[str, dict[str, Any]] = {
    "optimizer parallel 1": {"optimizer_parallel": {"level": 1, "threshold": 0}},
    "optimizer parallel 3": {"optimizer_parallel": {"level": 3, "threshold": 0}},
    "recomputation": {"recompute": ["*"]},
    "recomputation of a node": {"recompute": ["qkv"]},
    "stages": {"pipeline": {"stages": 2, "micro_batches": 2}},
    "given stages": {
        "pipeline": {"stages": 2, "micro_batches": 2, "assign": {"qkv": 0, "parts": 1, "out": 1}}
    },
}


# Level 3 shards what level 1 does, a node is recomputed as all are, and stages are given or chosen.
COVERED = ("optimizer parallel 1", "recomputation of a node", "stages")


@pytest.mark.parametrize(
    "more", [pytest.param(m, marks=pytest.mark.full) if m in COVERED else m for m in MORE]
)
def test_with(tmp_path: Path, more: str) -> None:
    strategy = Strategy.from_dict({"mesh": {"dp": 2, "tp": 2}, **MORE[more]})
    ranks = make(tmp_path / "ranks", "convolved", strategy, optimizer="adamw")
    found = runtime.verify(
        ranks,
        tmp_path / "ranks.onnx",
        cases=["batch=3,seq=5"],
        options=runtime.VerifyOptions(steps=2),
    )
    assert [problem for case in found for problem in case.problems] == []


def test_in_16_bits(tmp_path: Path) -> None:
    ranks = make(tmp_path / "ranks", "split", "tp=2", optimizer="adamw", compute="float16")
    found = runtime.verify(ranks, tmp_path / "ranks.onnx", cases=["batch=3,seq=5"])
    assert [problem for case in found for problem in case.problems] == []
    assert sum(s.part is not None for s in Manifest.load(ranks).trained().states.values()) > 0


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks with a checkpoint, and directories for other numbers of ranks."""
    folder = tmp_path_factory.mktemp("fused")
    directory = make(folder / "tp2", "convolved", "tp=2", optimizer="adamw")
    make(folder / "tp4", "convolved", "tp=4", optimizer="adamw")
    make(folder / "dp2tp2", "convolved", "dp=2,tp=2", optimizer="adamw")
    make(folder / "one", "convolved", "dp=1", optimizer="adamw")
    with pytest.MonkeyPatch.context() as patch:
        undivided(folder / "whole", "convolved", patch, optimizer="adamw")
    batch = batch_of(directory, np.random.default_rng(0), batch=8, seq=3)
    with after_training(directory, batch, lr=0.01) as group:
        weights = {n: group.gather(n) for n in ("w", "filters", "cbias", "wo")}
    np.savez(folder / "weights.npz", **weights)
    return folder


def bytes_of(checkpoint: Path) -> dict[str, bytes]:
    (file,) = checkpoint.glob("*.safetensors")
    return {name: array.tobytes() for name, array in load_file(file).items()}


def test_any_mesh_holds_the_same_bits(trained: Path, tmp_path: Path) -> None:
    """From two ranks to four, to one with parts, to one without, and back, and merged each time."""
    merge(trained / "ck", tmp_path / "first")
    wanted = bytes_of(tmp_path / "first")
    assert {"w", "filters", "cbias", "onnxpar.moment1.w"} <= set(wanted)
    source = trained / "ck"
    for number, name in enumerate(("tp4", "dp2tp2", "one", "whole", "tp2")):
        reshard(source, tmp_path / name, trained / name, verify=True)
        source = tmp_path / name
        merge(source, tmp_path / f"merged{number}")
        assert bytes_of(tmp_path / f"merged{number}") == wanted


def test_ranks_write_what_a_resharded_checkpoint_has(trained: Path, tmp_path: Path) -> None:
    """Read by four ranks, and by one whose weights are complete, and written again."""
    merge(trained / "ck", tmp_path / "first")
    again = TrainingRun(
        f"npz:{trained / 'a.npz'}", lr=0.01, batch_size=4, epochs=1, print_every=0,
        resume=str(trained / "ck"),
    )  # fmt: skip
    for name in ("tp4", "whole"):
        out = tmp_path / f"{name}.safetensors"
        with TrainerGroup(trained / name) as group:
            group.on_each(lambda member: run.train_with(member, again))
            group.on_each(lambda member, out=out: run.save(member, out))
            moment = group.gather("onnxpar.moment1.w")
        first = bytes_of(tmp_path / "first")
        assert moment.tobytes() == first["onnxpar.moment1.w"]
        saved = load_file(out)
        assert set(saved) == {"w", "wo", "filters", "cbias"}
        assert all(array.tobytes() == first[n] for n, array in saved.items())


def test_the_exported_model_has_the_tensors_of_the_file(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    arguments = [
        "export",
        str(trained / "ck"),
        "-o",
        str(out),
        "--model",
        str(trained / "tp2.onnx"),
    ]
    assert main(["checkpoint", *arguments]) == 0
    before, after = onnx.load(trained / "tp2.onnx"), onnx.load(out)
    assert [n.op_type for n in after.graph.node] == [n.op_type for n in before.graph.node]
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in after.graph.initializer}
    with np.load(trained / "weights.npz") as weights:
        for name in weights.files:
            np.testing.assert_array_equal(arrays[name], weights[name])


def test_complete_tensors_are_loaded_in_parts(trained: Path) -> None:
    draw = np.random.default_rng(3)
    w = draw.standard_normal((8, 16)).astype(np.float32)
    with TrainerGroup(trained / "tp2") as group:
        group.load_parameters({"w": w})
        np.testing.assert_array_equal(group.gather("w"), w)
        np.testing.assert_array_equal(group.gather("w.1"), w[:, 8:12])
        group.load_states({"onnxpar.moment1.w": w, "w.1": 2 * w[:, 8:12]})
        np.testing.assert_array_equal(group.gather("onnxpar.moment1.w"), w)
        np.testing.assert_array_equal(group.gather("w")[:, 8:12], 2 * w[:, 8:12])
        with pytest.raises(InputError, match=r"'w': expected the shape \(8, 16\), got \(8, 15\)"):
            group.load_parameters({"w": w[:, 1:]})


# -- what is trained -------------------------------------------------------------------------------


def test_lamb_needs_complete_tensors(tmp_path: Path) -> None:
    """Its step depends on the norm of the tensor."""
    states = Manifest.load(make(tmp_path / "a", "split", "tp=2", optimizer="lamb")).trained().states
    assert {"w", "onnxpar.moment1.w"} <= set(states)


def test_patterns_and_counts_are_of_the_file(tmp_path: Path) -> None:
    frozen = Manifest.load(make(tmp_path / "a", "split", "tp=2", freeze=("w",))).trained()
    assert {s.parameter for s in frozen.states.values()} == {"wo"}
    both = Manifest.load(make(tmp_path / "b", "split", "tp=2")).trained()
    assert [(t.name, t.elements, t.trained) for t in both.tensors] == [
        ("w", 128, True),
        ("wo", 64, True),
    ]
    with pytest.raises(ModelError, match=r"w\.0"):
        make(tmp_path / "c", "split", "tp=2", freeze=("w.0",))


def test_a_part_without_gradient_keeps_its_tensor_complete(tmp_path: Path) -> None:
    """The loss does not depend on v: w has a gradient, and a part of it has none."""
    proto = model(
        "[qkv] f = MatMul(x, w) q, k, v = Split<axis = -1>(f, sizes) kk = Concat<axis = 2>(k, k)"
        "s = Mul(q, kk) y = MatMul(s, wo) z = Identity(v)",
        more=", float[batch, seq, 4] z",
    )
    ranks = shard(tmp_path / "a", ir.from_proto(proto), "tp=2", loss="mse")
    assert {s.parameter for s in Manifest.load(ranks).trained().states.values()} == {"w", "wo"}
    found = runtime.verify(ranks, tmp_path / "a.onnx", cases=["batch=3,seq=5"])
    assert [problem for case in found for problem in case.problems] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, _: s.pop(), "parts that make up the tensor"),
        (lambda s, part: part.update(start=part["start"] + 1), "part"),
        (lambda s, part: part.update(axis=5), "a dim of the shape"),
        (lambda s, part: part.update(shape=[7]), "a range of the shape"),
        (lambda s, part: part.update(shape=[9]), "parts that make up the tensor"),
    ],
)
def test_a_manifest_with_wrong_parts_is_refused(
    trained: Path, tmp_path: Path, change: Any, message: str
) -> None:
    raw = json.loads((trained / "tp2" / "manifest.json").read_text())
    states = raw["training"]["states"]
    at = max(i for i, s in enumerate(states) if s.get("part"))
    del states[at + 1 :]
    change(states, states[at]["part"])
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises((FormatError, DirectoryError), match=message):
        Manifest.load(tmp_path)
