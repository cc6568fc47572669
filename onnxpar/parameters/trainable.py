"""Selects the initializers that are trained, with a reason for each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.name_patterns import SHOWN, nearest
from onnxpar.graph.tensor_parts import TensorPart, part_of, tensor_of
from onnxpar.ops.operand_roles import is_statistic, reads_elements
from onnxpar.ops.registry import Registry
from onnxpar.parameters.origin import Origin, Role, is_floating, origin_of, sizes
from onnxpar_format.manifest import TrainingTensor

FROZEN = "frozen"
CONSTANT = "constant"
EMPTY = "no element"
STATISTIC = "running statistic"
NAMED = "--trainable names it"


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter that is trained.

    Attributes:
        name: Its name in the model.
        dtype: Its element type, floating.
        shape: Its global shape.
        decay: Whether weight decay applies to it.
        norm_group: The gradient norm first adds the parameters of each group. If parameters whose
            gradients are sharded over the same devices are one group, the norm needs one reduction
            for each group instead of one for each parameter.
        stages: The pipeline stages that have a copy of it, if there are several: its gradient is
            the sum of theirs.
        counted: Whether its gradient counts in the norm of this stage; that of one copy does.
        part: The tensor of which it is a part; None if it is a tensor of its own.
    """

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    decay: bool = True
    norm_group: str = ""
    stages: tuple[int, ...] = ()
    counted: bool = True
    part: TensorPart | None = None

    @property
    def tensor(self) -> str:
        """Name of the tensor that it is, or is a part of."""
        return self.name if self.part is None else self.part.tensor


@dataclass(frozen=True)
class Counts:
    """How many elements and tensors are trained, and how many there are.

    Attributes:
        trained: Elements that are trained.
        elements: Elements of all parameters.
        trained_tensors: Tensors that are trained.
        tensors: Tensors that are parameters.
    """

    trained: int
    elements: int
    trained_tensors: int
    tensors: int


@dataclass(frozen=True)
class Selection:
    """The outcome of `select`.

    Attributes:
        trained: The selected parameters, in the order of the model's initializers.
        tensors: Every floating-point initializer of the model's file; if it is not trained, with
            the reason.
        doubtful: For each selected tensor that may also be a constant, the reason for the doubt.
    """

    trained: tuple[ParameterInfo, ...]
    tensors: tuple[TrainingTensor, ...]
    doubtful: Mapping[str, str]

    def divided(self, graph: ir.Graph) -> "Selection":
        """Returns the same selection of a graph in which some tensors are divided into parts."""
        parts: dict[str, list[ir.Value]] = {}
        for value in graph.initializers.values():
            if part_of(value) is not None:
                parts.setdefault(tensor_of(value), []).append(value)
        trained = tuple(
            info
            for p in self.trained
            for info in [
                replace(p, name=v.name or "", shape=sizes(v), part=part_of(v))
                for v in parts.get(p.name, ())
            ]
            or [p]
        )
        return replace(self, trained=trained)

    def outcome(self, unreached: Mapping[str, str]) -> tuple[TrainingTensor, ...]:
        """Returns all tensors; those on which the loss does not depend are not trained.

        Args:
            unreached: Parameter -> why no gradient reaches it.
        """
        return tuple(
            replace(t, trained=False, reason=unreached[t.name])
            if t.trained and t.name in unreached
            else t
            for t in self.tensors
        )

    def counts(self, unreached: Mapping[str, str]) -> Counts:
        """Returns how much is trained."""
        tensors = [t for t in self.outcome(unreached) if t.parameter]
        trained = [t.elements for t in tensors if t.trained]
        return Counts(sum(trained), sum(t.elements for t in tensors), len(trained), len(tensors))

    def shared(self, unreached: Mapping[str, str]) -> tuple[TrainingTensor, ...]:
        """Returns the tensors that are trained and that more than one node reads."""
        return tuple(t for t in self.outcome(unreached) if t.trained and len(t.used_by) > 1)

    def ask(self, reached: Iterable[str]) -> None:
        """Raises ModelError if a gradient reaches a tensor in doubt."""
        shapes = {p.tensor: list(p.part.shape if p.part else p.shape) for p in self.trained}
        asked = [f"  {n} {shapes[n]}: {self.doubtful[n]}" for n in reached if n in self.doubtful]
        if len(asked) > SHOWN:
            asked[SHOWN:] = [f"  and {len(asked) - SHOWN} more"]
        if asked:
            raise ModelError(
                "the file does not show whether these tensors are trained; expected --trainable "
                "NAME to train a tensor, or --freeze NAME to keep it fixed (NAME may be a "
                "pattern), got neither:\n" + "\n".join(asked)
            )


def select(
    model: ir.Model,
    registry: Registry,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    decay: Sequence[str] = (),
    no_decay: Sequence[str] = (),
) -> Selection:
    """Selects the tensors that are trained: the parameters of the file, changed by user options.

    Tensors in doubt are selected too, and listed as doubtful. Whether the loss depends on a
    parameter is not checked here.

    Args:
        model: The normalised model, whose initializers were recognised before
            (`onnxpar.parameters.recognise`); it is not changed.
        registry: The table of operators.
        trainable: Names and patterns (`fnmatch`) of further tensors to train; they win over
            `freeze`.
        freeze: Names and patterns of tensors not to train.
        decay: Names and patterns of parameters of fewer than two dims that have weight decay.
        no_decay: Names and patterns of parameters of two or more dims that have no weight decay.

    Raises:
        ModelError: A pattern matches no floating-point initializer, or one has both kinds of decay.
    """
    values = {
        name: (value, origin)
        for name, value in model.graph.initializers.items()
        if is_floating(value) and (origin := origin_of(value)) is not None
    }
    names = {name: (name, *origin.names) for name, (_, origin) in values.items()}
    chosen = _matching("--trainable", trainable, names)
    frozen = _matching("--freeze", freeze, names)
    order = {id(node): i for i, node in enumerate(ir.traversal.RecursiveGraphIterator(model.graph))}
    tensors, doubtful = [], {}
    for name, (value, origin) in values.items():
        reason = _unfit(value, origin, registry, frozen=name in frozen, named=name in chosen)
        if not reason and origin.role is Role.DOUBTFUL and name not in chosen:
            doubtful[name] = origin.rule
        readers = {id(node): node for node, _ in value.uses() if reads_elements(node, registry)}
        used_by = [n.name or "" for n in sorted(readers.values(), key=lambda n: order[id(n)])]
        tensors.append(
            TrainingTensor(
                name,
                prod(sizes(value)),
                not reason,
                not reason or origin.role is not Role.CONSTANT,
                reason,
                NAMED if name in chosen and not reason else origin.rule,
                tuple(used_by),
            )
        )
    dims = {
        name: len(sizes(value)) if origin.dims is None else origin.dims
        for name, (value, origin) in values.items()
    }
    decays = _decays(
        dims, _matching("--decay", decay, names), _matching("--no-decay", no_decay, names)
    )
    trained = tuple(
        ParameterInfo(t.name, value.dtype or ir.DataType.FLOAT, sizes(value), decays(t.name))
        for t in tensors
        if t.trained
        for value, _ in (values[t.name],)
    )
    return Selection(trained, tuple(tensors), doubtful)


# -- selecting -----------------------------------------------------------------------------------


def _matching(
    option: str, patterns: Sequence[str], names: Mapping[str, Sequence[str]]
) -> frozenset[str]:
    """Returns the tensors that the patterns match.

    Args:
        option: For messages.
        patterns: Names and patterns.
        names: For each tensor its own name, then those of the parameters from which it was folded.
            The latter count if the pattern matches all of them.

    Raises:
        ModelError: A pattern matches no tensor.
    """
    found: set[str] = set()
    for pattern in patterns:
        hits = {
            tensor
            for tensor, (own, *sources) in names.items()
            if _matches(own, pattern)
            or (sources and all(_matches(source, pattern) for source in sources))
        }
        if not hits:
            known = [name for its in names.values() for name in its]
            raise ModelError(
                f"{option} {pattern!r}: expected the name or a pattern of a floating-point "
                f"initializer, got no match{nearest(pattern, known)}"
            )
        found |= hits
    return frozenset(found)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _unfit(
    value: ir.Value, origin: Origin, registry: Registry, *, frozen: bool, named: bool
) -> str:
    """Returns why an initializer is not trained; empty if it is.

    Args:
        value: The initializer.
        origin: Its origin.
        registry: The table of operators.
        frozen: Whether a pattern of `freeze` matches it.
        named: Whether a pattern of `trainable` matches it.
    """
    uses = value.uses()
    if uses and all(is_statistic(node, index, registry) for node, index in uses):
        return FROZEN if frozen else STATISTIC
    if prod(sizes(value)) == 0:
        return EMPTY
    if named:
        return ""
    if frozen:
        return FROZEN
    return CONSTANT if origin.role is Role.CONSTANT else ""


def _decays(
    dims: Mapping[str, int], on: frozenset[str], off: frozenset[str]
) -> Callable[[str], bool]:
    """Returns whether weight decay applies to a parameter, by the dims of each."""
    for name in dims:
        if name in on and name in off:
            raise ModelError(f"parameter {name!r}: both --decay and --no-decay match it")
    return lambda name: name in on or (name not in off and dims[name] > 1)
