"""The strategy that was found, and why: what `onnxpar plan` shows."""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from onnxpar.autodiff.mixed_precision import COMPUTE_TYPES
from onnxpar.core.machine import Machine
from onnxpar.cost.price import InTurns, NodePrice
from onnxpar.facts.program import Program
from onnxpar.graph.plan import Plan
from onnxpar.search.configurations import Without
from onnxpar.search.find_plan import GAP, UNLIMITED, Candidate, Found
from onnxpar.search.rival_plans import FOUND, Objective, Way
from onnxpar.strategy.schema import SearchEntry
from onnxpar_format.texts import bytes_text, three_digits

AIMS = ("time with communication counted tenfold", "memory", "speed")
"""What each level of the objective seeks."""
EQUAL = 0.98
"""The lesser of two times is mentioned if it is less than this share of the other."""
STARTING = 0.5
"""Starting nodes is mentioned if it is this share of the time in which they compute."""
EXACT = 1e-4
"""A smaller gap is shown as none."""
HIDDEN = "hidden behind computing"
"""The row of communication that passes while something is computed: negative."""
REPLICATED = "replicated"
"""The row of nodes that every device computes."""
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class LayerRow:
    """A row of the table that says what a run or a micro-batch costs a device.

    Attributes:
        name: The common name of its nodes, with `*` for numbers that differ; or the name of work
            that belongs to no node.
        strategy: The layouts of their operands.
        local: The local shapes of a node's results.
        nodes: Number of nodes.
        computing: Seconds of computing.
        communication: Seconds of communication.
        made: Bytes of their results.
    """

    name: str
    strategy: str = ""
    local: tuple[tuple[int, ...], ...] = ()
    nodes: int = 0
    computing: float = 0.0
    communication: float = 0.0
    made: int = 0


@dataclass(frozen=True)
class FoundStrategy:
    """What `plan_strategy` found.

    Attributes:
        found: The search's result, or a preset, if the search found nothing better.
        plan: The plan of the complete program that follows from it.
        ways: That plan, then those found for other numbers of stages, then the presets.
        data: The content of a strategy file with this plan.
        machine: The machine to plan for.
        objective: How plans are compared.
        program: The program that was planned.
        without: If stages, micro-batches, optimizer parallel and recomputation were decided, too:
            what a step costs without each of these choices.
        choices: In the same case, the choices in words.
        types: If the type of products was decided: this type with the plan; then the other type, if
            it was tried, with the best plan that is known for it.
        in_turns: What a step costs whose micro-batches take turns, if they do; None also if it has
            stages.
    """

    found: Found
    plan: Plan
    ways: tuple[Way, ...]
    data: dict[str, Any]
    machine: Machine
    objective: Objective
    program: Program
    without: tuple[Without, ...] | None = None
    choices: str = ""
    types: tuple[tuple[str, Way], ...] = ()
    in_turns: InTurns | None = None

    @property
    def devices(self) -> int:
        """Number of devices of all stages together."""
        staged = self.ways[0].staged
        return self.plan.mesh.size * (staged.split.stages if staged is not None else 1)

    def layers(self) -> list[LayerRow]:
        """Returns a row for each layer, then rows for other work; they sum to the plan's seconds.

        Nodes belong to one layer if their names differ only in numbers and they are sharded alike.
        """
        best, plan = self.ways[0].price, self.plan
        assert best is not None
        groups: dict[tuple[str, str, object], list[NodePrice]] = {}
        replicated: list[NodePrice] = []
        for node in best.nodes:
            chosen = plan.nodes[node.name]
            if not chosen.factors and not node.moving:
                replicated.append(node)
                continue
            strategy = " ".join(
                s.describe(plan.mesh) for s in chosen.inputs if s is not None and s.rank
            )
            groups.setdefault((_DIGITS.sub("*", node.name), strategy, node.local), []).append(node)
        found = [
            _layer(_common([n.name for n in nodes]), strategy, nodes)
            for (_, strategy, _), nodes in groups.items()
        ]
        if replicated:
            found.append(replace(_layer(REPLICATED, "", replicated), local=()))
        rest = (
            LayerRow("outputs", communication=best.outputs),
            LayerRow("gradients", communication=best.gradients),
            LayerRow(HIDDEN, communication=-best.hidden),
            LayerRow("optimizer", computing=best.updating),
        )
        return [*found, *(row for row in rest if row.computing or row.communication)]

    def summary(self, entry: SearchEntry) -> str:
        """Returns two lines: how it was found, and what it costs."""
        best = self.ways[0]
        assert best.price is not None
        sizes = ", ".join(f"{n}={s}" for n, s in entry.sizes.items()) or "typical sizes"
        count = best.staged.split.stages if best.staged is not None else 1
        stages = f" in each of {count} stages" if count > 1 else ""
        runs = f" of {best.micro_batches} micro-batches" if best.micro_batches > 1 else ""
        by = f"Found by {entry.algorithm}"
        dtype = f", products in {self.types[0][0]}" if self.types else ""
        if not best.name.startswith(FOUND):
            by = f"The preset {best.name} (the search, {entry.algorithm}, found nothing better)"
        peak, cost = best.peak, f"{runs}: {seconds_text(best.seconds)}{_hidden(best)}"
        if self.in_turns is not None:
            runs = runs or " of two halves of the batch"
            peak = self.in_turns.peak
            cost = f"{runs} that take turns: {seconds_text(self.in_turns.seconds)}"
        return (
            f"{by} for {self.plan.mesh.size} devices{stages} "
            f"({self.machine.name}), {sizes}{dtype}.\nA step{cost}; {bytes_text(peak)} on a device."
        )

    def report(self, entry: SearchEntry) -> dict[str, Any]:
        """Returns what `onnxpar plan --json` prints."""
        return {
            "machine": self.machine.name,
            "devices": self.devices,
            "types": [
                {"type": name, "seconds": way.seconds, "peak_bytes": way.peak}
                for name, way in self.types
            ],
            "algorithm": entry.algorithm,
            "sizes": dict(entry.sizes),
            "large_sizes": dict(self.objective.large),
            "memory_limit": self.objective.limit,
            "ways": [
                {
                    "name": way.name,
                    "seconds": way.seconds if way.price else None,
                    "computing": way.price.computing if way.price else None,
                    "communicating": way.price.communicating if way.price else None,
                    "hidden": way.price.hidden if way.price and not way.staged else None,
                    "held_bytes": way.held if way.price else None,
                    "peak_bytes": way.peak if way.price else None,
                    "micro_batches": way.micro_batches,
                    "grows_faster_than": list(way.growth),
                    "seconds_at_large_sizes": way.large or None,
                    "stages": [asdict(stage) for stage in way.staged.stages] if way.staged else [],
                    "reason": way.reason,
                }
                for way in self.ways
            ],
            "in_turns": None
            if self.in_turns is None
            else {"seconds": self.in_turns.seconds, "peak_bytes": self.in_turns.peak},
            "choices": self.choices or None,
            "without": [
                {
                    "choice": each.choice,
                    "seconds": each.seconds,
                    "peak_bytes": each.peak,
                    "saved_seconds": each.saved_seconds,
                    "saved_bytes": each.saved_bytes,
                    "estimated": each.estimated,
                }
                for each in self.without or ()
            ],
            "layers": [asdict(layer) for layer in self.layers()],
            "meshes": [
                {
                    "axes": dict(c.axes),
                    "seconds": None if c.reason else c.seconds,
                    "bound": c.bound,
                    "gap": c.gap if c.bound else None,
                    "memory": c.memory,
                    "elapsed": c.elapsed,
                    "limit": c.limit if c.limit < UNLIMITED else None,
                    "reason": c.reason,
                }
                for c in self.found.candidates
            ],
            "strategy": self.data,
        }

    @property
    def compute(self) -> str | None:
        """The 16-bit type of products that was chosen; None for the model's own type."""
        return next((name for name, _ in self.types[:1] if name in COMPUTE_TYPES), None)

    def computes(self) -> str:
        """Returns in which type products are computed and why, if that was decided."""
        if not self.types:
            return ""
        (chosen, _), *others = self.types
        text = f"Products are computed in {chosen}"
        for name, way in others:
            limit = self.objective.limit
            more = "" if way.fits(limit) else f", more than {bytes_text(limit)}"
            text += (
                f"; in {name}, a step takes {seconds_text(way.seconds)} and a device needs "
                f"{bytes_text(way.peak)}{more}"
            )
        return f"{text}."

    def growth(self) -> str:
        """Returns how the plan fares at large sizes of the symbols, if another is better there."""
        best, sizes = self.ways[0], self.objective.large
        parts = []
        if best.growth:
            parts.append(
                f"{_in_words(best, 'The')} sends bytes that grow faster than in proportion to "
                f"{' and '.join(best.growth)}."
            )
        other = self.objective.best_at_large_sizes(self.ways)
        if best.large and other is not None and other.large < EQUAL * best.large:
            at = ", ".join(f"{name}={size}" for name, size in sizes.items())
            parts.append(
                f"At {at}, {_in_words(other)} takes {other.large / best.large:.2f} times as long."
            )
        return " ".join(parts)

    def reason(self) -> str:
        """Returns why it was chosen, for people."""
        texts = (self._choice(), self._turns(), self.computes(), self.growth(), self._starting())
        return " ".join(filter(None, texts))

    def _starting(self) -> str:
        """Returns what it takes to start nodes, if this is most of the time."""
        price, each = self.ways[0].price, self.machine.overhead
        assert price is not None
        nodes = sum(node.work.seconds > 0 for node in price.nodes)
        seconds, every = each * nodes, sum(node.computing for node in price.nodes)
        if seconds < STARTING * every or not nodes:
            return ""
        return (
            f"Starting nodes takes most of the computing time: {seconds_text(seconds)} of "
            f"{seconds_text(every)}, {seconds_text(each)} for each of "
            f"{nodes:,} node{'s' if nodes != 1 else ''}. Sharding does not reduce this."
        )

    def _turns(self) -> str:
        """Returns which micro-batches take turns, if they do."""
        if self.in_turns is None:
            return ""
        runs = self.ways[0].micro_batches
        which = "Two halves of the batch" if runs == 1 else "Each two micro-batches"
        return (
            f"{which} take turns in one program. What depends on no input is computed once for "
            "both, and one computes while the other communicates. A step takes "
            f"{seconds_text(self.in_turns.seconds)}, and needs {bytes_text(self.in_turns.peak)}."
        )

    def _choice(self) -> str:
        best, objective = self.ways[0], self.objective
        assert best.price is not None
        fitting = [w for w in self.ways[1:] if w.fits(objective.limit)]
        proof = _proof(self.found.chosen)
        if not fitting:
            rest = f"no other plan fits into {bytes_text(objective.limit)}"
            rest = rest if self.ways[1:] else "there is no other"
            return f"{_in_words(best, 'The')} is chosen; {rest}{proof}."
        rival = min(fitting, key=objective.rank)
        assert rival.price is not None
        ratio = rival.seconds / best.seconds if best.seconds else 1.0
        less = rival.price.communicating - best.price.communicating
        more = ""
        if not best.staged:
            word = "more" if less >= 0 else "less"
            more = f", with {seconds_text(abs(less))} {word} communication"
        if objective.level == 1:
            more += f", and {rival.peak / max(best.peak, 1):.2f} times the memory"
        chosen = f"{_in_words(best, 'The')} is best for {AIMS[objective.level]}"
        other = _in_words(rival)
        if objective.rank(rival) < objective.rank(best):
            return (
                f"{chosen} among the plans that keep what is fixed; {other} does not keep it, "
                f"and takes {ratio:.2f} times as long{more}{proof}."
            )
        if objective.rank(rival) == objective.rank(best):
            return f"{chosen}, and so is {other}{proof}."
        return (
            f"{chosen}; the next best is {other}, which takes {ratio:.2f} times as long{more}"
            f"{proof}."
        )


def _in_words(way: Way, article: str = "the") -> str:
    """Returns the name of a plan in a sentence: `dp=4`, or `the plan found with 2 stages`."""
    if not way.name.startswith(FOUND):
        return way.name
    return f"{article} plan {FOUND}" + way.name.removeprefix(FOUND).replace(",", " with", 1)


def _proof(chosen: Candidate) -> str:
    """Returns what an exact search proved about the mesh that won, for the search's own sum."""
    if not chosen.bound:
        return ""
    axes = " x ".join(f"{n}={s}" for n, s in chosen.axes)
    if chosen.limit < UNLIMITED:
        # The search counts memory without lifetimes, so its limit is not the device's.
        axes += f" with at most {bytes_text(chosen.limit)} by the search's own estimate of memory"
    gap = f"{100 * chosen.gap:.2f} %"
    if chosen.gap > GAP:
        return f"; the search on the mesh {axes} stopped early: another plan may be {gap} better"
    if chosen.gap < EXACT:
        return f"; it is proved that no other plan on the mesh {axes} is better"
    return f"; it is proved that no other plan on the mesh {axes} is more than {gap} better"


def _hidden(way: Way) -> str:
    """Returns how much of the communication of a step computing hides, in a sentence."""
    price, runs = way.price, way.micro_batches
    if price is None or way.staged is not None or not price.hidden:
        return ""
    once = price.outputs + price.gradients
    sent = runs * (price.communicating - once) + once
    hidden = runs * price.hidden_each + price.hidden_once
    return f" ({seconds_text(hidden)} of {seconds_text(sent)} of communication hidden)"


def _common(names: list[str]) -> str:
    """Returns the common form of names, with `*` for numbers that differ."""
    parts = zip(*(_DIGITS.split(name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _layer(name: str, strategy: str, nodes: list[NodePrice]) -> LayerRow:
    return LayerRow(
        name,
        strategy,
        nodes[0].local,
        len(nodes),
        sum(n.computing for n in nodes),
        sum(n.work.special + n.moving for n in nodes),
        sum(n.made for n in nodes),
    )


def seconds_text(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e6:.2g} µs"
