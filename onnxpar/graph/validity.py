"""Invalid models: the verdict of ONNX's checker on a model that could not be processed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from onnxpar.core.errors import ModelError, OnnxparError


@contextmanager
def blamed_on_model(path: Path) -> Iterator[None]:
    """Turns an exception that an invalid model caused into a `ModelError`.

    The checker runs only after an exception: it reads the file again, and it refuses some models
    that run, such as those that do not import the opset of a custom domain.

    Args:
        path: The model that the block processes.

    Raises:
        ModelError: The block raised an exception other than `OnnxparError`, and ONNX's checker or
            its shape inference refuses the model.
    """
    try:
        yield
    except OnnxparError:
        raise
    except Exception as error:
        try:
            onnx.checker.check_model(str(path), full_check=True)
        except Exception as verdict:
            text = " ".join(str(verdict).split())
            raise ModelError(f"{str(path)!r} is not a valid ONNX model: {text}") from error
        raise
