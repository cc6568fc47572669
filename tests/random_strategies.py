"""Random strategies for any model, each from one seed."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import onnx_ir as ir

from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, Sharding
from onnxpar.facts.program import Program
from onnxpar.graph.plan import factor_sizes
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.strategy import Strategy, resolve

MESHES = (
    {"dp": 2},
    {"dp": 3},
    {"dp": 4},
    {"tp": 2},
    {"tp": 3},
    {"tp": 8},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 3},
    {"dp": 3, "tp": 2},
    {"dp": 2, "tp": 4},
    {"dp": 2, "tp": 2, "sp": 2},
    {"dp": 5},
    {"dp": 6},
    {"tp": 7},
)


def document(seed: int, inputs: Mapping[str, int]) -> dict[str, Any]:
    """A strategy of mesh axes alone, which every model can follow; `inputs` gives their ranks."""
    draw = random.Random(f"strategy {seed}")
    mesh = draw.choice(MESHES)
    data: dict[str, Any] = {"mesh": mesh}
    if draw.random() < 0.3:
        data["parameter_axes"] = draw.sample(list(mesh), draw.randint(0, len(mesh)))
    way = draw.randrange(4)
    if way == 0:
        data["dataset"] = "full_batch"
    elif way == 1:
        data["dataset"] = {n: _names(draw, list(mesh), rank) for n, rank in inputs.items()}
    if draw.random() < 0.15:
        data["rest"] = draw.choice(["data_parallel", "replicate"])
    return data


def seeds_of(analysed: Program, inputs: Iterable[ir.Value], seed: int) -> Seeds:
    """Returns the seeds of a random strategy for a program with these inputs."""
    ranks = {v.name or "": v.shape.rank() for v in inputs if v.shape}
    strategy = Strategy.from_dict(document(seed, ranks))
    return resolve(strategy, analysed)


def _names(draw: random.Random, axes: list[str], rank: int) -> list[Any]:
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw.sample(axes, draw.randint(0, len(axes))):
        draw.choice(dims).append(axis)
    return [d or None for d in dims]


def pinned(analysed: Program, seeds: Seeds, seed: int) -> Seeds:
    """The seeds with random splits of random nodes' factors, outputs and parameters."""
    draw = random.Random(f"pinned {seed}")
    mesh, share = seeds.mesh, draw.choice([0.1, 0.3, 0.6])
    nodes = {}
    for name, rule in analysed.rules.by_node.items():
        view = analysed.rules.views[name]
        if draw.random() > share or name in analysed.rules.reasons:
            continue
        sizes = factor_sizes(rule, view)
        places = [f for f in rule.splittable if f in sizes]
        if not places:
            continue
        atoms = _atoms(draw, mesh, len(places))
        factors = {f: (Component(sizes[f], a),) for f, a in zip(places, atoms, strict=True) if a}
        outs: list[Sharding | None] = []
        for operand, value in zip(rule.outputs, view.node.outputs, strict=True):
            # An optional result that is not there has neither name nor shape.
            shape = analysed.env.shapes.get(value.name or "", ())
            asked = draw.random() < 0.25 and not operand.mode and bool(value.name)
            outs.append(Sharding.of(shape, _atoms(draw, mesh, len(shape))) if asked else None)
        nodes[name] = NodeSeed(name, factors, tuple(outs) if any(outs) else (), "seed")
    parameters = {
        name: Sharding.of(analysed.env.shapes[name], _atoms(draw, mesh, value.shape.rank()))
        for name, value in analysed.model.graph.initializers.items()
        if name.startswith("w") and value.shape is not None and draw.random() < share
    }
    return Seeds(mesh, nodes, seeds.inputs, parameters, seeds.parameter_axes, seeds.rest)


def _atoms(draw: random.Random, mesh: Mesh, places: int) -> list[tuple[int, ...]]:
    """Gives some atoms of the mesh, in any order, to some of the places."""
    found: list[list[int]] = [[] for _ in range(places)]
    count = draw.randint(0, len(mesh.atoms))
    for atom in draw.sample(range(len(mesh.atoms)), count) if places else ():
        draw.choice(found).append(atom)
    return [tuple(atoms) for atoms in found]
