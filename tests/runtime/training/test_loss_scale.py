"""The loss scale over steps, against PyTorch's, and its options."""

import numpy as np
import pytest

from onnxpar_runtime.errors import DirectoryError, LaunchError, TrainingError
from onnxpar_runtime.training.loss_scale import INTERVAL, LARGEST, LossScale, loss_scale


def test_dynamic_scaling_is_that_of_pytorchs_scaler() -> None:
    torch = pytest.importorskip("torch")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # makes its scale
    mine = loss_scale(None, "float16")
    rng = np.random.default_rng(0)
    for step in range(1, 3 * INTERVAL):
        bad = step in (1, 5, INTERVAL) or rng.random() < 1e-3
        mine.after(not bad, step)
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = torch.full((1,), float("inf") if bad else 1.0)
        scaler.step(torch.optim.SGD([parameter], lr=0.0))
        scaler.update()
        assert mine.scale == scaler.get_scale()
    assert mine.skipped > 3


def test_it_ends_where_scaling_does_not_help() -> None:
    mine = LossScale(2.0**-13, dynamic=True)
    mine.after(False, 1)
    with pytest.raises(TrainingError, match=r"step 2: gradients are not finite at the loss scale"):
        mine.after(False, 2)
    with pytest.raises(TrainingError, match="the parameters are those after step 6"):
        LossScale(8.0).after(False, 7)


def test_it_stops_growing() -> None:
    mine = LossScale(LARGEST, dynamic=True)
    for step in range(INTERVAL + 1):
        mine.after(True, step)
    assert mine.scale == LARGEST


def test_options() -> None:
    assert loss_scale(None, None) == LossScale(1.0)
    assert loss_scale(None, "bfloat16") == LossScale(1.0)
    assert loss_scale("dynamic", "bfloat16") == loss_scale(None, "float16")
    assert loss_scale("512", "float16") == LossScale(512.0)
    for text in ("0", "-1", "many", "inf", "nan", "1e30"):
        with pytest.raises(LaunchError, match="expected dynamic or a number from"):
            loss_scale(text, "float16")
    with pytest.raises(LaunchError, match="--loss-scale dynamic: the programs compute"):
        loss_scale("dynamic", None)
    with pytest.raises(DirectoryError, match="'float8'"):
        loss_scale(None, "float8")
