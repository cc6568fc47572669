"""Writes plans as strategy files."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import onnx_ir as ir

from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.core.symbols import Symbol, dim_str
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL, OptimizerParallel
from onnxpar.graph.plan import Factors, Plan, factor_sizes, operand_sharding
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.ops.node_rules import Rules
from onnxpar.strategy.schema import SEARCH, Strategy, TargetEntry

PAIR = "pair_micro_batches"
"""Key of a strategy file: whether two micro-batches take turns."""
_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")
_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
"""Words that YAML 1.1 does not read as text."""


def strategy_data(
    seeds: Seeds,
    rules: Rules,
    symbols: Mapping[str, Symbol],
    parallel: OptimizerParallel = NOT_PARALLEL,
    staged: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the content of a strategy file from which the same plan follows.

    Args:
        seeds: Every node's strategy.
        rules: The rules of the nodes.
        symbols: Constraints on symbols; they are kept.
        parallel: Optimizer parallel; it is kept.
        staged: The section `pipeline`, if there are stages with this mesh.
    """
    mesh = seeds.mesh
    data = _head(mesh, symbols, 1 if staged is None else staged["stages"])
    data["dataset"] = {name: _layout(s, mesh) for name, s in seeds.inputs.items()}
    if seeds.parameters:
        data["parameters"] = {name: _layout(s, mesh) for name, s in seeds.parameters.items()}
    data["parameter_axes"] = []
    data["nodes"] = {name: _seed(seed, rules, mesh) for name, seed in seeds.nodes.items()}
    data["rest"] = seeds.rest
    data["given"] = [name for name, seed in seeds.nodes.items() if seed.pinned]
    data |= _parallel(parallel)
    return data if staged is None else {**data, "pipeline": dict(staged)}


def plan_data(
    plan: Plan, model: ir.Model, strategy: Strategy, symbols: Mapping[str, Symbol]
) -> dict[str, Any]:
    """Returns the content of a strategy file with the complete plan: the resolved strategy.

    It has an entry for every node, including those that differentiation added, so it is for the
    same program of the same model. `given` names the nodes with entries from the user.

    Args:
        plan: The plan.
        model: Its program.
        strategy: The strategy from which it followed.
        symbols: Constraints on symbols, including those of the strategy.
    """
    mesh, graph = plan.mesh, model.graph
    data = _head(mesh, symbols, strategy.stages)
    # A sequence has no rank.
    ranks = {v.name: None if v.shape is None else len(v.shape) for v in graph.inputs}
    data["dataset"] = {n: _layout(s, mesh) for n, s in plan.inputs.items() if ranks[n] == s.rank}
    data["parameters"] = {n: _layout(s, mesh) for n, s in own_layouts(plan, graph).items()}
    data["parameter_axes"] = list(strategy.parameter_axes)
    data["nodes"] = {
        node.name or "": _planned(node, plan)
        for node in graph
        if not plan.nodes[node.name or ""].reason
    }
    data["rest"] = "propagate" if strategy.rest == SEARCH else strategy.rest
    data["given"] = [name for name, found in plan.nodes.items() if found.pinned]
    data |= _parallel(strategy.optimizer_parallel)
    if strategy.pipeline is not None:
        entry = strategy.pipeline
        data["pipeline"] = {"stages": entry.stages, **entry.model_dump(exclude_none=True)}
    if strategy.recompute:
        data["recompute"] = strategy.recompute.entry
    return data | divided(strategy.micro_batches) | pairing(strategy) | targeted(strategy)


def divided(micro_batches: int | None) -> dict[str, Any]:
    """Returns the number of micro-batches of one stage, as content of a file; nothing for one."""
    return {"micro_batches": micro_batches} if (micro_batches or 1) > 1 else {}


def pairing(strategy: Strategy) -> dict[str, Any]:
    """Returns what a strategy says about micro-batches that take turns, as content of a file."""
    wanted = strategy.pair_micro_batches
    return {} if wanted is None else {PAIR: wanted}


def targeted(strategy: Strategy) -> dict[str, Any]:
    """Returns what a strategy says it is for, as content of a file that does not search.

    From this follows what runs in the background, so the same programs are made again.
    """
    said = strategy.search.model_dump(include={*TargetEntry.model_fields}, exclude_unset=True)
    stated = {key: value for key, value in said.items() if value}
    return {"target": stated} if stated else {}


def given_data(mesh: Mesh, strategy: Strategy, symbols: Mapping[str, Symbol]) -> dict[str, Any]:
    """Returns the content of a strategy file with a strategy that names no nodes or tensors.

    Args:
        mesh: The mesh that follows from it.
        strategy: The strategy.
        symbols: Constraints on symbols, including those of the strategy.
    """
    return {
        **_head(mesh, symbols, strategy.stages),
        "dataset": strategy.dataset,
        "parameter_axes": list(strategy.parameter_axes),
        "rest": strategy.rest,
    }


def own_layouts(plan: Plan, graph: ir.Graph) -> dict[str, Sharding]:
    """Returns the shardings of parameters that differ from what their first reader wants."""
    first: dict[str, Sharding] = {}
    for node in graph:
        for value, want in zip(node.inputs, plan.nodes[node.name or ""].inputs, strict=False):
            if value is not None and want is not None:
                first.setdefault(value.name or "", want.with_partial(()))
    return {n: s for n, s in plan.parameters.items() if first.get(n, s) != s}


def _parallel(options: OptimizerParallel) -> dict[str, Any]:
    entry = {k: v for k, v in asdict(options).items() if v is not None}
    return {"optimizer_parallel": entry} if options.level else {}


def _head(mesh: Mesh, symbols: Mapping[str, Symbol], stages: int) -> dict[str, Any]:
    """The mesh of a stage, and symbols; a number of devices is that of all stages."""
    data: dict[str, Any] = {}
    if mesh.axes:
        data["mesh"] = dict(mesh.axes)
        usual = Mesh.of(dict(mesh.axes))
    else:
        data["devices"] = mesh.size * stages
        usual = Mesh.refine(mesh.size)
    if mesh.atoms != usual.atoms:
        data["atoms"] = list(mesh.atoms)
    if symbols:
        data["symbols"] = {name: symbol_data(symbol) for name, symbol in symbols.items()}
    return data


def write_strategy(data: Mapping[str, Any], head: str = "") -> str:
    """Returns the content of a strategy file as YAML, after `head` as comment lines.

    Each node, tensor and symbol has its own line, and so has each pattern of assigned nodes.
    """
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{key}:")
            for name, entry in value.items():
                if key == "pipeline" and name == "assign":
                    lines += [f"  {name}:", *(f"    {_text(k)}: {v}" for k, v in entry.items())]
                else:
                    lines.append(f"  {_text(str(name))}: {_flow(entry)}")
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join([*lines, ""])


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(str(k))}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if value is None:
        return "~"
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    """Text as YAML; in the quotes of JSON if YAML might not read it as text."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else json.dumps(text)


def symbol_data(symbol: Symbol) -> dict[str, Any]:
    """Returns the constraints of a symbol that are not the default."""
    default = Symbol()
    return {
        name: getattr(symbol, name)
        for name in Symbol.__dataclass_fields__
        if getattr(symbol, name) != getattr(default, name)
    }


# -- nodes ---------------------------------------------------------------------------------------


def _seed(seed: NodeSeed, rules: Rules, mesh: Mesh) -> dict[str, Any]:
    rule, view = rules.by_node[seed.node], rules.views[seed.node]
    sizes = factor_sizes(rule, view)
    inputs = [
        operand_sharding(operand, view.shape(i), seed.factors, sizes, rule.scaled)
        if not operand.mode and operand.dims and view.has(i)
        else None
        for i, operand in enumerate(rule.inputs)
    ]
    return _entry(rule, inputs, seed.factors, seed.out, seed.carried, mesh)


def _planned(node: ir.Node, plan: Plan) -> dict[str, Any]:
    found = plan.nodes[node.name or ""]
    out = [plan.resharded.get(v.name or "") for v in node.outputs]
    return _entry(found.rule, found.inputs, found.factors, out, found.carried, plan.mesh)


def _entry(
    rule: OpRule,
    inputs: Sequence[Sharding | None],
    factors: Factors,
    out: Sequence[Sharding | None],
    carried: Mapping[int, tuple[Atoms, str]],
    mesh: Mesh,
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "in": [
            _layout(sharding, mesh)
            for operand, sharding in zip(rule.inputs, inputs, strict=True)
            if sharding is not None and not operand.mode and operand.dims
        ]
    }
    read = {
        name
        for operand, sharding in zip(rule.inputs, inputs, strict=True)
        if sharding is not None and not operand.mode
        for names in operand.dims
        for name in names
    }
    made = {name: parts for name, parts in factors.items() if name not in read}
    if any(c.atoms for parts in made.values() for c in parts):
        entry["split"] = {name: _dim(parts, mesh) for name, parts in made.items()}
    if any(s is not None for s in out):
        entry["out"] = [None if s is None else _layout(s, mesh) for s in out]
    if carried:
        atoms, reduction = next(iter(carried.values()))
        axes = mesh.describe(atoms).split(".")
        entry["partial"] = {"operands": sorted(carried), "axes": axes}
        if reduction != "sum":
            entry["partial"]["reduction"] = reduction
    return entry


def _layout(sharding: Sharding, mesh: Mesh) -> list[Any]:
    return [_dim(dim, mesh) for dim in sharding.dims]


def _dim(dim: DimSharding, mesh: Mesh) -> Any:
    if not any(c.atoms for c in dim):
        return None
    if len(dim) == 1:
        axes = mesh.describe(dim[0].atoms).split(".")
        return axes[0] if len(axes) == 1 else axes
    parts = (
        dim_str(c.size).replace(" ", "") + (f":{mesh.describe(c.atoms)}" if c.atoms else "")
        for c in dim
    )
    return f"({' '.join(parts)})"
