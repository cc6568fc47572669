"""The cases of the gradient tests in this folder, found by calling them with checks disabled."""

import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
import pytest

from tests.onnxpar.ops import op_harness
from tests.onnxpar.ops.gradient_harness import GradCase

HERE = Path(__file__).resolve().parent


@dataclass
class Checked:
    """The checks of one operator: shapes of its operands, and whether PyTorch is compared."""

    shapes: set[tuple[tuple[int | str, ...], ...]] = field(default_factory=set)
    torch: bool = False


@lru_cache(maxsize=1)
def checked() -> dict[tuple[str, str], Checked]:
    """The checks, by domain and name of the operator."""
    found: dict[tuple[str, str], Checked] = defaultdict(Checked)
    for case in _cases():
        shapes = tuple(_shape(case, text) for text in case.inputs.values())
        for node in case.proto.graph.node:
            here = found[node.domain, node.op_type]
            here.shapes.add(shapes)
            here.torch |= case.torch is not None
    return found


def _shape(case: GradCase, text: str) -> tuple[int | str, ...]:
    value = onnx.parser.parse_graph(f"g ({text} x) => () {{}}").input[0]
    dims = value.type.tensor_type.shape.dim
    return tuple(case.sizes.get(d.dim_param, d.dim_param) or d.dim_value for d in dims)


def _cases() -> Iterator[GradCase]:
    cases: list[GradCase] = []

    def record(self: GradCase, *_: object, **__: object) -> None:
        cases.append(self)

    checks = [n for n in vars(GradCase) if n.startswith("check")]
    patches = [patch.object(GradCase, name, record) for name in checks]
    # All cases, where the quick tier runs a sample of them.
    patches.append(patch.object(op_harness, "FULL", True))
    for p in patches:
        p.start()
    try:
        for path in sorted(HERE.rglob("test_*gradient*.py")):
            if path.stem in ("test_gradient_slots", "test_gradient_coverage"):
                continue
            # Executes the module again, since pytest has imported it with a sample of its cases.
            spec = spec_from_file_location(f"all_of_{path.parent.name}_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            for name, function in inspect.getmembers(module, inspect.isfunction):
                if name.startswith("test_") and function.__module__ == module.__name__:
                    _call(function, cases)
    finally:
        for p in patches:
            p.stop()
    yield from cases


def _call(function: Any, cases: list[GradCase]) -> None:
    """Calls a test with every combination of its parameters; one with fixtures is left out."""
    marks = [m for m in getattr(function, "pytestmark", ()) if m.name == "parametrize"]
    axes = []
    for mark in marks:
        names, values = mark.args[:2]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        rows = [getattr(v, "values", (v,)) if len(names) == 1 else v for v in values]
        rows = [getattr(r, "values", r) for r in rows]
        axes.append([dict(zip(names, r, strict=True)) for r in rows])
    given = {n for axis in axes for n in (axis[0] if axis else ())}
    if set(inspect.signature(function).parameters) != given:
        return
    for combination in product(*axes):
        arguments = {k: v for part in combination for k, v in part.items()}
        before = len(cases)
        try:
            function(**arguments)
        except pytest.fail.Exception:
            del cases[before:]  # the test expects a refusal, so nothing is checked
        except Exception:
            continue  # its other assertions need the results of the disabled checks
