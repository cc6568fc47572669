"""`tp=2` sends at most 5 % more than the strategy that an expert would write for a network."""

import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("transformers", reason="exports from PyTorch: the extra zoo")

from plan_search import exported
from tensor_parallel import EXPERTS, compare

FULL = bool(os.environ.get("ONNXPAR_FULL"))
MORE = ("gpt2", "llama", "clip", "falcon", "mamba2")
NETWORKS = ("vit", "encoder", "phi3", *(MORE if FULL else ()))


def test_experts_are_of_networks() -> None:
    assert set(NETWORKS) < {path.stem for path in EXPERTS.glob("*.yaml")}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_preset_sends_what_an_expert_does(name: str, tmp_path: Path) -> None:
    plans = {plan: found for plan, found, _ in compare(exported(name, tmp_path), "tp=2")}
    preset, expert = plans["tp=2"], plans["expert"]
    assert preset.typical <= 1.05 * expert.typical
    assert preset.large <= 1.05 * expert.large
    assert preset.held <= 1.01 * expert.held
    assert preset.typical <= plans["propagation"].typical
