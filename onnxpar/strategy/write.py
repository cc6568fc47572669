"""What a search decided, as a strategy file that says the same."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from onnxpar.analysis.optimizer_parallel import NOT_PARALLEL, OptimizerParallel
from onnxpar.analysis.plan import factor_sizes, operand_sharding
from onnxpar.analysis.propagate import Rules
from onnxpar.analysis.seeds import NodeSeed, Seeds
from onnxpar.mesh import Mesh
from onnxpar.sharding import DimSharding, Sharding
from onnxpar.symbols import Symbol, dim_str


def strategy_data(
    seeds: Seeds,
    rules: Rules,
    symbols: Mapping[str, Symbol],
    parallel: OptimizerParallel = NOT_PARALLEL,
) -> dict[str, Any]:
    """Returns the content of a strategy file from which the same plan follows.

    Args:
        seeds: Every node's strategy, on a mesh whose axes have names.
        rules: The rules of the nodes.
        symbols: Constraints on symbols, kept.
        parallel: What replicas of a parameter share in training, kept.
    """
    mesh = seeds.mesh
    data: dict[str, Any] = {"mesh": dict(mesh.axes)}
    if symbols:
        data["symbols"] = {name: symbol_data(symbol) for name, symbol in symbols.items()}
    data["dataset"] = {name: _layout(s, mesh) for name, s in seeds.inputs.items()}
    if seeds.parameters:
        data["parameters"] = {name: _layout(s, mesh) for name, s in seeds.parameters.items()}
    data["parameter_axes"] = []
    data["nodes"] = {name: _node(seed, rules, mesh) for name, seed in seeds.nodes.items()}
    data["rest"] = seeds.rest
    if parallel.level:
        data["optimizer_parallel"] = {k: v for k, v in asdict(parallel).items() if v is not None}
    return data


def write_strategy(data: Mapping[str, Any], head: str = "") -> str:
    """Returns the content of a strategy file as YAML, after comment lines that say `head`."""
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    text = yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=1 << 20
    )
    return "\n".join([*lines, text])


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes None as `~`, as the documentation does; in C where PyYAML was built with it."""


_Dumper.add_representer(
    type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "~")
)


def symbol_data(symbol: Symbol) -> dict[str, Any]:
    """Returns the constraints of a symbol that are not the default."""
    default = Symbol()
    return {
        name: getattr(symbol, name)
        for name in Symbol.__dataclass_fields__
        if getattr(symbol, name) != getattr(default, name)
    }


def _node(seed: NodeSeed, rules: Rules, mesh: Mesh) -> dict[str, Any]:
    rule, view = rules.rules[seed.node], rules.views[seed.node]
    sizes = factor_sizes(rule, view)
    entry: dict[str, Any] = {
        "in": [
            _layout(
                operand_sharding(operand, view.shape(i), seed.factors, sizes, rule.scaled), mesh
            )
            for i, operand in enumerate(rule.inputs)
            if not operand.mode and operand.dims and view.has(i)
        ]
    }
    if any(s is not None for s in seed.out):
        entry["out"] = [None if s is None else _layout(s, mesh) for s in seed.out]
    if seed.carried:
        atoms = next(iter(seed.carried.values()))[0]
        axes = mesh.describe(atoms).split(".")
        entry["partial"] = {"operands": sorted(seed.carried), "axes": axes}
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
