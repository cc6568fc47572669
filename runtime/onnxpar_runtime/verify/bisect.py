"""Finds where a difference begins: the first node whose own result is wrong, and on which rank.

The ranks and the undivided program run once on the same inputs, with every value exposed. The
values are compared in the order of the undivided graph. A value may differ only because the
operands of its node do, so a node that differs is computed again by the undivided program, on the
operands that the ranks have. Its bound is the tolerance of `verify`, plus twice the distance that
the result moves if these operands are moved by rounding. The first node beyond this bound is where
the difference begins. The results of collectives are compared with the values that they were given.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.group import ThreadsGroup
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.options import parse_pairs
from onnxpar_runtime.temporary import temporary_folder
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.training.programs import EVALUATION, TRAINING
from onnxpar_runtime.verify.cases import chosen_cases
from onnxpar_runtime.verify.exposed import expose, exposed_values
from onnxpar_runtime.verify.findings import TOLERANCE
from onnxpar_runtime.verify.own_node import OwnNode
from onnxpar_runtime.verify.placed import Difference, PlacedValue, Shards
from onnxpar_runtime.verify.random_feeds import Draws, GivenFeeds, RandomFeeds
from onnxpar_runtime.verify.references import DirectoryReference
from onnxpar_runtime.verify.training_batches import RandomBatches

Array = NDArray[Any]
Json = dict[str, Any]
_FORWARD = "model"


@dataclass(frozen=True)
class FirstDifference:
    """The first result that is wrong though its operands are right.

    Attributes:
        node: The node of the undivided program; for a collective, the node that reads its result.
        op_type: Its operator, or the collective.
        value: The value that differs.
        collective: Name of the collective's node; "" if a node itself is wrong.
        group: For a collective the mesh axes over which it communicates; else "".
        rule: The sharding rule of the node.
        layout: Layout of the value.
        difference: Where it differs most on the first rank that is wrong.
        wrong_ranks: All ranks that are wrong.
        bound: The largest difference that rounding explains.
        repeats: Whether a second run gave every rank the same bits.
    """

    node: str
    op_type: str
    value: str
    collective: str
    group: str
    rule: str
    layout: str
    difference: Difference
    wrong_ranks: tuple[int, ...]
    bound: float
    repeats: bool


@dataclass(frozen=True)
class Bisection:
    """What a comparison of all values found.

    Attributes:
        symbols: Values of the symbols.
        program: The program that was compared.
        first: Where the difference begins; None if every value agrees.
        agree: Number of values that agree, up to there.
        carried: Values that differ only because operands of their nodes do.
        unknown: Number of values that could not be compared.
    """

    symbols: Mapping[str, int]
    program: str
    first: FirstDifference | None
    agree: int
    carried: tuple[str, ...]
    unknown: int


@dataclass(frozen=True)
class _Item:
    """A value to compare: a result of a node, or of a collective."""

    node: Json
    place: PlacedValue
    local: str
    collective: Json | None = None
    after: PlacedValue | None = None


@dataclass
class _Values:
    """The values of both programs in one run."""

    manifest: Manifest
    symbols: Mapping[str, int]
    ranks: Sequence[Mapping[str, Array]]
    undivided: Mapping[str, Array]
    places: dict[str, PlacedValue] = field(default_factory=dict)

    def shards(self, place: PlacedValue, local: str) -> Shards | None:
        """Returns the shards of a local value; None if no rank has it, or not in this layout."""
        held = {rank: one[local] for rank, one in enumerate(self.ranks) if local in one}
        if not held:
            return None
        try:
            return Shards(self.manifest, place, held, self.symbols)
        except ValueError:
            return None

    def whole(self, name: str) -> Array | None:
        """Returns a value of the ranks as a whole array; None if it is unknown."""
        place = self.places.get(name)
        shards = None if place is None else self.shards(place, name)
        return self.undivided.get(name) if shards is None else shards.whole()


@dataclass(frozen=True)
class Sides:
    """What is compared.

    Attributes:
        directory: The directory.
        undivided: The same program's directory for one device.
        report: How the program was sharded, as `onnxpar inspect --json` prints it.
        case: Values of the symbols.
        feeds: Inputs instead of random ones; then `case` must be empty.
        options: As for `verify`.
    """

    directory: Path
    undivided: Path
    report: Json
    case: Mapping[str, int]
    feeds: Mapping[str, Array] | None
    options: VerifyOptions


def bisect(sides: Sides) -> Bisection:
    """Returns where the ranks begin to differ from the undivided program.

    Raises:
        OnnxparRuntimeError: As `onnxpar_runtime.verify.compare.verify`.
    """
    with _compared(sides) as compared:
        return compared.search()


def dump(sides: Sides, patterns: Sequence[str]) -> dict[str, Array]:
    """Returns values of chosen nodes as whole arrays, of the ranks and of the undivided program.

    Args:
        sides: The programs.
        patterns: Patterns of node names, as in `fnmatch`; none for all nodes.

    Returns:
        `ranks/NAME` and `undivided/NAME` for each result NAME of these nodes.

    Raises:
        InputError: A pattern matches no node.
        OnnxparRuntimeError: As `bisect`.
    """
    nodes = sides.report["nodes"]
    names = [node["name"] for node in nodes]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"--node {pattern}: matches no node")
    chosen = patterns or ["*"]
    found: dict[str, Array] = {}
    with _compared(sides) as compared:
        values = compared.values
        for node in nodes:
            if not any(fnmatchcase(node["name"], pattern) for pattern in chosen):
                continue
            for item in node["outputs"]:
                name = item["name"]
                place = values.places.get(name)
                shards = None if place is None else values.shards(place, name)
                if shards is not None:
                    found[f"ranks/{name}"] = shards.whole()
                if name in values.undivided:
                    found[f"undivided/{name}"] = values.undivided[name]
    return found


@contextmanager
def _compared(sides: Sides) -> Iterator["_Compared"]:
    """Runs both programs on the same inputs, with every value exposed."""
    undivided, feeds, options = sides.undivided, sides.feeds, sides.options
    manifest = Manifest.load(sides.directory)
    trains = manifest.training is not None
    program = manifest.program(EVALUATION if trains else _FORWARD)
    (symbols,), given = chosen_cases(manifest, program, [] if feeds else [sides.case], feeds)
    names = {o["name"] for node in sides.report["nodes"] for o in node["outputs"]}
    with temporary_folder("onnxpar-bisect-") as folder:
        ours, its = folder / "ranks", folder / "undivided"
        ours.mkdir()
        its.mkdir()
        expose(sides.directory, ours, names)
        expose(undivided, its, names, inputs=True)
        draw = _draws(undivided, manifest, symbols, given, options)
        batch = draw.batch(symbols)
        start, run = _runs(trains, batch, options)
        with start(its) as one:
            (expected,) = exposed_values(one, run)
        with start(ours) as ranks:
            values = _Values(manifest, symbols, exposed_values(ranks, run), expected)

            def again() -> Sequence[Mapping[str, Array]]:
                if trains:
                    ranks.reset()
                return exposed_values(ranks, run)

            name = TRAINING if trains else _FORWARD
            file = Manifest.load(its).program(name).files[0]
            assert file is not None
            yield _Compared(sides.report, values, options, its / file, name, again)


def _draws(
    undivided: Path,
    manifest: Manifest,
    symbols: Mapping[str, int],
    given: Mapping[str, Array] | None,
    options: VerifyOptions,
) -> Draws:
    if given is not None:
        return GivenFeeds(given)
    if manifest.training is not None:
        return RandomBatches(Manifest.load(undivided), [symbols], options.seed, options.custom_ops)
    with closing(DirectoryReference(undivided, _FORWARD, options.custom_ops)) as reference:
        # Only the spans need the reference; drawing asks it again.
        return GivenFeeds(
            RandomFeeds(reference, manifest.program(_FORWARD), [symbols], options.seed).batch(
                symbols
            )
        )


def _runs(
    trains: bool, batch: Mapping[str, Array], options: VerifyOptions
) -> tuple[Callable[[Path], Any], Callable[[Any], object]]:
    """Returns what opens a directory, and what runs it once."""
    pairs = parse_pairs(options.ort)
    if not trains:
        return (
            lambda path: ThreadsGroup(path, ort_options=pairs, custom_ops=options.custom_ops),
            lambda group: group.run_global(batch),
        )
    return (
        lambda path: TrainerGroup(
            path, ort_options=pairs, custom_ops=options.custom_ops, seed=options.seed
        ),
        lambda group: group.forward_backward(batch),
    )


class _Compared:
    """Both programs after a run."""

    def __init__(
        self,
        report: Json,
        values: _Values,
        options: VerifyOptions,
        graph: Path,
        program: str,
        again: Callable[[], Sequence[Mapping[str, Array]]],
    ) -> None:
        self.values = values
        self._options, self._graph, self._program, self._again = options, graph, program, again
        # Under its own name, an output of the program is complete, whatever its node left open.
        outputs = values.manifest.program(program).outputs
        ready = {spec.name: PlacedValue(spec.name, spec) for spec in outputs}
        self._items = list(_items(report, values.places, ready))

    def search(self) -> Bisection:
        """Compares values in the order of the graph until one is wrong."""
        agree, unknown, carried = 0, 0, []
        first = None
        for item in self._items:
            outcome = self._outcome(item)
            if outcome is None:
                unknown += 1
            elif isinstance(outcome, FirstDifference):
                first = outcome
                break
            elif outcome:
                agree += 1
            else:
                carried.append(item.local)
        return Bisection(
            dict(self.values.symbols), self._program, first, agree, tuple(carried), unknown
        )

    def _outcome(self, item: _Item) -> FirstDifference | bool | None:
        """Returns what is wrong, whether the value agrees, or None if it cannot be compared."""
        expected = self.values.undivided.get(item.place.name)
        shards = self.values.shards(item.after or item.place, item.local)
        if expected is None or shards is None:
            return None
        bound = self._bound(expected)
        wrong = _beyond(shards.differences(expected), bound)
        if not wrong:
            return True
        if item.collective is not None:
            given = self.values.whole(item.place.name)
        else:
            given, bound = self._own(item, bound)
        if given is not None:
            wrong = _beyond(shards.differences(given), bound)
        if not wrong:
            return False
        collective = item.collective or {}
        place = item.after or item.place
        return FirstDifference(
            node=item.node["name"],
            op_type=str(collective.get("op", item.node["op_type"])),
            value=item.place.name,
            collective=collective.get("node", ""),
            group=collective.get("over", ""),
            rule=item.node.get("rule") or "",
            layout=_layout_text(item, place),
            difference=wrong[0],
            wrong_ranks=tuple(rank for one in wrong for rank in one.ranks),
            bound=bound,
            repeats=self._repeats(item.local),
        )

    def _bound(self, expected: Array) -> float:
        """Returns how much elements may differ by the tolerance of `verify`."""
        rtol = self._options.rtol
        if rtol is None:
            rtol = TOLERANCE.get(str(expected.dtype), 0.0)
        finite = np.abs(expected.astype(np.float64))
        finite = finite[np.isfinite(finite)]
        return self._options.atol + rtol * float(finite.max(initial=0.0))

    def _own(self, item: _Item, bound: float) -> tuple[Array | None, float]:
        """Returns the node's result on the operands that the ranks have, and its bound."""
        names = [o["name"] for o in item.node["inputs"] if o["name"]]
        try:
            own = OwnNode(self._graph, [item.place.name], names, self._options.custom_ops)
        except Exception:  # onnxruntime has no class of its own; then the value itself is compared
            return None, bound
        with closing(own):
            operands = {name: self.values.whole(name) for name in own.inputs}
            feeds = {name: array for name, array in operands.items() if array is not None}
            if len(feeds) < len(operands):
                return None, bound
            try:
                found = own.run(feeds)
                moved = own.moves(feeds, found)
            except Exception:
                return None, bound
        array = found[item.place.name]
        return array, self._bound(array) + 2 * moved[item.place.name]

    def _repeats(self, local: str) -> bool:
        """Whether a second run gives every rank the same bits of a value."""
        second = self._again()
        return all(
            local not in one or one[local].tobytes() == other[local].tobytes()
            for one, other in zip(self.values.ranks, second, strict=True)
        )


def _layout_text(item: _Item, place: PlacedValue) -> str:
    if item.collective is not None:
        return str(item.collective["after"])
    found = next(o for o in item.node["outputs"] if o["name"] == place.name)
    text = str(found["sharding"])
    if found["partial"]:
        text += f" partial {found['partial']['reduction']} over {found['partial']['over']}"
    return text


def _beyond(found: Sequence[Difference], bound: float) -> list[Difference]:
    return [one for one in found if not one.amount <= bound]


def _items(
    report: Json, places: dict[str, PlacedValue], ready: Mapping[str, PlacedValue]
) -> Iterator[_Item]:
    """Yields results of collectives before the node that reads them, then results of the node.

    Args:
        report: The report.
        places: Gets the place of each result.
        ready: The places of the program's outputs, instead of those in the report.
    """
    layouts = report["layouts"]
    needed: dict[str, list[Json]] = {}
    for collective in report["collectives"]:
        reader = collective["reason"].partition(" operand ")[0]
        needed.setdefault(reader, []).append(collective)
    for node in report["nodes"]:
        for item in node["outputs"]:
            place = ready.get(item["name"]) or PlacedValue.of(item["name"], item, layouts)
            if item["name"] and place is not None:
                places[item["name"]] = place
    for node in report["nodes"]:
        for collective in needed.get(node["name"], ()):
            place = places.get(collective["value"])
            after = _after(collective, place, layouts)
            if place is not None and after is not None:
                yield _Item(node, place, collective["node"], collective, after)
        for item in node["outputs"]:
            if item["name"] in places:
                yield _Item(node, places[item["name"]], item["name"])


def _after(
    collective: Json, place: PlacedValue | None, layouts: Mapping[str, Any]
) -> PlacedValue | None:
    """Returns where a collective leaves its value; None if that is not a layout of the report."""
    text = collective["after"]
    if place is None or text not in layouts:
        return None
    item = {"shape": list(place.entry.shape), "sharding": text, "partial": None}
    return PlacedValue.of(place.name, item, layouts)
