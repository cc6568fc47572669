"""Networks of the zoo in the dialects of other runtimes: equal, or refused by name."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")
zoo = pytest.importorskip("zoo", reason="needs transformers: the extra zoo")

from onnxpar.api.pytorch.export_module import export, save  # noqa: E402
from onnxpar.ops.collective.dialects import Dialect  # noqa: E402
from tools.zoo_dialects import STRATEGIES, cell  # noqa: E402

LIMIT = 300
ALONE = "its only group has all 4 ranks, but the node's has 2"


@pytest.mark.full
@pytest.mark.timeout(5 * LIMIT)
@pytest.mark.filterwarnings("ignore")  # of transformers about its defaults
@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_network(name: str, tmp_path: Path) -> None:
    save(export(zoo.example(name)), tmp_path / "model.onnx")
    one, several = (
        {dialect: cell(tmp_path / "model.onnx", strategy, dialect, LIMIT) for dialect in Dialect}
        for strategy in STRATEGIES
    )
    for found in (*one.values(), *several.values()):
        # A halo of a convolution is a Permute, which no dialect has.
        assert found == "yes" or "it has no such operator" in found or ALONE in found, found
    assert several[Dialect.ONNXRUNTIME] != "yes"
