"""Random PyTorch networks, exported and sharded, train as they do in PyTorch, or are refused.

A case is one seed of `torch_training.py`, which says what is compared; `python -m
tests.torch_training SEED --verbose`, with `models` on PYTHONPATH, repeats a failure.
`ONNXPAR_FUZZ_SEED` shifts the seeds, and `ONNXPAR_FULL` runs 500. Refused may be what PyTorch's
exporter has computed of parameters with its default, `optimize=True`, in a way that is not undone;
a notice must name what it dropped. All other networks must train.
"""

import os
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from tests import random_networks  # noqa: E402
from tests.tiers import FULL  # noqa: E402
from tests.torch_training import (  # noqa: E402
    EQUAL,
    NOTICED,
    REFUSED,
    Outcome,
    case_of,
    outcome,
    quick_exports,
)

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
CASES = 500 if FULL else 1


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with quick_exports():
        yield
    torch.set_num_threads(threads)


def may_be_so(found: Outcome) -> bool:
    refused = found.result == REFUSED and "optimize=False" in found.text
    return found.case.exporter == "folded" and (refused or found.result == NOTICED)


@pytest.mark.filterwarnings("ignore")  # of PyTorch's exporter
@pytest.mark.parametrize("seed", range(SEED, SEED + CASES))
def test_networks_train_as_in_pytorch(seed: int) -> None:
    found = outcome(seed)
    if may_be_so(found):
        pytest.skip(f"{found.result}: {found.text}")
    assert found.result == EQUAL, f"{found.result}: {found.case}: {found.text}"


def test_every_layer_is_drawn() -> None:
    """Also that a seed gives one network: layers, parameters and batches."""
    drawn = {name.split()[0] for seed in range(300) for name in case_of(seed).network.layers}
    wanted = {"LayerNorm(True,", "rms", "standardised", "W,", "2", "low", "gate", "temperature"}
    wanted |= {"frozen", "attention", "nn.Transformer", "rotary", "windows", "class", "tied"}
    wanted |= {"conv", "blur", "interpolated", "batch", "cosine", "weight_norm", "fourier"}
    assert wanted <= drawn
    one, two = (random_networks.network(7) for _ in range(2))
    assert one.layers == two.layers and one.batches == two.batches
    for a, b in zip(one.module.parameters(), two.module.parameters(), strict=True):
        assert torch.equal(a, b)
