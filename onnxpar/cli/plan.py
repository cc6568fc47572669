"""`onnxpar plan`: searches for a strategy and explains it."""

import gc
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

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

from onnxpar.api.plan_strategy import plan_strategy, searching
from onnxpar.api.plan_type import plan_any_type
from onnxpar.autodiff.mixed_precision import OPEN_TYPE
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cli.options import AsJson, Devices, takes_options
from onnxpar.cli.screen import Column, Content, Screen
from onnxpar.cli.shard import parse_symbols
from onnxpar.cli.training_options import TrainingOptions
from onnxpar.core.errors import DirectoryError, ModelError, StrategyError, short
from onnxpar.core.machine import PRESETS
from onnxpar.frontend.load import read
from onnxpar.graph.validity import blamed_on_model
from onnxpar.report.found_strategy import REPLICATED, FoundStrategy, seconds_text
from onnxpar.search.configurations import Without
from onnxpar.search.find_plan import OnProgress
from onnxpar.search.rival_plans import Way
from onnxpar.strategy import Strategy, strategy_for
from onnxpar.strategy.presets import AUTO, PRESET_AXES
from onnxpar.strategy.save import write_strategy
from onnxpar.strategy.schema import PIPELINE_AXIS, SearchEntry
from onnxpar.strategy.validation_errors import in_words, problem
from onnxpar_format.new_file import check_file, new_file
from onnxpar_format.option import Option, parse_bytes
from onnxpar_format.texts import bytes_text, whole

_SIZE = re.compile(r"([^:=]+)=(\d{1,18})")
OPTIMIZER = "adamw"
"""The optimizer to plan for if only a loss is given."""


@takes_options
def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The ONNX model.")],
    out: Annotated[Path, Option("The strategy file to write.", "FILE", flags=("--out", "-o"))],
    *,
    devices: Devices = None,
    strategy: Annotated[
        str | None,
        Option(
            "The fixed part of the strategy: a file, or only a mesh such as dp=2,tp=4. The "
            "search decides the rest. Default: the model's annotations.",
            "FILE|AXES",
            values=tuple(f"{axis}=" for axis in PRESET_AXES),
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        Option(
            "recursive (the default), or ilp for an exact search.",
            "NAME",
            values=("recursive", "ilp"),
        ),
    ] = None,
    level: Annotated[
        int | None,
        Option(
            "Objective: 0 time, with communication counted tenfold; 1 memory; 2 time (default).",
            "LEVEL",
            minimum=0,
            maximum=2,
            values=("0", "1", "2"),
        ),
    ] = None,
    memory: Annotated[
        int | None, Option("Memory limit of a device, such as 80GiB.", "SIZE", parse=parse_bytes)
    ] = None,
    machine: Annotated[
        str | None,
        Option(
            "cpu (the default), a100, h100, h200, or a file.", "NAME|FILE", values=tuple(PRESETS)
        ),
    ] = None,
    symbol: Annotated[
        Sequence[str],
        Option(
            "A symbol's size to plan for, or constraints on it; may be repeated.",
            "NAME=SIZE|NAME:CONSTRAINTS",
        ),
    ] = (),
    stages: Annotated[
        str | None,
        Option(
            "Number of pipeline stages; auto tries all that divide the number of devices.",
            "N|auto",
            values=("auto",),
        ),
    ] = None,
    micro_batches: Annotated[int | None, Option("Micro-batches in a step.", "M", minimum=1)] = None,
    training: TrainingOptions,
    json_output: AsJson = False,
) -> None:
    """Search for a strategy, and explain the choice."""
    check_file(out, DirectoryError)
    sizes, constraints = _symbols(symbol)
    with blamed_on_model(model):
        proto = read(model)
    strategy = _with_stages(strategy, stages)
    wanted = searching(strategy_for(strategy, devices, proto, f"model {str(model)!r}", AUTO))
    if training.loss is None and (given := [n for n in training.given() if n != "--optimizer"]):
        raise ModelError(f"{given[0]}: only for training; expected --loss as well")
    if training.loss is None and micro_batches is not None:
        raise ModelError("--micro-batches: only for training; expected --loss as well")
    search = {"algorithm": algorithm, "level": level, "memory": memory, "machine": machine}
    entry = _entry(wanted, search, sizes)
    any_type = training.compute == OPEN_TYPE
    if any_type:
        training = replace(training, compute=None)
    spec = None if training.loss is None else training.spec(training.loss, OPTIMIZER)
    wanted = replace(wanted, search=entry)
    symbols = parse_symbols(constraints)

    with _progress() as progress, _uncollected():

        def plan(spec: TrainingSpec | None) -> FoundStrategy:
            return plan_strategy(
                model,
                wanted,
                symbols=symbols,
                training=spec,
                stages=_stages(stages, wanted),
                micro_batches=micro_batches,
                level=training.optimizer_parallel,
                progress=progress,
            )

        if spec is not None and any_type:
            planned = plan_any_type(plan, model, wanted, symbols, spec)
            training = replace(training, compute=planned.compute)
        else:
            planned = plan(spec)
    with new_file(out, DirectoryError) as file:
        file.write_text(write_strategy(planned.data, planned.summary(entry)), encoding="utf-8")
    if json_output:
        print(json.dumps(planned.report(entry), indent=1))
        return
    screen = Screen({"axes": dict(planned.plan.mesh.axes)})
    _print(planned, screen)
    screen.entry("written", str(out))
    screen.line(
        f"next          onnxpar shard {model} --strategy {out}{_training_options(training)} -o DIR"
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turns off garbage collection: plans have no cycles, and looking for them took an eighth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Shows a bar on a terminal, and clears it at the end."""
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

        def show(stage: str, number: int, count: int) -> None:
            # What has begun is not done.
            done = max(number - 1, 0)
            shown.update(task, description=escape(stage), completed=done, total=count or None)

        yield show


def _training_options(training: TrainingOptions) -> str:
    """Returns the same training options for `shard`; the level is in the strategy file."""
    if training.loss is None:
        return ""
    given = {"--loss": training.loss, "--optimizer": OPTIMIZER} | training.given()
    words = ["--train"]
    for name, value in given.items():
        if name != "--optimizer-parallel":
            for one in [value] if isinstance(value, str) else value:
                words += [name, str(one)]
    return f" {shlex.join(words)}"


def _symbols(texts: Iterable[str]) -> tuple[dict[str, int], list[str]]:
    """Returns the sizes to plan for, and the options that are constraints."""
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


def _with_stages(strategy: str | None, stages: str | None) -> str | None:
    """Returns the preset with `--stages` as its axis pp: its other axes are those of one stage."""
    names = {part.partition("=")[0].strip() for part in (strategy or "").split(",")}
    if stages is None or whole(stages) is None or not names <= set(PRESET_AXES) - {PIPELINE_AXIS}:
        return strategy
    return f"{PIPELINE_AXIS}={stages},{strategy}"


def _stages(text: str | None, strategy: Strategy) -> list[int] | None:
    """Returns the numbers of stages to try; with `auto`, all that divide the devices."""
    if text is None:
        return None
    if text == "auto":
        return [n for n in range(1, strategy.world + 1) if strategy.world % n == 0]
    number = whole(text)
    if not number:
        raise StrategyError(f"--stages: expected a number or auto, got {short(text)}")
    return [number]


def _entry(strategy: Strategy, given: Mapping[str, object], sizes: dict[str, int]) -> SearchEntry:
    stated = {k: v for k, v in given.items() if v is not None}
    # What nobody states stays so: a file that `plan` writes has no machine then.
    known = strategy.search.model_dump(exclude_unset=True)
    merged = {**known, **stated}
    if sizes:
        merged["sizes"] = {**strategy.search.sizes, **sizes}
    algorithms = ("recursive", "ilp")
    if merged.get("algorithm", algorithms[0]) not in algorithms:
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


def _print(planned: FoundStrategy, screen: Screen) -> None:
    _print_layers(planned, screen)
    _print_stages(planned.ways[0], screen)
    _print_ways(planned, screen)
    _print_without(planned, screen)
    best = planned.ways[0]
    if planned.choices:
        screen.entry("choices", planned.choices)
    if best.mesh:
        of_stages = " (each stage)" if best.staged is not None else ""
        screen.entry("mesh", f"{best.mesh}{of_stages}", layout=True)
    screen.entry("reason", planned.reason())


def _print_layers(planned: FoundStrategy, screen: Screen) -> None:
    """Prints what the layers of the best plan cost."""
    columns = (
        Column("layers", Content.NAME),
        Column("strategy"),
        Column("local sizes", optional=True),
        Column("nodes", Content.NUMBER),
        Column("computing", Content.NUMBER),
        Column("communication", Content.NUMBER),
        Column("results", Content.NUMBER, optional=True),
    )
    rows = planned.layers()
    screen.table(
        columns,
        [
            (
                row.name,
                row.strategy,
                " ".join("x".join(map(str, shape)) for shape in row.local if shape),
                f"{row.nodes:,}" if row.nodes else "",
                seconds_text(row.computing),
                seconds_text(row.communication),
                bytes_text(row.made),
            )
            for row in rows
        ],
    )
    if all(row.name == REPLICATED or not row.nodes for row in rows):
        whole = "the complete model" if planned.ways[0].staged is None else "its complete stage"
        screen.note(f"Everything is replicated: every device computes {whole}.")


def _print_ways(planned: FoundStrategy, screen: Screen) -> None:
    """Prints the plans that were compared."""
    limit, runs = planned.objective.limit, planned.ways[0].micro_batches
    alike = len({way.micro_batches for way in planned.ways}) == 1
    step = f"a step of {runs} micro-batches" if runs > 1 and alike else "a step"
    numbers = (step, "computing", "communication", "hidden", "states", "memory")
    ways = []
    for way in planned.ways:
        if way.price is None:
            ways.append((way.name, *("" for _ in numbers), way.reason))
            continue
        # For a pipeline, the sums over its stages: a micro-batch passes through all of them.
        ways.append(
            (
                way.name,
                seconds_text(way.seconds),
                seconds_text(way.price.computing),
                seconds_text(way.price.communicating),
                seconds_text(way.price.hidden) if way.price.hidden and not way.staged else "",
                bytes_text(way.held),
                bytes_text(way.peak),
                "" if way.fits(limit) else f"more than {bytes_text(limit)}",
            )
        )
    titles = (Column("plan", Content.NAME), *(Column(n, Content.NUMBER) for n in numbers))
    screen.table((*titles, Column("why not")), ways)
    if runs > 1:
        screen.note(
            "The columns computing and communication are sums over all stages: of one micro-batch, "
            "and of the gradients and the update of a step."
        )


def _print_without(planned: FoundStrategy, screen: Screen) -> None:
    """Prints what each choice besides the strategy saves."""
    if not planned.without:
        return
    limit = planned.objective.limit
    rows = []
    for each in planned.without:
        about = "about " if each.estimated else ""
        fits = "" if each.peak <= limit else " (does not fit)"
        step, memory = seconds_text(each.seconds), bytes_text(each.peak)
        rows.append((each.choice, f"{about}{step}", f"{about}{memory}{fits}", _saved(each)))
    columns = (
        Column("a step without it", Content.NUMBER),
        Column("memory without it", Content.NUMBER),
    )
    screen.table((Column("choice"), *columns, Column("what it saves")), rows)


def _saved(without: Without) -> str:
    """Returns what a choice saves, and what it costs."""
    seconds, bytes_ = without.saved_seconds, without.saved_bytes
    costs = (seconds, seconds_text(abs(seconds))), (bytes_, bytes_text(abs(bytes_)))
    saves = " and ".join(text for amount, text in costs if amount > 0)
    takes = " and ".join(text for amount, text in costs if amount < 0)
    about = "about " if without.estimated else ""
    return f"{about}{saves or 'nothing'}" + (f", but takes {takes} more" if takes else "")


def _print_stages(way: Way, screen: Screen) -> None:
    if way.staged is None:
        return
    # Rows of layers and `shard` also count the nodes of the backward pass.
    titles = ("stage", "nodes of the model", "a micro-batch", "its transfers", "states", "memory")
    rows = [
        (
            str(number),
            f"{stage.nodes:,}",
            seconds_text(stage.seconds),
            seconds_text(stage.moving),
            bytes_text(stage.held),
            bytes_text(stage.peak),
        )
        for number, stage in enumerate(way.staged.stages)
    ]
    screen.table([Column(title, Content.NUMBER) for title in titles], rows)
