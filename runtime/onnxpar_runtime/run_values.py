"""What a program takes and makes in one run, besides states."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from numpy.typing import NDArray

from onnxpar_runtime.inputs import Feeds

Array = NDArray[Any]
LOSS_WEIGHT = "loss_weight"
"""The kind of a loss weight in `onnxpar_format.entries.SystemInput`, and its key in a run."""
START_AHEAD, FINISH_LATER, ACCUMULATE = "start_ahead", "finish_later", "accumulate"
"""Likewise, of inputs that are set for each run."""
ALONE, FIRST, ADDED = 0, 2, 3
"""Values of `ACCUMULATE`: gradients of a step's only micro-batch, of its first, of another."""


_NONE: Mapping[str, Any] = MappingProxyType({})


class Given(NamedTuple):
    """What a program takes in a run, besides states.

    Attributes:
        feeds: The inputs.
        counters: Values of `onnxpar_format.entries.COUNTERS`.
        numbers: Values of the hyperparameters by name, of `LOSS_WEIGHT`, and of the kinds
            that are set for each run.
        handed: OrtValues of the values that the program takes from others, by name; there may be
            more. No reference to them is kept.
    """

    feeds: Feeds
    counters: Mapping[str, int]
    numbers: Mapping[str, float] = _NONE
    handed: Mapping[str, Any] = _NONE


class Results(NamedTuple):
    """The results of a run, besides states.

    Attributes:
        data: Local array of every output, padding included.
        handed: The values for other programs, on the device.
    """

    data: Mapping[str, Array]
    handed: Mapping[str, Any]
