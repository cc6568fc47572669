"""The exact search against trying every strategy of random programs.

What a strategy costs is added up here from the cost model alone, without the search's tables. A
case is one seed. `ONNXPAR_FUZZ_SEED` shifts the seeds, `ONNXPAR_FULL` runs many more of them.
"""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod

import onnx_ir as ir
import pytest
from random_programs import program

import onnxpar.analysis.search.flow as flow_module
from onnxpar.analysis.cost import CostModel
from onnxpar.analysis.search import eliminate
from onnxpar.analysis.search.find import Candidate, SearchSpec, find
from onnxpar.analysis.search.flow import Flow, Value, flow
from onnxpar.analysis.search.options import Option, options
from onnxpar.analysis.seeds import Seeds
from onnxpar.machine import Link, Machine
from onnxpar.mesh import Mesh
from onnxpar.pipeline import Analysed, analyse
from onnxpar.sharding import Sharding

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
FULL = bool(os.environ.get("ONNXPAR_FULL"))
CASES = 200 if FULL else 20
MOST = 20_000 if FULL else 1500
"""Strategies of the largest program that is tried."""
SIZES = {"batch": 96, "seq": 32}


@dataclass(frozen=True)
class Case:
    """A program, a machine and a mesh, and every option of every node."""

    program: Analysed
    flow: Flow
    cost: CostModel
    found: tuple[tuple[Option, ...], ...]

    def search(self, memory: int | None = None, algorithm: str = "ilp") -> Candidate:
        """What is found."""
        spec = SearchSpec(self.cost.machine, algorithm, memory=memory, sizes=SIZES, gap=0.0)
        model, env, rules = self.program.model, self.program.env, self.program.rules
        seeds = Seeds(self.cost.mesh)
        return find(model, env, rules, seeds, spec, named=True, free_inputs=True).chosen

    def everything(self) -> Iterator[tuple[float, int]]:
        """Seconds and bytes of every strategy."""
        work = [
            [self._work(item, option) for option in found]
            for item, found in zip(self.flow.items, self.found, strict=True)
        ]
        sources = [v for v in self.flow.values if v.producer is None]
        made = [v for v in self.flow.values if v.producer is not None]
        layouts = [self._layouts(v) for v in sources]
        for choice in product(*(range(len(f)) for f in self.found)):
            chosen = [f[c] for f, c in zip(self.found, choice, strict=True)]
            seconds = sum(w[c] for w, c in zip(work, choice, strict=True))
            seconds += sum(self._moving(v, chosen) for v in made)
            if seconds == inf:
                continue
            wanted = [self._wanted(v, chosen) for v in sources]
            pairs = zip(wanted, layouts, strict=True)
            for lying in product(*(w if len(w) == 1 else a for w, a in pairs)):
                more = sum(
                    self.cost.reshard(s, want, v.itemsize)
                    for v, s, wants in zip(sources, lying, wanted, strict=True)
                    for want in wants
                    if s is not None
                )
                held = sum(
                    self.cost.elements(s) * v.itemsize
                    for v, s in zip(sources, lying, strict=True)
                    if v.parameter and s is not None
                )
                yield seconds + more, held

    def _work(self, item: flow_module.Item, option: Option) -> float:
        work = self.cost.node(item.rule, item.view, option.plan, item.cost)
        return work.seconds + work.special

    def _wanted(self, value: Value, chosen: Sequence[Option]) -> list[Sharding]:
        """How each reader wants a value."""
        wanted = (chosen[u.item].plan.inputs[u.operand] for u in value.uses)
        return [self.cost.fixed(s) for s in wanted if s is not None]

    def _layouts(self, value: Value) -> tuple[Sharding | None, ...]:
        """How an input or a parameter may lie: as some reader might want it."""
        wanted = (o.plan.inputs[u.operand] for u in value.uses for o in self.found[u.item])
        layouts = (self.cost.fixed(s).with_partial(()) for s in wanted if s is not None)
        return tuple(dict.fromkeys(layouts)) or (None,)

    def _moving(self, value: Value, chosen: Sequence[Option]) -> float:
        """Seconds to bring a value to its readers, who share one version of it at best."""
        assert value.producer is not None
        item, output = value.producer
        source = self.cost.fixed(chosen[item].plan.outputs[output])
        wanted = self._wanted(value, chosen)

        def move(target: Sharding) -> float:
            return self.cost.reshard(source, target, value.itemsize)

        leaving = move(source.with_partial(())) if value.leaves else 0.0
        each = sum(move(w) for w in wanted)
        shared = (move(k) + sum(move(w) for w in wanted if w != k) for k in wanted)
        return leaving + min((each, *shared))


def case(seed: int) -> Case | None:
    """The case of a seed; None where there is little to choose, or more than can be tried."""
    draw = random.Random(f"brute force {seed}")
    analysed = analyse(ir.from_proto(program(seed, draw.randint(2, 4))), {})
    mesh = Mesh.of(draw.choice([{"x": 2}, {"x": 4}, {"x": 3}, {"x": 2, "y": 2}]))
    # From links that everything is cheap over to links that nothing should be moved over.
    link = Link(
        0, 10 ** draw.uniform(7, 10), 10 ** draw.uniform(-9, -6), 10 ** draw.uniform(-9, -6)
    )
    rate = 10 ** draw.uniform(8, 10)
    machine = Machine("random", {"float32": rate, "float64": rate / 2}, 1e9, 1 << 40, 1e-9, (link,))
    cost = CostModel(machine, mesh, analysed.env.table, SIZES)
    seen = flow(analysed.model, analysed.env, analysed.rules)
    axes = [mesh.axis_atoms(name) for name, _ in mesh.axes]
    found = tuple(options(item, axes, cost) for item in seen.items)
    made = Case(analysed, seen, cost, found)
    several = [v for v in seen.values if v.producer is None and len(v.uses) > 1]
    count = prod(len(f) for f in found) * prod(len(made._layouts(v)) for v in several)
    return made if sum(len(f) > 1 for f in found) > 1 and count <= MOST else None


@pytest.fixture(autouse=True)
def _everything_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are small; otherwise most would be computed whole without any choice."""
    monkeypatch.setattr(flow_module, "WEIGHT", 1)


@pytest.mark.timeout(1200 if FULL else 120)
@pytest.mark.parametrize("entries", [eliminate.EASY_ENTRIES, 16])
def test_nothing_is_better_than_what_is_found(
    monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    """By elimination alone, and where bounds exclude what small tables do not decide."""
    monkeypatch.setattr(eliminate, "EASY_ENTRIES", entries)
    print(f"seeds from {SEED}")
    draw = random.Random(f"limits {SEED}")
    done = limited = changed = 0
    seed = SEED
    while done < CASES:
        seed += 1
        one = case(seed)
        if one is None:
            continue
        done += 1
        tried = list(one.everything())
        least = min(seconds for seconds, _ in tried)
        free = one.search()
        label = f"seed {seed}"
        assert free.seconds == pytest.approx(least, rel=1e-9), label
        assert free.bound == pytest.approx(least, rel=1e-9), label
        assert one.search(algorithm="recursive").seconds >= least * (1 - 1e-9), label
        memories = sorted({held for _, held in tried})
        if len(memories) < 2:
            continue
        limited += 1
        limit = draw.choice(memories[:-1])
        expected = min(seconds for seconds, held in tried if held <= limit)
        bounded = one.search(limit)
        assert bounded.memory <= limit, label
        assert bounded.seconds == pytest.approx(expected, rel=1e-6), label
        assert bounded.bound <= bounded.seconds * (1 + 1e-9), label
        changed += bounded.seconds > free.seconds * (1 + 1e-9)
    print(f"{done} programs, {limited} under a limit, which changed the plan of {changed}")
    assert limited >= CASES // 8
    assert changed > 0
