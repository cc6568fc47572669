"""Makes steps and micro-batches of samples, ahead of time.

The order of an epoch is a permutation that depends on the seed and the epoch alone, so that a run
gets the same batches on any mesh.
"""

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from onnxpar_format.entries import SymbolEntry, TensorEntry
from onnxpar_format.expressions import Size, bare_name
from onnxpar_runtime.errors import InputError, LaunchError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.training.metrics import NO_METRICS, Metrics
from onnxpar_runtime.training.permutation import Order, as_they_are, permutation
from onnxpar_runtime.training.same_on_ranks import digest_of
from onnxpar_runtime.training.sources import (
    Arrays,
    Batch,
    Place,
    Request,
    Samples,
    Shard,
    Source,
    Stream,
    per_sample,
)

T = TypeVar("T")
_FREE = SymbolEntry()
Sizes = tuple[int, ...]
"""Numbers of samples of a step's micro-batches."""


@dataclass(frozen=True)
class BatchDim:
    """The numbers of samples that a micro-batch may have.

    Attributes:
        size: The dim's size in the model: a fixed number, or the symbol's name.
        symbol: The symbol's constraint; unused if the size is fixed.
    """

    size: Size
    symbol: SymbolEntry = _FREE

    @staticmethod
    def of(manifest: Manifest, specs: Sequence[TensorEntry]) -> "BatchDim":
        """Returns the batch dim of a program with these inputs: dim 0 of the first.

        Raises:
            InputError: The first input has no dims.
        """
        per_sample(specs)
        size = specs[0].shape[0]
        return BatchDim(size, manifest.symbols.get(bare_name(size) or "", _FREE))

    @property
    def constraint(self) -> str:
        """The constraint for people."""
        if isinstance(self.size, int):
            return f"the model's batch is {self.size}"
        return f"symbol {self.size!r} must be {self.symbol.constraint}"

    def limits(self, samples: int, parts: int) -> str:
        """The constraint for people; if `parts` is too large, also the option that is possible."""
        most = samples // self.least if self.least else 0
        more = ""
        if 0 < most < parts:
            more = f", so at most {_micro_batches(most)} can be formed (--accumulate {most})"
        return self.constraint + more

    def admits(self, samples: int) -> bool:
        """Whether a micro-batch may have this number of samples."""
        if isinstance(self.size, int):
            return samples == self.size
        return self.symbol.admits(samples)

    @property
    def least(self) -> int:
        """The smallest admissible number of samples, or 0 if there is none."""
        if isinstance(self.size, int):
            return self.size
        return next(iter(self.symbol.admissible(1, 1)), 0)

    def largest(self, limit: int) -> int:
        """Returns the largest number of samples that is admissible and at most `limit`, or 0."""
        return next((n for n in range(limit, 0, -1) if self.admits(n)), 0)

    def split(self, samples: int, parts: int) -> Sizes | None:
        """Returns admissible sizes, as equal as possible, larger ones first; None without any.

        Sizes have the form d·N + r, so they differ by multiples of d: the N differ by at most 1.
        """
        divisor, remainder = self.symbol.divisor, self.symbol.remainder
        if isinstance(self.size, int):
            divisor, remainder = self.size, 0
        count, left = divmod(samples - parts * remainder, divisor)
        if left or count < parts:
            return None
        least, more = divmod(count, parts)
        sizes = tuple(divisor * (least + (part < more)) + remainder for part in range(parts))
        return sizes if all(self.admits(size) for size in sizes) else None


@dataclass(frozen=True)
class EpochPlan:
    """The sizes of an epoch's steps and micro-batches.

    Attributes:
        full: Sizes of the micro-batches of every step except the last.
        steps: Number of steps, the last one included.
        last: Sizes of the micro-batches of the last step.
        notice: A notice about samples that are left out; empty if there are none.
    """

    full: Sizes
    steps: int
    last: Sizes
    notice: str = ""

    def sizes(self) -> Iterator[Sizes]:
        """Returns the sizes of the micro-batches of each step."""
        for _ in range(self.steps - 1):
            yield self.full
        if self.steps:
            yield self.last


def plan_training(count: int, batch: int, accumulate: int, dim: BatchDim) -> EpochPlan:
    """Returns the plan of an epoch that trains on `count` samples.

    The last batch, with the remaining samples, may have fewer micro-batches. It is left out if no
    number of micro-batches satisfies the constraint.

    Raises:
        LaunchError: A full batch cannot be split into admissible micro-batches, or there are too
            few samples for a step.
    """
    if batch < 1 or accumulate < 1:
        raise LaunchError(
            f"--batch-size and --accumulate: expected numbers >= 1, got {batch} and {accumulate}"
        )
    full = dim.split(batch, accumulate)
    if full is None:
        raise LaunchError(
            f"--batch-size {batch}{_in_parts(accumulate)}: {dim.limits(batch, accumulate)}"
        )
    steps, rest = divmod(count, batch)
    tries = (dim.split(rest, parts) for parts in range(accumulate, 0, -1)) if rest else iter(())
    last = next((sizes for sizes in tries if sizes is not None), None)
    notice = ""
    if rest and last is None:
        notice = f"the last {_samples(rest)} of each epoch are left out: {dim.constraint}"
    if last is not None:
        return EpochPlan(full, steps + 1, last)
    if not steps:
        raise LaunchError(
            f"--batch-size {batch}: there are only {_samples(count)}, and {dim.constraint}"
        )
    return EpochPlan(full, steps, full, notice)


def plan_evaluation(count: int, batch: int | None, dim: BatchDim) -> EpochPlan:
    """Returns the plan of an evaluation, which leaves out as few samples as the constraint allows.

    Args:
        count: Number of samples.
        batch: Samples in a batch; None takes the largest admissible number up to 256, or the
            smallest above.
        dim: The admissible numbers of samples.

    Raises:
        LaunchError: The batch is not admissible, or there are too few samples for one.
    """
    if batch is None:
        batch = dim.size if isinstance(dim.size, int) else dim.largest(min(count, 256))
        batch = batch or dim.least
    if batch < 1 or not dim.admits(batch):
        raise LaunchError(f"--batch-size {batch}: {dim.constraint}")
    steps, rest = divmod(count, batch)
    last = dim.largest(rest)
    out = rest - last
    notice = f"{_samples(out)} of {count} are left out: {dim.constraint}" if out else ""
    if last:
        return EpochPlan((batch,), steps + 1, (last,), notice)
    if not steps:
        raise LaunchError(f"there are only {_samples(count)}, and {dim.constraint}")
    return EpochPlan((batch,), steps, (batch,), notice)


def _in_parts(count: int) -> str:
    return f" in {_micro_batches(count)}" if count > 1 else ""


def _micro_batches(count: int) -> str:
    return f"{count} micro-batch{'' if count == 1 else 'es'}"


def _samples(count: int) -> str:
    return f"{count} sample{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Step:
    """The data of one step.

    Attributes:
        micro_batches: In the order in which they run: batches, or what `Trainer.prepare` returned.
        samples: Number of samples in all of them.
        digest: A number made of the samples, if each rank made the complete batch itself.
    """

    micro_batches: tuple[Any, ...]
    samples: int
    digest: int | None = None


def steps_of(
    samples: Samples,
    plan: EpochPlan,
    order: Order,
    own: Mapping[str, Place] | None = None,
    skip: int = 0,
) -> Iterator[Step]:
    """Returns the steps of an epoch over the samples.

    Args:
        samples: The samples.
        plan: The sizes of steps and micro-batches.
        order: The order of the samples.
        own: As `Samples.take`.
        skip: Steps at the beginning that are left out.
    """
    start = 0
    for number, sizes in enumerate(plan.sizes()):
        if number < skip:
            start += sum(sizes)
            continue
        micro_batches = []
        for size in sizes:
            micro_batches.append(samples.take(order(np.arange(start, start + size)), own))
            start += size
        yield Step(tuple(micro_batches), sum(sizes))


def steps_from(
    stream: Stream,
    request: Request,
    specs: Sequence[TensorEntry],
    accumulate: int,
    dim: BatchDim,
    shard: Shard | None = None,
) -> Iterator[Step]:
    """Returns the steps of an epoch of a stream, each of its batches in `accumulate` micro-batches.

    Args:
        stream: The stream.
        request: What its function is asked for.
        specs: Inputs of the program.
        accumulate: Number of micro-batches.
        dim: What a micro-batch's number of samples may be.
        shard: The rows that the stream makes; None if it makes complete batches.

    Raises:
        InputError: A batch lacks an input, or has no dim of samples.
        LaunchError: A batch cannot be split into admissible micro-batches.
    """
    if shard is not None:
        request = replace(request, shard=(shard.index, shard.count))
    for number, batch in enumerate(stream.open(request), 1):
        parts = batch if isinstance(batch, tuple) else (batch,)
        where = f"{stream.name}: batch {number}"
        counts = [_count(part, specs, where) for part in parts]
        if shard is not None:
            yield _of_shard(shard, batch, counts[0], accumulate, specs, dim, where)
            continue
        digest = digest_of(parts, [spec.name for spec in specs])
        # With a dict for each data rank, their rows together are the batch.
        if accumulate == 1:
            yield Step((batch,), sum(counts), digest)
            continue
        split = [
            _split_arrays(part, count, len(parts), accumulate, specs, dim, where)
            for part, count in zip(parts, counts, strict=True)
        ]
        micro = tuple(
            tuple(row) if isinstance(batch, tuple) else row[0] for row in zip(*split, strict=True)
        )
        yield Step(micro, sum(counts), digest)


def _of_shard(
    shard: Shard,
    batch: Batch,
    count: int,
    accumulate: int,
    specs: Sequence[TensorEntry],
    dim: BatchDim,
    where: str,
) -> Step:
    """Returns a step of which this rank has `count` rows."""
    if isinstance(batch, tuple):
        raise InputError(f"{where}: expected a dict of the rows of one data rank, got a tuple")
    micro: Sequence[Arrays] = [batch]
    if accumulate > 1:
        try:
            micro = _split_arrays(batch, count, shard.count, accumulate, specs, dim, where)
        except LaunchError as error:
            raise LaunchError(f"{error}; {shard.explained(count * shard.count)}") from None
    return Step(tuple(shard.whole(rows, where) for rows in micro), count * shard.count)


def _count(arrays: Arrays, specs: Sequence[TensorEntry], where: str) -> int:
    """Returns the number of samples of a batch."""
    first = specs[0].name
    if first not in arrays or np.ndim(arrays[first]) == 0:
        raise InputError(
            f"{where}: expected arrays {[s.name for s in specs]} whose dim 0 are samples, got "
            f"{sorted(arrays)}"
        )
    return len(arrays[first])


def _split_arrays(
    arrays: Arrays,
    count: int,
    ranks: int,
    accumulate: int,
    specs: Sequence[TensorEntry],
    dim: BatchDim,
    where: str,
) -> list[dict[str, Any]]:
    """Returns a batch, or one data rank's rows of it, in micro-batches."""
    sizes = dim.split(count * ranks, accumulate)
    if sizes is None or any(size % ranks for size in sizes):
        raise LaunchError(
            f"{where}: {count * ranks} samples{_in_parts(accumulate)}: "
            f"{dim.limits(count * ranks, accumulate)}"
        )
    rows, start, split = per_sample(specs), 0, []
    for size in sizes:
        stop = start + size // ranks
        split.append({n: a[start:stop] if n in rows else a for n, a in arrays.items()})
        start = stop
    return split


class Ahead(Generic[T]):
    """Runs an iterator in its own thread, a few items ahead; used in a `with` statement.

    An exception of the iterator is raised where its items are taken. At the end of the block, the
    thread ends after the item that it is making.

    Args:
        items: The iterator.
        depth: The largest number of items that are ready.
    """

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        """Prepares the thread."""
        self._items = items
        self._ready: queue.Queue[tuple[T | None, BaseException | None, bool]]
        self._ready = queue.Queue(depth)
        self._stop = threading.Event()
        # A user's function that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="onnxpar-data", daemon=True)

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item, None, False):
                    return
            self._put(None, None, True)
        except BaseException as error:  # raised where the items are taken
            self._put(None, error, True)

    def _put(self, item: T | None, error: BaseException | None, last: bool) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put((item, error, last), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __enter__(self) -> Iterator[T]:
        """Starts the thread and returns the items."""
        self._thread.start()
        return self._taken()

    def _taken(self) -> Iterator[T]:
        while True:
            item, error, last = self._ready.get()
            if error is not None:
                raise error
            if last:
                return
            yield item  # type: ignore[misc]  # only the last has none

    def __exit__(self, *_: object) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(timeout=2)


@dataclass(frozen=True)
class EvaluationData:
    """What a model is evaluated on.

    Attributes:
        source: The source.
        specs: Inputs of the program.
        dim: What a micro-batch's number of samples may be.
        batch: Samples in a step, over all ranks; None if the plan or the stream chooses.
        seed: The seed of the order of samples, which a stream gets.
        plan: How the samples are put together; None for a stream.
        own: Inputs of which the rank needs its own rows only; all of them if None.
        limit: The largest number of batches of an evaluation; None for all of them.
        metrics: What is reported besides loss and accuracy.
        shard: The rows that a stream makes; None if it makes complete batches.
        runs: The values of symbols in each batch; none if they are not known.
    """

    source: Source
    specs: Sequence[TensorEntry]
    dim: BatchDim
    batch: int | None
    seed: int
    plan: EpochPlan | None
    own: Mapping[str, Place] | None = None
    limit: int | None = field(default=None, kw_only=True)
    metrics: Metrics = field(default=NO_METRICS, kw_only=True)
    shard: Shard | None = field(default=None, kw_only=True)
    runs: Sequence[Mapping[str, int]] = field(default=(), kw_only=True)

    def steps(self) -> Iterator[Step]:
        """Returns the batches of an evaluation, in the order of the source."""
        steps = self._steps(Request(1, self.seed, self.batch, train=False))
        return islice(steps, self.limit)

    def _steps(self, request: Request, accumulate: int = 1, skip: int = 0) -> Iterator[Step]:
        if isinstance(self.source, Stream):
            steps = steps_from(self.source, request, self.specs, accumulate, self.dim, self.shard)
            return islice(steps, skip, None)
        assert self.plan is not None
        order: Order = as_they_are
        if request.train:
            order = permutation(self.source.count, request.seed, request.epoch)
        return steps_of(self.source, self.plan, order, self.own, skip)


@dataclass(frozen=True)
class TrainingData(EvaluationData):
    """What a run trains on.

    Attributes:
        accumulate: Micro-batches in a step.
    """

    accumulate: int = 1

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None for a stream."""
        return None if self.plan is None else self.plan.steps

    def epoch(self, number: int, skip: int = 0) -> Iterator[Step]:
        """Returns the steps of an epoch, numbered from 1, without those `skip` at its beginning.

        A stream still makes the steps that are skipped: only its function knows what follows them.
        """
        request = Request(number, self.seed, self.batch, train=True)
        return self._steps(request, self.accumulate, skip)


def training_data(
    source: Source,
    specs: Sequence[TensorEntry],
    dim: BatchDim,
    *,
    batch: int | None,
    accumulate: int = 1,
    seed: int = 0,
    own: Mapping[str, Place] | None = None,
    shard: Shard | None = None,
) -> TrainingData:
    """Returns the data of a run; the arguments are the attributes of `TrainingData`.

    Raises:
        LaunchError: Samples without a batch size, or an impossible one; see `plan_training`.
    """
    if isinstance(source, Stream):
        if accumulate < 1:
            raise LaunchError(f"--accumulate: expected a number >= 1, got {accumulate}")
        return TrainingData(source, specs, dim, batch, seed, None, own, accumulate, shard=shard)
    if batch is None:
        raise LaunchError(f"--batch-size: expected a number for {source.name}, got none")
    plan = plan_training(source.count, batch, accumulate, dim)
    return TrainingData(source, specs, dim, batch, seed, plan, own, accumulate)


def evaluation_data(
    source: Source,
    specs: Sequence[TensorEntry],
    dim: BatchDim,
    *,
    batch: int | None = None,
    seed: int = 0,
    own: Mapping[str, Place] | None = None,
    limit: int | None = None,
    metrics: Metrics = NO_METRICS,
    shard: Shard | None = None,
) -> EvaluationData:
    """Returns the data of an evaluation; the arguments are the attributes of `EvaluationData`.

    Raises:
        LaunchError: An impossible batch size; see `plan_evaluation`. Or metrics of outputs, which
            read complete batches, of a stream that makes a data rank's rows only.
    """
    if metrics.of_outputs and shard is not None:
        raise LaunchError(
            f"--metric: {', '.join(metrics.of_outputs)} read complete batches: expected a function "
            f"without the parameter shard, got {source.name}"
        )
    plan = plan_evaluation(source.count, batch, dim) if isinstance(source, Samples) else None
    if metrics.of_outputs:
        own = None  # metrics read the whole batch
    return EvaluationData(source, specs, dim, batch, seed, plan, own, limit=limit, metrics=metrics)
