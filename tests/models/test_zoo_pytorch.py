"""Networks of the zoo train as PyTorch trains them, whoever exports them, or are asked about."""

import json
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")
zoo = pytest.importorskip("zoo", reason="needs transformers: the extra zoo")

ASKED = frozenset(
    {"efficientnet", "resnet50", "rwkv", "segformer", "swin", "vit_mae", "wav2vec2"}
)  # fmt: skip
"""Networks of which `torch.onnx.export(optimize=True)` computes parameters otherwise."""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of PyTorch and transformers about themselves
@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_network_trains_as_in_pytorch(
    name: str, table: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """That the script makes its rows in another process, `test_zoo_table.py` tests.

    In the quick tier `exec/test_training_torch.py` and `fuzz/test_torch_training.py` train smaller
    networks beside PyTorch, and `test_zoo_forward.py` runs an export of the zoo.
    """
    exporters, strategies = table.EXPORTERS, table.STRATEGIES
    pairs = [f"{exporter}:{strategy}" for exporter in exporters for strategy in strategies]
    table.task(name, pairs, 20, False, None)
    printed = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in printed if line.startswith("{")]
    assert len(rows) == len(pairs) == 9
    for row in rows:
        if row["exporter"] == "plain" and name in ASKED:
            assert "the file does not show whether these tensors are trained" in row["problem"]
        else:
            assert row["problem"] == "", (row["exporter"], row["strategy"])
