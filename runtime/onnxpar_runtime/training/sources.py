"""The sources of training data, which `--data` and `--eval-data` name.

A source is either `Samples`, arrays in memory whose rows become batches here, or a `Stream`, whose
batches a function of the user makes. Every rank opens the same source. The rows of a step depend on
the seed alone, and not on the mesh.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import block, coordinates
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import ProgramEntry, TensorEntry
from onnxpar_format.manifest import Loss
from onnxpar_runtime.errors import InputError, SymbolValueError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.npz import convert, read_npz
from onnxpar_runtime.symbol_checks import check_index_ranges, symbol_values
from onnxpar_runtime.training.images import handwritten_digits, mnist_files, resize
from onnxpar_runtime.training.parquet import read_parquet
from onnxpar_runtime.training.permutation import Order, as_they_are, permutation
from onnxpar_runtime.training.token_file import token_windows
from onnxpar_runtime.user_code import named_function, users_code

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Batch = Arrays | tuple[Arrays, ...]
"""Whole arrays of every input, or a tuple of them, one for each data rank (per-rank symbols)."""

TEST_EVERY = 5
"""Every fifth of the handwritten digits, from the first on, is held out for testing."""

FORMS = (
    "digits[:train|:test], npz:FILE, parquet:FILE, tokens:FILE,seq=N[,dtype=TYPE], idx:DIR or "
    "module:function"
)


@dataclass(frozen=True)
class Place:
    """A rank's place along the atoms that shard a dim.

    Attributes:
        parts: Sizes of the atoms.
        position: The rank's coordinates along them.
    """

    parts: tuple[int, ...]
    position: tuple[int, ...]

    def rows(self, size: int) -> slice:
        """Returns the rows that the rank has, of `size` rows."""
        mine = block(size, self.parts, self.position)
        return slice(mine.start, mine.start + mine.valid)


def places(
    specs: Sequence[TensorEntry], atoms: Sequence[int], rank: int, loss: Loss, source: "Source"
) -> dict[str, Place]:
    """Returns the rank's place in dim 0 of each input whose rows are sharded.

    Labels are left out if each rank must count those of the global batch that are not ignored.
    Tokens of a file are not negative, so they all count if a negative label is ignored.
    """
    ignored, mapped = loss.ignore_index, isinstance(source, Samples) and source.dtypes
    all_count = ignored is None or (mapped and ignored < 0)
    labels = None if all_count else loss.labels
    here = coordinates(rank, atoms)
    return {
        spec.name: Place(tuple(atoms[a] for a in by), tuple(here[a] for a in by))
        for spec in specs
        if spec.name != labels and spec.dims and len(spec.dims[0]) == 1
        for by in [spec.dims[0][0][1]]
        if by
    }


@dataclass(frozen=True)
class Shard:
    """The rows of every batch that a function makes for this rank.

    Attributes:
        index: The number of this rank's data rank.
        count: The number of data ranks, each of which has as many rows.
        names: Inputs with a row for each sample.
        labels: The input for the labels, if some labels do not count.
        ignored: The label that does not count.
    """

    index: int
    count: int
    names: tuple[str, ...]
    labels: str | None
    ignored: int | None

    def whole(self, rows: Arrays, where: str) -> Arrays:
        """Returns the arrays of a complete batch; rows of other data ranks are 0.

        Raises:
            InputError: Inputs have different numbers of rows. Or a label does not count: the other
                ranks do not know how many do.
        """
        sizes = {n: np.shape(rows[n])[0] for n in self.names if n in rows and np.ndim(rows[n])}
        if len(set(sizes.values())) > 1:
            got = ", ".join(f"{size} of {name!r}" for name, size in sizes.items())
            raise InputError(
                f"{where}: expected as many rows of each input, those of data rank {self.index} of "
                f"{self.count}, got {got}"
            )
        labels = rows.get(self.labels or "")
        if labels is not None and (np.asarray(labels) == self.ignored).any():
            raise InputError(
                f"{where}: expected labels that all count, since the function has the parameter "
                f"shard and ranks do not see one another's labels, got {self.ignored}, which the "
                "loss ignores"
            )
        batch = dict(rows)
        for name in self.names:
            if name in rows:
                own = np.asarray(rows[name])
                batch[name] = np.zeros((len(own) * self.count, *own.shape[1:]), own.dtype)
                batch[name][self.index * len(own) : (self.index + 1) * len(own)] = own
        return batch

    def explained(self, samples: int) -> str:
        """Returns what sizes in a message about a complete batch mean for this rank, for people."""
        return (
            f"the complete batch has {samples} samples, {samples // self.count} from each of "
            f"{self.count} data ranks"
        )


def data_rank(axes: Sequence[int], atoms: Sequence[int], rank: int) -> tuple[int, int]:
    """Returns a rank's number along the atoms `axes`, and the number of their positions."""
    here, index, count = coordinates(rank, atoms), 0, 1
    for atom in axes:
        index, count = index * atoms[atom] + here[atom], count * atoms[atom]
    return index, count


def shard_of(
    specs: Sequence[TensorEntry], atoms: Sequence[int], rank: int, loss: Loss, source: "Source"
) -> Shard | None:
    """Returns the rows that a function makes for the rank; None if it makes complete batches.

    Raises:
        InputError: Not all inputs with a row for each sample have the same rows on the rank.
    """
    if not isinstance(source, Stream) or not source.sharded:
        return None
    names = per_sample(specs)
    by = {s.name: s.dims[0][0][1] if len(s.dims[0]) == 1 else None for s in specs if s.dims}
    own = {by[name] for name in names}
    if len(own) > 1 or None in own:
        raise InputError(
            f"{source.name}: expected a function without the parameter shard, since dim 0 of "
            f"{', '.join(names)} is not sharded in the same way"
        )
    (axes,) = own
    index, count = data_rank(axes or (), atoms, rank)
    ignored = loss.ignore_index
    return Shard(index, count, names, loss.labels if ignored is not None else None, ignored)


@dataclass(frozen=True)
class Samples:
    """Samples in memory, or in a file that is mapped into memory.

    Attributes:
        name: Name for messages: the option and its text.
        rows: Arrays with one row for each sample, by input.
        fixed: Arrays that are the same in every batch, by input.
        count: Number of samples.
        parted: Whether training and testing use different samples.
        dtypes: Types to which a batch of `rows` is converted. Such rows are in a file, of which
            only those of a batch are read and checked.
        chosen: Returns the rows of samples.
    """

    name: str
    rows: Arrays
    fixed: Arrays
    count: int
    parted: bool = False
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    chosen: Order = as_they_are

    def validation(self, fraction: float, seed: int) -> "tuple[Samples, Samples]":
        """Returns the samples for training and those for validation, chosen by the seed.

        Raises:
            InputError: One of them would have no samples, or the source has a test split.
        """
        if self.parted:
            raise InputError(f"--validation: expected {self.name} without a test split; use --eval")
        number = round(fraction * self.count)
        if not 0 < number < self.count:
            raise InputError(
                f"--validation {fraction:g}: expected at least one of the {self.count} samples of "
                f"{self.name} for validation, and one for training, got {number} for validation"
            )
        # Epochs are numbered from 1, so no epoch has this order.
        order = permutation(self.count, seed, 0)
        return (
            replace(
                self,
                chosen=lambda samples: order(number + samples),
                count=self.count - number,
                parted=True,
            ),
            replace(self, chosen=order, count=number, parted=True),
        )

    def take(self, indices: NDArray[np.int64], own: Mapping[str, Place] | None = None) -> Arrays:
        """Returns the batch of these samples.

        Args:
            indices: The samples.
            own: Inputs of which the rank needs its own rows only; the memory of their other rows
                is not written.
        """
        indices = self.chosen(indices)
        batch: dict[str, Array] = {}
        for name, array in self.rows.items():
            dtype = self.dtypes.get(name, array.dtype)
            if own is None or name not in own:
                batch[name] = array[indices].astype(dtype, copy=False)
                continue
            rows = own[name].rows(len(indices))
            # Zeros take no time: memory that is not written is not touched.
            batch[name] = np.zeros((len(indices), *array.shape[1:]), dtype)
            batch[name][rows] = array[indices[rows]]
        return {**batch, **self.fixed}


@dataclass(frozen=True)
class Request:
    """The arguments that a stream's function may take, by the names of its parameters.

    Attributes:
        epoch: Number of the epoch, from 1.
        seed: Seed of the run.
        batch_size: `--batch-size`, or None.
        train: Whether the batches are for training rather than evaluation.
        shard: The number of this rank's data rank, and the number of data ranks.
    """

    epoch: int
    seed: int
    batch_size: int | None
    train: bool
    shard: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Stream:
    """Batches from a function of the user.

    Attributes:
        name: Name for messages: the option and its text.
        open: Returns the batches of an epoch.
        parted: Whether the function takes `train`, to make different batches for evaluation.
        sharded: Whether the function takes `shard`, and makes the rows of one data rank only.
    """

    name: str
    open: Callable[[Request], Iterator[Batch]]
    parted: bool = False
    sharded: bool = False


Source = Samples | Stream


def per_sample(specs: Sequence[TensorEntry]) -> tuple[str, ...]:
    """Returns the inputs with a row for each sample: those whose dim 0 is that of the first input.

    Raises:
        InputError: The first input has no dims.
    """
    if not specs or not specs[0].shape:
        raise InputError("expected the first input to have a dim of samples")
    return tuple(s.name for s in specs if s.shape and s.shape[0] == specs[0].shape[0])


def open_source(
    text: str,
    specs: Sequence[TensorEntry],
    labels: str | None,
    part: str = "train",
    option: str = "--data",
) -> Source:
    """Opens the source that a text such as `digits`, `npz:FILE` or `idx:DIR` names.

    `digits` and `idx` are images from 0 to 1 and their classes. If the labels are floating, classes
    are taken as numbers, for regression. Images are resized to the first input that is not the
    labels, of shape [batch, h, w] with any further dims of 1, or [batch, n] with a square number n.

    Args:
        text: The source.
        specs: The program's inputs.
        labels: The input for the labels; None if there is none.
        part: `train` or `test`: the part of a source that has two, unless `text` names it.
        option: The option that gave the text, for messages.

    Raises:
        InputError: The text is not one of the forms, the data cannot be read, or it does not fit
            the inputs.
    """
    kind, _, rest = text.partition(":")
    name = f"{option} {text}"
    if kind == "digits" and rest in ("", "train", "test"):
        images, classes = handwritten_digits()
        held_out = np.arange(len(images)) % TEST_EVERY == 0
        chosen = held_out if (rest or part) == "test" else ~held_out
        found = _classified(name, images[chosen], classes[chosen], specs, labels)
        return replace(found, parted=not rest)
    if kind == "npz" and rest:
        return samples(name, read_npz(Path(rest)), specs)
    if kind == "parquet" and rest:
        columns = read_parquet(Path(rest), [spec.name for spec in specs])
        return samples(name, columns, specs)
    if kind == "tokens" and rest:
        return tokens(name, rest, specs, labels)
    if kind == "idx" and rest:
        return replace(_classified(name, *mnist_files(rest, part), specs, labels), parted=True)
    if kind not in ("digits", "npz", "parquet", "tokens", "idx") and rest:
        return _function(name, text)
    raise InputError(f"{name}: expected {FORMS}")


def samples(name: str, arrays: Arrays, specs: Sequence[TensorEntry]) -> Samples:
    """Returns samples of arrays named like the inputs, converted to their dtypes without loss.

    Raises:
        InputError: A name, dtype or number of dims does not fit, or the lengths differ.
    """
    try:
        arrays = convert(specs, arrays)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    names = per_sample(specs)
    lengths = {n: len(arrays[n]) for n in names}
    count = lengths[names[0]]
    if count == 0 or any(length != count for length in lengths.values()):
        raise InputError(
            f"{name}: expected the same number of samples in dim 0 of {list(names)}, and "
            f"at least one, got {list(lengths.values())}"
        )
    return Samples(
        name,
        rows={n: arrays[n] for n in names},
        fixed={n: a for n, a in arrays.items() if n not in names},
        count=count,
    )


def tokens(name: str, text: str, specs: Sequence[TensorEntry], labels: str | None) -> Samples:
    """Returns the windows of a file of tokens as inputs and, a token later, labels.

    Args:
        name: Name for messages.
        text: What follows `tokens:`.
        specs: The program's inputs: one for tokens and one for labels.
        labels: The input for the labels.

    Raises:
        InputError: The program has other inputs, or the file cannot be used.
    """
    if len(specs) != 2 or labels is None or any(s.dtype not in ("int32", "int64") for s in specs):
        raise InputError(
            f"{name}: expected a program with one integer input for tokens and one for labels, got "
            f"{[f'{spec.name} {spec.dtype}' for spec in specs]} with labels {labels!r}"
        )
    windows, after = token_windows(name, text)
    rows = {spec.name: after if spec.name == labels else windows for spec in specs}
    dtypes = {spec.name: DTYPES[spec.dtype].dtype for spec in specs}
    return Samples(name, rows, {}, len(windows), dtypes=dtypes)


def check_samples(
    manifest: Manifest, program: ProgramEntry, source: Samples, sizes: Iterable[int]
) -> list[dict[str, int]]:
    """Checks that batches of these numbers of samples fit a program, before any is made.

    Elements of all samples that operators read as indices, such as labels, are checked too, at the
    sizes of the largest batch.

    Returns:
        The values of symbols with each number of samples.

    Raises:
        InputError: They do not fit; names source, input, expected and got.
    """
    found = []
    for number, size in enumerate(sorted(set(sizes), reverse=True)):
        shapes = {name: (size, *array.shape[1:]) for name, array in source.rows.items()}
        shapes |= {name: array.shape for name, array in source.fixed.items()}
        try:
            values = symbol_values(manifest.symbols, program, shapes)
            found.append(values)
            if number == 0 and not source.dtypes:
                check_index_ranges(program, {**source.rows, **source.fixed}, values, " of the data")
        except (InputError, SymbolValueError) as error:
            raise InputError(f"{source.name}: {error}") from None
    return found


def _classified(
    name: str,
    images: NDArray[np.float32],
    classes: NDArray[np.int64],
    specs: Sequence[TensorEntry],
    labels: str | None,
) -> Samples:
    """Returns images and classes as the two inputs of a classifier."""
    inputs = [spec for spec in specs if spec.name != labels]
    targets = [spec for spec in specs if spec.name == labels]
    if len(inputs) != 1 or len(targets) != 1:
        raise InputError(
            f"{name}: expected a program with one input for images and one for labels, got "
            f"{[spec.name for spec in specs]} with labels {labels!r}"
        )
    (image,), (target,) = inputs, targets
    wanted = DTYPES[target.dtype].dtype
    if wanted.kind not in "iufV" or any(size != 1 for size in target.shape[1:]):
        raise InputError(
            f"{name}: expected an integer or floating input [batch] for the labels (further "
            f"dims must be 1), got {labels!r} {target.dtype} {list(target.shape)}"
        )
    dtype = DTYPES[image.dtype].dtype
    if dtype.kind not in "fV":
        raise InputError(
            f"{name}: expected a floating input for the images (from 0 to 1), got "
            f"{image.name!r} {image.dtype}"
        )
    height, width = _image_size(name, image)
    if images.shape[1:] != (height, width):
        images = resize(images, height, width).astype(np.float32)
    shape = (len(images), *(int(size) for size in image.shape[1:]))
    rows = {
        image.name: images.reshape(shape).astype(dtype),
        target.name: classes.astype(wanted).reshape(len(images), *([1] * len(target.shape[1:]))),
    }
    return Samples(name, {s.name: rows[s.name] for s in specs}, {}, len(images))


def _image_size(name: str, spec: TensorEntry) -> tuple[int, int]:
    """Returns height and width of the images that an input takes."""
    sizes = [size for size in spec.shape[1:] if size != 1]
    if all(isinstance(size, int) for size in sizes):
        if len(sizes) == 2:
            return int(sizes[0]), int(sizes[1])
        side = round(int(sizes[0]) ** 0.5) if len(sizes) == 1 else 0
        if side and side * side == sizes[0]:
            return side, side
    raise InputError(
        f"{name}: expected an input [batch, height, width] (further dims must be 1), or "
        f"[batch, n] with a square number n, got {spec.name!r} {list(spec.shape)}"
    )


def stream_of(name: str, batches: Iterable[Any], specs: Sequence[TensorEntry]) -> Stream:
    """Returns the stream of an iterable, such as a DataLoader of PyTorch, read once for each epoch.

    Each batch is a dict of arrays or of tensors on the CPU by input, or a sequence of them in the
    order of the inputs. If its sampler has `set_epoch`, it gets the number of the epoch, from 0.
    If its sampler has `num_replicas` other than 1, as PyTorch's DistributedSampler, it makes the
    rows of one data rank.
    """
    names = [spec.name for spec in specs]
    sampler: Any = getattr(batches, "sampler", None)
    place = getattr(sampler, "rank", 0), getattr(sampler, "num_replicas", 1)
    sharded = place[1] != 1

    def open_epoch(request: Request) -> Iterator[Batch]:
        set_epoch = getattr(sampler, "set_epoch", None)
        if sharded and place != request.shard:
            raise InputError(
                f"{name}: expected a sampler with (rank, num_replicas) = {request.shard}, as "
                f"Trainer.shard says, got {place}"
            )
        with users_code(name):
            if set_epoch is not None:
                set_epoch(request.epoch - 1)
            for number, item in enumerate(batches, 1):
                named = isinstance(item, Mapping)
                if not named and (not isinstance(item, Sequence) or len(item) != len(names)):
                    raise InputError(
                        f"{name}: batch {number}: expected a dict, or a sequence of arrays for "
                        f"{', '.join(names)}, got {type(item).__name__}"
                    )
                given = item if named else dict(zip(names, item, strict=True))
                yield {key: np.asarray(array) for key, array in given.items()}

    return Stream(name, open_epoch, sharded=sharded)


def _function(name: str, text: str) -> Stream:
    """Returns the stream of a function that is called once for each epoch.

    It gets the fields of `Request` for which it has parameters.
    """
    function = named_function(text, name, FORMS)
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise InputError(f"{name}: {text!r} does not say which parameters it has") from None
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())

    def batches(request: Request) -> Iterator[Batch]:
        offered = vars(request)
        # A function with **arguments does not know that it should make fewer rows.
        given = {k: v for k, v in offered.items() if k in taken or (anything and k != "shard")}
        with users_code(name):
            result = function(**given)
            if not isinstance(result, Iterable):
                raise InputError(f"{name}: expected an iterable of dicts, got {result!r:.80}")
            for number, item in enumerate(result, 1):
                parts = item if isinstance(item, tuple) else (item,)
                if not parts or not all(isinstance(part, Mapping) for part in parts):
                    raise InputError(
                        f"{name}: batch {number}: expected a dict of arrays, or a tuple of "
                        f"dicts, one for each data rank, got {type(item).__name__}"
                    )
                yield item

    parted = anything or "train" in taken
    return Stream(name, batches, parted=parted, sharded="shard" in taken)
