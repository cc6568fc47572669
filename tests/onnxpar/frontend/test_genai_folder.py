"""A model folder in the form of onnxruntime-genai: the file and the states that it names."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.core.errors import ModelError
from onnxpar.frontend.model_folder import given_model
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.manifest import Manifest
from tests.decoders import HEAD, growing

DECODER: dict[str, Any] = {
    "filename": "decoder.onnx",
    "head_size": HEAD,
    "inputs": {"past_key_names": "old_%d_k", "past_value_names": "old_%d_v"},
    "outputs": {"present_key_names": "made_%d_k", "present_value_names": "made_%d_v"},
}


def written(folder: Path, decoder: Any = DECODER) -> Path:
    """A folder whose states have names that say nothing, with a configuration."""
    folder.mkdir()
    model = onnx.load(growing(folder / "decoder.onnx"))
    names = {
        f"{long}_{n}_{part}": f"{short}_{n}_{part[0]}"
        for long, short in (("past_key_values", "old"), ("present", "made"))
        for n in (0, 1)
        for part in ("key", "value")
    }
    for values in (model.graph.input, model.graph.output):
        for value in values:
            if value.name in names:
                value.name = names[value.name]
                # So the builder of onnxruntime-genai writes it; `head_size` says what it is.
                value.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    onnx.save(model, folder / "decoder.onnx")
    config = {"model": {"type": "llama", "decoder": decoder}}
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


def test_the_file_and_the_states_are_those_of_the_configuration(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    out = shard_model(folder, "tp=2", tmp_path / "out").out
    program = Manifest.load(out).program("model")
    assert [(state.input, state.output) for state in program.carried] == [
        (f"old_{n}_{part}", f"made_{n}_{part}") for n in (0, 1) for part in ("k", "v")
    ]
    assert "kv_cache_dim" not in Manifest.load(out).symbols
    assert all(state.grows == 2 for state in program.carried)
    options = VerifyOptions(generate=3, prompt_tokens=5)
    (case,) = runtime.verify(out, folder, options=options)
    assert case.ok, case


def test_a_file_is_itself(tmp_path: Path) -> None:
    found = given_model(tmp_path / "model.onnx")
    assert found.path == tmp_path / "model.onnx" and found.patterns == ()


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"inputs": {}}, "expected model.decoder.filename, one file, got None"),
        ({**DECODER, "pipeline": [{}]}, "expected model.decoder.filename, one file, got 'decoder"),
        ([], "expected model.decoder.filename, one file, got None"),
        (
            {**DECODER, "outputs": {**DECODER["outputs"], "present_key_names": "new_%d"}},
            "expected output 'new_0' for input 'old_0_k', got a model without it",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    decoder: Any, message: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "model", decoder)
    with pytest.raises(ModelError, match="genai_config.json: " + message):
        shard_model(folder, "tp=2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_or_with_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is a directory without genai_config\.json"):
        given_model(tmp_path)
    (tmp_path / "genai_config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        given_model(tmp_path)
