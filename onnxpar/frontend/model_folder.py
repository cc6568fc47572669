"""The model of a path: of a file, or of a folder in one of the forms that exporters write."""

from pathlib import Path

from onnxpar.core.errors import ModelError
from onnxpar.frontend.genai_folder import GENAI_CONFIG, genai_model
from onnxpar.frontend.given_model import GivenModel
from onnxpar.frontend.optimum_folder import optimum_model


def given_model(path: str | Path, encoder: str | Path | None = None) -> GivenModel:
    """Returns the model of a path: of a file, or of a folder of onnxruntime-genai or Optimum.

    Args:
        path: The file or the folder.
        encoder: The file of its encoder, if it is a decoder that has one.

    Raises:
        ModelError: The folder has neither form, or is not complete.
    """
    path = Path(path)
    if not path.is_dir():
        return GivenModel(path, encoder=None if encoder is None else Path(encoder))
    if encoder is not None:
        raise ModelError(f"--encoder {encoder}: expected the file of a decoder, got folder {path}")
    if (path / GENAI_CONFIG).is_file():
        return genai_model(path)
    return optimum_model(path)
