"""What a rank runs, holds and waits for, from the graphs of a directory.

Times are those of the cost model at some sizes of each symbol. They are the times of the nodes of a
rank's graph, with local shapes, so they include what partitioning added. Memory is given as the
lifetimes of values, with sizes as formulas, so that the page can compute it at other sizes.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from os.path import isfile
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxpar.core.machine import Machine
from onnxpar.core.mesh import Mesh
from onnxpar.core.symbols import Dim, SymbolTable, as_dim, dim_text
from onnxpar.core.symbols.expressions import count_str
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.live_memory import MemoryStep, lifetimes
from onnxpar.cost.local_nodes import LocalNodes
from onnxpar.cost.timeline import Transfer, elapsed
from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from onnxpar.partition.program_memory import LocalSizes, memory_steps
from onnxpar.report.read_directory import read_graph
from onnxpar.report.simple_graph import owner_of
from onnxpar.report.size_grid import SizeGrid
from onnxpar.report.tables import Size, Tables
from onnxpar_format.manifest import StateKind
from onnxpar_format.texts import whole

Json = dict[str, Any]


def rank_programs(
    directory: Path,
    manifest: Json,
    programs: Mapping[str, Json],
    tables: Tables,
    machine: Machine,
    grid: SizeGrid,
    registry: Registry = REGISTRY,
) -> list[Json]:
    """Returns each program of each stage, as the first rank runs it whose graph is there.

    Keys: `name`; `of`, the program of the report to whose nodes its nodes belong; `stage`, `rank`;
    `keeps`, whether its `handed` values wait for a backward pass;
    `nodes`, with `name`, `op`, `owner` (the number of the node in `of`, or -1) and `seconds`;
    `untimed`, the nodes whose time is not known and counts 0, since only a run shows the sizes;
    `transfers`, in the order in which they are ready, with `op`, `over`, `node`, `ready`, `needed`
    (numbers of nodes), `overlaps`, `seconds` and `bytes`; `apart`, collectives that run behind
    another program;
    `end`, the program's seconds;
    `values`, `[name, size, first node, last node]`; `work`, `[node, bytes]` of kernels that need
    memory while they run, at the sizes that are shown first; `bound`, `[name, kind, size]` of what
    is in memory before and after; `handed`, the values that other programs read; and `unknown`, the
    values whose size only a run shows.

    Args:
        directory: The directory.
        manifest: Its manifest.
        programs: The reports of its programs, by name.
        tables: Receives formulas, times and texts.
        machine: The machine whose times are predicted.
        grid: The sizes at which they are.
        registry: The table of operators.

    Raises:
        DirectoryError: A graph cannot be read.
    """
    found = []
    unsplit = {
        part: name
        for name, stages in manifest.get("pipeline", {}).get("programs", {}).items()
        for stage in stages
        for part in stage.values()
        if part is not None
    }
    kept = {
        stage["forward"]
        for stages in manifest.get("pipeline", {}).get("programs", {}).values()
        for stage in stages
        if stage.get("backward")
    }
    axes = manifest["mesh"]["axes"]
    mesh = Mesh(tuple((name, size) for name, size in axes), tuple(manifest["mesh"]["atoms"]))
    costs = [CostModel(machine, mesh, tables.symbols, sizes) for sizes in grid.points]
    each = manifest["devices"] // manifest.get("pipeline", {}).get("stages", 1)
    for name, entry in manifest["programs"].items():
        rank = next((r for r, file in enumerate(entry["files"] or ()) if file), None)
        # Unlike Path.is_file, this has an answer for a name that is too long.
        if rank is None or not isfile(directory / entry["files"][rank]):
            continue
        model = read_graph(directory / entry["files"][rank])
        of = name if name in programs else unsplit.get(name, name)
        rows = programs.get(of, {}).get("nodes", ())
        owners = {row["name"]: number for number, row in enumerate(rows)}
        reading = _Reading(manifest, entry, model, tables, costs, grid.shown, registry)
        data = {"name": name, "of": of, "stage": rank // each, "rank": rank, "keeps": name in kept}
        found.append(data | reading.times(owners) | reading.memory())
    return found


class _Reading:
    def __init__(
        self,
        manifest: Json,
        entry: Json,
        model: ir.Model,
        tables: Tables,
        costs: Sequence[CostModel],
        shown: int,
        registry: Registry,
    ) -> None:
        self.manifest, self.entry, self.model, self.tables = manifest, entry, model, tables
        self.registry, self.costs, self.shown = registry, costs, shown
        self.nodes = list(model.graph)
        self.table = tables.symbols
        given = [*model.graph.inputs, *model.graph.initializers.values()]
        opsets = model.opset_imports
        self.prices = LocalNodes.of(self.nodes, given, self.table, opsets, registry, costs)
        self.sizes = LocalSizes(self.table, dict(costs[shown].sizes))

    # -- times -----------------------------------------------------------------------------------

    def times(self, owners: Mapping[str, int]) -> Json:
        sent: dict[str, list[Json]] = {}
        for item in self.entry["collectives"]:
            sent.setdefault(item["node"], []).append(item)
        known = [self.prices.seconds(node) for node in self.nodes]
        untimed = [node for node, time in zip(self.nodes, known, strict=True) if time is None]
        nothing = (0.0,) * len(self.costs)
        seconds = [time or nothing for time in known]
        # The runtime begins transfers in the order in which they are ready.
        transfers = sorted(self._transfers(sent), key=lambda t: t["ready"])
        apart = [
            {
                **self._kind(item),
                "node": self.tables.text(item["node"]),
                "value": self.tables.text(item["value"]),
                "seconds": self.tables.time(self._sending([item])),
                "overlaps": self._overlaps(item["atoms"]),
                "behind": item.get("started_in") or item.get("finished_in"),
            }
            for item in self.entry["collectives"]
            if item.get("started_in") or item.get("finished_in")
        ]
        return {
            "nodes": [
                {
                    "name": self.tables.text(node.name or ""),
                    "op": self.tables.text(node.op_type),
                    "owner": owners.get(owner_of(node.name or "", owners), -1),
                    "seconds": self.tables.time(time),
                }
                for node, time in zip(self.nodes, seconds, strict=True)
            ],
            "untimed": [self.tables.text(node.name or "") for node in untimed],
            "transfers": [t | {"seconds": self.tables.time(t["seconds"])} for t in transfers],
            "apart": apart,
            "end": self.tables.time(
                [_end(seconds, transfers, point) for point in range(len(self.costs))]
            ),
        }

    def _transfers(self, sent: Mapping[str, list[Json]]) -> Iterator[Json]:
        """Yields the collectives of the program, with their seconds at each point."""
        waits: dict[ir.Node, int] = {}
        for number, node in enumerate(self.nodes):
            started = node.inputs[0].producer() if node.inputs and node.inputs[0] else None
            # The wait for a collective in the background takes its result and its operand.
            if started is not None and node.domain == DOMAIN and started.name in sent:
                pair = (started.outputs[0], started.inputs[0])
                if tuple(node.inputs[:2]) == pair:
                    waits.setdefault(started, number)
        for number, node in enumerate(self.nodes):
            items = sent.get(node.name or "", [])
            items = [i for i in items if not i.get("started_in") and not i.get("finished_in")]
            if not items:
                continue
            yield {
                **self._kind(items[0]),
                "node": number,
                "ready": number,
                "needed": waits.get(node, number),
                "overlaps": self._overlaps(items[0]["atoms"]),
                "seconds": self._sending(items),
                "bytes": [self.tables.size(_number(item["bytes"])) for item in items],
            }

    def _kind(self, item: Json) -> Json:
        return {"op": item["op"], "over": self.costs[0].mesh.describe(item["atoms"])}

    def _overlaps(self, atoms: Sequence[int]) -> bool:
        """Whether a device computes while it communicates over these atoms."""
        cost = self.costs[0]
        return bool(atoms) and cost.machine.link(cost.mesh, tuple(atoms)).overlaps

    def _sending(self, items: list[Json]) -> list[float]:
        """Seconds of one call at each point."""
        atoms = tuple(items[0]["atoms"])
        sizes = [as_dim(_number(item["bytes"])) for item in items]
        found = []
        for cost in self.costs:
            moved = sum(map(cost.value, sizes))
            if atoms:
                found.append(cost.call(items[0]["op"], atoms, moved))
            else:
                # Between stages: one message to the counterparts.
                link = cost.machine.links[-1]
                found.append(link.latency + moved / link.bandwidth)
        return found

    # -- memory ----------------------------------------------------------------------------------

    def memory(self) -> Json:
        formulas = _Formulas(self.table, self.tables, self.sizes)
        steps = list(memory_steps(self.nodes, formulas, self.registry))
        handed = tuple(v["name"] for v in self.entry.get("handed_out", ()))
        own = {v.name or "" for v in self.model.graph.outputs} - set(handed)
        values = lifetimes([*steps, MemoryStep("", handed, (), 0)], own)
        last = len(steps) - 1
        return {
            "values": [
                [self.tables.text(v.name), formulas.places[v.bytes], v.first, min(v.last, last)]
                for v in values
                if formulas.places[v.bytes] != 0
            ],
            "work": [[number, step.work] for number, step in enumerate(steps) if step.work],
            "bound": list(self._bound(formulas)),
            "handed": [self.tables.text(name) for name in handed],
            "unknown": list(dict.fromkeys(formulas.unknown)),
        }

    def _bound(self, formulas: "_Formulas") -> Iterator[list[Any]]:
        states = set(self.entry.get("state_inputs", ()))
        # The runtime has the sums of gradients in the memory of the gradients.
        states_of = self.manifest.get("training", {}).get("states", ())
        sums = {s["name"] for s in states_of if s["kind"] == StateKind.MICRO_GRADIENT}
        kept = {o["name"]: o["state"] for o in self.entry.get("state_outputs", ())}
        handed = {v["name"] for v in self.entry.get("handed_in", ())}
        handed |= {v["name"] for v in self.entry.get("handed_out", ())}
        for value in self.model.graph.initializers.values():
            yield [self.tables.text(value.name or ""), "weight", formulas.size(value)]
        known: set[str] = set()
        for value in self.model.graph.inputs:
            name = value.name or ""
            if name in states:
                known.add(name)
                if name not in sums:
                    yield [self.tables.text(name), "state", formulas.size(value)]
            elif name not in handed:
                yield [self.tables.text(name), "input", formulas.size(value)]
        for value in self.model.graph.outputs:
            name = value.name or ""
            if name in kept and kept[name] not in known:
                yield [self.tables.text(kept[name]), "state", formulas.size(value)]
            elif name not in kept and name not in handed:
                yield [self.tables.text(name), "output", formulas.size(value)]


class _Formulas(LocalSizes):
    """Sizes whose bytes are the places of formulas in `places`."""

    def __init__(self, table: SymbolTable, tables: Tables, numbers: LocalSizes) -> None:
        super().__init__(table, {})
        self._tables, self._numbers = tables, numbers
        self._known: dict[tuple[Any, ...], int] = {}
        self.places: list[Size] = []

    def shape(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """Returns the shape at the chosen sizes, for the memory that kernels need themselves."""
        return self._numbers.shape(value)

    def size(self, value: ir.Value) -> Size:
        """Returns the bytes of a value for a page."""
        return self.places[self.bytes(value)]

    def bytes(self, value: ir.Value) -> int:
        """Returns the place of the bytes of a value."""
        dims = None if value.shape is None else [_size_of(dim) for dim in value.shape]
        if dims is None or value.dtype is None or None in dims:
            self.unknown.append(value.name or "")
            key: tuple[Any, ...] = ()
        else:
            key = (*dims, value.dtype)
        if key not in self._known:
            width = Fraction(key[-1].itemsize if key else 0)
            product: Dim = width.numerator
            for dim in key[:-1]:
                product = product * as_dim(dim)
            if width.denominator > 1:
                # Several elements are packed into a byte, and the last one may have room left.
                product = (product + width.denominator - 1) // width.denominator
            exact = count_str(product, dim_text)
            self._known[key] = len(self.places)
            self.places.append(self._tables.size(exact))
        return self._known[key]


def _size_of(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def _number(size: int | str) -> int | str:
    """Returns a size of a manifest as a number if it is one."""
    number = whole(size) if isinstance(size, str) else size
    return size if number is None else number


def _end(seconds: Sequence[Sequence[float]], transfers: Sequence[Json], point: int) -> float:
    """Returns the seconds of all nodes and transfers at a point."""
    row = [Transfer(t["seconds"][point], t["ready"], t["needed"], t["overlaps"]) for t in transfers]
    return elapsed([times[point] for times in seconds], row)
