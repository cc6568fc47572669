"""How `onnxpar inspect` shows a directory: the summary first, repeated layers once."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxpar.cli.describe import (
    count,
    describe_conflict,
    describe_growth,
    describe_kinds,
    describe_pair,
    describe_program,
)
from onnxpar.cli.screen import Column, Content, Screen, amount, once
from onnxpar.core.name_patterns import listed
from onnxpar.report.fold_layers import (
    common_name,
    fold_alike,
    fold_nodes,
    fold_rows,
    matching_nodes,
    without_sizes,
)
from onnxpar.report.inspect_data import is_sharded
from onnxpar_format.texts import bytes_text, ranks_text

Json = dict[str, Any]

NAME, NUMBER = Content.NAME, Content.NUMBER
TIMES = Column("×", NUMBER)
_GROUPS = 8
"""The most groups of a collective that a row lists."""


@dataclass(frozen=True)
class Wanted:
    """What the user asked to see.

    Attributes:
        nodes: Patterns of the nodes whose operands are shown.
        layers: Show only the layers.
        collectives: Show only the collectives.
    """

    nodes: Sequence[str] = ()
    layers: bool = False
    collectives: bool = False

    @property
    def all(self) -> bool:
        """Whether nothing in particular was asked for."""
        return not (self.nodes or self.layers or self.collectives)


def show_directory(report: Json, wanted: Wanted) -> None:
    """Prints the report of a directory.

    Raises:
        DirectoryError: A pattern matches no node.
    """
    screen = Screen(report["mesh"])
    if wanted.all:
        _summary(report, screen)
        if "training" in report:
            _tensors(report["training"]["tensors"], screen)
        _nodes(report["nodes"], screen)
    if wanted.layers:
        _layers(report, screen)
    if wanted.nodes:
        _operands(report["nodes"], wanted.nodes, screen)
    if wanted.all or wanted.collectives:
        _collectives(report["collectives"], screen)
    if "machines" in report:
        _machines(report["machines"], screen)
    if wanted.all:
        _rest(report, screen)
    screen.legend()
    if wanted.all and report["nodes"]:
        screen.line()
        screen.note(
            "--node GLOB shows the operands of nodes. --layers and --collectives show only these."
        )


def _summary(report: Json, screen: Screen) -> None:
    texts = describe_program(report)
    screen.entry("devices", texts.pop("devices"), layout=True)
    if report["dialect"] is not None:
        screen.entry("dialect", f"{report['dialect']}: its collectives, in place of onnxpar's")
    for name, constraint in report["symbols"].items():
        screen.entry("symbol", f"{name}: {constraint or 'any size'}")
    for notice in report["notices"]:
        screen.entry("notice", notice)
    if "training" in report:
        _training(report["training"], screen)
        _programs(report["programs"], screen)
        screen.line()
        screen.entry("program", report["program"])
    for title, text in texts.items():
        screen.entry(title, text)


def _nodes(nodes: Sequence[Json], screen: Screen) -> None:
    """Prints one row for each node, with its first result."""
    rows = []
    others, sizes = without_sizes(nodes)
    for alike in fold_alike(others):
        node = alike[0]
        made = node["outputs"][:1]
        result = made[0] if made else None
        rows.append(
            (
                _times(alike),
                common_name([n["name"] for n in alike]) + (" *" if node["pinned"] else ""),
                node["op_type"],
                shape_text(result["shape"]) if result else "",
                layout_text(result) if result else "",
            )
        )
    columns = (
        TIMES, Column("node", Content.NODE), Column("operator", NAME, optional=True),
        Column("result"), Column("layout"),
    )  # fmt: skip
    screen.table(columns, rows)
    note_sizes(sizes, screen)
    _pinned(nodes, screen)


def note_sizes(sizes: Sequence[Json], screen: Screen) -> None:
    """Prints how many nodes are not shown because they only compute sizes."""
    if sizes:
        screen.note(f"Not shown: {count(len(sizes), 'node')} for sizes (--node shows them).")


def _operands(nodes: Sequence[Json], patterns: Sequence[str], screen: Screen) -> None:
    """Prints every operand and result of the nodes that a pattern matches."""
    shown = matching_nodes(nodes, patterns)
    chosen = {node["name"] for node in shown}
    rows = []
    for every in (group for part in without_sizes(nodes) for group in fold_alike(part)):
        alike = [node for node in every if node["name"] in chosen]
        if not alike:
            continue
        first = alike[0]
        name = common_name([n["name"] for n in alike]) + (" *" if first["pinned"] else "")
        rows.append((_times(alike), name, first["op_type"], "", "", ""))
        items = [("   ", "inputs", i) for i, item in enumerate(first["inputs"]) if item["name"]]
        items += [("-> ", "outputs", i) for i in range(len(first["outputs"]))]
        for arrow, kind, i in items:
            item = first[kind][i]
            name = common_name([n[kind][i]["name"] for n in alike])
            rows.append(("", arrow + name, *_layout(item)))
            if "resharded" in item:
                rows.append(("", f"   after: {name}", *_layout(item["resharded"])))
    columns = (
        TIMES, Column("node and its operands", NAME), Column("shape"),
        Column("local shape", optional=True), Column("shards", optional=True), Column("layout"),
    )  # fmt: skip
    screen.table(columns, rows)
    _pinned(shown, screen)


def _pinned(nodes: Iterable[Json], screen: Screen) -> None:
    if any(node["pinned"] for node in nodes):
        screen.line("* given by the strategy")


def _layers(report: Json, screen: Screen) -> None:
    """Prints a row for each repeated layer, and for the nodes between them."""
    nodes, _ = without_sizes(report["nodes"])
    home = {o["name"]: i for i, node in enumerate(nodes) for o in node["outputs"]}
    names = {node["name"]: i for i, node in enumerate(nodes)}
    rows = []
    for block in fold_nodes(nodes):
        own = range(block.start, block.start + block.size * block.count)
        ends = [
            common_name([nodes[i]["name"] for i in block.places(place)])
            for place in (0, block.size - 1)
        ]
        sent = Counter(
            item["op"]
            for item in report["collectives"]
            if home.get(item["value"], names.get(_reader(item), -1)) in own
        )
        sharded = sum(is_sharded(nodes[i]) for i in own)
        rows.append(
            (
                f"{block.count}" if block.count > 1 else "",
                ends[0],
                ends[1] if block.size > 1 else "",
                f"{block.size:,}",
                f"{sharded / block.count:,.4g}",
                ", ".join(f"{n / block.count:.4g} {op}" for op, n in sent.items()),
            )
        )
    columns = (
        TIMES, Column("first node", NAME), Column("last node", NAME), Column("nodes", NUMBER),
        Column("sharded", NUMBER), Column("collectives"),
    )  # fmt: skip
    screen.table(columns, rows)
    screen.line("In rows with ×, the numbers are those of one layer.")


def _reader(collective: Json) -> str:
    """Returns the name of the node for which a collective is, if its reason begins with one."""
    found: str = collective["reason"].partition(" operand ")[0]
    return found


def _collectives(found: Sequence[Json], screen: Screen) -> None:
    calls = Counter(item["node"] for item in found)

    def why(item: Json) -> str:
        others = calls[item["node"]] - 1
        more = f"; in one call with {others} more" if others else ""
        return more + (f"; in the background of {item['behind']}" if item["behind"] else "")

    def facts(item: Json) -> tuple[object, ...]:
        shown = (item["op"], item["over"], str(item["bytes"]), str(item["groups"]))
        return *shown, calls[item["node"]], bool(item["behind"])

    rows = []
    for alike in fold_rows(found, lambda c: (c["value"], c["reason"]), facts):
        item = alike[0]
        value = common_name([c["value"] for c in alike])
        reason = common_name([c["reason"] + why(c) for c in alike])
        named = _times(alike), item["op"], value, item["over"], amount(item["bytes"])
        rows.append((*named, reason, _groups(item["groups"])))
    columns = (
        TIMES, Column("collective", NAME), Column("value", NAME), Column("over"),
        Column("bytes sent", NUMBER), Column("for", optional=True),
        Column("groups", optional=True),
    )  # fmt: skip
    titles = screen.table(columns, rows)
    if "for" in titles and any(item["behind"] for item in found):
        screen.line("in the background: between machines and between GPUs;")
        screen.line("ranks that share memory communicate at once")


def _machines(traffic: Json, screen: Screen) -> None:
    columns = (
        Column("over"), Column("collectives", NUMBER), Column("bytes sent", NUMBER),
        Column("a group is on"),
    )  # fmt: skip
    rows = [
        (
            item["over"],
            f"{item['collectives']:,}",
            amount(item["bytes"]),
            "one machine" if item["machines"] == 1 else f"{item['machines']} machines",
        )
        for item in traffic["over"]
    ]
    screen.table(columns, rows)
    sent, each = amount(traffic["bytes"]), traffic["ranks_per_machine"]
    ranks = "one rank" if each == 1 else f"{each} consecutive ranks"
    screen.note(
        f"With {ranks} on each machine, a device sends {sent} bytes in collectives of several "
        "machines."
    )
    if traffic["advice"]:
        screen.note(traffic["advice"])


def _groups(groups: Sequence[Sequence[int]]) -> str:
    texts = ["{" + ",".join(map(str, group)) + "}" for group in groups]
    return listed(texts, " ", _GROUPS)


def _rest(report: Json, screen: Screen) -> None:
    """Prints conflicts, states, supplied inputs, stages and replicated nodes, if there are any."""
    conflicts = fold_rows(
        report["conflicts"],
        lambda c: (c["value"], c["node"]),
        lambda c: (c["from"], c["to"], c["operand"], str(c["steps"]), str(c["bytes"]), c["reason"]),
    )
    if conflicts:
        screen.line()
    for alike in conflicts:
        names = {key: common_name([c[key] for c in alike]) for key in ("value", "node")}
        times = f"{_times(alike)}× " if len(alike) > 1 else ""
        screen.entry("conflict", times + describe_conflict(alike[0] | names), layout=True)
    _table(
        screen,
        (Column("state", NAME), Column("from output", NAME), Column("layout"), Column("")),
        report["states"],
        lambda s: (s["input"], s["output"]),
        lambda s, read, made: (read, made, s["sharding"], describe_growth(s)),
    )
    _table(
        screen,
        (Column("input", NAME), Column("from program"), Column("its value", NAME),
         Column("layout")),
        report["supplied"],
        lambda s: (s["input"], s["value"]),
        lambda s, read, made: (read, s["source"], made, s["sharding"]),
    )  # fmt: skip
    _stages(report, screen)
    _table(
        screen,
        (Column("replicated node", NAME), Column("operator", NAME), Column("reason")),
        report["replicated"],
        lambda r: (r["name"],),
        lambda r, name: (name, r["op_type"], r["reason"]),
    )


def _table(
    screen: Screen,
    columns: Sequence[Column],
    items: Sequence[Json],
    names: Callable[[Json], Sequence[str]],
    cells: Callable[..., Sequence[str]],
) -> None:
    """Prints a table in which items that differ only in the numbers of names are one row.

    Args:
        screen: Where to print.
        columns: The columns, without that of how often a row occurs.
        items: The items.
        names: The names of an item, which the row has as patterns.
        cells: Makes the row of an item and of its patterns.
    """

    def shown(item: Json) -> Sequence[str]:
        own = tuple(names(item))
        return [text.replace(own[0], "") for text in cells(item, *("" for _ in own))]

    rows = []
    for alike in fold_rows(items, names, lambda item: tuple(shown(item))):
        patterns = [common_name(column) for column in zip(*map(names, alike), strict=True)]
        row = cells(alike[0], *patterns)
        if len(alike) > 1:
            # The item's own name in a sentence is a name, too.
            row = [text.replace(names(alike[0])[0], patterns[0]) for text in row]
        rows.append((_times(alike), *row))
    screen.table((TIMES, *columns), rows)


def _stages(report: Json, screen: Screen) -> None:
    """Prints the contents of the stages of a pipeline, and the transfers between them."""
    if not report["stage_totals"]:
        return
    columns = (
        Column("stage", NUMBER), Column("ranks"), Column("nodes", NUMBER),
        Column("parameters", NUMBER), Column("of each device", NUMBER),
        Column("collectives", NUMBER), Column("bytes sent", NUMBER),
    )  # fmt: skip
    rows = []
    for item in report["stage_totals"]:
        numbers = (f"{item[key]:,}" for key in ("nodes", "parameters"))
        size = bytes_text(item["parameter_bytes_per_device"])
        sent = f"{item['collectives']:,}", amount(item["bytes"])
        rows.append((str(item["stage"]), ranks_text(item["ranks"]), *numbers, size, *sent))
    screen.table(columns, rows)
    chunks = any(item["from_chunk"] or item["to_chunk"] for item in report["transfers"])
    _table(
        screen,
        (Column("value", NAME), Column("from stage"), Column("to stage"),
         Column("bytes per rank and micro-batch", NUMBER)),
        report["transfers"],
        lambda t: (t["value"],),
        lambda t, value: (
            value, *(_stage_and_chunk(t, end, chunks) for end in ("from", "to")),
            "unknown" if t["bytes"] is None else amount(t["bytes"]),
        ),
    )  # fmt: skip


def _stage_and_chunk(item: Json, end: str, chunks: bool) -> str:
    """Returns one end of a transfer: its stage, and its chunk if stages have several."""
    return f"{item[end]}, chunk {item[f'{end}_chunk']}" if chunks else str(item[end])


def _training(training: Json, screen: Screen) -> None:
    """Prints what is trained."""
    tensors = [t for t in training["tensors"] if t["parameter"]]
    trained = [t for t in tensors if t["trained"]]
    elements, of = (sum(t["elements"] for t in group) for group in (trained, tensors))
    text = (
        f"{elements:,} of {of:,} parameters, in {len(trained)} of {len(tensors)} "
        f"tensors, with {training['optimizer']['kind']} on {training['loss']['kind']}"
    )
    if training["loss"]["labels"] is not None:
        text += f"; the labels are the input {training['loss']['labels']}"
    screen.entry("trained", text)
    for notice in once(training["notices"]):
        screen.entry("notice", notice)
    rules = {t["rule"] for t in training["tensors"]}
    if len(rules) == 1:
        screen.entry("rule", f"{', '.join(rules)} (each tensor)")


def _tensors(tensors: Sequence[Json], screen: Screen) -> None:
    """Prints every tensor of the model, and why it is not trained if it is not."""
    differ = len({t["rule"] for t in tensors}) > 1
    constants = [t for t in tensors if not t["parameter"]]
    _table(
        screen,
        (Column("tensor", NAME), Column("elements", NUMBER), Column("trained"),
         Column("read by", NAME, optional=True), Column("rule", optional=True)),
        [t for t in tensors if t["parameter"]],
        lambda t: (t["name"], ", ".join(t["used_by"]) + _shared(t), t["rule"] if differ else ""),
        lambda t, name, readers, rule: (
            name, f"{t['elements']:,}", "yes" if t["trained"] else f"no: {t['reason']}", readers,
            rule,
        ),
    )  # fmt: skip
    if constants:
        elements = count(sum(t["elements"] for t in constants), "element")
        screen.note(f"Not shown: {count(len(constants), 'constant')} with {elements}.")


def _shared(tensor: Json) -> str:
    return " (shared)" if tensor["trained"] and len(tensor["used_by"]) > 1 else ""


def _programs(programs: Mapping[str, Json], screen: Screen) -> None:
    """Prints a line for each program."""
    rows = []
    for name, report in programs.items():
        totals = report["totals"]
        kinds = describe_kinds(totals)
        numbers = [f"{totals[key]:,}" for key in ("nodes", "sharded")]
        rows.append((name, *numbers, kinds or "none", amount(totals["bytes"])))
    columns = (
        Column("program", NAME), Column("nodes", NUMBER), Column("sharded", NUMBER),
        Column("collectives"), Column("bytes that a device sends"),
    )  # fmt: skip
    screen.table(columns, rows)
    for name, report in programs.items():
        if "once" in report["totals"]:
            screen.note(f"In {name}, {describe_pair(report['totals'])}.")


def _times(alike: Sequence[Json]) -> str:
    return str(len(alike)) if len(alike) > 1 else ""


def _layout(item: Json) -> tuple[str, str, str, str]:
    shards = "" if item["strategy"] is None else ",".join(map(str, item["strategy"]))
    return shape_text(item["shape"]), shape_text(item["local_shape"]), shards, layout_text(item)


def layout_text(item: Json) -> str:
    """Returns the layout of an operand or result, and that after a reshard."""
    text: str = item["sharding"] or "in its current layout"
    if item["partial"]:
        text += f", partial {item['partial']['reduction']} over {item['partial']['over']}"
    return text


def shape_text(shape: "list[int | str] | None") -> str:
    """Returns a shape in brackets; `?` if it is unknown."""
    return "?" if shape is None else f"({', '.join(map(str, shape))})"
