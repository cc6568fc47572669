"""Compares training, divided over all ranks in this process, with the undivided program.

Both train on the same random batches for some steps, and their losses are compared. Optimizers such
as Adam blow noise up: the element of a parameter whose gradient is rounding noise may move either
way, and after that gradients differ by more than rounding. So the undivided program takes every
step a second time, beginning with the states that the ranks have: of this step loss, gradients,
moments and parameters must be equal but for rounding. A mistake of any step is seen in that step,
and what adds up over steps in the losses.

A gradient that jumps (ReLU's at 0) may jump on one side alone, where its operand is rounding noise.
So where a gradient differs, the undivided program is asked how far its own gradients move when its
parameters move by rounding; that far they may be apart. Running statistics likewise, since layers
that normalise over few elements carry rounding on (`onnxpar_runtime.training.limits`).

Before the first step both evaluate. Steps have as many micro-batches as a pipeline was cut for, or
one; those of even number have one more, and clip the gradients to half of the last step's norm. The
bytes that the ranks count are compared with the formulas of the manifest.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from onnxpar_runtime.errors import ArtifactError, InputError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.npz import convert
from onnxpar_runtime.symbol_checks import bind_symbols, check_equal_sizes, check_symbols
from onnxpar_runtime.training.comparison import (
    Comparison,
    Rates,
    StepCase,
    TrainingCase,
    TrainingSettings,
    trained_parameters,
)
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.training.hyper import Settings, hyperparameters
from onnxpar_runtime.training.programs import EVALUATION
from onnxpar_runtime.training.random_data import Draws, Given, Random
from onnxpar_runtime.verify import complete_case, default_cases

__all__ = ["RATES", "StepCase", "TrainingCase", "TrainingSettings", "verify_training"]

Array = NDArray[Any]
RATES: Mapping[str, float] = {"sgd": 1e-2, "momentum": 1e-2, "adam": 1e-3, "adamw": 1e-3,
                              "lamb": 1e-3}  # fmt: skip
"""Learning rate of each optimizer, unless one is given: steps as in practice."""
_DECAY = 1e-2


def verify_training(
    directory: str | Path,
    reference: str | Path,
    cases: Sequence[Mapping[str, int]] = (),
    feeds: Mapping[str, Array] | None = None,
    settings: TrainingSettings | None = None,
) -> list[TrainingCase]:
    """Returns the comparison at each case.

    Args:
        directory: A directory that was cut for training.
        reference: The same, cut for one device.
        cases: As `onnxpar_runtime.verify.verify`.
        feeds: Inputs and labels of every micro-batch, instead of random ones; then there is one
            case and `cases` must be empty.
        settings: What to compare and how strictly.

    Raises:
        OnnxparRuntimeError: Artifacts cannot be loaded, were changed, or are not of the same
            training; a case names an unknown symbol or violates a constraint; a rank fails.
    """
    settings = settings or TrainingSettings()
    manifest, whole = Manifest.load(directory), Manifest.load(reference)
    manifest.verify_files()
    _check_same(manifest, whole)
    program = manifest.program(EVALUATION)
    kind = manifest.trained().optimizer
    chosen: list[dict[str, int]]
    if feeds is not None:
        if cases:
            raise InputError("give inputs or symbols: the inputs' shapes tell the symbols")
        feeds = convert(program.inputs, feeds)
        values = bind_symbols(program.inputs, {name: a.shape for name, a in feeds.items()})
        check_symbols(manifest.symbols, values)
        check_equal_sizes(program, values)
        chosen = [values]
    else:
        chosen = [complete_case(manifest, program, c) for c in cases]
        chosen = chosen or default_cases(manifest, program)
    # Limits of what is compared are worked out for gradients as they are.
    scale = None if manifest.trained().compute is None else "1"
    start = partial(
        TrainerGroup, custom_ops=settings.custom_ops, seed=settings.seed, loss_scale=scale
    )
    draw: Draws
    draw = Given(feeds) if feeds else Random(whole, settings.seed, chosen, settings.custom_ops)
    rate = RATES[kind] if settings.lr is None else settings.lr
    hyper = Rates(hyperparameters(kind, _settings(kind)), rate)
    with (
        start(directory, ort_options=settings.ort_options) as ranks,
        start(reference) as one,
    ):
        return [Comparison(ranks, one, hyper, settings, v).run(draw) for v in chosen]


def _settings(kind: str) -> Settings:
    """Settings in which nothing of an optimizer is without effect."""
    dampening = 0.1 if kind == "momentum" else None
    return Settings(weight_decay=_DECAY, dampening=dampening)


def _check_same(manifest: Manifest, whole: Manifest) -> None:
    """Raises ArtifactError unless the second is what the first is to be compared with."""
    if whole.devices != 1:
        raise ArtifactError(
            f"{whole.directory}: expected a model, or artifacts for 1 device, got {whole.devices} "
            "devices"
        )
    mine, its = manifest.trained(), whole.trained()
    for what, got, expected in (
        ("optimizer", its.optimizer, mine.optimizer),
        ("loss", its.loss.kind, mine.loss.kind),
        ("trained parameters", trained_parameters(its.states), trained_parameters(mine.states)),
    ):
        if got != expected:
            raise ArtifactError(f"{whole.directory}: {what}: expected {expected}, got {got}")
