"""Random batches to train on."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.expressions import ExpressionError, Size, evaluate
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.symbol_checks import bind_symbols
from onnxpar_runtime.training.programs import EVALUATION
from onnxpar_runtime.training.trainer import Trainer
from onnxpar_runtime.verify.random_feeds import RandomFeeds, random_feeds

Array = NDArray[Any]
CROSS_ENTROPY = "softmax_cross_entropy"
_IGNORED_SHARE = 0.25


class RandomBatches(RandomFeeds):
    """Random batches: labels are existing classes, or probabilities; some are ignored.

    Args:
        undivided: The directory for one device, which show which indices are out of range.
        cases: All values of the symbols at which batches are drawn.
        seed: Seed.
        custom_ops: Further custom-op libraries.

    Raises:
        OnnxparRuntimeError: As `onnxpar_runtime.verify.random_feeds.index_spans`.
    """

    def __init__(
        self,
        undivided: Manifest,
        cases: Sequence[Mapping[str, int]],
        seed: int,
        custom_ops: Sequence[str | Path] = (),
    ) -> None:
        """Finds the bounds of the integers."""
        training, program = undivided.trained(), undivided.program(EVALUATION)
        self._loss, self._inputs = training.loss, program
        # Sizes of outputs may be symbolic: a contrastive loss has the logits [batch, batch].
        self._classes: dict[str, Size] = {}
        if training.loss.kind == CROSS_ENTROPY and training.loss.labels is not None:
            self._classes[training.loss.labels] = _classes(undivided)
        asked = tuple(s for s in program.inputs if s.name not in self._classes)
        with closing(_Evaluated(undivided, custom_ops, self._classes)) as reference:
            super().__init__(reference, replace(program, inputs=asked), cases, seed)

    def batch(self, values: Mapping[str, int]) -> dict[str, Array]:
        """Returns new inputs and labels; not all labels are ignored.

        Raises:
            InputError: The number of classes depends on data.
        """
        classes = {n: _evaluated(n, size, values) for n, size in self._classes.items()}
        spans = self.spans(values)
        bounds = {name: span.high for name, span in spans.items()} | classes
        feeds = random_feeds(self._inputs, values, bounds, self._rng)
        for name, span in spans.items():
            feeds[name] = np.maximum(feeds[name], span.low)
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


def _classes(undivided: Manifest) -> Size:
    """Returns the number of classes: the last dim of the logits, which the manifest names."""
    outputs = undivided.program(EVALUATION).outputs
    name = undivided.trained().spec["loss"]["output"] or outputs[0].name
    return next(s.shape[-1] for s in outputs if s.name == name)


def _evaluated(labels: str, classes: Size, values: Mapping[str, int]) -> int:
    try:
        return evaluate(classes, values)
    except ExpressionError as error:
        raise InputError(
            f"labels {labels!r}: cannot draw random labels for {classes} classes: {error} (give "
            "inputs with --inputs)"
        ) from None


class _Evaluated:
    """The undivided evaluation without the labels; it refuses indices out of range."""

    def __init__(
        self, undivided: Manifest, custom_ops: Sequence[str | Path], classes: Collection[str]
    ) -> None:
        self._trainer = Trainer(
            undivided.directory,
            device="cpu",
            custom_ops=custom_ops,
            programs=(EVALUATION,),
            manifest=undivided,
        )
        program = undivided.program(EVALUATION)
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
