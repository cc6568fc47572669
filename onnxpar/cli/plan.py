"""`onnxpar plan`: a strategy, searched for and explained."""

import gc
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from onnxpar.api.plan_strategy import FoundStrategy, plan_strategy, searching
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.mixed_precision import parse_compute
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cli.options import (
    TRAINING,
    AsJson,
    Compute,
    Devices,
    Freeze,
    IgnoreIndex,
    LabelInput,
    OptimizerParallelLevel,
    Tie,
    Trainable,
)
from onnxpar.cli.shard import parse_symbols
from onnxpar.core.errors import ModelError, StrategyError
from onnxpar.core.machine import parse_bytes
from onnxpar.cost.price import NodePrice, Price
from onnxpar.emit import check_file, new_file
from onnxpar.frontend.load import read
from onnxpar.graph.plan import Plan
from onnxpar.graph.validity import blamed_on_model
from onnxpar.search.find_plan import GAP, UNLIMITED, Candidate, Told
from onnxpar.search.rival_plans import FOUND, Way
from onnxpar.strategy import Strategy, strategy_for
from onnxpar.strategy.presets import AUTO
from onnxpar.strategy.save import write_strategy
from onnxpar.strategy.schema import SearchEntry
from onnxpar.strategy.validation_errors import in_words, problem

WIDE = 160
_SIZE = re.compile(r"([^:=]+)=(\d+)")
AIMS = ("little communication for the computing done", "memory", "speed")
"""What each level seeks."""
EXACT = 1e-4
"""A gap that is shown as none."""
REPLICATED = "computed whole"
"""The row of nodes that no device shares with another."""
_DIGITS = re.compile(r"(\d+)")


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The ONNX model to plan for.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The strategy file to write.")
    ],
    devices: Devices = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|AXES",
            help="What is fixed, the rest being searched for: a file, or only the mesh, as "
            "dp=2,tp=4. Default: the model's annotations.",
        ),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="recursive (the default) or ilp, exact.")
    ] = None,
    level: Annotated[
        int | None,
        typer.Option(
            min=0, max=2, help="What counts: 0 little communication, 1 memory, 2 speed (default)."
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What a device may hold, as 80GiB.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="cpu (the default), a100, h100, h200, or a file."),
    ] = None,
    symbol: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZE|NAME:CONSTRAINTS",
            help="The size to plan for, or constraints; may be repeated.",
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="LOSS",
            help="Plan training by this loss, as `shard --train`.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="sgd, momentum, adam, adamw or lamb.", rich_help_panel=TRAINING
        ),
    ] = "adamw",
    label_input: LabelInput = None,
    ignore_index: IgnoreIndex = None,
    trainable: Trainable = None,
    freeze: Freeze = None,
    tie: Tie = None,
    compute: Compute = None,
    optimizer_parallel: OptimizerParallelLevel = None,
    stages: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Pipeline stages; auto tries all that fit."),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, metavar="M", help="Micro-batches of a step.")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Search for a strategy, say why it won, and write it to a file."""
    check_file(out)
    sizes, constraints = _symbols(symbol or [])
    with blamed_on_model(model):
        proto = read(model)
    wanted = searching(strategy_for(strategy, devices, proto, f"model {str(model)!r}", AUTO))
    of_training = {
        "--label-input": label_input,
        "--ignore-index": ignore_index,
        "--trainable": trainable,
        "--freeze": freeze,
        "--tie": tie,
        "--compute": compute,
    }
    stated = {name: value for name, value in of_training.items() if value is not None}
    if loss is None and (stated or optimizer_parallel is not None):
        first = next(iter(stated), "--optimizer-parallel")
        raise ModelError(f"{first}: it is for training; expected --loss as well")
    if optimizer_parallel is not None:
        wanted = wanted.at_level(optimizer_parallel)
    given: dict[str, object] = {"algorithm": algorithm, "level": level, "machine": machine}
    try:
        given["memory"] = None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise StrategyError(f"--memory: {error}") from None
    entry = _entry(wanted, given, sizes)
    training = None
    if loss is not None:
        training = TrainingSpec(
            parse_loss(loss, label_input=label_input, ignore_index=ignore_index),
            parse_optimizer(optimizer),
            tuple(trainable or ()),
            tuple(freeze or ()),
            compute=None if compute is None else parse_compute(compute),
            ties=tuple(tie or ()),
        )
    with _progress() as told, _uncollected():
        planned = plan_strategy(
            model,
            replace(wanted, search=entry),
            symbols=parse_symbols(constraints),
            training=training,
            stages=_stages(stages, wanted),
            micro_batches=micro_batches,
            told=told,
        )
    data = _data(planned, entry)
    with new_file(out) as file:
        file.write_text(write_strategy(planned.data, _head(planned, entry)), encoding="utf-8")
    if json_output:
        print(json.dumps(data, indent=1))
        return
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        # Names would be cut to fit 80 columns.
        console.width = WIDE
    training_options = _again(loss, optimizer, stated) if loss is not None else ""
    _print(planned, console)
    console.print(f"written       {out}", markup=False)
    console.print(
        f"next          onnxpar shard {model} --strategy {out}{training_options} -o DIR",
        markup=False,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Plans are trees: to look for cycles in hundreds of thousands of them took an eighth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _progress() -> Iterator[Told]:
    """A bar on a terminal, which is cleared at the end; nothing elsewhere."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with shown:
        task = shown.add_task("", total=None)

        def told(stage: str, number: int, count: int) -> None:
            # What has begun is not done.
            done = max(number - 1, 0)
            shown.update(task, description=escape(stage), completed=done, total=count or None)

        yield told


def _again(loss: str, optimizer: str, stated: Mapping[str, Any]) -> str:
    """The options with which `shard` trains what was planned."""
    words = ["--train", "--loss", loss, "--optimizer", optimizer]
    for name, value in stated.items():
        for one in value if isinstance(value, list) else [value]:
            words += [name, str(one)]
    return f" {shlex.join(words)}"


def _symbols(texts: list[str]) -> tuple[dict[str, int], list[str]]:
    """Sizes to plan for, and the options that are constraints."""
    sizes: dict[str, int] = {}
    constraints = []
    for text in texts:
        match = _SIZE.fullmatch(text)
        if match is not None:
            sizes[match[1]] = int(match[2])
        elif ":" in text:
            constraints.append(text)
        else:
            raise StrategyError(
                f"--symbol {text}: expected a size, as in batch=32, or constraints, as in "
                "batch:divisor=8"
            )
    return sizes, constraints


def _stages(text: str | None, strategy: Strategy) -> list[int] | None:
    """Numbers of stages to try: with `auto` all that divide the devices."""
    if text is None:
        return None
    if text == "auto":
        return [n for n in range(1, strategy.world + 1) if strategy.world % n == 0]
    if not text.isdecimal() or not int(text):
        raise StrategyError(f"--stages: expected a number or auto, got {text!r}")
    return [int(text)]


def _entry(strategy: Strategy, given: Mapping[str, object], sizes: dict[str, int]) -> SearchEntry:
    stated = {k: v for k, v in given.items() if v is not None}
    known = strategy.search.model_dump()
    merged = {**known, **stated, "sizes": {**known["sizes"], **sizes}}
    algorithms = ("recursive", "ilp")
    if merged["algorithm"] not in algorithms:
        raise StrategyError(
            f"--algorithm: expected one of {', '.join(algorithms)}, got {merged['algorithm']!r}"
        )
    try:
        return SearchEntry.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        option, *name = first["loc"]
        flag = "symbol" if option == "sizes" else option
        raise StrategyError(f"--{flag}: {in_words(name)}{problem(first)}") from None


@dataclass(frozen=True)
class LayerRow:
    """A row of what a run or a micro-batch costs a device.

    Attributes:
        name: Names of its nodes, with `*` for numbers that they differ in; or what it is that no
            node does.
        strategy: How their operands lie.
        local: The shapes of a node's results on a device.
        nodes: How many there are.
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


# -- what is printed -----------------------------------------------------------------------------


def _head(planned: FoundStrategy, entry: SearchEntry) -> str:
    best = planned.ways[0]
    assert best.price is not None
    sizes = ", ".join(f"{n}={s}" for n, s in entry.sizes.items()) or "typical sizes"
    count = best.staged.split.stages if best.staged is not None else 1
    stages = f" in each of {count} stages" if count > 1 else ""
    runs = f" of {best.micro_batches} micro-batches" if best.micro_batches > 1 else ""
    by = f"Found by {entry.algorithm}"
    if not best.name.startswith(FOUND):
        by = f"The preset {best.name}, which {entry.algorithm} does not better,"
    return (
        f"{by} for {planned.plan.mesh.size} devices{stages} "
        f"({planned.machine.name}), {sizes}.\n"
        f"A step{runs}: {_seconds(best.seconds)}; {_bytes(best.peak)} on a device."
    )


def _data(planned: FoundStrategy, entry: SearchEntry) -> dict[str, Any]:
    best = planned.ways[0].price
    assert best is not None
    return {
        "machine": planned.machine.name,
        "devices": planned.devices,
        "algorithm": entry.algorithm,
        "sizes": dict(entry.sizes),
        "memory_limit": planned.objective.limit,
        "stopped_by_clock": planned.found.timed,
        "ways": [
            {
                "name": way.name,
                "seconds": way.seconds if way.price else None,
                "computing": way.price.computing if way.price else None,
                "communicating": way.price.communicating if way.price else None,
                "held_bytes": way.held if way.price else None,
                "peak_bytes": way.peak if way.price else None,
                "micro_batches": way.micro_batches,
                "stages": [asdict(stage) for stage in way.staged.stages] if way.staged else [],
                "reason": way.reason,
            }
            for way in planned.ways
        ],
        "layers": [asdict(layer) for layer in _layers(best, planned.plan)],
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
            for c in planned.found.candidates
        ],
        "strategy": planned.data,
    }


def _print(planned: FoundStrategy, console: Console) -> None:
    best, limit = planned.ways[0].price, planned.objective.limit
    assert best is not None
    columns = ("layers", "strategy", "local sizes", "nodes", "computing", "communication", "made")
    layers = Table(*columns, title=None)
    rows = _layers(best, planned.plan)
    for row in rows:
        layers.add_row(
            escape(row.name),
            escape(row.strategy),
            " ".join("x".join(map(str, shape)) for shape in row.local if shape),
            str(row.nodes or ""),
            _seconds(row.computing),
            _seconds(row.communication),
            _bytes(row.made),
        )
    console.print(layers)
    if all(row.name == REPLICATED or not row.nodes for row in rows):
        console.print("Every device computes all of it: nothing is divided.")
    _print_stages(planned.ways[0], console)
    runs = planned.ways[0].micro_batches
    step = f"a step of {runs} micro-batches" if runs > 1 else "a step"
    ways = Table("way", step, "computing", "communication", "on a device", "why not")
    for way in planned.ways:
        if way.price is None:
            ways.add_row(way.name, "", "", "", "", escape(way.reason))
            continue
        # In stages, of all of them: a micro-batch goes through one after another.
        ways.add_row(
            way.name,
            _seconds(way.seconds),
            _seconds(way.price.computing),
            _seconds(way.price.communicating),
            _bytes(way.peak),
            "" if way.fits(limit) else f"more than {_bytes(limit)}",
        )
    console.print(ways)
    console.print(escape(_why(planned)))
    if planned.found.timed:
        console.print("The clock stopped a search: on another machine another plan may be found.")


def _print_stages(way: Way, console: Console) -> None:
    if way.staged is None:
        return
    stages = Table("stage", "nodes", "a micro-batch", "of it transfers", "on a device")
    for number, stage in enumerate(way.staged.stages):
        stages.add_row(
            str(number),
            str(stage.nodes),
            _seconds(stage.seconds),
            _seconds(stage.moving),
            _bytes(stage.peak),
        )
    console.print(stages)


def _why(planned: FoundStrategy) -> str:
    best, objective = planned.ways[0], planned.objective
    assert best.price is not None
    fitting = [w for w in planned.ways[1:] if w.fits(objective.limit)]
    proof = _proof(planned.found.chosen)
    if not fitting:
        rest = f"no other way fits into {_bytes(objective.limit)}"
        return f"{best.name} is taken; {rest if planned.ways[1:] else 'there is no other'}{proof}."
    rival = min(fitting, key=objective.rank)
    assert rival.price is not None
    ratio = rival.seconds / best.seconds if best.seconds else 1.0
    less = rival.price.communicating - best.price.communicating
    more = (
        ""
        if best.staged
        else f", {_seconds(abs(less))} {'more' if less >= 0 else 'less'} of it communication"
    )
    if objective.level == 1:
        more += f", and {rival.peak / max(best.peak, 1):.2f} times the memory"
    if objective.rank(rival) < objective.rank(best):
        return (
            f"{best.name} is best for {AIMS[objective.level]} of what keeps all that is fixed; "
            f"{rival.name}, which does not, takes {ratio:.2f} times as long{more}{proof}."
        )
    if objective.rank(rival) == objective.rank(best):
        return f"{best.name} is best for {AIMS[objective.level]}, and so is {rival.name}{proof}."
    return (
        f"{best.name} is best for {AIMS[objective.level]}; the next best is {rival.name}: it takes "
        f"{ratio:.2f} times as long{more}{proof}."
    )


def _proof(chosen: Candidate) -> str:
    """What an exact search proved on the mesh that won: by the sum that it takes the least of."""
    if not chosen.bound:
        return ""
    axes = " x ".join(f"{n}={s}" for n, s in chosen.axes)
    if chosen.limit < UNLIMITED:
        # The search counts memory without lifetimes, so its limit is not the device's.
        axes += f" that holds at most {_bytes(chosen.limit)}, as the search counts,"
    gap = f"{100 * chosen.gap:.2f} %"
    if chosen.gap > GAP:
        return f"; the search of the mesh {axes} stopped early: another may be {gap} better"
    if chosen.gap < EXACT:
        return f"; no other on the mesh {axes} is better, which is proved"
    return f"; no other on the mesh {axes} is more than {gap} better, which is proved"


def _layers(best: Price, plan: Plan) -> list[LayerRow]:
    """Nodes by layer, then what is no node's: the rows' seconds sum to those of the plan.

    Nodes are of one layer whose names are alike but for numbers, and that are divided alike.
    """
    groups: dict[tuple[str, str, object], list[NodePrice]] = {}
    whole: list[NodePrice] = []
    for node in best.nodes:
        chosen = plan.nodes[node.name]
        if not chosen.factors and not node.moving:
            whole.append(node)
            continue
        strategy = " ".join(
            s.describe(plan.mesh) for s in chosen.inputs if s is not None and s.rank
        )
        groups.setdefault((_DIGITS.sub("*", node.name), strategy, node.local), []).append(node)
    found = [
        _layer(_common([n.name for n in nodes]), strategy, nodes)
        for (_, strategy, _), nodes in groups.items()
    ]
    if whole:
        found.append(replace(_layer(REPLICATED, "", whole), local=()))
    rest = (
        LayerRow("outputs", communication=best.outputs),
        LayerRow("gradients", communication=best.gradients),
        LayerRow("optimizer", computing=best.updating),
    )
    return [*found, *(row for row in rest if row.computing or row.communication)]


def _common(names: list[str]) -> str:
    """Returns names that are alike but for numbers as one, with `*` for numbers that differ."""
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


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us"


def _bytes(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
