"""Functions of numpy as operators of onnx.reference."""

from collections.abc import Callable
from typing import Any

from onnx.reference.op_run import OpRun


def numpy_operators(domain: str, **functions: Callable[..., Any]) -> list[type[OpRun]]:
    """Returns operators, by name: functions of the inputs, with the attributes as keywords.

    A function returns the result, or a tuple of the results; more than the node has are ignored.
    """
    return [_operator(domain, name, function) for name, function in functions.items()]


def _operator(domain: str, name: str, function: Callable[..., Any]) -> type[OpRun]:
    def run(_: OpRun, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        results = function(*inputs, **attributes)
        return results if isinstance(results, tuple) else (results,)

    return type(name, (OpRun,), {"op_domain": domain, "_run": run})
