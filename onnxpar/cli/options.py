"""The options that several commands have, and commands that take dataclasses of options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.mixed_precision import parse_compute
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import OnnxparError
from onnxpar_format.options import Option

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Output of `onnxpar shard`.")]
TrainingDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Output of `onnxpar shard --train`.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Devices = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Number of devices, if the strategy does not give it."),
]
Constraints = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:CONSTRAINTS",
        help="Constraints on a symbol, as in batch:divisor=8,max=512; may be repeated.",
    ),
]
RecomputeCommunication = Annotated[
    str,
    typer.Option(
        metavar="keep|recompute",
        help="Recompute collectives among the recomputed nodes, or keep their results.",
    ),
]


@dataclass(frozen=True)
class TrainingOptions:
    """The training options of `shard` and `plan`."""

    loss: Annotated[
        str | None,
        typer.Option(
            metavar="LOSS",
            help="What training minimises: softmax_cross_entropy, mse, mae or bce of the first "
            "output (or of another, as in mse:NAME), or output:NAME for a scalar output of the "
            "model.",
        ),
    ] = None
    label_input: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Model input with the labels. Default: a new input named labels."
        ),
    ] = None
    ignore_index: Annotated[
        int | None,
        typer.Option(metavar="LABEL", help="Label that does not count in softmax_cross_entropy."),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="sgd, momentum, adam, adamw or lamb. `shard --train` needs it; `plan` uses "
            "adamw by default.",
        ),
    ] = None
    trainable: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Also train these tensors, even if they look like constants or --freeze matches "
            "them; may be repeated.",
        ),
    ] = None
    freeze: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Do not train these parameters; may be repeated."),
    ] = None
    tie: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A=B",
            help="Tie B to A: train two tensors with equal elements (possibly transposed) as "
            "one; may be repeated.",
        ),
    ] = None
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="float16 or bfloat16: compute the products of a float32 model in this type; "
            "parameters stay float32. bfloat16 runs on CUDA only.",
        ),
    ] = None
    optimizer_parallel: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=3,
            metavar="LEVEL",
            help="Shard over the replicas of a parameter: 0 nothing, 1 moments, 2 also "
            "gradients, 3 also parameters. Default: the strategy's level, else 0.",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Returns the options that were given, by name."""
        values = {f"--{f.name.replace('_', '-')}": getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def spec(self, loss: str, optimizer: str) -> TrainingSpec:
        """Returns what is trained and how.

        Args:
            loss: The loss.
            optimizer: The optimizer if the option was not given.

        Raises:
            OnnxparError: An option is malformed.
        """
        return TrainingSpec(
            parse_loss(loss, label_input=self.label_input, ignore_index=self.ignore_index),
            parse_optimizer(self.optimizer or optimizer),
            tuple(self.trainable or ()),
            tuple(self.freeze or ()),
            compute=None if self.compute is None else parse_compute(self.compute),
            ties=tuple(self.tie or ()),
        )


def takes_options(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that has an option for each field of its dataclass parameters.

    This includes the fields of nested dataclasses. An option that is not given has the default of
    its field.
    """
    own = signature(function, eval_str=True).parameters.values()
    parameters = [each for one in own for each in _expanded(one)]
    # Typer needs parameters without a default first.
    parameters.sort(key=lambda one: one.default is not Parameter.empty)

    def command(**given: Any) -> None:
        built = {
            one.name: _built(one.annotation, given)
            if is_dataclass(one.annotation)
            else given[one.name]
            for one in own
        }
        function(**built)

    command.__doc__, command.__name__ = function.__doc__, function.__name__
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def _expanded(parameter: Parameter) -> list[Parameter]:
    """Returns the options of a parameter: the fields of a dataclass, or the parameter itself."""
    kind, one = parameter.annotation, Parameter.KEYWORD_ONLY
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        defaults = {f.name: f.default for f in fields(kind)}
        inner = [
            Parameter(n, one, annotation=hints[n], default=_default(defaults[n])) for n in defaults
        ]
        return [each for option in inner for each in _expanded(option)]
    option = next((m for m in getattr(kind, "__metadata__", ()) if isinstance(m, Option)), None)
    return [parameter.replace(kind=one) if option is None else _of_typer(parameter, option)]


def _of_typer(parameter: Parameter, option: Option) -> Parameter:
    """Returns an option in Typer's form."""
    kind, default = get_args(parameter.annotation)[0], parameter.default
    if option.parse is not None:
        kind = str | None
    elif get_origin(kind) is Sequence:
        (item,) = get_args(kind)
        kind, default = list[Path if Path in get_args(item) else item] | None, None  # type: ignore[misc]
    form = typer.Option(*option.flags, help=option.help, metavar=option.metavar, min=option.minimum)
    return Parameter(
        parameter.name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, form], default=default
    )


def _default(value: Any) -> Any:
    return Parameter.empty if value is MISSING else value


def _built(kind: Any, given: Mapping[str, Any]) -> Any:
    """Returns a dataclass of the options given; OnnxparError if a text is malformed."""
    hints, values = get_type_hints(kind, include_extras=True), {}
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            values[field.name] = _built(hint, given)
        elif (value := given[field.name]) is not None:
            values[field.name] = _parsed(field.name, hint, value)
    return kind(**values)


def _parsed(name: str, hint: Any, value: Any) -> Any:
    for option in hint.__metadata__:
        if isinstance(option, Option) and option.parse is not None:
            try:
                return option.parse(value)
            except ValueError as error:
                raise OnnxparError(f"--{name.replace('_', '-')}: {error}") from None
    return value
