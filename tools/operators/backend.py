"""ONNX's own backend node tests, sharded along the factors of their nodes and run by all ranks.

A case is processed like a user's model: analysed, planned with one factor of one node
sharded, partitioned, written as a directory, and run by 2 or 4 ranks of this process over
the threads transport. Its results are compared with those of the undivided model in onnxruntime.
"""

import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx.backend.test import loader

from onnxpar.api.shard_model import analyse
from onnxpar.core.errors import OnnxparError, ShardingError
from onnxpar.core.mesh import Mesh
from onnxpar.core.rule import REPLICATED, format_rule
from onnxpar.core.sharding import Component, DimSharding
from onnxpar.emit import write
from onnxpar.facts.program import Program
from onnxpar.graph.local_builder import COUNTER_INPUTS
from onnxpar.graph.plan import factor_sizes, shardings
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.partition.partition import partition
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.propagation.propagate import propagate
from onnxpar.report.inspect_data import directory_data
from onnxpar_runtime.group import ThreadsGroup
from onnxpar_runtime.tensors import to_host, to_ort
from onnxpar_runtime.verify.findings import TOLERANCE, difference_of

Array = NDArray[Any]
MESHES = (Mesh.of(x=2), Mesh.of(x=2, y=2))
# Operands that say shapes, axes and numbers are at most this large; in real models constants.
SMALL, SCALES = 64, 8
NEWEST_IR = 13  # that onnxruntime 1.31 reads

PASSED, WRONG, FAILED, CRASHED = "passed", "wrong", "failed", "crashed"


@dataclass(frozen=True)
class Case:
    """A node test and its data.

    Attributes:
        name: Its name in ONNX.
        model: The undivided model.
        feeds: Its inputs.
        expected: Its outputs.
        rtol: Relative tolerance of the expected outputs.
        atol: Absolute tolerance of the expected outputs.
    """

    name: str
    model: onnx.ModelProto
    feeds: Mapping[str, Any]
    expected: Sequence[Any]
    rtol: float
    atol: float

    @property
    def op_type(self) -> str:
        """The operator that is tested; an expanded one's name says it, not its nodes."""
        return self.model.graph.node[0].op_type if len(self.model.graph.node) == 1 else ""

    @property
    def divisible(self) -> bool:
        """Whether some operand or result has a dim larger than 1."""
        arrays = [*self.feeds.values(), *self.expected]
        return any(np.ndim(a) and max(np.shape(a)) > 1 for a in arrays if is_dense(a))


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        name: The case.
        operators: Domain and name of each of its nodes, and its opset.
        status: PASSED, WRONG (a result differs), FAILED (an error where there should be none) or
            CRASHED.
        divisible: Whether any of its dims is larger than 1.
        splits: Number of different plans that were run in which a node is sharded.
        plans: How many different plans were run.
        reasons: For each node that was never sharded, its operator and the reason.
        detail: What went wrong.
    """

    name: str
    operators: Sequence[str]
    status: str
    divisible: bool
    splits: int = 0
    plans: int = 0
    reasons: Sequence[tuple[str, str]] = ()
    detail: str = ""


def is_dense(value: object) -> bool:
    """Whether a value is an array of numbers or booleans."""
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSU"


@lru_cache(maxsize=1)
def cases() -> dict[str, Case]:
    """All node tests, by name."""
    with (
        warnings.catch_warnings(),
        # It makes the text of documentation, for which nobody asks here.
        patch("onnx.backend.test.case.base.process_snippet", lambda *_: ("", "")),
    ):
        warnings.simplefilter("ignore")  # the tests' own data overflow on purpose
        found = [_case(t) for t in loader.load_model_tests(kind="node")]
    return {case.name: case for case in found}


def _case(test: Any) -> Case:
    ((inputs, outputs),) = test.data_sets
    names = [v.name for v in test.model.graph.input]
    model = onnx.ModelProto.FromString(test.model.SerializeToString())
    model.ir_version = min(model.ir_version, NEWEST_IR)
    feeds = {n: _array(a) for n, a in zip(names, inputs, strict=True)}
    return Case(
        test.name, model, feeds, [_array(a) for a in outputs], test.rtol, max(test.atol, 1e-7)
    )


def _array(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


# -- the undivided model ---------------------------------------------------------------------------


def undivided_results(case: Case) -> dict[str, Any] | None:
    """Returns onnxruntime's results of the undivided model; None if it does not pass the test."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(
            case.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        made = _run(session, case)
    except Exception:  # onnxruntime has a class of its own for each status, and RuntimeError
        return None
    names = [o.name for o in case.model.graph.output]
    for got, want in zip(made, case.expected, strict=True):
        if not _passes(got, want, case):
            return None
    return dict(zip(names, made, strict=True))


def _run(session: ort.InferenceSession, case: Case) -> list[Any]:
    if not all(is_dense(a) for a in (*case.feeds.values(), *case.expected)):
        made: list[Any] = session.run(None, dict(case.feeds))
        return made
    binding = session.io_binding()
    kept = {n: to_ort(np.asarray(a, order="C")) for n, a in case.feeds.items()}
    for name, value in kept.items():
        binding.bind_ortvalue_input(name, value)
    for out in case.model.graph.output:
        binding.bind_output(out.name, "cpu")
    session.run_with_iobinding(binding)
    return [to_host(value) for value in binding.get_outputs()]


def _passes(got: Any, want: Any, case: Case) -> bool:
    if isinstance(want, list):
        return len(got) == len(want) and all(
            _passes(g, w, case) for g, w in zip(got, want, strict=True)
        )
    if want is None or got is None:
        return got is want
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if want.dtype.kind in "OSU":
        return bool((got == want).all())
    with np.errstate(all="ignore"):
        return bool(
            np.allclose(got.astype(np.float64), want.astype(np.float64), case.rtol, case.atol, True)
        )


# -- the sharded model -----------------------------------------------------------------------------


def with_constants(case: Case) -> Case:
    """The case with its small vectors and its scalars as constants, as models have them.

    Shapes, axes, numbers of elements and rates are operands in the tests alone: in exported models
    they are constants nearly always, and without them no local form can be stated. The first
    operand stays, and so does one of more than one dim.
    """
    names = [v.name for v in case.model.graph.input]
    # A first operand that alone says what is made, as ConstantOfShape's does.
    rest = (
        names[1:]
        if any(is_dense(a) and np.size(a) > 1 for a in list(case.feeds.values())[1:])
        else names
    )
    fixed = {n for n in rest if is_dense(case.feeds[n]) and _says_something(case.feeds[n])}
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    for value in [v for v in model.graph.input if v.name in fixed]:
        model.graph.input.remove(value)
        array = np.asarray(case.feeds[value.name])
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    feeds = {n: a for n, a in case.feeds.items() if n not in fixed}
    return replace(case, model=model, feeds=feeds)


def _says_something(array: Any) -> bool:
    if np.ndim(array) == 0:
        return True
    # Numbers of another type: the scales and regions of interest of Resize.
    most = SMALL if array.dtype.kind in "iu" else SCALES
    return np.ndim(array) == 1 and np.size(array) <= most


def analysed(case: Case) -> Program:
    """Returns the program of a case before it is partitioned, which uses it up."""
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    return analyse(ir.from_proto(model), {})


def seeds(known: Program, mesh: Mesh) -> Iterator[Seeds]:
    """Every factor of every node over all devices, and every two factors of a node over one each.

    The graph's inputs that the node reads come as it wants them; everything else follows by
    propagation.
    """
    everything = tuple(range(len(mesh.atoms)))
    for name, rule in known.rules.by_node.items():
        sizes = factor_sizes(rule, known.rules.views[name])
        factors = [f for f in rule.splittable if f in sizes and sizes[f] != 1]
        for one in factors:
            yield _seed(known, mesh, name, {one: (Component(sizes[one], everything),)})
        if len(everything) == 1:
            continue
        for one, other in permutations(factors, 2):
            split = {
                one: (Component(sizes[one], everything[:1]),),
                other: (Component(sizes[other], everything[1:]),),
            }
            yield _seed(known, mesh, name, split)


def _seed(known: Program, mesh: Mesh, name: str, split: Mapping[str, DimSharding]) -> Seeds:
    view = known.rules.views[name]
    plan = shardings(known.rules.by_node[name], view, split, mesh)
    graph = set(known.model.graph.inputs)
    inputs = {
        value.name or "": sharding
        for value, sharding in zip(view.node.inputs, plan.inputs, strict=False)
        if value in graph and value is not None and sharding is not None
    }
    return Seeds(mesh, {name: NodeSeed(name, split)}, inputs)


def partitioned(case: Case, known: Program, chosen: Seeds) -> PartitionedModel:
    """The program of all ranks under some seeds."""
    plan = propagate(known, chosen)
    return partition(known, plan)


def signature(program: PartitionedModel) -> str:
    """Returns text that is equal for two plans that shard every node alike."""
    plan = program.plan
    return repr([(n, sorted(p.factors.items()), p.inputs) for n, p in plan.nodes.items()])


def run(program: PartitionedModel, feeds: Mapping[str, Any]) -> dict[str, Array]:
    """The results of all ranks of this process, written to disk and read back as a user does."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "sharded"
        write([program], out, report=directory_data([program]), model_name="case")
        with ThreadsGroup(out) as group:
            return group.run_global({n: np.asarray(a, order="C") for n, a in feeds.items()})


def compare(got: Mapping[str, Array], want: Mapping[str, Any]) -> str:
    """What differs, or nothing."""
    for name, expected in want.items():
        made = got[name]
        difference, scale, same = difference_of(np.asarray(expected), made)
        limit = TOLERANCE.get(str(made.dtype), 0.0) * scale
        if not same or made.dtype != expected.dtype or difference > limit:
            return f"output {name!r}: differs by {difference:.3g}, expected at most {limit:.3g}"
    return ""


def examine(case: Case, sample: int | None, seed: int = 0) -> Outcome | None:
    """Shards a case in every way, or in `sample` ways for each number of ranks, and runs them.

    Returns:
        What became of it; None where onnxruntime itself does not pass the test.
    """
    want = undivided_results(case)
    if want is None:
        return None
    versions = {o.domain: o.version for o in case.model.opset_import}
    operators = [f"{n.domain or 'ai.onnx'}::{n.op_type}" for n in case.model.graph.node]
    operators = [f"{op} {versions.get('', 0)}" for op in dict.fromkeys(operators)]
    made = Outcome(case.name, operators, PASSED, case.divisible)
    try:
        case, known = _best(case)
        return _examine(case, known, want, made, sample, seed)
    except OnnxparError as error:
        return replace(made, status=FAILED, detail=f"{type(error).__name__}: {error}")
    except Exception as error:
        return replace(made, status=CRASHED, detail=f"{type(error).__name__}: {error}")


def _best(case: Case) -> tuple[Case, Program]:
    """Returns the case, or the case with constants if more of it can then be sharded."""
    fixed = with_constants(case)
    same = len(fixed.feeds) == len(case.feeds)
    try:
        known = analysed(case)
    except OnnxparError:
        if same:
            raise
        return fixed, analysed(fixed)
    if same or not (known.rules.reasons or not _splittable(known)):
        return case, known
    better = analysed(fixed) if undivided_results(fixed) is not None else known
    return (fixed, better) if _worth(better) > _worth(known) else (case, known)


def _splittable(known: Program) -> int:
    return sum(
        factor_sizes(rule, known.rules.views[name]).get(f) not in (1, None)
        for name, rule in known.rules.by_node.items()
        for f in rule.splittable
    )


def _worth(known: Program) -> tuple[int, int]:
    return -len(known.rules.reasons), _splittable(known)


def _examine(
    case: Case,
    known: Program,
    want: Mapping[str, Any],
    made: Outcome,
    sample: int | None,
    seed: int,
) -> Outcome:
    ops = {name: view.node for name, view in known.rules.views.items()}
    split: set[str] = set()
    splits, plans = 0, 0
    undivided: Mapping[str, Any] | None = None
    for mesh in MESHES:
        choices = [Seeds(mesh), *seeds(known, mesh)]
        if sample is not None and len(choices) > sample + 1:
            draw = random.Random(f"{seed} {case.name} {mesh.size}")
            choices = [choices[0], *draw.sample(choices[1:], sample)]
        seen: set[str] = set()
        for chosen in choices[1:] or choices:
            try:
                program = partitioned(case, known, chosen)
            except ShardingError:
                if not chosen.nodes:
                    raise
                continue
            key = signature(program)
            if key in seen:
                continue
            seen.add(key)
            here = {name for name, p in program.plan.nodes.items() if p.factors}
            plans += 1
            splits += bool(here)
            split |= here
            if set(COUNTER_INPUTS) & set(program.builder.system_inputs):
                undivided = undivided or run(partitioned(case, known, Seeds(Mesh.of())), case.feeds)
            wrong = compare(run(program, case.feeds), undivided or want)
            if wrong:
                where = {n: dict(s.factors) for n, s in chosen.nodes.items()}
                return replace(made, status=WRONG, detail=f"{mesh.size} ranks, {where}: {wrong}")
    reasons = []
    for name, node in ops.items():
        if name not in split:
            reasons.append((node.op_type, known.rules.reasons.get(name) or _why(known, name)))
    return replace(made, splits=splits, plans=plans, reasons=list(dict.fromkeys(reasons)))


def _why(known: Program, name: str) -> str:
    rule, view = known.rules.by_node[name], known.rules.views[name]
    sizes = factor_sizes(rule, view)
    if not rule.factors:
        return "its rule has no factor"
    if all(sizes.get(f) == 1 for f in rule.splittable) and rule.splittable:
        return "every dim that can be sharded has size 1"
    replicated = [f for f, kind in rule.kinds.items() if kind == REPLICATED]
    if not rule.splittable:
        return f"all its factors are replicated: {format_rule(rule)}"
    return f"not sharded in the plans that were tried: {format_rule(rule)} {replicated}"


def main(names: Sequence[str], sample: int | None) -> None:
    """Examines cases one after another; a JSON line before each and one after it, on stdout."""
    for name in names:
        print(json.dumps({"begin": name}), flush=True)
        outcome = examine(cases()[name], sample)
        print(json.dumps({"done": name, "outcome": outcome and asdict(outcome)}), flush=True)
