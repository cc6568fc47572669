"""What `onnxpar inspect` shows of a model before and after partitioning, as plain data."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm, prod
from typing import Any

import onnx_ir as ir

from onnxpar.core.errors import DirectoryError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.rule import OpRule, format_rule
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Dim, SymbolTable, dim_symbol, dim_text, symbols_of
from onnxpar.core.symbols.expressions import count_str
from onnxpar.cost.growth import Sizes, grows_faster, large_size
from onnxpar.emit.weight_sources import check_tensors
from onnxpar.facts.host_nodes import size_nodes
from onnxpar.facts.program import Program
from onnxpar.graph.local_builder import Collective
from onnxpar.graph.padding_masks import PADDING
from onnxpar.graph.pipeline_places import virtual_stage_of
from onnxpar.graph.plan import NodePlan, factor_sizes
from onnxpar.graph.shapes import ShapeEnv, shapes
from onnxpar.ops.node_rules import Rules
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.propagation.conflicts import Conflict
from onnxpar.report.stage_data import bytes_of, local_bytes, stage_data, total_bytes
from onnxpar.resharding.routes import OPERATORS

Json = dict[str, Any]

OF_A_PROGRAM = (
    "nodes",
    "collectives",
    "conflicts",
    "replicated",
    "states",
    "supplied",
    "totals",
    "stage_totals",
    "transfers",
    "layouts",
)
"""Keys of a report that describe one program; the others describe the directory."""

SMALL = 1024
"""Up to this many elements, an initializer of integers counts as a shape or an axis."""


def directory_data(
    programs: Sequence[PartitionedModel], split: Sequence[PartitionedModel] = ()
) -> Json:
    """Returns the manifest's "report": the data of the first program, and of the others by name.

    Keys: those of `inspect_data`; `program`, the name of the first program; and `programs`, which
    has the keys `OF_A_PROGRAM` for each other program.

    Args:
        programs: All programs of a directory; the first one is shown by default.
        split: In a pipeline, the programs that run in place of these.
    """
    first, *others = programs
    return {
        **inspect_data(first, split),
        "program": first.program,
        "programs": {
            other.program: {key: data[key] for key in OF_A_PROGRAM}
            for other in others
            for data in [inspect_data(other, split)]
        },
    }


def inspect_data(parted: PartitionedModel, split: Sequence[PartitionedModel] = ()) -> Json:
    """Returns how one program was partitioned.

    Sizes are integers, or text in the model's symbols. Shapes are global, in elements; a
    `local_shape` is that of every device's shard, padding included. `strategy` has the number of
    shards of each dim, and `sharding` the mesh axes (`2@4`: two unnamed devices that are 4 apart).
    Both are None for an operand that is absent or taken in its current layout. `partial` is None,
    or the reduction that has not been done yet: `{"reduction", "over", "atoms"}`. `bytes` are
    those that one device sends. A node's `rule` is its sharding rule, and `reason` why it is
    replicated, or empty; `computes_sizes` says that it only computes sizes for kernels. `layouts`
    has for each `sharding` the components of each dim, major first: the size (None if the dim has
    one component), and the atoms that shard it.

    `conflicts` are the reshards between neighbours with different layouts, the most expensive
    first: `cost` is the number of bytes that the reader's layout sends at typical sizes, and
    `cost_in_current_layout` the number if the reader followed the value, or None if it cannot.
    `node` is empty if the value is an output of the model.

    Keys: `mesh` (of one pipeline stage), `devices`, `stages`, `symbols`, `nodes`, `collectives`,
    `conflicts`, `replicated`, `states` (of a forward program: outputs that are inputs of the next
    run), `supplied` (inputs that another program computes), `totals`, `layouts`, and those of
    `onnxpar.report.stage_data.stage_data`.

    Args:
        parted: The program of all ranks.
        split: In a pipeline, the programs that run in its place.
    """
    texts = _Texts(parted.plan.mesh, shapes(parted.source, parted.builder.table))
    replicated = [
        {"name": name, "op_type": op_type, "reason": reason}
        for name, op_type, reason in parted.replicated
    ]
    nodes, sizes = [], size_nodes(parted.source.graph, parted.registry)
    for node in parted.source.graph:
        found = parted.plan.nodes.get(node.name or "")
        if found is not None:
            item = _node(node, found, parted.plan.resharded, texts, parted.stages)
            nodes.append(item | {"computes_sizes": node in sizes})
    mesh = parted.plan.mesh
    of_stages = stage_data(parted, split)
    return {
        "mesh": {"axes": dict(mesh.axes), "atoms": list(mesh.atoms)},
        "devices": mesh.size * parted.stages,
        "stages": parted.stages,
        "symbols": {name: str(symbol) for name, symbol in parted.symbols.items()},
        "nodes": nodes,
        "collectives": [texts.collective(c) for c in parted.builder.collectives],
        "conflicts": [
            texts.conflict(c) for c in sorted(parted.conflicts, key=lambda c: -c.typical)
        ],
        "replicated": replicated,
        "states": [
            {**vars(state), "sharding": parted.plan.inputs[state.input].describe(mesh)}
            for state in parted.carried
        ],
        "supplied": [
            {**vars(pair), "sharding": parted.plan.inputs[pair.input].describe(mesh)}
            for pair in parted.supplied
        ],
        "totals": _totals(parted, nodes, replicated, of_stages["stage_totals"]),
        "layouts": texts.drawn,
        **of_stages,
    }


@dataclass(frozen=True)
class _Texts:
    """Layouts, rules and groups as text, each made once: a deep model has few different ones."""

    mesh: Mesh
    env: ShapeEnv
    drawn: dict[str, list[list[list[Any]]]] = field(default_factory=dict)
    _rules: dict[OpRule, str] = field(default_factory=dict)
    _layouts: dict[Sharding, Json] = field(default_factory=dict)
    _shapes: dict[tuple[Dim, ...], list[int | str]] = field(default_factory=dict)
    _groups: dict[Atoms, list[list[int]]] = field(default_factory=dict)

    def operand(self, value: ir.Value | None, sharding: Sharding | None) -> Json:
        name = value.name or "" if value is not None else ""
        shape = self.env.shapes.get(name)
        layout = dict.fromkeys(("local_shape", "strategy", "sharding", "partial"))
        # An output of unknown rank has a sharding without dims; its layout cannot be shown.
        if sharding is not None and shape is not None and len(shape) == sharding.rank:
            layout = self.layout(sharding)
        return {"name": name, "shape": None if shape is None else self.sizes(shape), **layout}

    def layout(self, sharding: Sharding) -> Json:
        found = self._layouts.get(sharding)
        if found is None:
            mesh, partial = self.mesh, None
            if sharding.partial:
                over = mesh.describe(sharding.partial)
                atoms = list(sharding.partial)
                partial = {"reduction": sharding.reduction, "over": over, "atoms": atoms}
            text = sharding.with_partial(()).describe(mesh)
            self.drawn[text] = [
                [[None if len(dim) == 1 else self.sizes((c.size,))[0], list(c.atoms)] for c in dim]
                for dim in sharding.dims
            ]
            found = self._layouts[sharding] = {
                "local_shape": self.sizes(sharding.local_shape(mesh, self.env.table)),
                "strategy": list(sharding.strategy(mesh)),
                "sharding": text,
                "partial": partial,
            }
        return found

    def rule(self, rule: OpRule) -> str:
        found = self._rules.get(rule)
        if found is None:
            found = self._rules[rule] = format_rule(rule)
        return found

    def sizes(self, shape: tuple[Dim, ...]) -> list[int | str]:
        found = self._shapes.get(shape)
        if found is None:
            found = self._shapes[shape] = _sizes(shape)
        return found

    def collective(self, collective: Collective) -> Json:
        atoms = collective.atoms
        if atoms not in self._groups:
            self._groups[atoms] = [list(group) for group in self.mesh.groups(atoms)]
        return {
            "op": collective.op,
            "node": collective.node,
            "value": collective.value,
            "over": self.mesh.describe(atoms),
            "groups": self._groups[atoms],
            "bytes": count_str(collective.bytes, dim_text),
            "reason": collective.reason,
            "before": collective.before,
            "after": collective.after,
            "behind": collective.behind or None,
        }

    def conflict(self, conflict: Conflict) -> Json:
        return {
            "node": conflict.node,
            "operand": conflict.operand,
            "value": conflict.value,
            "made_by": conflict.maker,
            "from": conflict.held.describe(self.mesh),
            "to": conflict.wanted.describe(self.mesh),
            "steps": [OPERATORS[kind] for kind in conflict.steps if kind in OPERATORS],
            "bytes": count_str(conflict.bytes, dim_text),
            "chosen": conflict.why,
            "cost": conflict.cost,
            "cost_in_current_layout": conflict.other,
            "reason": conflict.reason,
        }


def _node(
    node: ir.Node, plan: NodePlan, resharded: Mapping[str, Sharding], texts: _Texts, stages: int
) -> Json:
    outputs = []
    for value, sharding in zip(node.outputs, plan.outputs, strict=True):
        item = texts.operand(value, sharding)
        after = resharded.get(value.name or "")
        if after is not None:
            item["resharded"] = texts.operand(value, after)
        outputs.append(item)
    return {
        "name": node.name or "",
        "op_type": node.op_type,
        "stage": virtual_stage_of(node) % stages,
        "pinned": plan.pinned,
        "rule": texts.rule(plan.rule),
        "reason": plan.reason,
        "inputs": [
            texts.operand(value, sharding)
            for value, sharding in zip(node.inputs, plan.inputs, strict=True)
        ],
        "outputs": outputs,
    }


def _sizes(shape: Sequence[Dim]) -> list[int | str]:
    return [size if isinstance(size, int) else dim_text(size) for size in shape]


def is_sharded(node: Json) -> bool:
    """Whether some operand or result of a node of a report is sharded or a partial result."""
    operands = [*node["inputs"], *node["outputs"]]
    return any(o["partial"] or prod(o["strategy"] or ()) > 1 for o in operands)


def _totals(
    parted: PartitionedModel,
    nodes: Sequence[Json],
    replicated: Sequence[Json],
    stages: Sequence[Json],
) -> Json:
    """Sums of a program. In a pipeline, the fullest stage gives the bytes of a device.

    A node that is there for each of two micro-batches counts twice. Such a program also has `once`,
    the number of the other nodes.
    """
    collectives, twice = parted.builder.collectives, parted.twice

    def times(names: Iterable[str]) -> int:
        return sum(2 if name in twice else 1 for name in names)

    conflicts = [c for c in parted.conflicts for _ in range(times([c.node]))]
    # A parameter that several stages hold counts once.
    sizes = {
        p.name: bytes_of(p.source.dtype, map(int, p.sharding.shape)) for p in parted.parameters
    }
    return {
        "nodes": times(node["name"] for node in nodes),
        "sharded": times(node["name"] for node in nodes if is_sharded(node)),
        "replicated": times(item["name"] for item in replicated),
        **({"once": sum(node["name"] not in twice for node in nodes)} if twice else {}),
        "collectives": len(collectives),
        "calls": len({c.node for c in collectives}),
        "collectives_by_op": dict(sorted(Counter(c.op for c in collectives).items())),
        "bytes": total_bytes(c.bytes for c in collectives),
        "grows_faster_than": _growth(collectives, parted.builder.table),
        "padding": _padding(parted),
        "conflicts": len(conflicts),
        "conflict_bytes": total_bytes(c.bytes for c in conflicts),
        "parameters": len(sizes),
        "parameter_bytes": sum(sizes.values()),
        "parameter_bytes_per_device": max(
            (stage["parameter_bytes_per_device"] for stage in stages),
            default=local_bytes(parted.parameters, parted.plan.mesh),
        ),
    }


def _padding(parted: PartitionedModel) -> Json:
    """For each symbol that need not be divisible: how many nodes set padding, and the divisor.

    With this divisor, a multiple of the one that is known, they would not be needed.
    """
    found: dict[str, list[int]] = {}
    table = parted.builder.table
    for node in parted.builder.nodes:
        component = node.meta.get(PADDING)
        if component is not None and str(component.size) in table:
            divisor = parted.plan.mesh.count(component.atoms)
            found.setdefault(str(component.size), []).append(divisor)
    return {
        name: {
            "divisor": lcm(*divisors, max(table.facts(dim_symbol(name)).divisor, 1)),
            "nodes": len(divisors),
        }
        for name, divisors in sorted(found.items())
    }


def _growth(collectives: Sequence[Collective], table: SymbolTable) -> list[str]:
    """The symbols with which the bytes of all collectives grow faster than in proportion."""
    counts = Counter(c.bytes for c in collectives)
    names = sorted({name for size in counts for name in symbols_of(size)})

    def sent(sizes: Sizes) -> float:
        return sum(n * table.typical(size, sizes) for size, n in counts.items())

    return list(grows_faster(sent, table, {n: large_size(table.symbol(n)) for n in names}))


def model_data(program: Program) -> Json:
    """Returns what `onnxpar inspect MODEL --json` prints: what a strategy can address.

    Keys: `inputs`, `outputs`, `parameters` (`name`, `dtype`, `shape`; without small integers and
    scalars), `symbols`, and `nodes` with the names of `inputs` and `outputs`, `rule`, `operands`
    (names of the operands that take an entry of a strategy), `factors` (name, size, kind),
    `reason` (why it cannot be sharded) and `computes_sizes` (whether it only computes sizes for
    kernels); and `notices`, the first weight whose data is not there, if any is.
    """
    graph, env, rules = program.graph, program.env, program.rules
    sizes = size_nodes(graph, program.registry)
    return {
        "model": graph.name or "",
        "inputs": [_value(v, env) for v in graph.inputs],
        "outputs": [_value(v, env) for v in graph.outputs],
        "symbols": {name: str(symbol) for name, symbol in env.table.items()},
        "notices": _missing_data(graph),
        "parameters": [
            _value(v, env) for v in graph.initializers.values() if _is_worth_sharding(v)
        ],
        "nodes": [_rule(node, rules) | {"computes_sizes": node in sizes} for node in graph],
    }


def _missing_data(graph: ir.Graph) -> list[str]:
    weights = graph.initializers.items()
    try:
        check_tensors((name, v.const_value) for name, v in weights if v.const_value is not None)
    except DirectoryError as error:
        return [f"{error}; `onnxpar shard` needs it"]
    return []


def _is_worth_sharding(value: ir.Value) -> bool:
    """Whether an initializer is large enough: shapes, axes and scalars of the graph are not."""
    if value.shape is None or value.dtype is None:
        return True
    large = value.shape.is_dynamic() or prod(value.shape.numpy()) > SMALL
    return large or (value.dtype.is_floating_point() and len(value.shape) > 0)


def _value(value: ir.Value, env: ShapeEnv) -> Json:
    shape = env.shapes.get(value.name or "")
    return {
        "name": value.name or "",
        "dtype": value.dtype.name.lower() if value.dtype is not None else None,
        "shape": None if shape is None else _sizes(shape),
    }


def _rule(node: ir.Node, rules: Rules) -> Json:
    name = node.name or ""
    rule, view = rules.by_node[name], rules.views[name]
    reason = rules.reasons.get(name, "")
    sizes: Mapping[str, Dim] = {} if reason else factor_sizes(rule, view)
    operands = [
        value.name or ""
        for index, (value, operand) in enumerate(zip(node.inputs, rule.inputs, strict=True))
        if value is not None and not operand.mode and operand.dims and view.has(index)
    ]
    return {
        "name": name,
        "op_type": node.op_type,
        "inputs": [value.name or "" if value is not None else "" for value in node.inputs],
        "outputs": [value.name or "" for value in node.outputs],
        "rule": format_rule(rule),
        "operands": operands,
        "factors": [
            {"name": factor, "size": _sizes([sizes[factor]])[0], "kind": kind}
            for factor, kind in rule.kinds.items()
            if factor in sizes
        ],
        "reason": reason,
    }
