"""The table of all operators, which joins the `DEFS` of every module in this folder."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

import onnxpar.ops
from onnxpar.ops.operator import OpDef
from onnxpar.ops.registry import Registry


def _records() -> Iterator[OpDef]:
    for module in walk_packages(onnxpar.ops.__path__, "onnxpar.ops."):
        yield from getattr(import_module(module.name), "DEFS", ())


REGISTRY = Registry(tuple(_records()))
