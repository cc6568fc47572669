"""The zoo's networks are complete, and all exports of them compute what PyTorch does."""

import inspect
from pathlib import Path

import numpy as np
import pytest

from tests.models.example import run

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")
zoo = pytest.importorskip("zoo", reason="needs transformers: the extra zoo")

from zoo_pytorch import outputs, random_batch, random_inputs, train  # noqa: E402

from onnxpar.api.pytorch.export_module import export, plain_export  # noqa: E402
from tests.tiers import FULL  # noqa: E402

QUICK = ("temperature",)
SIZES = (
    {"batch": 2, "seq": 6, "target": 9, "nodes": 6, "edges": 13},
    {"batch": 5, "seq": 9, "target": 4, "nodes": 9, "edges": 4},
)

# Sums have at most 128 terms, a network some thirty sums one after the other, and norms divide what
# was added at their scale: 30 sqrt(128) 2^-24 = 2e-5 of the largest output.
RTOL = 2e-5


def test_a_network_has_one_name() -> None:
    files = (zoo.zoo_other, zoo.zoo_language, zoo.zoo_vision)
    assert len(zoo.ZOO) == sum(len(file.NETWORKS) for file in files)
    for file in files:
        made = [f for n, f in vars(file).items() if inspect.isfunction(f) and not n.startswith("_")]
        own = {f.__name__ for f in made if f.__module__ == file.__name__}
        assert own == {make.__name__ for make in file.NETWORKS}, "of no list"
        assert len(Path(file.__file__).read_text().splitlines()) <= 600


@pytest.mark.filterwarnings("ignore")  # of transformers about its defaults
@pytest.mark.parametrize("name", zoo.ZOO if FULL else QUICK)
def test_its_weights_are_those_of_the_seed(name: str) -> None:
    one, two, other = (zoo.example(name, seed).module.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
    assert not all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@pytest.mark.filterwarnings("ignore")  # of transformers about its defaults
@pytest.mark.parametrize("name", zoo.ZOO if FULL else QUICK)
def test_nothing_drops_in_training(name: str) -> None:
    """Two runs from the same weights have the same losses: no network draws anything."""
    made = zoo.example(name)
    symbols = {"batch": 4, "seq": 8, "target": 6, "nodes": 6, "edges": 10}
    batches = [random_batch(made, symbols, np.random.default_rng(0))]
    first, second = (train(made, batches, 1e-3) for _ in range(2))
    assert first.losses == second.losses
    assert np.isfinite(first.losses).all()
    # Whatever needs a gradient gets one, but for what is of no output that is compared.
    needed = {n for n, p in made.module.named_parameters() if p.requires_grad}
    assert {n for n in needed - set(first.parameters) if not n.startswith(UNUSED)} == set()


UNUSED = ("bbox_predictor.", "wav2vec2.masked_spec_embed")
"""DETR's boxes, and what stands in place of frames that wav2vec 2.0 masks while it is taught."""


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # of transformers about its defaults
@pytest.mark.parametrize("exporter", ["ours", "plain", "unoptimised"] if FULL else ["ours"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_an_export_computes_what_pytorch_does(name: str, exporter: str) -> None:
    if not FULL and name not in QUICK:
        pytest.skip("ten seconds each; with ONNXPAR_FULL=1")
    made = zoo.example(name)
    if exporter == "ours":
        model = export(made)
        kept = set(model.graph.initializers)
        own = {n for n, _ in made.module.named_parameters() if not n.startswith(UNUSED)}
        assert own <= kept
    else:
        model = plain_export(made, optimize=exporter == "plain")
    for sizes in SIZES:
        feeds = random_inputs(made, sizes, np.random.default_rng(0))
        got = run(model, feeds).values()
        for found, wanted in zip(got, outputs(made, feeds), strict=True):
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found, wanted, rtol=0, atol=RTOL * np.abs(wanted).max())
