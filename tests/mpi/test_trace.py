"""`--trace` under mpirun, and what `onnxpar trace` says of the file."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from onnxpar.cli import main
from onnxpar_format.calls import COLLECTIVE
from onnxpar_format.trace import (
    CALL,
    FOREGROUND,
    MAIN,
    OPERATOR,
    PROGRAM,
    STEP,
    WAITING,
    Trace,
    read_trace,
)
from onnxpar_format.trace_times import PARTS, times
from tests.chrome_trace import complaints
from tests.cli import linear
from tests.mpi.test_train import DIGITS, train


def check(file: Path, trace: Trace, steps: int) -> int:
    """Checks that steps are the sums of their parts; returns the number of collectives."""
    assert complaints(json.loads(file.read_text())) == []
    assert [c.uncertainty for c in trace.clocks] == [0, 0]
    found = times(trace)
    assert found.steps == steps
    for rank in found.ranks:
        assert sum(getattr(rank, part) for part in PARTS) == pytest.approx(rank.step)
        assert min(getattr(rank, part) for part in PARTS) >= 0
    waits = {(s.rank, s.track, s.start): s.end for s in trace.spans if s.kind == WAITING}
    members: dict[tuple[object, ...], list[float]] = {}
    for call in trace.spans:
        if call.kind == CALL and call.more["op"] == COLLECTIVE:
            met = waits[call.rank, call.track, call.start]
            assert call.start <= met <= call.end
            key = call.name, call.more["lane"], call.more["place"]
            members.setdefault(key, []).append(met)
            # Ranks of one machine do not compute while they communicate.
            assert call.track == FOREGROUND
    assert {len(met) for met in members.values()} == {2}
    return len(members)


def test_a_trace_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times of steps are sums of their parts; all members of a call have it, and meet at once."""
    file = tmp_path / "t.json"
    directory = linear.shard(tmp_path, 2)
    outcome = train(
        2, directory, *DIGITS, "--steps", "6", "--trace", str(file), "--trace-operators"
    )
    assert outcome.code == 0, outcome.err
    assert f"wrote {file}: of a step of " in outcome.err
    trace = read_trace(file)
    # 6 steps of a reduction of gradients and one of the program's own, at least.
    assert check(file, trace, 5) >= 12
    for number in range(2):
        own = [s for s in trace.spans if s.rank == number]
        assert sum(s.kind == STEP and s.track == MAIN for s in own) >= 6
        programs = [s for s in own if s.kind == PROGRAM]
        operators = [s for s in own if s.kind == OPERATOR]
        assert {s.more["op"] for s in operators} >= {"AllReduce"}
        # onnxruntime rounds to microseconds, and its clock is the wall's, which may be adjusted.
        slack = 1e-3
        for operator in operators:
            assert any(
                p.start - slack <= operator.start and operator.end <= p.end + slack
                for p in programs
            )

    capsys.readouterr()
    assert main(["trace", str(file)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:3] == ["rank", "step", "compute"] and shown[2].split()[0] == "1"
    assert main(["trace", str(file), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 2


@pytest.mark.full
def test_a_trace_of_resnet50_adds_up(tmp_path: Path) -> None:
    """With parameters that are gathered behind the next step, where the transport can do that."""
    zoo = pytest.importorskip("zoo", reason="needs transformers: the extra zoo")
    from onnxpar.api.pytorch.export_module import export, save

    save(export(zoo.example("resnet50")), tmp_path / "resnet50.onnx")
    strategy, out = tmp_path / "s.yaml", tmp_path / "out"
    strategy.write_text("mesh: {dp: 2}\noptimizer_parallel: {level: 1, threshold: 0}\n")
    training = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "momentum"]
    model = str(tmp_path / "resnet50.onnx")
    assert main(["shard", model, "--strategy", str(strategy), "-o", str(out), *training]) == 0
    draw = np.random.default_rng(0)
    images = draw.standard_normal((16, 3, 128, 128), np.float32)
    np.savez(tmp_path / "d.npz", pixel_values=images, labels=draw.integers(0, 10, 16))
    data = ["--data", f"npz:{tmp_path / 'd.npz'}", "--batch-size", "4", "--lr", "0.01"]
    file = tmp_path / "t.json"
    outcome = train(2, out, *data, "--steps", "4", "--device", "cpu", "--trace", str(file))
    assert outcome.code == 0, outcome.err
    trace = read_trace(file)
    # Statistics of 53 norms, their gradients, and what the optimizer sends.
    assert check(file, trace, 3) > 4 * 53
    assert {s.name for s in trace.spans if s.kind == PROGRAM} >= {"training_model"}


def test_the_trace_of_an_evaluation_is_shown_on_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """360 images in 4 batches, of which the first does not count."""
    directory, file = linear.shard(tmp_path, 1), tmp_path / "t.json"
    run = ["eval", str(directory), "--data", "digits", "--batch-size", "100", "--device", "cpu"]
    assert main([*run, "--trace", str(file)]) == 0
    found = times(read_trace(file))
    (rank,) = found.ranks
    assert found.steps == 3 and rank.compute > 0 and rank.input > 0
    assert sum(getattr(rank, part) for part in PARTS) == pytest.approx(rank.step)
    capsys.readouterr()
    page = tmp_path / "page.html"
    assert main(["report", str(directory), "--trace", str(file), "-o", str(page)]) == 0
    (data,) = re.findall(r'<script[^>]* id="data">(.*?)</script>', page.read_text())
    shown = json.loads(data)["trace"]
    assert shown["name"] == "t.json" and len(shown["ranks"]) == 1
    headings = [heading for _, heading in shown["columns"]]
    assert headings[:2] == ["step", "compute"] and "waiting" not in headings
    assert shown["ranks"][0]["step"] == rank.step
    two = linear.shard(tmp_path, 2)
    page.unlink()
    assert main(["report", str(two), "--trace", str(file), "-o", str(page)]) == 2
    assert "expected a trace of 2 ranks, as ranks2 has, got one of 1" in capsys.readouterr().err
    assert not page.exists()


def test_files_that_are_no_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text('{"traceEvents": []}')
    assert main(["trace", str(tmp_path / "a.json")]) == 2
    assert "expected a trace that --trace wrote, got another file" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "b.json")]) == 2
    assert "b.json: No such file" in capsys.readouterr().err
    directory = linear.shard(tmp_path, 1)
    options = ["train", str(directory), *DIGITS, "--steps", "1", "--trace-operators"]
    assert main(options) == 2
    assert "--trace-operators: expected --trace as well" in capsys.readouterr().err
