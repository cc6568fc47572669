"""The seam to PyTorch: modules in, trained parameters back.

Loaded when one of its functions in `onnxpar` is first used, such as `onnxpar.from_torch`.
"""

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "this function of onnxpar needs PyTorch: pip install 'onnxpar[torch]'"
    ) from error
