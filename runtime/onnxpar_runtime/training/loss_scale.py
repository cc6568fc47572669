"""The loss scale of training in 16 bits, which keeps small gradients in the range of float16.

Dynamic scaling is that of Micikevicius et al., 2018, "Mixed Precision Training", section 3.2, with
the numbers of PyTorch's `torch.amp.GradScaler`: it begins at 2^16, doubles after 2000 steps with
finite gradients, and halves after a step without. Scales are powers of two, so that multiplying by
a scale rounds nothing.
"""

from dataclasses import dataclass

from onnxpar_runtime.errors import DirectoryError, LaunchError, TrainingError

DYNAMIC = "dynamic"
INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
INTERVAL = 2000
LARGEST = 2.0**24
SMALLEST = 2.0**-14
_DEFAULTS = {"float16": DYNAMIC, "bfloat16": "1"}


@dataclass
class LossScale:
    """The factor of the loss, and its history.

    Attributes:
        scale: The factor, > 0.
        dynamic: Whether it follows the gradients.
        good: Number of steps since it last changed, all with finite gradients.
        skipped: Number of steps that changed nothing, because their gradients were not finite.
    """

    scale: float = 1.0
    dynamic: bool = False
    good: int = 0
    skipped: int = 0

    def resume(self, scale: float, good: int, skipped: int) -> None:
        """Continues from the numbers of a checkpoint; a fixed scale does not change."""
        self.skipped = skipped
        if self.dynamic:
            self.scale, self.good = scale, good

    def after(self, finite: bool, step: int) -> None:
        """Adapts the scale to a step's gradients.

        Args:
            finite: Whether their norm was finite; otherwise the step changed nothing.
            step: Its number, for messages.

        Raises:
            TrainingError: They were not finite, and the scale is fixed or the smallest possible.
        """
        if finite:
            self.good += 1
            if self.dynamic and self.good == INTERVAL:
                self.scale, self.good = min(self.scale * GROWTH, LARGEST), 0
            return
        if not self.dynamic or self.scale * BACKOFF < SMALLEST:
            raise TrainingError(
                f"step {step}: gradients are not finite at the loss scale {self.scale:g}; "
                f"training stops; the parameters are those after step {step - 1}"
            ).as_agreed()  # the norm is the same on all ranks
        self.scale, self.good = self.scale * BACKOFF, 0
        self.skipped += 1


def loss_scale(text: str | None, compute: str | None) -> LossScale:
    """Returns the loss scale that `--loss-scale` asks for.

    Args:
        text: `dynamic`, a number > 0, or None for the default: dynamic for float16, 1 for bfloat16,
            whose range is that of float32.
        compute: The 16-bit type that the directory computes in, or None.

    Raises:
        LaunchError: Something else; or a scale for a directory that computes in float32.
        DirectoryError: The type is unknown.
    """
    if compute is None:
        if text is not None:
            raise LaunchError(
                f"--loss-scale {text}: the programs compute in the type of their parameters; to "
                "train in 16 bits, shard the model with --compute float16"
            )
        return LossScale()
    if compute not in _DEFAULTS:
        raise DirectoryError(f"unknown compute type {compute!r}, expected {' or '.join(_DEFAULTS)}")
    text = _DEFAULTS[compute] if text is None else text
    if text == DYNAMIC:
        return LossScale(INITIAL, dynamic=True)
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not SMALLEST <= scale <= LARGEST:
        raise LaunchError(
            f"--loss-scale: expected dynamic or a number from {SMALLEST:g} to {LARGEST:g}, got "
            f"{text}"
        )
    return LossScale(scale)
