"""Stores a strategy in a model, as ONNX's multi-device annotations."""

import filecmp
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import EncodeError

from onnxpar.api.shard_model import analyse, plan_in_stages
from onnxpar.core.errors import DirectoryError, ModelError
from onnxpar.core.symbols import Symbol
from onnxpar.frontend.check_proto import external_locations
from onnxpar.frontend.load import in_memory, read
from onnxpar.graph.plan import Plan
from onnxpar.graph.validity import blamed_on_model
from onnxpar.search.decide import settled
from onnxpar.search.workload import Workload
from onnxpar.strategy import Strategy, strategy_for
from onnxpar.strategy.annotation_writer import annotate_proto
from onnxpar_format.new_file import check_file, new_file


@dataclass(frozen=True)
class Annotated:
    """What `annotate` did.

    Attributes:
        out: The file written.
        devices: Number of devices.
        nodes: Number of nodes in the file's main graph.
        annotated: How many of them have an annotation.
        differing: Names of the nodes and tensors whose sharding changes when the file is read
            again: annotations cannot express it, and propagation does not restore it.
    """

    out: Path
    devices: int
    nodes: int
    annotated: int
    differing: tuple[str, ...]


def annotate(
    model: str | Path,
    strategy: str | Path | Strategy | None,
    out: str | Path,
    *,
    devices: int | None = None,
    symbols: Mapping[str, Symbol] | None = None,
) -> Annotated:
    """Writes a model with the plan of a strategy as annotations, and changes nothing else in it.

    External weight files are not changed. If the model is written to another folder, they are
    copied.

    Args:
        model: Path of the ONNX file.
        strategy: A strategy, the path of a strategy file, or a preset such as `dp=2,tp=4`; None
            for the model's annotations, which are then written again.
        out: The file to write; it may be the model itself.
        devices: Number of devices, if the strategy does not give it.
        symbols: Constraints on symbols; they replace the strategy's of the same name.

    Raises:
        OnnxparError: The model or the strategy is wrong, or the file cannot be written; an existing
            file is then unchanged.
    """
    path, out = Path(model), Path(out)
    check_file(out, DirectoryError)
    with blamed_on_model(path):
        proto = read(path)
        strategy = strategy_for(strategy, devices, proto, f"model {str(path)!r}")
        constraints = {**strategy.symbols, **(symbols or {})}
        program = analyse(in_memory(proto, path), constraints)
        strategy = settled(strategy, Workload.inference(program), constraints)
        placed, places, plan = plan_in_stages(program, strategy)
        count = annotate_proto(proto, placed, plan, constraints, strategy.pipeline)
        if strategy.pipeline is not None:
            # Its nodes were assigned to stages.
            program = analyse(in_memory(proto, path), constraints)
        written = strategy_for(None, None, proto, f"model {str(out)!r}")
        _, where, again = plan_in_stages(program, written)
    try:
        data = proto.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ModelError(
            f"{str(path)!r}: expected a model of less than 2 GiB without its external files: "
            f"{error}"
        ) from None
    with new_file(out, DirectoryError) as name:
        _copy_weights(proto, path.parent, out.parent)
        name.write_bytes(data)
    differing = _differing(plan, again)
    moved = sorted(n for n, part in places.nodes.items() if where.nodes.get(n) != part)
    differing += tuple(name for name in moved if name not in differing)
    return Annotated(out, strategy.world, len(proto.graph.node), count, differing)


def _differing(first: Plan, second: Plan) -> tuple[str, ...]:
    tensors = [
        name
        for side in ("inputs", "parameters", "outputs")
        for name, sharding in getattr(first, side).items()
        if getattr(second, side).get(name) != sharding
    ]
    nodes = [
        name
        for name, plan in first.nodes.items()
        if (found := second.nodes.get(name)) is None
        or (plan.inputs, plan.outputs) != (found.inputs, found.outputs)
    ]
    return (*tensors, *nodes)


# -- files ---------------------------------------------------------------------------------------


def _copy_weights(proto: onnx.ModelProto, source: Path, target: Path) -> None:
    """Copies the external files of a model, except those that are already there."""
    for location in external_locations(proto):
        old, new = source / location, target / location
        if not old.is_file():
            raise ModelError(f"the model's external file {str(old)!r} does not exist")
        if new.exists():
            if not (os.path.samefile(old, new) or filecmp.cmp(old, new, shallow=False)):
                raise ModelError(
                    f"{str(new)!r}: expected no file of that name, or the model's own weights, "
                    f"got another file"
                )
            continue
        new.parent.mkdir(parents=True, exist_ok=True)
        with new_file(new, DirectoryError) as name:
            shutil.copyfile(old, name)
