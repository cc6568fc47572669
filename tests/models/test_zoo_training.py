"""Training of networks exported from PyTorch: in pipeline stages, and with layers recomputed."""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from onnxpar.api import runtime
from onnxpar.core.symbols import NO_CONSTRAINTS
from onnxpar.facts.layers import carriers, find_layers
from onnxpar.frontend.load import normalise
from onnxpar.graph.metadata_keys import RECOMPUTED_FROM
from onnxpar.graph.shapes import shapes
from onnxpar.ops.table import REGISTRY
from onnxpar.strategy import Strategy
from onnxpar_runtime.manifest import Manifest
from tests.training_cases import shard

pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")
zoo = pytest.importorskip("zoo", reason="needs transformers: the extra zoo")
from onnxpar.api.pytorch.export_module import export  # noqa: E402
from tests.tiers import FULL  # noqa: E402

SHAPES = ({"batch": 4, "seq": 8, "target": 6}, {"batch": 5, "seq": 7, "target": 9})
TIED = {"gpt2": "transformer.wte.weight", "t5": "shared.weight"}
STACKS = {"gpt2": ("transformer/h",), "t5": ("encoder/block", "decoder/block")}


@cache
def serialized(name: str, layers: int) -> bytes:
    model: bytes = ir.to_proto(export(zoo.example(name, layers=layers))).SerializeToString()
    return model


def network(name: str, layers: int = zoo.LAYERS) -> ir.Model:
    return ir.from_proto(onnx.load_from_string(serialized(name, layers)))


def sizes(directory: Path) -> list[dict[str, int]]:
    """Both settings, symbols that the network has only."""
    inputs = Manifest.load(directory).program("training_model").inputs
    names = {d for spec in inputs for d in spec.shape if isinstance(d, str)}
    return [{n: v for n, v in shape.items() if n in names} for shape in SHAPES]


def layers_of(directory: Path) -> Counter[str]:
    """How many nodes of each layer the first rank computes again, by the layer's name."""
    manifest = json.loads((directory / "manifest.json").read_text())
    file = manifest["programs"]["training_model"]["files"][0]
    nodes = onnx.load(directory / file, load_external_data=False).graph.node
    entries = [e for node in nodes for e in node.metadata_props if e.key == RECOMPUTED_FROM]
    found = (
        re.match(r"/(transformer/h|encoder/block|decoder/block)\.\d+", e.value) for e in entries
    )
    return Counter(layer[0][1:] for layer in found if layer)


def verify(directory: Path) -> None:
    """Three steps at each setting, beside one device."""
    cases = [",".join(f"{k}={v}" for k, v in symbols.items()) for symbols in sizes(directory)]
    for case in runtime.verify(
        directory,
        directory.with_suffix(".onnx"),
        cases=cases,
        options=runtime.VerifyOptions(steps=3),
    ):
        assert case.ok, case.problems


CASES = [("gpt2", 2), ("t5", 2), ("gpt2", 4), ("t5", 4)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "layers"), CASES if FULL else CASES[:1])
def test_all_layers_are_found(name: str, layers: int) -> None:
    """The first, too, in which sizes and masks stand that all layers read."""
    model = normalise(network(name, layers))
    row = carriers(model.graph, REGISTRY)
    found = find_layers(row, shapes(model, NO_CONSTRAINTS))
    expected = [f"/{stack}.{i}/" for stack in STACKS[name] for i in range(layers)]
    assert len(found) == len(expected)
    for layer, prefix in zip(found, expected, strict=True):
        names = [node.name or "" for node in row[layer.start : layer.stop]]
        assert names[0].startswith(prefix) and names[-1].startswith(prefix)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "layers"), CASES)
def test_with_layers_recomputed_it_trains_as_one_device(
    tmp_path: Path, name: str, layers: int
) -> None:
    strategy = Strategy.from_dict({"mesh": {"dp": 2}, "recompute": {"layers": 1}})
    out = shard(tmp_path / "ranks", network(name, layers), strategy, optimizer="adamw")
    counts = layers_of(out)
    # The first layer of a stack of T5 makes the position bias of all, too.
    assert all(counts[f"{stack}.{i}"] > 20 for stack in STACKS[name] for i in range(layers))
    verify(out)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_in_stages_it_trains_as_one_device(tmp_path: Path, name: str, stages: int) -> None:
    """The token table is read by several stages, T5's encoder by every layer of the decoder."""
    pipeline = {"stages": stages, "micro_batches": 2}
    strategy = Strategy.from_dict({"devices": stages, "pipeline": pipeline})
    out = shard(tmp_path / "ranks", network(name), strategy, optimizer="adamw")
    table = Manifest.load(out).trained().states[TIED[name]]
    assert {0, stages - 1} <= set(table.stages)
    verify(out)
