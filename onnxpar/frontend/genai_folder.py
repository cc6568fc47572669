"""A model folder in the form of onnxruntime-genai: `genai_config.json` next to the file.

The configuration names the file of the decoder, and its inputs and outputs, those of the cache with
`%d` for the number of the layer (https://onnxruntime.ai/docs/genai/reference/config.html). If there
is an encoder, it names its file too, and the outputs whose values the decoder takes in every step.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from onnxpar.core.errors import ModelError

_CONFIG = "genai_config.json"
_STATES = (
    ("past_key_names", "present_key_names"),
    ("past_value_names", "present_value_names"),
)
_CROSSED = (
    ("cross_past_key_names", "cross_present_key_names"),
    ("cross_past_value_names", "cross_present_value_names"),
)


@dataclass(frozen=True)
class GivenModel:
    """What the user gave as a model.

    Attributes:
        path: The ONNX file, of the decoder if there is an encoder.
        patterns: Names of states, `(input, output)`, with `%d` for the number of the layer.
        width: Elements of a head of the cache; None if nobody says.
        encoder: The ONNX file of the encoder; None if there is none.
        crossed: Names of the decoder's inputs and the encoder's outputs, as `patterns`.
    """

    path: Path
    patterns: tuple[tuple[str, str], ...] = ()
    width: int | None = None
    encoder: Path | None = None
    crossed: tuple[tuple[str, str], ...] = ()

    def supplied(self, proto: onnx.ModelProto) -> dict[str, str]:
        """Returns the encoder's output by input of the decoder, as far as the folder names them."""
        inputs = [value.name for value in proto.graph.input]
        pairs = {
            _numbered(taken, layer): _numbered(made, layer)
            for taken, made in self.crossed
            for layer in range(len(inputs))
        }
        return {name: pairs[name] for name in inputs if name in pairs}

    def states(self, proto: onnx.ModelProto) -> dict[str, str]:
        """Returns the states of the model that the folder names, output by input.

        Their last dim, which the builder of onnxruntime-genai leaves symbolic, gets its size.

        Raises:
            ModelError: The model has no output that belongs to an input.
        """
        inputs = {value.name for value in proto.graph.input}
        outputs = {value.name for value in proto.graph.output}
        found = {}
        for taken, left in self.patterns:
            for layer in range(len(inputs)):
                name, output = (_numbered(text, layer) for text in (taken, left))
                if name in inputs and output not in outputs:
                    raise ModelError(
                        f"{self.path.parent / _CONFIG}: expected output {output!r} for input "
                        f"{name!r}, got a model without it"
                    )
                if name in inputs:
                    found[name] = output
        for value in (*proto.graph.input, *proto.graph.output):
            dims = value.type.tensor_type.shape.dim
            if value.name in (*found, *found.values()) and len(dims) == 4 and self.width:
                dims[3].dim_value = self.width
        return found


def given_model(path: str | Path, encoder: str | Path | None = None) -> GivenModel:
    """Returns the model of a path: of a file, or of a folder with `genai_config.json`.

    Args:
        path: The file or the folder.
        encoder: The file of its encoder, if it is a decoder that has one.

    Raises:
        ModelError: The folder has no such configuration, or one that describes no decoder in a
            single file.
    """
    path = Path(path)
    if not path.is_dir():
        return GivenModel(path, encoder=None if encoder is None else Path(encoder))
    if encoder is not None:
        raise ModelError(f"--encoder {encoder}: expected the file of a decoder, got folder {path}")
    config = path / _CONFIG
    if not config.is_file():
        raise ModelError(f"the model {str(path)!r} is a directory without {_CONFIG}")
    try:
        read = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{config}: not a JSON file: {error}") from None
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
    )


def _pairs(found: Iterable[tuple[Any, Any]]) -> tuple[tuple[str, str], ...]:
    """Returns the pairs of which both names are given."""
    return tuple((a, b) for a, b in found if isinstance(a, str) and isinstance(b, str))


def _entry(found: Any, name: str) -> Mapping[str, Any]:
    """Returns an object of the configuration; an empty one if there is none."""
    entry = found.get(name) if isinstance(found, dict) else None
    return entry if isinstance(entry, dict) else {}


def _numbered(text: str, layer: int) -> str:
    return text.replace("%d", str(layer))
