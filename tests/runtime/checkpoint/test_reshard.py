"""Checkpoints of other meshes: whatever the way, bytes equal those of the direct merge."""

import hashlib
import json
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import transformer
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from onnxpar.cli import main
from onnxpar.strategy import Strategy
from onnxpar_format.checkpoint import FILE_NAME, Progress
from onnxpar_format.options import Saving, TrainingRun
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.checkpoint import reshard as module
from onnxpar_runtime.checkpoint.contents import Checkpoint
from onnxpar_runtime.checkpoint.folder import resolve
from onnxpar_runtime.checkpoint.reshard import export_weights, merge, pieces_of, reshard
from onnxpar_runtime.checkpoint.writer import Checkpointer
from onnxpar_runtime.errors import CheckpointError
from onnxpar_runtime.training import run
from tests.tiers import FULL
from tests.training_cases import batch_of, shard

GPT = {"layers": 1, "d_model": 32, "heads": 4, "vocab": 40, "max_positions": 16}
MESHES: dict[str, str | Strategy] = {
    "tp4": "tp=4",
    "pp2dp2": Strategy.from_dict(
        {"mesh": {"dp": 2}, "pipeline": {"stages": 2, "micro_batches": 2}}
    ),
    "tp3": "tp=3",
    "dp3": Strategy.from_dict(
        {"mesh": {"dp": 3}, "optimizer_parallel": {"level": 3, "threshold": 0}}
    ),
    "one": "dp=1",
}
if not FULL:
    del MESHES["tp3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the directories of several meshes, a checkpoint of dp2·tp2 and its weights."""
    folder = tmp_path_factory.mktemp("reshard")
    model = transformer.build(**GPT, fused_qkv=True, tied_head=True)
    first = shard(folder / "dp2tp2", model, "dp=2,tp=2", optimizer="adamw")
    for name, strategy in MESHES.items():
        shard(folder / name, model, strategy, optimizer="adamw")
    batch = batch_of(first, np.random.default_rng(1), batch=3, seq=5)
    np.savez(folder / "a.npz", **batch)
    wanted = TrainingRun(
        f"npz:{folder / 'a.npz'}", lr=1e-2, batch_size=3, epochs=2, print_every=0,
        checkpoints=Saving(folder / "ck"), save=folder / "w",
    )  # fmt: skip
    with TrainerGroup(first) as group:
        group.on_each(lambda member: run.train_with(member, wanted))
    return folder


def bytes_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


@pytest.mark.parametrize("limit", [1 << 25, 1000])
def test_any_way_leads_to_the_same_bytes(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    pieces = pieces_of
    monkeypatch.setattr(module, "pieces_of", lambda shape, size: pieces(shape, size, limit))
    merge(trained / "ck", tmp_path / "direct")
    source = trained / "ck"
    for name in MESHES:
        made = reshard(source, tmp_path / name, trained / name)
        source = made.path
        checkpoint = Checkpoint.load(source)
        for file in checkpoint.files:
            checkpoint.verify_file(file)
        merge(source, tmp_path / f"merged {name}")
        assert bytes_of(tmp_path / f"merged {name}") == bytes_of(tmp_path / "direct")
    # One device holds what a merge makes.
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "direct")


def test_a_resharded_checkpoint_is_what_its_ranks_write(trained: Path, tmp_path: Path) -> None:
    made = reshard(trained / "ck", tmp_path / "made", trained / "dp3")
    with TrainerGroup(trained / "dp3") as group:
        group.load_states({n: a for n, a in load_file(_merged(trained, tmp_path)).items()})
        checkpoint = Checkpoint.load(made.path)

        def write(rank: int) -> None:
            member = group.members[rank]
            with Checkpointer(
                member.rank, group.manifest, tmp_path / "ck", member.states, checkpoint.run
            ) as writer:
                writer.save(checkpoint.progress)

        group.each(write)
    (written,) = (p for p in (tmp_path / "ck").iterdir() if p.is_dir())
    ours, theirs = Checkpoint.load(written), Checkpoint.load(made.path)
    # The model's name is that of the file that was sharded.
    assert (ours.tensors, ours.files, ours.progress) == (
        theirs.tensors,
        theirs.files,
        theirs.progress,
    )


def _merged(trained: Path, folder: Path) -> Path:
    return merge(trained / "ck", folder / "merged").path / "rank0000.safetensors"


def test_weights_by_name(trained: Path, tmp_path: Path) -> None:
    export_weights(trained / "ck", tmp_path / "w.safetensors")
    got, wanted = load_file(tmp_path / "w.safetensors"), load_file(trained / "w")
    assert got.keys() == wanted.keys() and len(got) > 10
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 7), max_size=4),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 200),
)
def test_pieces_are_runs_of_memory_in_order(shape: list[int], size: int, limit: int) -> None:
    memory = np.arange(prod(shape)).reshape(shape)
    found: list[int] = []
    for region in pieces_of(shape, size, limit):
        piece = memory[tuple(slice(*interval) for interval in region)]
        assert piece.size * size <= max(limit, size)
        found += piece.ravel().tolist()
    assert found == list(range(prod(shape)))


@pytest.mark.parametrize("summed", [True, False])
def test_schema_1_is_read(trained: Path, tmp_path: Path, summed: bool) -> None:
    """It may have no sums: then bytes that changed are found by SHA-256, and sums are made."""
    source = Checkpoint.load(resolve(trained / "ck"))
    old = tmp_path / "old"
    shutil.copytree(source.directory, old)
    contents = json.loads((old / FILE_NAME).read_text())["contents"]
    assert contents["schema"] == 2
    contents["schema"] = 1
    if not summed:
        for tensor in contents["tensors"].values():
            del tensor["sum"]
    text = json.dumps(contents, ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (old / FILE_NAME).write_text(json.dumps({"sha256": digest, "contents": contents}))
    merge(old, tmp_path / "a")
    merge(source.directory, tmp_path / "b")
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    file = next(old.glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(
        CheckpointError, match=f"expected {'the checksum' if summed else 'SHA-256'}"
    ):
        merge(old, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_changed_byte_of_the_source_is_found(trained: Path, tmp_path: Path) -> None:
    merged = merge(trained / "ck", tmp_path / "m").path
    file = merged / "rank0000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for action, message in (
        (
            lambda: merge(merged, tmp_path / "n"),
            r"in rank0000.safetensors: its content has "
            r"changed: expected the",
        ),
        (
            lambda: reshard(merged, tmp_path / "n", trained / "tp4"),
            "its content has changed: expected the checksum",
        ),
        (
            lambda: merge(merged, tmp_path / "n", verify=True),
            "rank0000.safetensors: its content has changed: expect",
        ),
        (
            lambda: export_weights(merged, tmp_path / "n", verify=True),
            "its content has changed: expected SHA-256",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            action()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_cannot_be_is_reported(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / ".y.partial").symlink_to(tmp_path / "there")
    other = shard(
        tmp_path / "sgd", transformer.build(**GPT, fused_qkv=True), "tp=2", optimizer="sgd"
    )
    cases = (
        (["merge", str(trained / "ck"), str(tmp_path / "there")], "already exists"),
        (["merge", str(trained / "ck"), str(tmp_path / "y")],
         ".y.partial: expected no such file"),
        (["merge", str(trained), str(tmp_path / "x")], "has no complete checkpoint"),
        (["reshard", str(trained / "ck"), str(tmp_path / "x"), "--to", str(other)],
         "expected the optimizer sgd, got adamw"),
        (["reshard", str(trained / "ck"), str(tmp_path / "x"), "--to", str(tmp_path)],
         "expected a directory that `onnxpar shard` wrote"),
        (["export", str(trained / "ck"), "-o", str(tmp_path / "x.pt")], "named *.onnx or"),
        (["export", str(trained / "ck"), "-o", str(tmp_path / "x.onnx")], "needs --model"),
        (["export", str(trained / "ck"), "-o", str(tmp_path / "no" / "x.safetensors")],
         f"x.safetensors: its folder {tmp_path}/no does not exist"),
    )  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    for arguments, message in cases:
        assert main(["checkpoint", *arguments]) == 2
        error = capsys.readouterr().err
        assert (
            message in error and error.startswith("onnxpar: error: ") and "Traceback" not in error
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_results_are_printed_as_json(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, weights = str(trained / "ck"), tmp_path / "w.safetensors"
    cases = (
        (tmp_path / "merged", ["merge", source, str(tmp_path / "merged")], 1),
        (tmp_path / "tp4", ["reshard", source, str(tmp_path / "tp4"), "--to",
                            str(trained / "tp4")], 4),
        (weights, ["export", source, "-o", str(weights)], 1),
    )  # fmt: skip
    for path, arguments, files in cases:
        capsys.readouterr()
        assert main(["checkpoint", *arguments, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        written = [path] if path.is_file() else list(path.glob("*.safetensors"))
        tensors = {name for file in written for name in load_file(file)}
        assert printed == {
            "path": str(path), "step": 2, "tensors": len(tensors), "files": files,
            "bytes": sum(file.stat().st_size for file in written),
        }  # fmt: skip


def test_progress_survives(trained: Path, tmp_path: Path) -> None:
    before = Checkpoint.load(next(p for p in (trained / "ck").iterdir() if p.is_dir()))
    after = Checkpoint.load(merge(trained / "ck", tmp_path / "m").path)
    assert after.progress == before.progress and after.run == before.run
    assert replace(before.progress, loss=None) == Progress(
        step=2, epoch=2, epoch_step=1, seed=0, lr=1e-2
    )
