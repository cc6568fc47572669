"""Networks of the zoo train as PyTorch trains them, whoever exports them, or are asked about."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")
zoo = pytest.importorskip("zoo", reason="needs transformers: the extra zoo")

FULL = bool(os.environ.get("ONNXPAR_FULL"))
SCRIPT = Path(__file__).parents[2] / "tools" / "zoo_table.py"
QUICK = ("temperature",)
"""A tied head with a scalar, and a norm without scale."""

ASKED = frozenset(
    {"efficientnet", "resnet50", "rwkv", "segformer", "swin", "vit_mae", "wav2vec2"}
)  # fmt: skip
"""Networks of which `torch.onnx.export(optimize=True)` computes parameters otherwise."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", zoo.ZOO if FULL else QUICK)
def test_a_network_trains_as_in_pytorch(name: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    strategies = () if FULL else ("--strategy", "dp=2,tp=2")
    subprocess.run(
        [sys.executable, SCRIPT, name, *strategies, "--results", kept],
        check=False, capture_output=True, timeout=900,
    )  # fmt: skip
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(rows) == (9 if FULL else 3)
    for row in rows:
        if row["exporter"] == "plain" and name in ASKED:
            assert "the file does not show whether these tensors are trained" in row["problem"]
        else:
            assert row["problem"] == "", (row["exporter"], row["strategy"])
