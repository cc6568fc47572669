"""Compares the divided program, all ranks in this process, with the undivided model.

Both run on the same random inputs at several values of the symbols. The bytes that the ranks count
in their collectives are compared with the formulas of the manifest as well.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from onnxpar_runtime.dtypes import DTYPES
from onnxpar_runtime.errors import ArtifactError, InputError, SymbolValueError
from onnxpar_runtime.expressions import ExpressionError, bare_name, evaluate
from onnxpar_runtime.group import ThreadsGroup
from onnxpar_runtime.manifest import (
    FILE_NAME,
    Manifest,
    ProgramEntry,
    SymbolEntry,
    TensorSpec,
)
from onnxpar_runtime.npz import convert
from onnxpar_runtime.symbol_checks import bind_symbols, check_equal_sizes, check_symbols
from onnxpar_runtime.tensors import to_host, to_ort
from onnxpar_runtime.traffic import compare_bytes

log = logging.getLogger(__name__)
Array = NDArray[Any]

# Relative to the largest magnitude of the tensor. float32 as the project's tests ask; the others
# are some ten to a hundred units of rounding of their type, since sums are formed in another order.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
_MAX_INDEX = 1 << 20
_NOTHING_KNOWN: Mapping[str, "Span"] = {}
NEWEST_IR = 13  # that onnxruntime 1.31 reads; onnx 1.23 writes 14


class Reference(Protocol):
    """Whatever computes the undivided program on global arrays."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the outputs by name."""

    def close(self) -> None:
        """Frees what it holds."""


def _readable(path: Path, options: onnxruntime.SessionOptions) -> str | bytes:
    """Returns the model's path, or its bytes where its file format is newer than onnxruntime's.

    What newer IR versions add are annotations: a program means the same without them.
    """
    model = onnx.load(path, load_external_data=False)
    if model.ir_version <= NEWEST_IR:
        return str(path)
    model.ir_version = NEWEST_IR
    folder = "session.model_external_initializers_file_folder_path"
    options.add_session_config_entry(folder, str(path.resolve().parent))
    data: bytes = model.SerializeToString()
    return data


class ModelReference:
    """An ONNX model in onnxruntime on the CPU."""

    def __init__(self, path: Path, custom_ops: Sequence[str | Path] = ()) -> None:
        """Loads the model; raises ArtifactError where onnxruntime cannot."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        for library in custom_ops:
            options.register_custom_ops_library(str(library))
        try:
            self._session = onnxruntime.InferenceSession(
                _readable(path, options), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            text = str(error).splitlines()[0]
            raise ArtifactError(f"{path}: onnxruntime cannot load it: {text}") from None
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._inputs = {i.name for i in self._session.get_inputs()}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the outputs by name."""
        binding = self._session.io_binding()
        for name, array in feeds.items():
            if name in self._inputs:
                binding.bind_ortvalue_input(name, to_ort(array))
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        results = zip(self._outputs, binding.get_outputs(), strict=True)
        return {name: to_host(value) for name, value in results}

    def close(self) -> None:
        """Frees the session."""
        self._session = None


class ArtifactReference:
    """A model cut for one device: the reference where the model has random numbers of its own."""

    def __init__(
        self, directory: Path, program: str, custom_ops: Sequence[str | Path] = ()
    ) -> None:
        """Reads the manifest; raises ArtifactError unless it is for one device."""
        devices = Manifest.load(directory).devices
        if devices != 1:
            raise ArtifactError(
                f"{directory}: expected a model, or artifacts for 1 device, got {devices} devices"
            )
        self._start = partial(ThreadsGroup, directory, program=program, custom_ops=custom_ops)
        self._group: ThreadsGroup | None = None

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the outputs by name."""
        group = self._group or self._start()
        # A group is of no further use once a rank failed, so it is kept only after success.
        self._group = None
        try:
            outputs = group.run_global(feeds)
        except BaseException:
            group.close()
            raise
        self._group = group
        return outputs

    def close(self) -> None:
        """Ends the one rank."""
        if self._group is not None:
            self._group.close()


@dataclass(frozen=True)
class Case:
    """The outcome at one choice of the symbols.

    Attributes:
        symbols: Values of the symbols.
        ok: Whether all outputs are within tolerance and the bytes are as promised.
        max_abs: Largest absolute difference of any output.
        max_rel: Largest difference relative to its output's largest magnitude.
        worst: The output that `max_rel` is of; empty where nothing differs.
        bytes_expected: Bytes that one rank sends by the manifest's formulas, None where a formula
            has a size that depends on data.
        bytes_counted: The most bytes that any rank counted.
        problems: What does not hold, for people.
    """

    symbols: Mapping[str, int]
    ok: bool
    max_abs: float
    max_rel: float
    worst: str
    bytes_expected: int | None
    bytes_counted: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """What to compare and how strictly.

    Attributes:
        program: Which program of the artifacts.
        seed: Seed of the random inputs.
        rtol: Tolerance relative to an output's largest magnitude; None takes `TOLERANCE`.
        atol: Absolute tolerance, added.
        custom_ops: Further custom-op libraries, for both sides.
        ort_options: Options of onnxruntime for the ranks.
    """

    program: str = "model"
    seed: int = 0
    rtol: float | None = None
    atol: float = 0.0
    custom_ops: tuple[str, ...] = ()
    ort_options: Mapping[str, str] | None = None


def verify(
    directory: str | Path,
    model: str | Path,
    cases: Sequence[Mapping[str, int]] = (),
    feeds: Mapping[str, Array] | None = None,
    settings: Settings | None = None,
) -> list[Case]:
    """Returns the comparison at each case.

    Args:
        directory: The artifact directory.
        model: The undivided ONNX model, or a directory of artifacts for one device.
        cases: Values of symbols; those that a case leaves out take a default. None at all means
            three cases: an even one, an uneven one and the smallest, as the constraints allow.
        feeds: The inputs, instead of random ones; then there is one case and `cases` must be empty.
        settings: What to compare and how strictly.

    Raises:
        OnnxparRuntimeError: Artifacts or model cannot be loaded or were changed, a case names an
            unknown symbol or violates a constraint, or a rank fails.
    """
    settings = settings or Settings()
    manifest = Manifest.load(directory)
    manifest.verify_files()
    program = manifest.program(settings.program)
    model = Path(model)
    if not model.exists():
        raise InputError(f"{model}: no such file")
    reference = _reference(model, manifest, settings)
    with closing(reference):
        if feeds is not None:
            if cases:
                raise InputError("give inputs or symbols: the inputs' shapes tell the symbols")
            feeds = convert(program.inputs, feeds)
            shapes = {name: a.shape for name, a in feeds.items()}
            values = bind_symbols(program.inputs, shapes)
            check_symbols(manifest.symbols, values)
            check_equal_sizes(program, values)
            runs = [(values, feeds)]
        else:
            chosen = [complete_case(manifest, program, c) for c in cases]
            chosen = chosen or default_cases(manifest, program)
            rng = np.random.default_rng(settings.seed)
            spans: dict[str, Span] = {}
            runs = []
            for case in chosen:
                spans = index_spans(reference, program, case, spans)
                runs.append((case, drawn_feeds(reference, program, case, spans, rng)))
        with ThreadsGroup(
            directory,
            program=settings.program,
            ort_options=settings.ort_options,
            custom_ops=settings.custom_ops,
        ) as group:
            return [_compare(group, reference, program, v, f, settings) for v, f in runs]


def _reference(model: Path, manifest: Manifest, settings: Settings) -> Reference:
    if (model / FILE_NAME).is_file():
        return ArtifactReference(model, settings.program, settings.custom_ops)
    parts = [manifest.program(name) for name in manifest.parts(settings.program)]
    if any(entry.counter is not None for part in parts for entry in part.system_inputs):
        # onnxruntime's own generators have hidden state, so no run of the model repeats another.
        raise InputError(
            f"the program draws random numbers, which {model} would draw differently: cut it with "
            "`onnxpar shard --devices 1` and give that directory as --model"
        )
    return ModelReference(model, settings.custom_ops)


def _compare(
    group: ThreadsGroup,
    reference: Reference,
    program: ProgramEntry,
    values: Mapping[str, int],
    feeds: Mapping[str, Array],
    settings: Settings,
) -> Case:
    expected = _reference_run(reference, feeds, values)
    group.reset_counters()
    got = group.run_global(feeds)
    problems: list[str] = []
    worst, max_abs, max_rel = "", 0.0, 0.0
    for spec in program.outputs:
        if spec.name not in expected:
            raise InputError(f"the model has no output {spec.name!r}; it has {sorted(expected)}")
        difference, scale, same = difference_of(expected[spec.name], got[spec.name])
        relative = difference / scale if scale else difference
        if relative > max_rel or (difference and not worst):
            worst, max_rel = spec.name, relative
        max_abs = max(max_abs, difference)
        rtol = TOLERANCE.get(spec.dtype, 0.0) if settings.rtol is None else settings.rtol
        limit = settings.atol + rtol * scale
        if not same:
            worst = spec.name
            problems.append(
                f"output {spec.name!r}: shapes or non-finite elements differ: expected shape "
                f"{expected[spec.name].shape}, got {got[spec.name].shape}"
            )
        elif difference > limit:
            problems.append(
                f"output {spec.name!r}: expected a difference of at most {limit:.3g}, got "
                f"{difference:.3g}"
            )
    total, counted, wrong = compare_bytes({settings.program: 1}, group, values)
    problems += wrong
    return Case(values, not problems, max_abs, max_rel, worst, total, counted, tuple(problems))


def _reference_run(
    reference: Reference, feeds: Mapping[str, Array], values: Mapping[str, int]
) -> dict[str, Array]:
    try:
        return reference.run(feeds)
    except Exception as error:
        shown = ", ".join(f"{k}={v}" for k, v in values.items())
        text = " ".join(str(error).split())
        raise InputError(
            f"the undivided model fails at {shown or 'these inputs'}: {text[:500]} (choose other "
            "values with --symbol, or give inputs with --inputs)"
        ) from None


def difference_of(expected: Array, got: Array) -> tuple[float, float, bool]:
    """Returns largest difference, largest finite magnitude, and whether the rest is the same.

    The rest: shape, dtype kind, and where elements are infinite or not a number.
    """
    if expected.shape != got.shape:
        return float("inf"), 0.0, False
    if expected.size == 0:
        return 0.0, 0.0, True
    a, b = expected.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(np.where(finite, 0, a), np.where(np.isfinite(b), 0, b), equal_nan=True):
        return float("inf"), 0.0, False
    a, b = np.where(finite, a, 0), np.where(finite, b, 0)
    difference = float(np.abs(a - b).max())
    if expected.dtype.kind in "iub" and difference == 0 and not np.array_equal(expected, got):
        difference = 1.0  # integers beyond 2^53 that float64 does not tell apart
    return difference, float(np.abs(a).max()), True


# -- cases and inputs ----------------------------------------------------------------------------


def symbols_of(manifest: Manifest, program: ProgramEntry) -> dict[str, SymbolEntry]:
    """Returns the symbols of the program's inputs, with constraints, in order of first use."""
    names = [bare_name(size) for spec in program.inputs for size in spec.shape]
    return {n: manifest.symbols.get(n, SymbolEntry()) for n in names if n is not None}


def complete_case(
    manifest: Manifest, program: ProgramEntry, case: Mapping[str, int]
) -> dict[str, int]:
    """Returns a case with a value for every symbol.

    Raises:
        SymbolValueError: The case names an unknown symbol or violates a constraint.
    """
    known = symbols_of(manifest, program)
    for name in case:
        if name not in known:
            raise SymbolValueError(f"unknown symbol {name!r}; the inputs have {sorted(known)}")
    default = default_cases(manifest, program)[0]
    tied = _tied(known, program)
    # A value given for one of several symbols that must be equal holds for all of them.
    given = {tied[name]: value for name, value in case.items() if name in tied}
    values = {name: case.get(name, given.get(tied[name], default[name])) for name in known}
    check_symbols(known, values)
    check_equal_sizes(program, values)
    return values


def default_cases(manifest: Manifest, program: ProgramEntry) -> list[dict[str, int]]:
    """Returns an even case, an uneven one and the smallest, as far as the constraints allow."""
    picks = _offers(manifest, program, lambda symbol: _picks(symbol, manifest.devices))
    count = min(3, max((len(p) for p in picks.values()), default=1))
    return [{n: p[min(i, len(p) - 1)] for n, p in picks.items()} for i in range(count)]


def _offers(
    manifest: Manifest, program: ProgramEntry, offer: Callable[[SymbolEntry], list[int]]
) -> dict[str, list[int]]:
    """Returns the values that are offered for each symbol and that all it must equal admit."""
    known = symbols_of(manifest, program)
    tied = _tied(known, program)
    found: dict[str, list[int]] = {}
    for name in known:
        alike = [known[other] for other in known if tied[other] == tied[name]]
        offered = [value for symbol in alike for value in offer(symbol)]
        fits = [value for value in offered if all(symbol.admits(value) for symbol in alike)]
        found[name] = list(dict.fromkeys(fits or offered))
    for equal in program.equal_sizes:
        numbers = [size for size in equal.sizes if isinstance(size, int)]
        names = [tied.get(bare_name(size) or "") for size in equal.sizes]
        found |= {name: numbers for name in known if numbers and tied[name] in names}
    return found


def _tied(known: Mapping[str, SymbolEntry], program: ProgramEntry) -> dict[str, str]:
    """Returns for each symbol the first of those that must have its value."""
    first = {name: name for name in known}
    pairs: list[tuple[str | None, str | None]]
    pairs = [(name, symbol.same_as) for name, symbol in known.items()]
    pairs += [(bare_name(e.sizes[0]), bare_name(e.sizes[1])) for e in program.equal_sizes]
    for one, other in pairs:
        if one in first and other in first:
            low, high = sorted((first[one], first[other]), key=list(known).index)
            first = {name: low if of == high else of for name, of in first.items()}
    return first


def _picks(symbol: SymbolEntry, devices: int) -> list[int]:
    near = symbol.admissible(devices + 1, 2 * devices + 2) or symbol.admissible(1, 4)[::-1]
    smallest = symbol.admissible(1, 1)
    even = [v for v in near if v % devices == 0]
    # Not a multiple of any part of the mesh, if there is such a value.
    uneven = [v for v in near if v % 2 and v % devices] or [v for v in near if v % devices]
    picks = [*even[:1], *uneven[:1], *smallest, *near]
    return list(dict.fromkeys(picks))[:3]


def random_feeds(
    program: ProgramEntry,
    values: Mapping[str, int],
    bounds: Mapping[str, int],
    rng: np.random.Generator,
) -> dict[str, Array]:
    """Returns random inputs: normal floats, integers below their bound, either truth value."""
    feeds = {}
    for spec in program.inputs:
        shape = _shape(spec, values)
        dtype = DTYPES[spec.dtype].dtype
        if spec.dtype == "bool" or dtype.kind in "iu":
            feeds[spec.name] = rng.integers(0, bounds.get(spec.name, 2), shape).astype(dtype)
        else:
            feeds[spec.name] = rng.standard_normal(shape).astype(dtype)
    return feeds


def _shape(spec: TensorSpec, values: Mapping[str, int]) -> tuple[int, ...]:
    try:
        return tuple(evaluate(size, values) for size in spec.shape)
    except ExpressionError as error:
        raise InputError(
            f"input {spec.name!r}: no random array of shape {list(spec.shape)}: {error} (give "
            "inputs with --inputs)"
        ) from None


def _shapes(outputs: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in outputs.items()}


@dataclass(frozen=True)
class Span:
    """What an integer input may hold.

    Attributes:
        low: The smallest value that the model takes everywhere at once: 0, or 1 where it refuses
            nothing but zeros, as of a mask.
        limit: The smallest value above that the model refuses; None where there is none up to 2^20.
    """

    low: int
    limit: int | None

    @property
    def high(self) -> int:
        """One more than the largest value to draw: what takes any is no index, but a mask."""
        return 2 if self.limit is None else self.limit


def drawn_feeds(
    reference: Reference,
    program: ProgramEntry,
    values: Mapping[str, int],
    spans: Mapping[str, Span],
    rng: np.random.Generator,
) -> dict[str, Array]:
    """Returns random inputs whose integers are in the spans, with zeros among them.

    Where all zeros are refused, the model is asked whether it takes the zeros drawn.
    """
    feeds = random_feeds(program, values, {name: span.high for name, span in spans.items()}, rng)
    raised = {n: np.maximum(feeds[n], span.low) for n, span in spans.items() if span.low}
    if raised:
        try:
            reference.run(feeds)
        except Exception:  # as in `index_spans`
            return feeds | raised
    return feeds


def index_spans(
    reference: Reference,
    program: ProgramEntry,
    values: Mapping[str, int],
    known: Mapping[str, Span] = _NOTHING_KNOWN,
) -> dict[str, Span]:
    """Returns for each integer input what it may hold at these values of the symbols.

    An input that is used as an index is refused by the undivided model where it is out of range. So
    the model is asked: the limit is the smallest refused value, found by doubling and bisection,
    while the others hold zeros, or ones where the model refuses zeros.

    Args:
        reference: The undivided model.
        program: Its inputs.
        values: Values of the symbols: what is in range may depend on them.
        known: Spans at other values, which are tried first.

    Raises:
        InputError: The model fails with zeros and with ones, or an input decides a shape.
    """
    integers = [s for s in program.inputs if DTYPES[s.dtype].dtype.kind in "iu"]
    if not integers:
        return {}
    floats = random_feeds(program, values, {s.name: 1 for s in integers}, np.random.default_rng(0))
    base, usual = 0, {}
    try:
        usual = _shapes(reference.run(floats))
    except Exception:
        # Of the two errors that of ones is the reason: no mask of a batch is nothing but zeros.
        base = 1
        floats |= {s.name: np.ones_like(floats[s.name]) for s in integers}
        usual = _shapes(_reference_run(reference, floats, values))

    def admits(spec: TensorSpec, value: int) -> bool:
        feeds = dict(floats)
        feeds[spec.name] = np.full_like(feeds[spec.name], value)
        try:
            found = _shapes(reference.run(feeds))
        except Exception:
            # Whatever onnxruntime raises for an index out of range: it has no class of its own.
            return False
        if found != usual:
            raise InputError(
                f"input {spec.name!r} decides the shape of an output, so no random values are "
                "drawn for it: give inputs with --inputs"
            )
        return True

    spans = {}
    for spec in integers:
        least = 1 if base and not admits(spec, 0) else 0
        limit = _limit(partial(admits, spec), spec, base, known.get(spec.name))
        spans[spec.name] = Span(least, limit)
    return spans


def _limit(
    admits: Callable[[int], bool], spec: TensorSpec, base: int, known: Span | None
) -> int | None:
    """Returns the smallest value above `base`, which is admitted, that is not, as far as asked."""
    top = min(_MAX_INDEX, int(np.iinfo(DTYPES[spec.dtype].dtype).max))
    if known is not None:
        if known.limit is None and admits(top // 2):
            return None
        limit = known.limit or 0
        if limit > base and admits(limit - 1) and not admits(limit):
            return limit
    low, high = base, base + 1
    while high < top and admits(high):
        low, high = high, high * 2
    if high >= top:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if admits(middle) else (low, middle)
    return high
