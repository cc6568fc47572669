"""The table of ONNX functions by which PyTorch exports, made once for each process."""

import sys
from functools import cache
from typing import Any

MODULE = "torch.onnx._internal.exporter._registration"


@cache
def keep(registry: Any) -> None:
    """Keeps what `registry.from_torchlib` makes.

    Otherwise, each export parses the source of five hundred functions again, which takes more than
    half of the time that a small network needs. An export may add functions, to lists of its own.
    """
    make = cache(registry.from_torchlib)

    def from_torchlib(*arguments: Any, **options: Any) -> Any:
        made, found = make(*arguments, **options), registry()
        vars(found).update(vars(made))
        found.functions = {target: list(metas) for target, metas in made.functions.items()}
        return found

    registry.from_torchlib = staticmethod(from_torchlib)


def keep_if_loaded() -> None:
    """Does so where PyTorch has loaded its exporter, in versions that have such a table."""
    registry = getattr(sys.modules.get(MODULE), "ONNXRegistry", None)
    if registry is not None:
        keep(registry)
