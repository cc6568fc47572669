"""`mpirun onnxpar generate`: JSON on rank 0 alone, streams, an encoder, and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar.cli import main
from tests.decoders import FEATURES, encoder_decoder, growing
from tests.runtime.generation.plain import encoded, greedy
from tests.runtime.launching import Outcome, mpirun

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 9]]


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """A decoder over two ranks, and files with prompts."""
    model = growing(tmp_path / "model.onnx")
    (tmp_path / "three.json").write_text(json.dumps(PROMPTS))
    (tmp_path / "one.json").write_text(json.dumps(PROMPTS[1:2]))
    shard_model(model, "tp=2", tmp_path / "out")
    return model


def generate(folder: Path, *arguments: str, tokens: str = "three.json") -> Outcome:
    given = ["--tokens", str(folder / tokens), "--max-new-tokens", "12", *arguments]
    return mpirun(2, ["-m", "onnxpar.cli", "generate", str(folder / "out"), *given])


def test_json_is_all_that_is_printed(decoder: Path, tmp_path: Path) -> None:
    outcome = generate(tmp_path, "--json")
    found = json.loads(outcome.out)
    assert outcome.code == 0 and outcome.out.count("\n") == 1
    assert set(found) == {"sequences", "first_token_ms", "token_ms"}
    assert found["sequences"] == greedy(decoder, PROMPTS, 12)
    assert found["first_token_ms"] > 0 and found["token_ms"] > 0
    assert "tokens/s" in outcome.err


def test_logprobs_and_beams(decoder: Path, tmp_path: Path) -> None:
    """The best of two beams is at least as likely as what is chosen token by token."""
    likely = json.loads(generate(tmp_path, "--json", "--logprobs", "2").out)
    assert likely["sequences"] == greedy(decoder, PROMPTS, 12)
    for tokens, row in zip(likely["sequences"], likely["logprobs"], strict=True):
        assert [one["best"][0] for one in row] == [
            [token, one["logprob"]] for token, one in zip(tokens, row, strict=True)
        ]
        assert all(one["logprob"] > one["best"][1][1] for one in row)
    given = ["--beams", "2", "--length-penalty", "0", "--early-stopping", "never"]
    found = json.loads(generate(tmp_path, *given, "--json").out)
    assert [row[0]["tokens"] for row in found["beams"]] == found["sequences"]
    assert all(row[0]["score"] >= row[1]["score"] and len(row) == 2 for row in found["beams"])
    for row, tokens in zip(found["beams"], likely["logprobs"], strict=True):
        assert row[0]["score"] >= sum(one["logprob"] for one in tokens) - 1e-6


def test_shard_names_the_command_that_generates(
    decoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = decoder.parent / "named"
    assert main(["shard", str(decoder), "--strategy", "tp=2", "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"onnxpar launch -- generate {out} --tokens prompts.json" in printed


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("pp=2", 2), pytest.param("pp=2,tp=2", 4, marks=pytest.mark.full)]
)
def test_stages_of_a_pipeline(decoder: Path, strategy: str, ranks: int, tmp_path: Path) -> None:
    shard_model(decoder, strategy, tmp_path / "stages")
    given = ["--tokens", str(tmp_path / "three.json"), "--max-new-tokens", "12", "--json"]
    outcome = mpirun(ranks, ["-m", "onnxpar.cli", "generate", str(tmp_path / "stages"), *given])
    assert outcome.code == 0, outcome.text
    assert json.loads(outcome.out)["sequences"] == greedy(decoder, PROMPTS, 12)
    assert outcome.err.count("notice: one stage computes at a time") == 1


FAILS = """
import os, signal, sys
from onnxpar_runtime.errors import RankError
from onnxpar_runtime.generation.bound_graph import BoundGraph

run, left = BoundGraph.run, 4

def failing(self, handed):
    global left
    left -= 1
    index = self.executor.rank.index
    if index == {rank} and not left:
        if {kills}:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RankError(index, "the fourth run failed")
    return run(self, handed)

BoundGraph.run = failing
from onnxpar.cli import main
sys.exit(main(["generate", {directory!r}, "--tokens", {tokens!r}]))
"""


@pytest.mark.parametrize(
    ("rank", "kills"),
    [
        (0, False),
        (1, True),
        pytest.param(0, True, marks=pytest.mark.full),
        pytest.param(1, False, marks=pytest.mark.full),
    ],
)
def test_a_stage_that_fails_ends_all(decoder: Path, rank: int, kills: bool, tmp_path: Path) -> None:
    shard_model(decoder, "pp=2", tmp_path / "stages")
    script = FAILS.format(
        rank=rank,
        kills=kills,
        directory=str(tmp_path / "stages"),
        tokens=str(tmp_path / "three.json"),
    )
    outcome = mpirun(2, ["-c", script])
    assert outcome.code != 0 and outcome.out == ""
    if not kills:
        assert any("the fourth run failed" in line for line in outcome.messages)


def test_tokens_are_printed_as_they_come_and_end_at_eos(decoder: Path, tmp_path: Path) -> None:
    (want,) = greedy(decoder, PROMPTS[1:2], 12)
    end = want[4]
    outcome = generate(tmp_path, "--eos", str(end), tokens="one.json")
    expected = want[: want.index(end) + 1]
    assert outcome.code == 0, outcome.text
    assert [int(token) for token in outcome.out.split()] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            '[["a"]]',
            "expected a list of prompts, each a list of numbers from 0",
            marks=pytest.mark.full,
        ),
        pytest.param("[[1]", "not valid JSON", marks=pytest.mark.full),
        ("[[1], [99]]", "expected elements from -96 to 95 for node 'Gather_e' (Gather), got 99"),
    ],
)
def test_prompts_that_are_none_end_all_ranks(
    decoder: Path, text: str, message: str, tmp_path: Path
) -> None:
    del decoder
    (tmp_path / "three.json").write_text(text)
    outcome = generate(tmp_path)
    assert outcome.code == 2 and message in outcome.err and outcome.out == ""


def test_an_encoder_reads_its_inputs_once(tmp_path: Path) -> None:
    """With prompts from a file, and with one first token for all sequences."""
    folder = encoder_decoder(tmp_path / "model")
    shard_model(folder, "tp=2", tmp_path / "out")
    given = np.random.default_rng(0).normal(0, 2, (3, 9, FEATURES)).astype(np.float32)
    np.savez(tmp_path / "in.npz", features=given)
    left = encoded(folder, [{"features": row[None]} for row in given])
    (tmp_path / "three.json").write_text(json.dumps(PROMPTS))
    inputs = ["--inputs", str(tmp_path / "in.npz"), "--json"]
    outcome = generate(tmp_path, *inputs)
    want = greedy(folder / "decoder.onnx", PROMPTS, 12, left)
    assert json.loads(outcome.out)["sequences"] == want
    command = ["-m", "onnxpar.cli", "generate", str(tmp_path / "out"), "--max-new-tokens", "12"]
    outcome = mpirun(2, [*command, *inputs, "--start", "3", "--start", "8"])
    want = greedy(folder / "decoder.onnx", [[3, 8]] * 3, 12, left)
    assert json.loads(outcome.out)["sequences"] == want
