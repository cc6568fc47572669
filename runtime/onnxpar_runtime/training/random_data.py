"""Random batches to train on, and what their integers may be."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxpar_runtime.errors import InputError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.shapes import bind_symbols
from onnxpar_runtime.training.programs import EVALUATION
from onnxpar_runtime.training.trainer import Trainer
from onnxpar_runtime.verify import index_bounds, random_feeds, smallest_case

Array = NDArray[Any]
CROSS_ENTROPY = "softmax_cross_entropy"
_IGNORED_SHARE = 0.25


class Draws(Protocol):
    """What gives a batch."""

    def batch(self, values: Mapping[str, int]) -> dict[str, Array]:
        """Returns global inputs and labels at these values of the symbols."""


class Given:
    """The same arrays in every batch.

    Args:
        feeds: The arrays.
    """

    def __init__(self, feeds: Mapping[str, Array]) -> None:
        """Keeps the arrays."""
        self._feeds = dict(feeds)

    def batch(self, values: Mapping[str, int]) -> dict[str, Array]:
        """Returns the arrays."""
        return dict(self._feeds)


class Random:
    """Random batches: labels are classes that there are, or probabilities; some are ignored.

    Args:
        whole: The artifacts for one device, which are asked for the indices that they refuse.
        seed: Seed.
        custom_ops: Further custom-op libraries.

    Raises:
        OnnxparRuntimeError: As `onnxpar_runtime.verify.index_bounds`; or the number of classes is
            not known.
    """

    def __init__(self, whole: Manifest, seed: int, custom_ops: Sequence[str] = ()) -> None:
        """Finds the bounds of the integers."""
        training, program = whole.trained(), whole.program(EVALUATION)
        self._loss, self._program = training.loss, program
        self._rng = np.random.default_rng(seed)
        self._bounds: dict[str, int] = {}
        if training.loss.kind == CROSS_ENTROPY and training.loss.labels is not None:
            self._bounds[training.loss.labels] = _classes(whole)
        asked = tuple(s for s in program.inputs if s.name not in self._bounds)
        with closing(_Evaluated(whole, custom_ops, self._bounds)) as reference:
            smallest = smallest_case(whole, program)
            found = index_bounds(reference, replace(program, inputs=asked), smallest)
        self._bounds |= found

    def batch(self, values: Mapping[str, int]) -> dict[str, Array]:
        """Returns new inputs and labels; not all labels are ignored."""
        feeds = random_feeds(self._program, values, self._bounds, self._rng)
        loss = self._loss
        if loss.labels is None:
            return feeds
        labels = feeds[loss.labels]
        if loss.kind == "bce":
            feeds[loss.labels] = self._rng.random(labels.shape).astype(labels.dtype)
        if loss.ignore_index is not None:
            ignored = self._rng.random(labels.shape) < _IGNORED_SHARE
            ignored.flat[self._rng.integers(ignored.size)] = False
            labels[ignored] = loss.ignore_index
        return feeds


def _classes(whole: Manifest) -> int:
    """Returns the number of classes: the last dim of the logits, which the manifest names."""
    outputs = whole.program(EVALUATION).outputs
    name = whole.trained().spec["loss"]["output"] or outputs[0].name
    size = next(s.shape[-1] for s in outputs if s.name == name)
    if not isinstance(size, int):
        raise InputError(
            f"output {name!r}: no random labels for {size} classes: give inputs with --inputs"
        )
    return size


class _Evaluated:
    """The undivided evaluation without the labels, as what says which indices it refuses."""

    def __init__(
        self, whole: Manifest, custom_ops: Sequence[str], classes: Mapping[str, int]
    ) -> None:
        self._trainer = Trainer(
            whole.directory,
            device="cpu",
            custom_ops=custom_ops,
            programs=(EVALUATION,),
            manifest=whole,
        )
        program = whole.program(EVALUATION)
        self._asked = [s for s in program.inputs if s.name not in classes]
        self._labels = replace(
            program, inputs=tuple(s for s in program.inputs if s.name in classes)
        )

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        values = bind_symbols(self._asked, {name: a.shape for name, a in feeds.items()})
        first = {s.name: 1 for s in self._labels.inputs}
        labels = random_feeds(self._labels, values, first, np.random.default_rng(0))
        return self._trainer.evaluate({**feeds, **labels}, outputs=True)["outputs"] or {}

    def close(self) -> None:
        self._trainer.close()
