"""The optimizer's settings, and the scalars that its program takes at each step.

The formulas are those of PyTorch 2.13's `torch.optim` (SGD with momentum and dampening; Kingma &
Ba, 2015 for Adam; Loshchilov & Hutter, 2019 for AdamW) and of You et al., 2020 for LAMB. Scalars
that depend on the step t = 1, 2, … are computed here in double precision, so that 1 - beta2^t keeps
its digits.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite, sqrt

from onnxpar_format.options import Settings
from onnxpar_runtime.errors import DirectoryError, LaunchError

_ADAM = Settings(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
DEFAULTS: Mapping[str, Settings] = {
    "sgd": Settings(weight_decay=0.0),
    "momentum": Settings(momentum=0.9, dampening=0.0, weight_decay=0.0),
    "adam": _ADAM,
    "adamw": Settings(betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2),
    "lamb": Settings(betas=(0.9, 0.999), eps=1e-6, weight_decay=1e-2),
}
"""The settings that each optimizer has, with PyTorch's defaults (LAMB: the paper's)."""

# The scalars of a setting. The setting has an effect only if the optimizer's graph reads one.
_SCALARS = {
    "momentum": ("momentum",),
    "dampening": ("dampening",),
    "betas": ("beta1", "beta2", "beta1_complement", "beta2_complement"),
    "eps": ("eps",),
    "weight_decay": ("weight_decay", "decay"),
    "clip_norm": ("clip_norm",),
}


@dataclass(frozen=True)
class Hyperparameters:
    """The scalars of an optimizer's program, as functions of step and learning rate.

    Attributes:
        kind: `sgd`, `momentum`, `adam`, `adamw` or `lamb`.
        settings: The settings that the optimizer has; only `clip_norm` may be left open.
    """

    kind: str
    settings: Settings

    def at(self, step: int, rate: float) -> dict[str, float]:
        """Returns every scalar of the optimizer at step t = `step` (from 1) and learning rate."""
        chosen = self.settings
        scalars = {
            "lr": rate,
            "clip_norm": inf if chosen.clip_norm is None else chosen.clip_norm,
            "weight_decay": chosen.weight_decay or 0.0,
        }
        # Decoupled decay: the factor of the parameter before its step.
        scalars["decay"] = 1.0 - rate * scalars["weight_decay"]
        if chosen.momentum is not None:
            scalars["momentum"] = chosen.momentum
            scalars["dampening"] = chosen.dampening or 0.0
            scalars["momentum_first"] = 1.0 if step == 1 else 0.0
        if chosen.betas is not None:
            beta1, beta2 = chosen.betas
            scalars |= {
                "beta1": beta1,
                "beta1_complement": 1.0 - beta1,
                "beta2": beta2,
                "beta2_complement": 1.0 - beta2,
                "eps": chosen.eps or 0.0,
                "lr_corrected": rate / (1.0 - beta1**step),
                "correction2_sqrt": sqrt(1.0 - beta2**step),
            }
        return scalars


def hyperparameters(
    kind: str, given: Settings, reads: Collection[str] | None = None
) -> Hyperparameters:
    """Returns an optimizer's hyperparameters from what the user set.

    Args:
        kind: The directory's optimizer.
        given: What the user set.
        reads: Names of the scalars that the optimizer's program takes, if they are known.

    Raises:
        DirectoryError: An unknown optimizer.
        LaunchError: A setting that this optimizer does not have, or a value out of its range.
    """
    if kind not in DEFAULTS:
        raise DirectoryError(f"unknown optimizer {kind!r}, expected one of {', '.join(DEFAULTS)}")
    defaults, chosen = DEFAULTS[kind], {}
    for field in fields(Settings):
        value, default = getattr(given, field.name), getattr(defaults, field.name)
        option = f"--{field.name.replace('_', '-')}"
        if value is None:
            chosen[field.name] = default
            continue
        if default is None and field.name != "clip_norm":
            have = [f"--{f.name.replace('_', '-')}" for f in fields(Settings)
                    if getattr(defaults, f.name) is not None]  # fmt: skip
            raise LaunchError(
                f"{option}: the directory's optimizer {kind} does not have this setting; it has "
                f"{', '.join([*have, '--clip-norm'])}"
            )
        _check(option, field.name, value)
        if reads is not None and value and not set(_SCALARS[field.name]) & set(reads):
            raise LaunchError(
                f"{option} {value}: the directory's optimizer {kind} has no parameter to which it "
                "applies; shard the model again with other options, such as --decay"
            )
        chosen[field.name] = value
    return Hyperparameters(kind, Settings(**chosen))


def _check(option: str, name: str, value: float | tuple[float, float]) -> None:
    """Raises LaunchError unless the value is in the setting's range."""
    numbers = value if isinstance(value, tuple) else (value,)
    wanted, holds = "a number >= 0", all(isfinite(n) and n >= 0 for n in numbers)
    if name in ("momentum", "betas"):
        wanted, holds = "a number >= 0 and < 1", all(0 <= n < 1 for n in numbers)
    elif name == "dampening":
        wanted, holds = "a number from 0 to 1", all(0 <= n <= 1 for n in numbers)
    elif name == "clip_norm":
        wanted, holds = "a number > 0", all(n > 0 for n in numbers)
    if not holds:
        raise LaunchError(f"{option}: expected {wanted}, got {value}")
