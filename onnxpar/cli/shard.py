"""`onnxpar shard`: writes one ONNX file for each rank."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from onnxpar.api.shard_model import Summary, shard_model
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cli.describe import (
    SHOWN,
    count,
    describe_conflict,
    describe_device,
    describe_growth,
    describe_held,
    describe_pair,
    describe_program,
    describe_updates,
)
from onnxpar.cli.options import AsJson, Constraints, Devices, takes_options
from onnxpar.cli.screen import TITLE, Screen, amount, once
from onnxpar.cli.training_options import TrainingOptions
from onnxpar.core.errors import DialectError, ModelError, SymbolError
from onnxpar.core.symbols import Symbol
from onnxpar.ops.collective.dialects import Dialect
from onnxpar.report.fold_layers import common_name, fold_rows
from onnxpar.stages.partition_training import PartitionedTraining
from onnxpar.strategy.presets import OFFERED
from onnxpar.strategy.recompute_entry import AGAIN, parse_recompute
from onnxpar_format.manifest import StateKind
from onnxpar_format.option import Option
from onnxpar_format.texts import bytes_text, numbered_ranks


@dataclass(frozen=True)
class _TrainingOptions(TrainingOptions):
    """The training options of `shard`, some of which `plan` does not have."""

    decay: Annotated[
        Sequence[str],
        Option(
            "Also apply weight decay to these; may be repeated. Default: parameters with two "
            "or more dims.",
            "GLOB",
        ),
    ] = ()
    no_decay: Annotated[
        Sequence[str], Option("Apply no weight decay to these; may be repeated.", "GLOB")
    ] = ()
    recompute: Annotated[
        Sequence[str],
        Option(
            "Forward values to recompute in the backward pass: a node name pattern, layers "
            "(all repeated layers), layers=K (every K-th layer), or auto=BYTES (as few as "
            "possible within this memory per device); may be repeated. Default: those of the "
            "strategy, else none.",
            "WHAT",
            values=("layers", "layers=", "auto="),
        ),
    ] = ()

    def spec(self, loss: str, optimizer: str) -> TrainingSpec:
        """Returns what is trained and how, and which parameters decay."""
        spec = super().spec(loss, optimizer)
        return replace(spec, decay=tuple(self.decay), no_decay=tuple(self.no_decay))


@takes_options
def command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="The ONNX model to shard, or a model folder of onnxruntime-genai or Optimum.",
        ),
    ],
    out: Annotated[
        Path,
        Option(
            "Output directory. It is written completely or not at all.",
            "DIR",
            flags=("--out", "-o"),
        ),
    ],
    *,
    strategy: Annotated[
        str | None,
        Option(
            "Strategy file, or one of dp, tp=4, dp=2,tp=4, replicate, auto. Default: the "
            "model's annotations.",
            "FILE|PRESET",
            values=OFFERED,
        ),
    ] = None,
    devices: Devices = None,
    symbol: Constraints = (),
    encoder: Annotated[
        Path | None,
        Option(
            "The encoder's ONNX file, if MODEL is the file of its decoder. Inputs of the decoder "
            "and outputs of the encoder are paired by name (past_key_values.0.encoder.key and "
            "present.0.encoder.key).",
            "FILE",
        ),
    ] = None,
    state: Annotated[
        Sequence[str],
        Option(
            "An output that is an input of the next run; may be repeated. Caches with usual names "
            "(past_key_values.0.key and present.0.key) are found without it.",
            "INPUT=OUTPUT",
        ),
    ] = (),
    rank: Annotated[
        Sequence[int],
        Option("Write this rank only; may be repeated. Default: all.", "R", minimum=0),
    ] = (),
    dump: Annotated[
        Path | None, Option("Write the model after each phase to this directory.", "DIR")
    ] = None,
    force: Annotated[
        bool, Option("Replace an existing output directory.", flags=("--force",))
    ] = False,
    train: Annotated[
        bool, Option("Write the programs that train the model.", flags=("--train",))
    ] = False,
    training: _TrainingOptions,
    recompute_communication: Annotated[
        str,
        Option(
            "Recompute collectives among the recomputed nodes, or keep their results.",
            "keep|recompute",
            values=("keep", "recompute"),
        ),
    ] = AGAIN,
    dialect: Annotated[
        str | None,
        Option(
            "Write the collectives as another runtime has them; for forward programs.",
            "tensorrt|onnxruntime",
            values=tuple(Dialect),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shard a model: write one graph for each device."""
    given, spec = training.given(), None
    if train:
        if training.loss is None or training.optimizer is None:
            missing = "--loss" if training.loss is None else "--optimizer"
            raise ModelError(f"--train: expected {missing} as well, got none")
        spec = training.spec(training.loss, training.optimizer)
    elif given:
        raise ModelError(f"{next(iter(given))}: only for training; expected --train as well")
    if train and state:
        raise ModelError("--state: expected a forward program, got --train")
    if dialect is not None and dialect not in [*Dialect]:
        raise DialectError(f"--dialect {dialect}: expected {' or '.join(Dialect)}")
    recompute = training.recompute
    summary = shard_model(
        model,
        strategy,
        out,
        devices=devices,
        symbols=parse_symbols(symbol),
        ranks=rank or None,
        dump=dump,
        force=force,
        training=spec,
        optimizer_parallel=training.optimizer_parallel,
        recompute=parse_recompute(recompute, recompute_communication) if recompute else None,
        states=parse_states(state),
        encoder=encoder,
        dialect=None if dialect is None else Dialect(dialect),
    )
    if as_json:
        seconds = {name: round(taken, 3) for name, taken in summary.seconds.items()}
        found = {"directory": str(summary.out), "seconds": seconds, "report": summary.report}
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    _print(summary, rank or range(summary.report["devices"]))


def parse_symbols(texts: Iterable[str]) -> dict[str, Symbol]:
    """Returns the constraints of `--symbol NAME:CONSTRAINTS` options by name.

    Raises:
        SymbolError: A text is malformed, or a name is given twice.
    """
    symbols: dict[str, Symbol] = {}
    for text in texts:
        name, constraint = Symbol.parse_named(text)
        if name in symbols:
            raise SymbolError(f"--symbol {text}: expected {name!r} once, got it twice")
        symbols[name] = constraint
    return symbols


def parse_states(texts: Iterable[str]) -> dict[str, str]:
    """Returns the output of each input that `--state INPUT=OUTPUT` options name.

    Raises:
        ModelError: A text is malformed, or an input is named twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, output = (part.strip() for part in text.partition("="))
        if not (name and equals and output):
            raise ModelError(f"--state {text}: expected INPUT=OUTPUT, two names of the model")
        if name in found:
            raise ModelError(f"--state {text}: expected {name!r} once, got it twice")
        found[name] = output
    return found


def _print(summary: Summary, ranks: Sequence[int]) -> None:
    report, screen = summary.report, Screen(summary.report["mesh"])
    facts = describe_program(report) | describe_updates(report)
    lines = [
        *(f"{title:<{TITLE}}{text}" for title, text in facts.items()),
        *_carried(report),
        *_supplied(report),
        *_stages(report),
        *_conflicts(report),
    ]
    replicated = fold_rows(
        report["replicated"],
        lambda item: (item["name"],),
        lambda item: (item["op_type"], item["reason"].replace(item["name"], "")),
    )
    for alike in replicated[:SHOWN]:
        first, name = alike[0], common_name([item["name"] for item in alike])
        times = f" (×{len(alike)})" if len(alike) > 1 else ""
        reason = first["reason"].replace(first["name"], name)
        lines.append(f"replicated    {name} ({first['op_type']}){times}: {reason}")
    if len(replicated) > SHOWN:
        left = sum(map(len, replicated[SHOWN:]))
        lines.append(f"replicated    and {count(left, 'more node')}")
    lines.append(f"written       {summary.out} in {sum(summary.seconds.values()):.1f} s")
    if summary.training is not None:
        lines += [*_pairs(report), *_trained(summary.training, describe_device(report))]
    for line in lines:
        screen.entry(line[:TITLE].rstrip(), line[TITLE:], layout=True)
    screen.legend()
    if len(ranks) == report["devices"]:
        # Commands are not wrapped, so that they can be copied.
        screen.line(_next(summary.out, report, summary.training))


def _carried(report: dict[str, Any]) -> list[str]:
    """Returns a line about the states of a forward program, if it has any."""
    found = report["states"]
    if not found:
        return []
    first = found[0]
    return [
        f"states        {len(found)}, such as {first['input']} from {first['output']}, "
        f"{first['sharding']}: {describe_growth(first)}"
    ]


def _supplied(report: dict[str, Any]) -> list[str]:
    """Returns lines about a program that computes inputs, if there is one, and about these."""
    found = [pair for pair in report["supplied"] if not pair["given"]]
    if not found:
        return []
    first = found[0]
    totals = report["programs"][first["source"]]["totals"]
    return [
        f"{first['source']:<14}{count(totals['nodes'], 'node')}, runs once: "
        f"{count(totals['parameters'], 'parameter')}, {describe_held(totals)} on "
        f"{describe_device(report)}",
        f"              {count(len(found), 'input')} from it, such as {first['input']} from "
        f"{first['value']}, {first['sharding']}",
    ]


def _pairs(report: dict[str, Any]) -> list[str]:
    """Returns lines about the program of two micro-batches, if there is one."""
    return [
        f"pairs         in {name}, {describe_pair(data['totals'])}"
        for name, data in report["programs"].items()
        if "once" in data["totals"]
    ]


def _stages(report: dict[str, Any]) -> list[str]:
    """Returns a line for each stage of a pipeline: its contents, and what it sends."""
    lines = []
    chunks = any(t["from_chunk"] or t["to_chunk"] for t in report["transfers"])
    for item in report["stage_totals"]:
        sent = [t for t in report["transfers"] if t["from"] == item["stage"]]
        goes = [f"{t['value']} to {_where(t, chunks)} ({_size(t['bytes'])})" for t in sent[:SHOWN]]
        goes += [f"{len(sent) - SHOWN} more"] if len(sent) > SHOWN else []
        ranks, title = item["ranks"], f"stage {item['stage']}"
        lines.append(
            f"{title:<14}{numbered_ranks(ranks)}: "
            f"{count(item['nodes'], 'node')}, {count(item['parameters'], 'parameter')} of "
            f"{bytes_text(item['parameter_bytes_per_device'])} on each device, "
            f"{count(item['collectives'], 'collective')} of {amount(item['bytes'])} bytes; in each "
            f"micro-batch it sends {', '.join(goes) or 'nothing'}"
        )
    return lines


def _where(transfer: dict[str, Any], chunks: bool) -> str:
    """Returns the target stage of a transfer, and the chunks if stages have several."""
    if not chunks:
        return str(transfer["to"])
    return f"{transfer['to']} (chunk {transfer['from_chunk']} to {transfer['to_chunk']})"


def _size(sent: int | str | None) -> str:
    return "of a size that depends on data" if sent is None else f"{amount(sent)} bytes"


def _trained(training: PartitionedTraining, device: str) -> list[str]:
    """Returns what is trained and what is not: the user must notice if something is missing."""
    selection, unreached = training.prepared.selection, training.prepared.unreached
    counts = selection.counts(unreached)
    lines = [
        f"trained       {counts.trained:,} of {counts.elements:,} parameters, in "
        f"{counts.trained_tensors} of {counts.tensors} tensors",
        *_states(training, device),
    ]
    tensors = selection.outcome(unreached)
    constants = [t for t in tensors if not t.parameter and t.elements > 1]
    if constants:
        lines.append(
            f"constants     {count(len(constants), 'tensor')} with "
            f"{sum(t.elements for t in constants):,} elements, such as {constants[0].name}; "
            "onnxpar inspect lists all, with the reason"
        )
    groups = (
        (
            "not trained",
            [f"{t.name}: {t.reason}" for t in tensors if t.parameter and not t.trained],
        ),
        (
            "shared",
            [f"{t.name}, by {', '.join(t.used_by)}" for t in selection.shared(unreached)],
        ),
        ("notice", once(training.prepared.notices)),
    )
    for title, texts in groups:
        lines += [f"{title:<14}{text}" for text in texts[:SHOWN]]
        if len(texts) > SHOWN:
            lines.append(f"{title:<14}and {len(texts) - SHOWN} more, see onnxpar inspect")
    return lines


def _states(training: PartitionedTraining, device: str) -> list[str]:
    """Returns what a device keeps from step to step, and how much of it replicas share."""
    kept, pairs = training.kept, training.strategy.pair_micro_batches
    moments = kept[StateKind.MOMENT1] + kept[StateKind.MOMENT2]
    lines = [
        f"states        {bytes_text(kept[StateKind.PARAMETER])} of trained parameters on {device}, "
        f"{bytes_text(kept[StateKind.GRADIENT])} of gradients, {bytes_text(moments)} of moments"
    ]
    if training.pipeline is not None:
        entry = training.pipeline.entry
        lines.append(f"schedule      {entry.schedule}; {_divided(entry.micro_batches)}")
    elif (runs := max(training.strategy.micro_batches or 1, 2 if pairs else 1)) > 1:
        lines.append(f"step          {_divided(runs)}")
    shards = training.shards
    if shards.options.level:
        # A tensor that several stages hold counts once.
        trained = {p.name for p in training.prepared.selection.trained}
        shared, every = len(trained & shards.shards.keys()), len(trained & shards.gradients.keys())
        lines.append(
            f"              optimizer parallel, level {shards.options.level}: {shared} of "
            f"{count(every, 'tensor')} sharded over replicas; the others have no replicas, no dim "
            f"that can be sharded, or less than {bytes_text(shards.options.threshold)}"
        )
    return lines


def _divided(runs: int) -> str:
    return f"micro-batches in a step: {runs}, or as --accumulate says"


def _conflicts(report: dict[str, Any]) -> list[str]:
    """Returns what different layouts of neighbours cost, with the most expensive conflicts."""
    found = report["conflicts"]
    if not found:
        return []
    sent = report["totals"]["conflict_bytes"]
    lines = [f"conflicts     {count(len(found), 'reshard')} between neighbours, {sent} bytes"]
    lines += [f"              {describe_conflict(item)}" for item in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"              and {len(found) - SHOWN} more, see onnxpar inspect")
    return lines


def _next(out: Path, report: dict[str, Any], training: PartitionedTraining | None) -> str:
    devices = report["devices"]
    run = f"run {out} --inputs in.npz --outputs out.npz"
    if report["supplied"]:
        run = f"generate {out} --inputs in.npz --start TOKEN"
    elif report["states"]:
        run = f"generate {out} --tokens prompts.json"
    if training is not None:
        run = f"train {out} --data SOURCE --batch-size B --epochs E --lr X"
    # Not mpirun: more ranks than cores need an option with Open MPI, which MPICH does not know.
    start = "onnxpar launch -- " if devices > 1 else "onnxpar "
    return (
        f"next          onnxpar inspect {out}\n"
        f"              onnxpar view {out} --rank 0\n"
        f"              {start}{run}"
    )
