"""Presets; `load_strategy` reads the value of `--strategy FILE|PRESET`."""

import re
from math import prod
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxpar.core.errors import StrategyError
from onnxpar.core.name_patterns import nearest
from onnxpar.strategy.annotation_reader import read_annotation
from onnxpar.strategy.schema import DATA_AXIS, PARAMETER_AXIS, PIPELINE_AXIS, Strategy

REPLICATE = "replicate"
AUTO = "auto"
OFFERED = (DATA_AXIS, f"{PARAMETER_AXIS}=", f"{PIPELINE_AXIS}=", REPLICATE, AUTO)
"""Presets, and beginnings of presets, that shells offer."""
_ALGORITHMS = ("recursive", "ilp", "propagation")
PRESET_AXES = (DATA_AXIS, PARAMETER_AXIS, PIPELINE_AXIS)
_PART = re.compile(r"([A-Za-z_]\w*)(?:=(\d{1,18}))?")


def load_strategy(text: str, devices: int | None = None) -> Strategy:
    """Reads a strategy file, or makes the strategy of a preset.

    `dp` shards the batch; `tp=4` shards parameters; `dp=2,tp=4` does both, on a 2x4 mesh. `pp=2`
    splits the model into stages, each on a mesh of the other axes (`pp=2,dp=2,tp=2`). One axis may
    have no number; it takes the remaining devices. `replicate` shards nothing. `auto`,
    `auto:recursive` and `auto:ilp` search. `auto:propagation` shards the batch and propagates.

    Args:
        text: Path or preset; if both exist, the file wins.
        devices: Number of devices, if the file or preset does not give it.

    Raises:
        StrategyError: There is no such file or preset, or it is malformed.
    """
    path = Path(text)
    if path.is_file():
        return Strategy.from_file(path, devices)
    if path.is_dir():
        raise StrategyError(f"strategy {text!r}: expected a file or a preset, got a directory")
    if text == AUTO or text.startswith(f"{AUTO}:"):
        return _auto(text, devices)
    if text == REPLICATE:
        content = {"rest": "replicate", "dataset": "full_batch"}
        return Strategy.from_dict(content, devices, f"preset {text!r}")
    parts = [_PART.fullmatch(part.strip()) for part in text.split(",")]
    if path.suffix or any(part is None for part in parts):
        raise StrategyError(
            f"strategy {text!r}: expected an existing file or a preset "
            f"(dp, tp=4, dp=2,tp=4, {REPLICATE}, {AUTO}, {AUTO}:ilp), got neither"
        )
    return _preset(text, [(p[1], p[2]) for p in parts if p is not None], devices)


def strategy_for(
    strategy: str | Path | Strategy | None,
    devices: int | None,
    model: onnx.ModelProto | ir.Model,
    source: str,
    default: str | None = None,
) -> Strategy:
    """Returns the strategy that is given, or else that of the model's annotation.

    Args:
        strategy: A strategy, a file or a preset (as `load_strategy`), or None.
        devices: Number of devices, if the strategy does not give it.
        model: The model.
        source: Name of the model in messages.
        default: A preset for a model without annotations.

    Raises:
        StrategyError: There is no such strategy; or none is given, and the model has no annotation
            or a malformed one.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy is not None:
        return load_strategy(str(strategy), devices)
    annotation = read_annotation(model, source, devices)
    if annotation is None and default is not None:
        return load_strategy(default, devices)
    if annotation is None:
        raise StrategyError(
            f"{source}: expected --strategy, or a model with annotations (see `onnxpar annotate`), "
            "got neither"
        )
    return Strategy.from_annotation(annotation)


def _auto(text: str, devices: int | None) -> Strategy:
    algorithm = text.partition(":")[2] or "recursive"
    if algorithm not in _ALGORITHMS:
        raise StrategyError(
            f"strategy {text!r}: expected one of {', '.join(_ALGORITHMS)} after '{AUTO}:', got "
            f"{algorithm!r}{nearest(algorithm, _ALGORITHMS)}"
        )
    content: dict[str, object] = {"search": {"algorithm": algorithm}}
    if algorithm == "propagation":
        content = {"rest": "propagate"}
    return Strategy.from_dict(content, devices, f"preset {text!r}")


def _preset(text: str, parts: list[tuple[str, str | None]], devices: int | None) -> Strategy:
    names = [name for name, _ in parts]
    for name in names:
        if name not in PRESET_AXES:
            raise StrategyError(
                f"strategy {text!r}: expected a file or a preset, got {name!r}"
                f"{nearest(name, (*PRESET_AXES, REPLICATE, AUTO))}"
            )
        if names.count(name) > 1:
            raise StrategyError(f"strategy {text!r}: expected {name} once, got it twice")
    sizes = {name: None if size is None else int(size) for name, size in parts}
    known = prod(size for size in sizes.values() if size is not None)
    open_axes = [name for name, size in sizes.items() if size is None]
    if open_axes:
        if len(open_axes) > 1:
            raise StrategyError(
                f"strategy {text!r}: expected a number for every axis but one, as in dp,tp=4"
            )
        if devices is None:
            raise StrategyError(
                f"strategy {text!r}: expected {open_axes[0]}=N or --devices, got neither"
            )
        if not known or devices % known:
            raise StrategyError(
                f"strategy {text!r}: {known} devices do not divide the {devices} requested"
            )
        sizes[open_axes[0]] = devices // known
    content: dict[str, object] = {}
    stages = sizes.pop(PIPELINE_AXIS, None)
    if stages is not None:
        content["pipeline"] = {"stages": stages}
    # Stages of one device each have a mesh without axes.
    content |= {"mesh": sizes} if sizes else {"devices": stages}
    return Strategy.from_dict(content, devices, f"preset {text!r}")
