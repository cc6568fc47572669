"""The package's Python interface."""

import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest
import two_layer

import onnxpar
from onnxpar_format.texts import argument_names


def test_every_public_name_is_there() -> None:
    for name in (*onnxpar.__all__, "from_torch", "shard_module"):
        assert getattr(onnxpar, name) is not None
        assert name in dir(onnxpar)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onnxpar.nothing


def test_every_name_is_imported_without_pytorch() -> None:
    code = """if True:
        import sys
        sys.modules["torch"] = None
        from onnxpar import *
        shard_model, shard, Strategy
        try:
            from onnxpar import from_torch
        except ModuleNotFoundError as error:
            sys.exit("pip install 'onnxpar[torch]'" not in str(error))
        sys.exit(1)"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_package_loads_no_transformer() -> None:
    code = "import onnxpar, sys; sys.exit(any(m in sys.modules for m in ('sympy', 'onnx_ir')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_plan_and_shard_from_python(tmp_path: Path) -> None:
    strategy = onnxpar.Strategy.from_dict(
        {"devices": 8, "nodes": {"/matmul1/MatMul": {"in": [[2, 4], [4, 1]]}}}
    )
    plan = onnxpar.plan(two_layer.build(), strategy)
    assert plan.nodes["/matmul1/MatMul"].inputs[0].strategy(plan.mesh) == (2, 4)
    path = tmp_path / "two.onnx"
    ir.save(two_layer.build(), path)
    summary = onnxpar.shard_model(
        path, "dp", tmp_path / "out", devices=4, symbols={"batch": onnxpar.Symbol(divisor=4)}
    )
    assert summary.out.joinpath("rank0003.model.onnx").is_file()
    assert summary.report["devices"] == 4


def test_errors_name_arguments_not_options(tmp_path: Path) -> None:
    ir.save(two_layer.build(), path := tmp_path / "two.onnx")
    for arguments, message in (
        ({"strategy": "dp"}, "strategy 'dp': expected dp=N or devices, got neither"),
        ({"strategy": None}, "expected strategy, or a model with annotations"),
        ({"strategy": "dp=2", "ranks": [3]}, "ranks 3: expected a rank from 0 to 1"),
    ):
        with pytest.raises(onnxpar.OnnxparError, match=message) as caught:
            onnxpar.shard_model(path, out=tmp_path / "out", **arguments)
        assert "--" not in str(caught.value)
    text = "--eval-every: expected --eval (see `onnxpar train --help`)\nValueError: --mine"
    named = "eval_every: expected evaluate (see `onnxpar train --help`)\nValueError: --mine"
    assert argument_names(text) == named
