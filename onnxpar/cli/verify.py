"""`onnxpar verify`: compares the partitioned program with the undivided one."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnxpar.cli.options import AsJson, Directory, takes_options
from onnxpar.cli.screen import Column, Content, Screen, once
from onnxpar_format.options import Option, VerifyOptions

if TYPE_CHECKING:
    from onnxpar.api.runtime import Case, TrainingCase

_SHOWN = 5
"""Names of a long list that are printed."""


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
    options: VerifyOptions,
    as_json: AsJson = False,
) -> None:
    """Compare the ranks with the undivided model.

    All ranks run in this process. The exit code is 1 if the results differ.
    """
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    cases = runtime.verify(directory, model, symbol, inputs, options, encoder)
    if as_json:
        typer.echo(runtime.report_json(cases))
    else:
        _print(cases, runtime.TrainingCase)
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
        screen.line(
            "loss, gradient: largest relative difference; state: largest fraction of its tolerance"
        )
    for one in trained:
        screen.line(_worst(one))
        jumps = sorted({name for step in one.steps for name in step.jumps})
        if jumps:
            named = ", ".join(jumps[:_SHOWN]) + (", …" if jumps[_SHOWN:] else "")
            text = f"{len(jumps)} compared less strictly (discontinuous gradients): {named}"
            screen.line(text)
    for case in cases:
        for problem in once(case.problems):
            screen.line(f"difference: {problem}")


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
