"""Small twins of large models, trained with the layouts that `plan` finds for the large ones.

`twins/NAME.yaml` has the layouts of the plan's products, its schedule and its recomputation, on 8
devices. `tools/bench/large_models.py` exports the models. `ONNXPAR_FULL` trains every twin, the
quick tier those of GPT, which have the same layouts and fewer nodes.
"""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("transformers", reason="exports from PyTorch: the extra zoo")

import transformer
from _exporter import save
from large_models import MODELS, example

from onnxpar.api.pytorch.export_module import export
from onnxpar.cli import main
from tests.tiers import FULL

TWINS = Path(__file__).parents[1] / "twins"
GPT = transformer.Config(layers=4, d_model=64, heads=8, vocab=128, max_positions=64)
NAMES = sorted(path.stem for path in TWINS.glob("*.yaml" if FULL else "gpt-*.yaml"))


@pytest.mark.parametrize("name", NAMES if FULL else ["gpt-175b-1024"])
def test_a_twin_trains_with_the_layouts_of_the_plan(name: str, tmp_path: Path) -> None:
    model, directory = tmp_path / "model.onnx", tmp_path / "d"
    save(export(example(name, small=True)) if name in MODELS else transformer.build(GPT), model)
    options = ["--strategy", str(TWINS / f"{name}.yaml"), "--train", "-o", str(directory)]
    loss = ["--loss", "softmax_cross_entropy", "--optimizer", "adamw"]
    assert main(["shard", str(model), *options, *loss]) == 0
    sizes = "batch=16" if name == "vit-22b" else "batch=8,seq=8"
    assert main(["verify", str(directory), "--model", str(model), "--symbol", sizes]) == 0
