"""The norms of the gradients of groups of parameters."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np

from onnxpar_runtime.errors import InputError
from onnxpar_runtime.training.step_trainer import StepTrainer


def check_groups(trainer: StepTrainer, patterns: Sequence[str]) -> None:
    """Raises InputError for a pattern that matches no trained parameter."""
    names = sorted({s.parameter for s in trainer.training.states.values() if s.kind == "gradient"})
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"--grad-norm {pattern}: expected the name or a pattern of trained parameters, "
                f"got none of {', '.join(names)}"
            )


def gradient_norms(trainer: StepTrainer, patterns: Sequence[str]) -> dict[str, float]:
    """Returns the 2-norm of the gradients of the last step for each group, before clipping.

    Every rank must call it, after a step. Gradients that the optimizer adds up over ranks are added
    up again for it, which takes as long as it does in the step.

    Args:
        trainer: This rank's trainer.
        patterns: Names of parameters, or patterns as in `fnmatch`: a group each.

    Raises:
        InputError: A pattern matches no parameter.
        RankError: A rank failed.
    """
    check_groups(trainer, patterns)
    manifest, rank = trainer.manifest, trainer.rank
    squares = np.zeros(len(patterns), np.float64)
    for name, state in trainer.training.states.items():
        if state.kind != "gradient":
            continue
        matched = [fnmatchcase(state.parameter, pattern) for pattern in patterns]
        if not any(matched) or not trainer.holds(name):
            continue
        part = trainer.summed(name)
        stage = min(state.stages)
        place = rank.index - stage * manifest.stage_devices
        sharding = trainer.sharding(name)
        if place in sharding.owners():
            own = sharding.unpadded(part, place).astype(np.float64).ravel()
            squares += np.array(matched) * (own @ own)
    norms = np.sqrt(rank.all_reduce(squares)) / trainer.gradient_scale
    return dict(zip(patterns, norms.tolist(), strict=True))
