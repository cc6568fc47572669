"""The optimizer's scalars, by the formulas that PyTorch documents."""

import math

import pytest

from onnxpar_format.option import parse_betas
from onnxpar_format.options import Settings
from onnxpar_runtime.errors import DirectoryError, LaunchError
from onnxpar_runtime.training.hyper import hyperparameters


def test_sgd() -> None:
    scalars = hyperparameters("sgd", Settings()).at(3, 0.25)
    assert scalars == {"lr": 0.25, "clip_norm": math.inf, "weight_decay": 0.0, "decay": 1.0}


def test_momentum_knows_its_first_step() -> None:
    hyper = hyperparameters("momentum", Settings(momentum=0.8, dampening=0.1, weight_decay=0.5))
    first, second = hyper.at(1, 0.1), hyper.at(2, 0.1)
    assert (first["momentum_first"], second["momentum_first"]) == (1.0, 0.0)
    assert (first["momentum"], first["dampening"], first["weight_decay"]) == (0.8, 0.1, 0.5)


@pytest.mark.parametrize("kind", ["adam", "adamw", "lamb"])
def test_bias_corrections(kind: str) -> None:
    hyper = hyperparameters(kind, Settings(betas=(0.5, 0.75), eps=1e-3, clip_norm=2.0))
    scalars = hyper.at(2, 0.3)
    # Powers of two: exact.
    assert scalars["lr_corrected"] == 0.3 / 0.75
    assert scalars["correction2_sqrt"] == math.sqrt(1 - 0.5625)
    assert (scalars["beta1_complement"], scalars["beta2_complement"]) == (0.5, 0.25)
    assert (scalars["eps"], scalars["clip_norm"]) == (1e-3, 2.0)


def test_adamw_decays_by_pytorchs_default() -> None:
    scalars = hyperparameters("adamw", Settings()).at(1, 0.1)
    assert (scalars["weight_decay"], scalars["decay"]) == (0.01, 1 - 0.1 * 0.01)
    assert (scalars["beta1"], scalars["beta2"], scalars["eps"]) == (0.9, 0.999, 1e-8)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            "adamw",
            Settings(momentum=0.9),
            "--momentum: the directory's optimizer adamw does not have this",
        ),
        (
            "sgd",
            Settings(betas=(0.9, 0.9)),
            "sgd does not have this setting; it has --weight-decay, --cl",
        ),
        ("sgd", Settings(eps=1.0), "--eps: the directory's optimizer sgd"),
        ("momentum", Settings(momentum=1.0), "--momentum: expected a number >= 0 and < 1, got 1"),
        ("momentum", Settings(dampening=2.0), "--dampening: expected a number from 0 to 1"),
        ("adam", Settings(betas=(0.9, -0.1)), "--betas: expected a number >= 0 and < 1"),
        ("adam", Settings(eps=-1.0), "--eps: expected a number >= 0"),
        ("sgd", Settings(weight_decay=math.nan), "--weight-decay: expected a number >= 0, got nan"),
        ("sgd", Settings(clip_norm=0.0), "--clip-norm: expected a number > 0, got 0"),
    ],
)
def test_refused(kind: str, given: Settings, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        hyperparameters(kind, given)


def test_what_the_program_does_not_read_is_refused() -> None:
    given = Settings(weight_decay=0.1)
    assert hyperparameters("adamw", given, {"lr_corrected", "decay"}).settings.weight_decay == 0.1
    with pytest.raises(LaunchError, match=r"--weight-decay 0\.1: .* has no parameter to which"):
        hyperparameters("adamw", given, {"lr_corrected"})
    # Without weight decay such a program is correct.
    assert hyperparameters("adamw", Settings(weight_decay=0.0), {"lr_corrected"})


def test_unknown_optimizer() -> None:
    with pytest.raises(DirectoryError, match="unknown optimizer 'adagrad', expected one of sgd"):
        hyperparameters("adagrad", Settings())


def test_betas() -> None:
    assert parse_betas("0.9,0.95") == (0.9, 0.95)
    for text in ("0.9", "a,b", "1,2,3"):
        with pytest.raises(ValueError, match="expected two numbers A,B, got"):
            parse_betas(text)
