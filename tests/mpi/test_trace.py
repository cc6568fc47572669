"""`--trace` under mpirun, and what `onnxpar trace` says of the file."""

import json
import re
from pathlib import Path

import pytest

from onnxpar.cli import main
from onnxpar_format.calls import COLLECTIVE
from onnxpar_format.trace import (
    CALL,
    MAIN,
    OPERATOR,
    PROGRAM,
    STEP,
    WAITING,
    read_trace,
)
from onnxpar_format.trace_times import PARTS, times
from tests.cli import linear
from tests.mpi.test_train import DIGITS, train


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
    assert [c.uncertainty for c in trace.clocks] == [0, 0]
    found = times(trace)
    assert found.steps == 5
    for rank in found.ranks:
        assert sum(getattr(rank, part) for part in PARTS) == pytest.approx(rank.step)
        assert min(getattr(rank, part) for part in PARTS) >= 0
    collectives = [s for s in trace.spans if s.kind == CALL and s.more["op"] == COLLECTIVE]
    members: dict[tuple[object, ...], list[float]] = {}
    for call in collectives:
        key = call.name, call.more["lane"], call.more["place"]
        waits = [s for s in trace.spans if s.kind == WAITING and s.rank == call.rank]
        (met,) = [s.end for s in waits if (s.track, s.start) == (call.track, call.start)]
        assert call.start <= met <= call.end
        members.setdefault(key, []).append(met)
    # 6 steps of a reduction of gradients and one of the program's own, at least.
    assert len(members) >= 12 and {len(met) for met in members.values()} == {2}
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
