"""What tests of example models share."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "zoo_table.py"


@pytest.fixture(scope="session")
def table() -> ModuleType:
    """The script that compares the zoo with PyTorch, as a module."""
    spec = importlib.util.spec_from_file_location("zoo_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo_table"] = module
    spec.loader.exec_module(module)
    return module
