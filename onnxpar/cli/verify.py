"""`onnxpar verify`: compares the partitioned program with the undivided one."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnxpar.cli.describe import count
from onnxpar.cli.options import AsJson, Directory, takes_options
from onnxpar.cli.screen import Column, Content, Screen, once
from onnxpar.core.errors import DirectoryError
from onnxpar_format.option import Option
from onnxpar_format.options import VerifyOptions
from onnxpar_format.texts import numbered_ranks

if TYPE_CHECKING:
    from onnxpar.api.runtime import Bisection, Case, TrainingCase

_SHOWN = 5
"""Names of a long list that are printed."""
_LISTED = 20
"""Differences of a case that are printed."""


@takes_options
def command(
    directory: Directory,
    model: Annotated[
        Path, Option("The undivided model, or the output of `shard --devices 1`.", "MODEL")
    ],
    *,
    encoder: Annotated[
        Path | None, Option("The undivided encoder, if MODEL is the file of its decoder.", "FILE")
    ] = None,
    symbol: Annotated[
        Sequence[str],
        Option(
            "Values of symbols for one case; may be repeated. Default: three cases.",
            "NAME=VALUE[,…]",
        ),
    ] = (),
    inputs: Annotated[
        Path | None, Option(".npz file of inputs instead of random ones.", "FILE")
    ] = None,
    bisect: Annotated[
        bool,
        Option(
            "If a result differs, find the first node whose own result is wrong, and say on which "
            "rank and at which element.",
            flags=("--bisect",),
        ),
    ] = False,
    dump: Annotated[
        Path | None,
        Option(
            "Write values of the first case to this .npz file, as whole arrays: ranks/NAME and "
            "undivided/NAME.",
            "FILE",
        ),
    ] = None,
    node: Annotated[
        Sequence[str],
        Option(
            "With --dump: the nodes whose results are written; may be repeated. Default: all.",
            "GLOB",
        ),
    ] = (),
    options: VerifyOptions,
    as_json: AsJson = False,
) -> None:
    """Compare the ranks with the undivided model.

    All ranks run in this process. The exit code is 1 if the results differ.
    """
    if node and dump is None:
        raise DirectoryError("--node: expected --dump FILE as well, got none")
    if options.prompt_tokens is not None and options.generate is None:
        raise DirectoryError("--prompt-tokens: expected --generate N as well, got none")
    if (bisect or dump) and (encoder or options.generate is not None):
        other = "--encoder" if encoder else "--generate"
        flag = "--bisect" if bisect else "--dump"
        raise DirectoryError(
            f"{flag}: expected no {other}, since it compares one run of one program"
        )
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    with runtime.leaving_no_folders():
        cases = runtime.verify(directory, model, symbol, inputs, options, encoder)
        wrong, found = next((case for case in cases if not case.ok), None), None
        if bisect and wrong is not None:
            values = {} if inputs else wrong.symbols
            found = runtime.first_difference(directory, model, values, inputs, options)
    if as_json:
        typer.echo(runtime.report_json(cases, found))
    else:
        _print(cases, runtime.TrainingCase)
        if found is not None:
            _print_first(found)
        _print_differences(cases)
    if dump is not None:
        values = {} if inputs else cases[0].symbols
        with runtime.leaving_no_folders():
            count = runtime.dump_values(directory, model, dump, node, values, inputs, options)
        if not as_json:
            Screen().entry("written", f"{dump}: {count:,} arrays")
    raise typer.Exit(0 if all(case.ok for case in cases) else 1)


def _print(cases: "Sequence[Case]", training: "type[TrainingCase]") -> None:
    screen = Screen()
    trained = [case for case in cases if isinstance(case, training)]
    compared = ("loss", "gradient", "state") if trained else ("max abs", "max rel")
    columns = [Column("symbols")]
    columns += [Column(title, Content.NUMBER) for title in compared]
    if not trained:
        columns.append(Column("worst", Content.NAME, optional=True))
    columns += [Column("bytes sent by a rank", Content.NUMBER), Column("agrees")]
    rows = []
    for case in cases:
        found = _steps(case) if isinstance(case, training) else _outputs(case)
        rows.append((_symbols(case), *found, _bytes(case), "yes" if case.ok else "no"))
    screen.table(columns, rows)
    if trained:
        screen.note(
            "loss, gradient: largest relative difference; state: largest fraction of its tolerance"
        )
    for one in trained:
        screen.note(_worst(one))
        jumps = sorted({name for step in one.steps for name in step.jumps})
        if jumps:
            named = ", ".join(jumps[:_SHOWN]) + (", …" if jumps[_SHOWN:] else "")
            text = f"{len(jumps)} compared less strictly (discontinuous gradients): {named}"
            screen.note(text)


def _print_differences(cases: "Sequence[Case]") -> None:
    screen = Screen()
    for case in cases:
        problems = once(case.problems)
        for problem in problems[:_LISTED]:
            screen.note(f"difference: {problem}")
        if problems[_LISTED:]:
            screen.note(f"and {count(len(problems) - _LISTED, 'more difference')}")


def _print_first(found: "Bisection") -> None:
    """Prints where a difference begins."""
    screen, first = Screen(), found.first
    screen.line()
    compared = f"{found.agree:,} values agree"
    if found.carried:
        compared += (
            f", {len(found.carried):,} differ because operands of their nodes do (such as "
            f"{found.carried[0]})"
        )
    if first is None:
        screen.entry(
            "no first node",
            f"{compared}: with every value exposed, no node is wrong. The difference is in the "
            "optimizer's update, or in nodes that onnxruntime fuses when their values are not "
            "exposed.",
        )
        return
    what = f"{first.node} ({first.op_type})"
    if first.collective:
        what = f"{first.collective} over {first.group}, for {first.node}"
    screen.entry("first wrong", what)
    at = first.difference
    screen.entry("value", f"{first.value} {first.layout} on {numbered_ranks(first.wrong_ranks)}")
    reduced = f" (terms of {numbered_ranks(at.ranks)} together)" if at.ranks[1:] else ""
    screen.entry(
        "element",
        f"{list(at.index)} on rank {at.ranks[0]}{reduced}: expected {at.expected:.9g}, got "
        f"{at.got:.9g}; they differ by {at.amount:.3g}, rounding explains {first.bound:.3g}",
    )
    if first.rule:
        screen.entry("rule", first.rule)
    screen.entry("before it", compared)
    if not first.repeats:
        screen.entry("notice", "a second run gave other bits: the kernel is not deterministic")


def _symbols(case: "Case") -> str:
    return ", ".join(f"{k}={v}" for k, v in case.symbols.items()) or "none"


def _bytes(case: "Case") -> str:
    expected = "depends on data" if case.bytes_expected is None else f"{case.bytes_expected:,}"
    counted = f"{case.bytes_counted:,}"
    equal = counted == expected
    return f"{expected}, as counted" if equal else f"{expected}, counted {counted}"


def _outputs(case: "Case") -> list[str]:
    return [f"{case.max_abs:.2e}", f"{case.max_rel:.2e}", case.worst or "none"]


def _steps(case: "TrainingCase") -> list[str]:
    """Returns the largest difference of each kind over all steps."""
    return [
        f"{max((getattr(step, name) for step in case.steps), default=0.0):.1e}"
        for name in ("loss_rel", "gradient_rel", "state_share")
    ]


def _worst(case: "TrainingCase") -> str:
    gradient = max(case.steps, key=lambda step: step.gradient_rel, default=None)
    state = max(case.steps, key=lambda step: step.state_share, default=None)
    names = {
        "gradient of": gradient.gradient_worst if gradient else "",
        "state": state.state_worst if state else "",
    }
    found = ", ".join(f"{what} {name}" for what, name in names.items() if name)
    return f"largest at {_symbols(case)}: {found or 'none'}"
