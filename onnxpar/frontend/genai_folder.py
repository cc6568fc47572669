"""A model folder in the form of onnxruntime-genai: `genai_config.json` next to the file.

The configuration names the file of the decoder, and its inputs and outputs, those of the cache with
`%d` for the number of the layer (https://onnxruntime.ai/docs/genai/reference/config.html). If there
is an encoder, it names its file too, and the outputs whose values the decoder takes in every step.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onnxpar.core.errors import ModelError
from onnxpar.frontend.given_model import GivenModel
from onnxpar_format.records import FormatError, load_json

GENAI_CONFIG = "genai_config.json"
"""Name of the configuration."""
_STATES = (
    ("past_key_names", "present_key_names"),
    ("past_value_names", "present_value_names"),
)
_CROSSED = (
    ("cross_past_key_names", "cross_present_key_names"),
    ("cross_past_value_names", "cross_present_value_names"),
)


def genai_model(path: Path) -> GivenModel:
    """Returns the model of a folder with `genai_config.json`.

    Raises:
        ModelError: The configuration is not JSON, or describes no decoder in a single file.
    """
    config = path / GENAI_CONFIG
    try:
        read = load_json(config, f"expected {GENAI_CONFIG}, got none")
    except FormatError as error:
        raise ModelError(str(error)) from None
    model = _entry(read, "model")
    decoder, reader = _entry(model, "decoder"), _entry(model, "encoder")
    name = decoder.get("filename")
    if not isinstance(name, str) or decoder.get("pipeline"):
        raise ModelError(f"{config}: expected model.decoder.filename, one file, got {name!r}")
    inputs, outputs = _entry(decoder, "inputs"), _entry(decoder, "outputs")
    made = _entry(reader, "outputs")
    width, file = decoder.get("head_size"), reader.get("filename")
    return GivenModel(
        path / name,
        _pairs((inputs.get(taken), outputs.get(left)) for taken, left in _STATES),
        width if isinstance(width, int) else None,
        path / file if isinstance(file, str) else None,
        _pairs((inputs.get(taken), made.get(left)) for taken, left in _CROSSED),
        config,
    )


def _pairs(found: Iterable[tuple[Any, Any]]) -> tuple[tuple[str, str], ...]:
    """Returns the pairs of which both names are given."""
    return tuple((a, b) for a, b in found if isinstance(a, str) and isinstance(b, str))


def _entry(found: Any, name: str) -> Mapping[str, Any]:
    """Returns an object of the configuration; an empty one if there is none."""
    entry = found.get(name) if isinstance(found, dict) else None
    return entry if isinstance(entry, dict) else {}
