"""The seam to PyTorch: modules in, trained parameters back.

Loaded when `onnxpar.from_torch` or `onnxpar.state_dict` is first used.
"""

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "onnxpar.from_torch and onnxpar.state_dict need PyTorch: pip install 'onnxpar[torch]'"
    ) from error
