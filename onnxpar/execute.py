"""The one seam from the transformer to the runtime: running and verifying what has been cut.

Importing this module loads onnxruntime and the collective library. So the commands import it when
they are called, and nothing else of `onnxpar` does.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onnxpar.errors import CallError, ModelError, OnnxparError, SymbolError
from onnxpar_runtime import Rank, Session, ThreadsGroup, commands, init
from onnxpar_runtime import verify as checks
from onnxpar_runtime.agree import together
from onnxpar_runtime.boxes import Cut
from onnxpar_runtime.data import read_npz
from onnxpar_runtime.launch import mpirun_place
from onnxpar_runtime.manifest import FILE_NAME, Manifest
from onnxpar_runtime.options import parse_pairs
from onnxpar_runtime.shapes import bind_symbols
from onnxpar_runtime.training import commands as training
from onnxpar_runtime.training.hyper import Settings, parse_betas
from onnxpar_runtime.training.verify import TrainingCase, TrainingSettings, verify_training
from onnxpar_runtime.verify import Case

if TYPE_CHECKING:
    from onnxpar.symbols import Symbol

__all__ = [
    "Call",
    "Case",
    "TrainingCase",
    "evaluate",
    "open_program",
    "parse_case",
    "report_json",
    "run",
    "started",
    "train",
    "verify",
]


def run(
    directory: Path,
    inputs: Path,
    outputs: Path,
    *,
    device: str = "auto",
    log_dir: Path | None = None,
    ort: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> int:
    """Runs this process's rank of an artifact directory once; returns the exit code.

    Args:
        directory: The artifact directory.
        inputs: `.npz` file of global arrays named as the inputs.
        outputs: `.npz` file to write.
        device: `auto`, `cpu` or `cuda`.
        log_dir: Folder for a log file of each rank, or None.
        ort: `key=value` options of onnxruntime.
        custom_ops: Further custom-op libraries.

    Raises:
        LaunchError: An option is malformed, or MPI cannot be used.
    """
    return commands.run(
        directory,
        inputs,
        outputs,
        device=device,
        log_dir=log_dir,
        ort_options=parse_pairs(ort),
        custom_ops=custom_ops,
    )


def train(
    directory: Path,
    data: str,
    *,
    lr: float,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    accumulate: int = 1,
    schedule: str = "constant",
    warmup: int = 0,
    momentum: float | None = None,
    dampening: float | None = None,
    betas: str | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    clip_norm: float | None = None,
    evaluate: bool = False,
    parameters: Path | None = None,
    save: Path | None = None,
    log: Path | None = None,
    print_every: int = 1,
    device: str = "auto",
    transport: str = "auto",
    log_dir: Path | None = None,
    ort: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> int:
    """Trains with this process's rank of an artifact directory; returns the exit code.

    Args:
        directory: A directory that was cut for training.
        data: The source: `digits`, `npz:FILE`, `idx:DIR` or `module:function`.
        lr: Base learning rate.
        batch_size: Samples in a step, of all ranks together.
        epochs: Epochs.
        steps: Steps of all epochs together after which it ends.
        seed: What the order of samples and the model's random numbers depend on.
        accumulate: Micro-batches in a step.
        schedule: `constant`, `linear` or `cosine`.
        warmup: Warm-up steps.
        momentum: Factor of the velocity; None for the optimizer's default, as for what follows.
        dampening: Share of the gradient that does not enter the velocity.
        betas: Decay rates of the two moments, as a text `0.9,0.999`.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        clip_norm: Largest 2-norm of all gradients together.
        evaluate: Whether to evaluate after each epoch.
        parameters: Safetensors file of global parameters to begin with.
        save: Safetensors file for the trained global parameters.
        log: File of JSON lines.
        print_every: Print every so many steps of an epoch; 0 prints none.
        device: `auto`, `cpu` or `cuda`.
        transport: `auto`, `mpi` or `threads`.
        log_dir: Folder for a log file of each rank, or None.
        ort: `key=value` options of onnxruntime.
        custom_ops: Further custom-op libraries.

    Raises:
        LaunchError: An option is malformed, or MPI cannot be used.
    """
    settings = Settings(
        momentum=momentum,
        dampening=dampening,
        betas=None if betas is None else parse_betas(betas),
        eps=eps,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
    )
    wanted = training.TrainingRun(
        data=data,
        lr=lr,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        seed=seed,
        accumulate=accumulate,
        schedule=schedule,
        warmup=warmup,
        settings=settings,
        evaluate=evaluate,
        parameters=parameters,
        save=save,
        log=log,
        print_every=print_every,
    )
    how = training.Execution(device, transport, log_dir, parse_pairs(ort), custom_ops)
    return training.train(directory, wanted, how)


def evaluate(
    directory: Path,
    data: str,
    *,
    batch_size: int | None = None,
    parameters: Path | None = None,
    metric: str | None = None,
    as_json: bool = False,
    device: str = "auto",
    transport: str = "auto",
    log_dir: Path | None = None,
    ort: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> int:
    """Evaluates with this process's rank of an artifact directory; returns the exit code.

    Args:
        directory: A directory that was cut for training.
        data: The source, of whose halves the one for testing is taken.
        batch_size: Samples in a batch, of all ranks together.
        parameters: Safetensors file of global parameters, or None for those of the directory.
        metric: `accuracy` to insist on it, or None for what there is.
        as_json: Print JSON.
        device: `auto`, `cpu` or `cuda`.
        transport: `auto`, `mpi` or `threads`.
        log_dir: Folder for a log file of each rank, or None.
        ort: `key=value` options of onnxruntime.
        custom_ops: Further custom-op libraries.

    Raises:
        LaunchError: An option is malformed, or MPI cannot be used.
    """
    how = training.Execution(device, transport, log_dir, parse_pairs(ort), custom_ops)
    return training.evaluation(
        directory,
        data,
        how,
        batch_size=batch_size,
        parameters=parameters,
        metric=metric,
        as_json=as_json,
    )


def verify(
    directory: Path,
    model: Path,
    *,
    cases: Sequence[str] = (),
    inputs: Path | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float = 0.0,
    steps: int | None = None,
    lr: float | None = None,
    ort: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> list[Case] | list[TrainingCase]:
    """Compares the divided program with the undivided one, all ranks in this process.

    Artifacts for training are compared by training: losses, gradients and parameters.

    Args:
        directory: The artifact directory.
        model: The undivided model, or artifacts of it for one device.
        cases: Texts `batch=16,seq=8`, one case each; none means three default cases.
        inputs: `.npz` file of global inputs instead of random ones.
        seed: Seed of the random inputs.
        rtol: Tolerance relative to an output's largest magnitude, by dtype if None.
        atol: Absolute tolerance, added.
        steps: Steps of training, for artifacts for training; one if None.
        lr: Learning rate of these; None for one that suits the optimizer.
        ort: `key=value` options of onnxruntime for the ranks.
        custom_ops: Further custom-op libraries.

    Raises:
        SymbolError: A case is malformed.
        ModelError: Steps or a learning rate for artifacts that do not train.
        OnnxparError: The model cannot be cut for one device as the artifacts say.
        OnnxparRuntimeError: As `onnxpar_runtime.verify.verify` and
            `onnxpar_runtime.training.verify.verify_training`.
    """
    libraries = tuple(str(path) for path in custom_ops)
    parsed = [parse_case(text) for text in cases]
    feeds = None if inputs is None else read_npz(inputs)
    manifest = Manifest.load(directory)
    if manifest.training is not None:
        how = TrainingSettings(
            steps=1 if steps is None else steps,
            lr=lr,
            seed=seed,
            rtol=rtol,
            atol=atol,
            custom_ops=libraries,
            ort_options=parse_pairs(ort),
        )
        with _undivided(manifest, model) as whole:
            return verify_training(directory, whole, parsed, feeds, how)
    for option, number in (("--steps", steps), ("--lr", lr)):
        if number is not None:
            raise ModelError(f"{option}: expected artifacts for training, got {directory}")
    settings = checks.Settings(
        seed=seed, rtol=rtol, atol=atol, custom_ops=libraries, ort_options=parse_pairs(ort)
    )
    return checks.verify(directory, model, parsed, feeds, settings)


@contextmanager
def _undivided(manifest: Manifest, model: Path) -> Iterator[Path]:
    """Gives a directory with the same training for one device: the one given, or one made of it."""
    if (model / FILE_NAME).is_file():
        yield model
        return
    # The transformer takes a second to load, which the ranks of `run` and `train` do without.
    from onnxpar.pipeline import shard
    from onnxpar.training.prepare import TrainingSpec

    spec = TrainingSpec.of(manifest.trained().spec)
    with TemporaryDirectory(prefix="onnxpar-verify-") as folder:
        whole = Path(folder, "whole")
        shard(model, "replicate", whole, devices=1, symbols=_symbols(manifest), training=spec)
        yield whole


def _symbols(manifest: Manifest) -> "dict[str, Symbol]":
    """The constraints of the artifacts; names that are one size share their symbol."""
    from onnxpar.symbols import Symbol

    found: dict[str, Symbol] = {}
    for name, symbol in manifest.symbols.items():
        found[name] = (
            found[symbol.same_as]
            if symbol.same_as in found
            else Symbol(
                max=symbol.max,
                min=symbol.min,
                divisor=symbol.divisor,
                remainder=symbol.remainder,
                unique=symbol.unique,
                per_rank=symbol.per_rank,
            )
        )
    return found


def parse_case(text: str) -> Mapping[str, int]:
    """Returns the values of symbols in `batch=16,seq=8`.

    Raises:
        SymbolError: A part is not `name=integer`, or a name comes twice.
    """
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.rpartition("=")
        if not name.strip() or not number.strip().isdecimal():
            raise SymbolError(f"--symbol {text!r}: expected name=integer, got {part!r}")
        if name.strip() in values:
            raise SymbolError(f"--symbol {text!r}: {name.strip()!r} is given twice")
        values[name.strip()] = int(number)
    return values


def report_json(cases: Sequence[Case] | Sequence[TrainingCase]) -> str:
    """Returns the comparison as JSON: `{"ok", "cases": [{"symbols", "max_abs", …}]}`.

    Cases of training have `steps` as well, a list of what was found in each.
    """
    report = {"ok": all(case.ok for case in cases), "cases": [asdict(case) for case in cases]}
    return json.dumps(report, indent=2)


# -- functions -----------------------------------------------------------------------------------

Array = NDArray[Any]
Report = Mapping[str, Any]
_TAG = 1
_POLL_S = 0.01


def started() -> int | None:
    """Returns how many ranks mpirun started; None where the ranks are threads of this process."""
    place = mpirun_place()
    return None if place is None or place[1] == 1 else place[1]


@cache
def _own_rank() -> tuple[Rank, Any]:
    """This process's rank, and a communicator of its own for what is not done in graphs."""
    rank = init()
    return rank, rank.world.comm.Dup()


class Call:
    """The arrays of one call of a divided function, as all ranks of it see them.

    Every rank must make it at the same time.

    Args:
        devices: Number of ranks.
        feeds: By input an array; where a rank is given a slice, this rank's, or a sequence with one
            for each rank where they are threads.
        sliced: By input whether a rank is given a slice.

    Attributes:
        shapes: Global shape of each input.
        dtypes: Element type of each input.

    Raises:
        CallError: An input is no array, or ranks do not fit together. All ranks raise it.
    """

    def __init__(self, devices: int, feeds: Mapping[str, Any], sliced: Mapping[str, bool]) -> None:
        """Finds the global shapes."""
        self._size = devices
        self._first = 0
        places: Sequence[int] = range(devices)
        if started() is not None:
            rank, comm = _own_rank()
            self._first, places = rank.index, [rank.index]
        error = None
        mine: dict[str, list[Array]] = {}
        try:
            for name, given in feeds.items():
                mine[name] = _parts(name, given, len(places), sliced[name])
        except CallError as caught:
            error = caught
        seen: list[Any] = [
            str(error) if error else {n: (p[i].shape, p[i].dtype) for n, p in mine.items()}
            for i in range(len(places))
        ]
        if started() is not None:
            seen = comm.allgather(seen[0])
        for entry in seen:
            if isinstance(entry, str):
                raise CallError(entry)
        self._mine = mine
        # By rank, the shape and type of each input that it is given.
        self._seen: list[dict[str, tuple[tuple[int, ...], np.dtype[Any]]]] = seen
        self._sliced = {n: flag and len(seen[0][n][0]) > 0 for n, flag in sliced.items()}
        self.shapes = tuple(self._global_shape(name) for name in feeds)
        self.dtypes = tuple(seen[0][name][1] for name in feeds)

    def _global_shape(self, name: str) -> tuple[int, ...]:
        found = [entry[name] for entry in self._seen]
        shape, dtype = found[0]
        first = 1 if self._sliced[name] else 0
        for rank, (other, kind) in enumerate(found):
            if len(other) != len(shape) or other[first:] != shape[first:] or kind != dtype:
                raise CallError(
                    f"input {name!r}: expected the same element type and shape on all ranks"
                    f"{' after dim 0' if first else ''}, got {dtype}{list(shape)} on rank 0 and "
                    f"{kind}{list(other)} on rank {rank}"
                )
        if not first:
            return shape
        return (sum(other[0] for other, _ in found), *shape[1:])

    def local(self, name: str, cut: Cut, rank: int) -> Array:
        """Returns the part of an input that a rank of this process takes, padding included.

        Raises:
            CallError: The slices are others than the cut makes. All ranks raise it.
        """
        array = self._mine[name][rank - self._first]
        if not self._sliced[name]:
            return np.asarray(cut.take(array, rank), order="C")
        expected = [cut.blocks(r)[0].valid for r in range(self._size)]
        got = [entry[name][0][0] for entry in self._seen]
        if got != expected:
            raise CallError(
                f"input {name!r}: expected slices of {expected} rows on the ranks, got {got}"
            )
        padding = [(0, cut.local_shape[0] - len(array))] + [(0, 0)] * (array.ndim - 1)
        return np.pad(array, padding)


def _parts(name: str, given: Any, count: int, sliced: bool) -> list[Array]:
    """One array for each rank of this process."""
    several = sliced and started() is None
    if several and (not isinstance(given, list | tuple) or len(given) != count):
        raise CallError(
            f"input {name!r}: expected a sequence of {count} slices, one for each rank, got "
            f"{type(given).__name__}{f' of {len(given)}' if hasattr(given, '__len__') else ''}"
        )
    found = []
    for item in given if several else [given]:
        array = np.asarray(item)
        if array.dtype.kind in "OUSMm":
            raise CallError(f"input {name!r}: expected an array of numbers, got {array.dtype}")
        found.append(array)
    return found if several else found * count


class _Program:
    """The ranks of this process with their graphs loaded."""

    def __init__(self, sessions: Sequence[Session], group: ThreadsGroup | None) -> None:
        self._sessions = sessions
        self._group = group

    def run(self, call: Call, *, sliced: bool) -> list[Any]:
        """Returns each output: whole, or each rank's own where `sliced`.

        Raises:
            CallError: Slices are others than the cut makes.
            OnnxparRuntimeError: As `Session.run`.
        """
        first = self._sessions[0]
        specs = first.program.inputs
        shapes = dict(zip((spec.name for spec in specs), call.shapes, strict=True))
        values = bind_symbols(specs, shapes)
        atoms = first.manifest.atoms
        cuts = {spec.name: spec.cut(atoms, values) for spec in specs}
        feeds = {
            session.rank.index: {
                n: call.local(n, cut, session.rank.index) for n, cut in cuts.items()
            }
            for session in self._sessions
        }

        def one(index: int) -> list[Array]:
            session = self._sessions[index]
            rank = session.rank.index
            outputs = session.run(feeds[rank], values)
            return [
                _valid(spec.cut(atoms, values, outputs[spec.name].shape), outputs[spec.name], rank)
                for spec in first.program.outputs
            ]

        if self._group is not None:
            results = self._group.each(one)
            return [list(each) for each in zip(*results, strict=True)] if sliced else results[0]
        try:
            return one(0)
        except BaseException as error:
            _end_all(error, first.rank)
            raise

    def close(self) -> None:
        """Frees the sessions."""
        if self._group is not None:
            self._group.close()
        else:
            self._sessions[0].close()


def _valid(cut: Cut, part: Array, rank: int) -> Array:
    """Returns a copy of the elements of a rank's part that are no padding."""
    blocks = iter(cut.blocks(rank))
    dims = [[next(blocks) for _ in dim] for dim in cut.dims]
    inside = part.reshape([b.local for dim in dims for b in dim])
    inside = inside[tuple(slice(0, b.valid) for dim in dims for b in dim)]
    return np.array(inside.reshape([prod(b.valid for b in dim) for dim in dims]))


def _end_all(error: BaseException, rank: Rank) -> None:
    """Ends the processes of all ranks, unless all of them raise the same error."""
    if not getattr(error, "agreed", isinstance(error, OnnxparError)):
        rank.world.abort(rank.index, f"{type(error).__name__}: {error}")


def open_program(devices: int, make: Callable[[Path], Report]) -> tuple[_Program, Report]:
    """Returns the ranks of a program that is made for them; every rank must call it.

    The program is written to a temporary directory, by rank 0 alone, which is removed as soon as
    all ranks have loaded their graphs. So nothing is left behind however the ranks end later.

    Args:
        devices: Number of ranks.
        make: Writes the artifact directory of the path it is given, and returns its report.

    Raises:
        OnnxparError: What `make` raises, on all ranks.
        OnnxparRuntimeError: As `Session`.
    """
    if started() is None:
        with TemporaryDirectory(prefix="onnxpar-shard-") as folder:
            report = make(Path(folder, "cut"))
            group = ThreadsGroup(Path(folder, "cut"))
        return _Program(group.sessions, group), report
    rank, comm = _own_rank()
    try:
        if rank.index:
            # Polled, since a waiting MPI call would take the core that rank 0 computes on.
            while not comm.iprobe(source=0, tag=_TAG):
                time.sleep(_POLL_S)
            return _opened(rank, *comm.recv(source=0, tag=_TAG))
        with TemporaryDirectory(prefix="onnxpar-shard-") as folder:
            report, error = {}, None
            try:
                report = make(Path(folder, "cut"))
            except OnnxparError as caught:
                error = caught
            packet = Path(folder, "cut"), report, error
            for other in range(1, devices):
                comm.send(packet, dest=other, tag=_TAG)
            return _opened(rank, *packet)
    except BaseException as error:
        _end_all(error, rank)
        raise


def _opened(
    rank: Rank, directory: Path, report: Report, error: OnnxparError | None
) -> tuple[_Program, Report]:
    if error is not None:
        raise error
    session = together(rank, lambda: Session(directory, rank=rank))
    return _Program([session], None), report
