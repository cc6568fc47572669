"""What an evaluation reports besides its loss: metrics of the model's outputs.

The outputs of each batch are gathered to rank 0, which alone computes metrics of them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.manifest import Loss
from onnxpar_runtime.errors import InputError, LaunchError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.training.programs import CORRECT, EVALUATION, LOSS
from onnxpar_runtime.training.sources import Batch
from onnxpar_runtime.user_code import named_function, users_code

Array = NDArray[Any]
FORMS = "accuracy, perplexity, f1, topK (such as top5) or module:function"

_TAKEN = ("loss", "accuracy")
"""Names of results that every evaluation has."""


class Metric(Protocol):
    """Sums up an evaluation: `update` for each batch, then `compute` once."""

    def update(self, outputs: Mapping[str, Array], batch: Mapping[str, Array]) -> None:
        """Takes a batch.

        Args:
            outputs: The model's outputs of the whole batch, by name.
            batch: The whole inputs, labels included, by name.
        """
        ...

    def compute(self) -> float | Mapping[str, float]:
        """Returns the result over all batches; several results by name."""
        ...


@dataclass(frozen=True)
class Metrics:
    """The metrics of an evaluation, by the names under which they are reported.

    Attributes:
        of_outputs: Makes what sums up the outputs of one evaluation, and the option that names it.
        perplexity: Whether the exponential of the mean loss is reported.
    """

    of_outputs: Mapping[str, tuple[str, Callable[[], Metric]]]
    perplexity: bool = False

    def begin(self) -> "Sums":
        """Returns the sums of a new evaluation.

        Raises:
            UserCodeError: The user's function failed.
        """
        made = {}
        for name, (option, make) in self.of_outputs.items():
            with users_code(option):
                made[name] = make()
            if not all(callable(getattr(made[name], part, None)) for part in ("update", "compute")):
                raise InputError(
                    f"{option}: expected an object with the methods update and compute, got "
                    f"{type(made[name]).__name__}"
                )
        return Sums(self, made)


NO_METRICS = Metrics({})


@dataclass(frozen=True)
class Sums:
    """The metrics of one evaluation, on rank 0."""

    _metrics: Metrics
    _made: Mapping[str, Metric]

    def update(self, outputs: Mapping[str, Array], batch: Batch) -> None:
        """Takes a batch.

        Raises:
            UserCodeError: The user's method failed.
        """
        parts = batch if isinstance(batch, tuple) else (batch,)
        whole = parts[0]
        if len(parts) > 1:
            whole = {name: np.concatenate([part[name] for part in parts]) for name in whole}
        for name, metric in self._made.items():
            with users_code(self._metrics.of_outputs[name][0]):
                metric.update(_read_only(outputs), _read_only(whole))

    def results(self, loss: float) -> dict[str, float]:
        """Returns the results by name.

        Args:
            loss: The mean loss.

        Raises:
            InputError: A result is not a number.
            UserCodeError: The user's method failed.
        """
        found: dict[str, float] = {}
        if self._metrics.perplexity:
            found["perplexity"] = exp(loss) if loss < 700 else float("inf")  # exp(710) overflows
        for name, metric in self._made.items():
            option = self._metrics.of_outputs[name][0]
            with users_code(option):
                result = metric.compute()
            named = result if isinstance(result, Mapping) else {name: result}
            for key, value in named.items():
                if key in found or key in _TAKEN:
                    raise InputError(
                        f"{option}: expected a name that no other result has, got {str(key)!r}"
                    )
                try:
                    found[str(key)] = float(value)
                except (TypeError, ValueError):
                    raise InputError(
                        f"{option}: {key}: expected a number from compute, got {value!r:.80}"
                    ) from None
        return found


def _read_only(arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Returns arrays that cannot be written: other metrics get the same ones."""
    views = {name: np.asarray(array).view() for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


def chosen_metrics(names: Sequence[str], manifest: Manifest) -> Metrics:
    """Returns the metrics with these names.

    Args:
        names: As the option `--metric` takes them.
        manifest: A directory that was made for training.

    Raises:
        LaunchError: An unknown or repeated name, or a metric of classes for a loss without classes.
        InputError: There is no such function.
        UserCodeError: The user's module failed when it was imported.
    """
    loss, outputs = manifest.trained().loss, manifest.program(EVALUATION).outputs
    has_classes = any(spec.name == CORRECT for spec in outputs)
    scores = next((s.name for s in outputs if s.name not in (LOSS, CORRECT)), None)
    made: dict[str, tuple[str, Callable[[], Metric]]] = {}
    for name, count in Counter(names).items():
        option = f"--metric {name}"
        if count > 1:
            raise LaunchError(f"{option}: expected it once, got it {count} times")
        if ":" in name:
            own = name.partition(":")[2]
            if own in made or own in (*names, *_TAKEN):
                raise LaunchError(
                    f"{option}: expected a name that no other metric has, got {own!r}"
                )
            made[own] = option, named_function(name, option, FORMS)
            continue
        most = name.removeprefix("top")
        is_top = most != name and most.isdecimal() and 0 < int(most) < 10**9
        if not is_top and name not in ("accuracy", "perplexity", "f1"):
            raise LaunchError(f"--metric: expected {FORMS}, got {name!r}")
        if not has_classes or scores is None:
            raise LaunchError(f"{option}: the loss {loss.kind} of the directory has no classes")
        if is_top:
            made[name] = option, partial(_Top, scores, loss, int(most))
        elif name == "f1":
            made[name] = option, partial(_F1, scores, loss)
    return Metrics(made, "perplexity" in names)


def _counted_rows(
    scores: str, loss: Loss, outputs: Mapping[str, Array], batch: Mapping[str, Array]
) -> tuple[Array, NDArray[np.int64]]:
    """Returns rows of scores [n, classes] and their labels [n], of those that count."""
    found = outputs[scores]
    rows = found.reshape(-1, found.shape[-1]).astype(np.float32, copy=False)
    labels = np.asarray(batch[loss.labels or ""]).reshape(-1).astype(np.int64)
    if loss.ignore_index is not None:
        counts = labels != loss.ignore_index
        rows, labels = rows[counts], labels[counts]
    return rows, labels


class _Top:
    """The share of labels that are among the K classes with the highest scores.

    Of equal scores, that of the class with the lower number is higher, as in ArgMax.
    """

    def __init__(self, scores: str, loss: Loss, most: int) -> None:
        self._scores, self._loss, self._most = scores, loss, most
        self._found = self._labels = 0

    def update(self, outputs: Mapping[str, Array], batch: Mapping[str, Array]) -> None:
        rows, labels = _counted_rows(self._scores, self._loss, outputs, batch)
        own = np.take_along_axis(rows, labels[:, None], 1)
        before = np.arange(rows.shape[1]) < labels[:, None]
        higher = (rows > own) | ((rows == own) & before)
        self._found += int(np.count_nonzero(higher.sum(1) < self._most))
        self._labels += len(labels)

    def compute(self) -> float:
        return self._found / self._labels if self._labels else float("nan")


class _F1:
    """The mean over classes of the harmonic mean of precision and recall ("macro").

    Classes that are neither labels nor predictions do not count.
    """

    def __init__(self, scores: str, loss: Loss) -> None:
        self._scores, self._loss = scores, loss
        self._right = self._predicted = self._labelled = np.zeros(0, np.int64)

    def update(self, outputs: Mapping[str, Array], batch: Mapping[str, Array]) -> None:
        rows, labels = _counted_rows(self._scores, self._loss, outputs, batch)
        classes = rows.shape[1]
        if not len(self._right):
            self._right = self._predicted = self._labelled = np.zeros(classes, np.int64)
        best = rows.argmax(1)
        self._right = self._right + np.bincount(labels[best == labels], minlength=classes)
        self._predicted = self._predicted + np.bincount(best, minlength=classes)
        self._labelled = self._labelled + np.bincount(labels, minlength=classes)

    def compute(self) -> float:
        both = self._predicted + self._labelled
        occur = both > 0
        return float(np.mean(2 * self._right[occur] / both[occur])) if occur.any() else float("nan")
