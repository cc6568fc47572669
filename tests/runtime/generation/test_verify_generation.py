"""`verify --generate` accepts right tokens and near ties, and refuses wrong tokens and logits."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.cli import main
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.manifest import Manifest
from tests.cli import linear
from tests.decoders import VOCAB, growing
from tests.runtime.generation.decoders import decoder


def head(path: Path, weights: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Path:
    """Writes the decoder with another projection to logits."""
    model = onnx.load(growing(path))
    (found,) = [w for w in model.graph.initializer if w.name == "head"]
    found.CopyFrom(numpy_helper.from_array(weights, "head"))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("strategy", "values"),
    [
        # Embedding, and two reductions in each of two layers, of a rank's 2 rows of 32 floats.
        ("dp=2,tp=2", 5 * 2),
        # The activations of 3 rows, from the first stage to the second.
        ("pp=2", 3),
        # Two reductions in the first stage, and partial sums to the second, which makes three.
        ("pp=2,tp=2", 3 * 3),
    ],
)
def test_tokens_logits_and_bytes_agree(
    strategy: str, values: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = growing(tmp_path / "model.onnx")
    out = shard_model(model, strategy, tmp_path / "out").out
    capsys.readouterr()
    assert main(["verify", str(out), "--model", str(model), "--generate", "20", "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["symbols"] == {"prompts": 3, "longest": 64, "new_tokens": 20}
    steps = 64 + 19
    assert case["bytes_counted"] == case["bytes_expected"] == values * 32 * 4 * steps


def test_another_model_is_refused(tmp_path: Path) -> None:
    out = shard_model(growing(tmp_path / "model.onnx"), "tp=2", tmp_path / "out").out
    other = growing(tmp_path / "other.onnx", seed=1)
    (case,) = runtime.verify(out, other, options=VerifyOptions(generate=3, prompt_tokens=5))
    assert not case.ok and case.max_rel > 0.1
    assert any("new token 0: output 'logits': expected a difference" in p for p in case.problems)
    assert any(p.startswith("prompt 0, new token 0: expected token ") for p in case.problems)


def test_either_of_two_tokens_with_one_score_is_right(tmp_path: Path) -> None:
    """The second half of the tokens has the scores of the first, but for a rounding error."""
    half = np.random.default_rng(0).normal(0, 1, (32, VOCAB // 2)).astype(np.float32)
    one = head(tmp_path / "one.onnx", np.concatenate([half, half * np.float32(1 - 1e-6)], 1))
    other = head(tmp_path / "other.onnx", np.concatenate([half * np.float32(1 - 1e-6), half], 1))
    out = shard_model(one, "tp=2", tmp_path / "out").out
    (case,) = runtime.verify(out, other, options=VerifyOptions(generate=6, prompt_tokens=9))
    assert case.ok, case


def test_only_decoders_with_a_cache_generate(tmp_path: Path) -> None:
    trained = linear.shard(tmp_path, 2, "--symbol", "batch:divisor=2", optimizer="sgd")
    model = growing(tmp_path / "model.onnx")
    with pytest.raises(InputError, match="--generate: expected a forward program, got"):
        runtime.verify(trained, tmp_path / "linear.onnx", options=VerifyOptions(generate=2))
    out = shard_model(model, "tp=2", tmp_path / "out").out
    with pytest.raises(
        InputError, match="--generate draws its own prompts: expected neither --symbol"
    ):
        runtime.verify(out, model, ["batch=2"], options=VerifyOptions(generate=2))


def unsized(path: Path) -> Path:
    """Gives the last dim of all caches the name that onnxruntime-genai's builder gives it."""
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 4:
            dims[3].dim_param = "kv_cache_dim"
    onnx.save(model, path)
    return path


def test_heads_of_attention_give_the_width_of_a_cache(tmp_path: Path) -> None:
    """As a bare file of onnxruntime-genai's builder needs."""
    model = unsized(decoder("in_place", tmp_path))
    out = shard_model(model, "tp=2", tmp_path / "out").out
    assert "kv_cache_dim" not in Manifest.load(out).symbols
    (case,) = runtime.verify(out, model, options=VerifyOptions(generate=4, prompt_tokens=5))
    assert case.ok, case


def test_a_cache_of_unknown_width_is_refused(tmp_path: Path) -> None:
    model = unsized(growing(tmp_path / "model.onnx"))
    out = shard_model(model, "tp=2", tmp_path / "out").out
    with pytest.raises(InputError, match="past_key_values_0_key': its size is not known: symbol"):
        runtime.verify(out, model, options=VerifyOptions(generate=4, prompt_tokens=5))
