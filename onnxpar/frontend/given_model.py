"""What the user gives as a model: a file, the files of an encoder and a decoder, or a folder."""

from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.frontend.load import load, read


@dataclass(frozen=True)
class GivenModel:
    """What the user gave as a model.

    Attributes:
        path: The ONNX file, of the decoder if there is an encoder.
        patterns: Names of states, `(input, output)`, with `%d` for the number of the layer.
        width: Elements of a head of the cache; None if the folder does not give it.
        encoder: The ONNX file of the encoder; None if there is none.
        crossed: Names of the decoder's inputs and the encoder's outputs, as `patterns`.
        source: The file that gave the names; None if no file did.
    """

    path: Path
    patterns: tuple[tuple[str, str], ...] = ()
    width: int | None = None
    encoder: Path | None = None
    crossed: tuple[tuple[str, str], ...] = ()
    source: Path | None = None

    def read(self) -> onnx.ModelProto:
        """Reads the model, or the decoder if there is an encoder, without external weights.

        Raises:
            ModelError: As `onnxpar.frontend.load.read`.
        """
        return read(self.path)

    def read_encoder(self) -> ir.Model:
        """Reads the encoder.

        Raises:
            ModelError: As `onnxpar.frontend.load.load`; or there is none.
        """
        if self.encoder is None:
            raise ModelError(f"the model {str(self.path)!r} has no encoder")
        return load(self.encoder)

    def files(self, folder: Path) -> tuple[Path, Path | None]:
        """Returns the files of the models that `read` and `read_encoder` give, for onnxruntime.

        Args:
            folder: Where files may be written, if there are none yet.

        Raises:
            ModelError: As `read` and `read_encoder`.
        """
        del folder
        return self.path, self.encoder

    def supplied(self, proto: onnx.ModelProto) -> dict[str, str]:
        """Returns the encoder's output by input of the decoder, as far as the folder names them."""
        inputs = [value.name for value in proto.graph.input]
        pairs = {
            numbered(taken, layer): numbered(made, layer)
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
                name, output = (numbered(text, layer) for text in (taken, left))
                if name in inputs and output not in outputs:
                    raise ModelError(
                        f"{self.source}: expected output {output!r} for input "
                        f"{name!r}, got a model without it"
                    )
                if name in inputs:
                    found[name] = output
        for value in (*proto.graph.input, *proto.graph.output):
            dims = value.type.tensor_type.shape.dim
            if value.name in (*found, *found.values()) and len(dims) == 4 and self.width:
                dims[3].dim_value = self.width
        return found


def numbered(text: str, layer: int) -> str:
    """Returns a name of a pattern, with the number of a layer."""
    return text.replace("%d", str(layer))
