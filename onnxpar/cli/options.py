"""The parameters that several commands have, and commands that take options in our form."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from onnxpar.core.errors import OnnxparError
from onnxpar_format.option import Option

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Output of `onnxpar shard`.")]
TrainingDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Output of `onnxpar shard --train`.")
]
AsJson = Annotated[bool, Option("Print JSON.", flags=("--json",))]
Devices = Annotated[
    int | None, Option("Number of devices, if the strategy does not give it.", "N", minimum=1)
]
Constraints = Annotated[
    Sequence[str],
    Option(
        "Constraints on a symbol, as in batch:divisor=8,max=512; may be repeated.",
        "NAME:CONSTRAINTS",
    ),
]


_DESCRIBED = "__options__"  # the name of an attribute


def takes_options(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a command for Typer whose parameters may be an `Option` or a dataclass of options.

    A dataclass may have other dataclasses as fields. An option that is not given has the default of
    its parameter or field.
    """
    own = list(signature(function, eval_str=True).parameters.values())
    parameters = [_of_typer(option) for option in _flat(own)]
    # Typer needs parameters without a default first.
    parameters.sort(key=lambda one: one.default is not Parameter.empty)

    def command(**given: Any) -> None:
        function(**_values(own, given))

    command.__doc__, command.__name__ = function.__doc__, function.__name__
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    forms = {one.name: form for one in _flat(own) if (form := _option(one))}
    setattr(command, _DESCRIBED, forms)
    return command


def described(command: Callable[..., Any]) -> Mapping[str, Option]:
    """Returns the options of what `takes_options` returned, by the names of their parameters."""
    found: Mapping[str, Option] = getattr(command, _DESCRIBED)
    return found


def flag(name: str) -> str:
    """Returns a parameter's name on the command line."""
    return f"--{name.replace('_', '-')}"


def _flat(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """Returns the parameters, with its fields in place of each dataclass."""
    for one in parameters:
        if is_dataclass(one.annotation):
            yield from _flat(_fields(one.annotation))
        else:
            yield one


def _fields(kind: Any) -> list[Parameter]:
    """Returns the fields of a dataclass as parameters."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(
            f.name,
            Parameter.KEYWORD_ONLY,
            annotation=hints[f.name],
            default=Parameter.empty if f.default is MISSING else f.default,
        )
        for f in fields(kind)
    ]


def _option(parameter: Parameter) -> Option | None:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return next((one for one in metadata if isinstance(one, Option)), None)


def _of_typer(parameter: Parameter) -> Parameter:
    """Returns a parameter in Typer's form."""
    parameter, option = parameter.replace(kind=Parameter.KEYWORD_ONLY), _option(parameter)
    if option is None:
        return parameter
    kind, default = get_args(parameter.annotation)[0], parameter.default
    if option.parse is not None:
        kind = str | None
    elif get_origin(kind) is Sequence:
        (item,) = get_args(kind)
        kind, default = list[Path if Path in get_args(item) else item] | None, None  # type: ignore[misc]
    # Typer makes two flags of a truth value. Other names are given: Typer 0.27 takes that of the
    # metavar otherwise, as in --LOSS.
    flags = option.flags or (() if kind is bool else (flag(parameter.name),))
    form = typer.Option(
        *flags,
        help=option.help,
        metavar=option.metavar,
        min=option.minimum,
        max=option.maximum,
    )
    return parameter.replace(annotation=Annotated[kind, form], default=default)


def _values(parameters: Iterable[Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of each parameter; OnnxparError if a text or number is malformed."""
    found = {}
    for one in parameters:
        kind: Any = one.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            found[one.name] = kind(**_values(_fields(kind), given))
        else:
            value, option = given[one.name], _option(one)
            if value is None:
                value = one.default
            elif option is not None and option.parse is not None:
                try:
                    value = option.parse(value)
                except ValueError as error:
                    raise OnnxparError(f"{flag(one.name)}: {error}") from None
            if isinstance(value, float) and not isfinite(value):
                raise OnnxparError(f"{flag(one.name)}: expected a finite number, got {value}")
            found[one.name] = value
    return found
