"""A model of two products, sharded over 8 devices."""

from pathlib import Path

import onnx_ir as ir
import two_layer

from onnxpar.cli import main

_STRATEGY = "devices: 8\nnodes: {/matmul1/MatMul: {in: [[2, 4], [4, 1]], out: [[8, 1]]}}\n"


def shard(folder: Path) -> None:
    """Writes model.onnx, the strategy s.yaml and the directory `out` to a folder."""
    model, strategy = folder / "model.onnx", folder / "s.yaml"
    ir.save(two_layer.build(), model)
    strategy.write_text(_STRATEGY)
    arguments = ["--strategy", str(strategy), "--symbol", "batch:divisor=8"]
    assert main(["shard", str(model), "-o", str(folder / "out"), *arguments]) == 0
