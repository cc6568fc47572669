"""What the example models share: a small graph writer, seeded weights and the command line.

The graphs look like those of a framework's exporter: each operation is one node with a path-like
name (`/layer0/attn/q_proj/MatMul`), values are named after the node that makes them, shapes are
computed in the graph, and only inputs and outputs have symbolic dims.

Weights are drawn when they are read, never all at once, so a model may be larger than memory. Each
weight depends only on the seed and its own name, not on the rest of the graph.
"""

import argparse
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

T = TypeVar("T")
ConfigT = TypeVar("ConfigT", bound="Exported")

IR_VERSION = 11
"""The first with multi-device fields; onnxruntime 1.31 reads up to 13."""

OPSET = 21

EXTERNAL_BYTES = 16 * 2**20
"""Models with more bytes of weights than this store them in a file beside the `.onnx`."""

_ALIGNMENT = 4096

Dims = Sequence[int | str]
Attribute = int | float | str | Sequence[int]


class GraphWriter:
    """Appends nodes, constants and seeded weights to one graph under construction.

    Args:
        seed: non-negative; equal seeds give equal weights.
    """

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed: expected a non-negative integer, got {seed}")
        self._seed = seed
        self._inputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []
        self._weights: dict[str, ir.Value] = {}
        self._domains: set[str] = {""}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, dims: Dims) -> ir.Value:
        """A graph input; a dim given as text is symbolic."""
        value = ir.val(name, dtype, ir.Shape(dims))
        self._inputs.append(value)
        return value

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        outputs: int,
        *,
        domain: str = "",
        absent: Sequence[int] = (),
        **attributes: Attribute,
    ) -> tuple[ir.Value, ...]:
        """Append one node with that many outputs, named `<node>_output_<i>`.

        Outputs that are `absent` have no name: the node does not make them.
        """
        names = ["" if i in absent else f"{name}_output_{i}" for i in range(outputs)]
        node = ir.node(
            op_type,
            inputs,
            attributes or None,
            domain=domain,
            outputs=[ir.val(n) for n in names],
            name=name,
        )
        self._domains.add(domain)
        self._nodes.append(node)
        return tuple(node.outputs)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        name: str,
        domain: str = "",
        **attributes: Attribute,
    ) -> ir.Value:
        """Append one node with one output and return that output."""
        return self.ops(op_type, inputs, name, 1, domain=domain, absent=(), **attributes)[0]

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike) -> ir.Value:
        """The output of a Constant node; equal constants share one node."""
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"/Constant_{len(self._constants)}"
            node = ir.node(
                "Constant",
                [],
                {"value": ir.tensor(array)},
                outputs=[ir.val(f"{name}_output_0")],
                name=name,
            )
            self._nodes.append(node)
            self._constants[key] = node.outputs[0]
        return self._constants[key]

    def weight(
        self, name: str, shape: tuple[int, ...], *, std: float, mean: float = 0.0
    ) -> ir.Value:
        """A float32 initializer drawn from a normal distribution; one name is one tensor."""
        if name in self._weights:
            raise ValueError(f"weight {name!r} is defined twice")

        def draw() -> ir.TensorProtocol:
            return ir.Tensor(self.normal(name, shape, std) + np.float32(mean), name=name)

        tensor = ir.LazyTensor(draw, ir.DataType.FLOAT, ir.Shape(shape), name=name)
        value = ir.val(name, ir.DataType.FLOAT, shape, const_value=tensor)
        self._weights[name] = value
        return value

    def table(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        """An initializer with this content, such as a quantised weight, angles or scales."""
        if name in self._weights:
            raise ValueError(f"weight {name!r} is defined twice")
        tensor = ir.tensor(array, name=name)
        self._weights[name] = ir.val(name, tensor.dtype, array.shape, const_value=tensor)
        return self._weights[name]

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> npt.NDArray[np.float32]:
        """What `weight` draws for this name around 0, for example to quantise it."""
        # Keyed by the name, so that an option that adds a weight does not change the others.
        key = [self._seed, zlib.crc32(name.encode())]
        sample = np.random.default_rng(key).standard_normal(shape, dtype=np.float32)
        sample *= np.float32(std)
        return sample

    def model(self, outputs: Mapping[str, tuple[ir.Value, Dims]], name: str) -> ir.Model:
        """The finished float32 model; `outputs` gives each result its name and dims."""
        for output, (value, dims) in outputs.items():
            value.name = output
            value.dtype = ir.DataType.FLOAT
            value.shape = ir.Shape(dims)
        graph = ir.Graph(
            self._inputs,
            [value for value, _ in outputs.values()],
            nodes=self._nodes,
            initializers=list(self._weights.values()),
            opset_imports={d: 1 if d else OPSET for d in sorted(self._domains)},
            name=name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name=f"models/{name}.py")


_SMALL = 1 << 10
"""Tensors with fewer bytes may be constants on which shapes depend."""


def weight_bytes(model: ir.Model) -> int:
    """The bytes of all initializers together."""
    return sum(tensor.nbytes for tensor in _weights(model))


def save(model: ir.Model, path: Path, *, materialise: bool = True) -> None:
    """Write `path`, and `path` + ".data" beside it if the weights are large.

    Args:
        model: as a `build` function returns it; it is left unchanged.
        path: the `.onnx` file; its folder is made.
        materialise: `False` writes no tensors of 1 KiB or more: the data file is sparse, has the
            right size, and reads as zeros. For graphs whose weights would not fit on the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.with_name(path.name + ".data")
    if not materialise:
        _save_sparse(model, path, data)
    elif weight_bytes(model) > EXTERNAL_BYTES:
        ir.save(model, path, external_data=data.name)
    else:
        data.unlink(missing_ok=True)
        ir.save(model, path)


def _weights(model: ir.Model) -> list[ir.TensorProtocol]:
    values = model.graph.initializers.values()
    return [value.const_value for value in values if value.const_value is not None]


def _save_sparse(model: ir.Model, path: Path, data: Path) -> None:
    kept = {value: value.const_value for value in model.graph.initializers.values()}
    end = 0
    try:
        for value, tensor in kept.items():
            if tensor is None or not isinstance(tensor.shape, ir.Shape):
                raise ValueError(f"initializer {value.name!r} has no tensor")
            if tensor.nbytes < _SMALL:
                continue
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = offset + tensor.nbytes
            value.const_value = ir.ExternalTensor(
                data.name,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=tensor.shape,
                name=str(value.name),
                base_dir=path.parent,
            )
        with data.open("wb") as file:
            file.truncate(end)
        ir.save(model, path)
    finally:
        for value, tensor in kept.items():
            value.const_value = tensor


def option(default: T, text: str) -> T:
    """A field of an exporter's `Config` with its help text."""
    return field(default=default, metadata={"help": text})


def size(default: T, text: str) -> T:
    """A field of an exporter's `Config` whose numbers must be positive."""
    return field(default=default, metadata={"help": text, "positive": True})


@dataclass(frozen=True)
class Exported:
    """The sizes and the form of a network; sizes are in elements.

    Raises:
        ValueError: a size that is not positive.
    """

    seed: int = option(0, "seed of the weights")

    def __post_init__(self) -> None:
        """Refuse sizes that no layer can have."""
        for one in fields(self):
            value = getattr(self, one.name)
            least = min(value if isinstance(value, tuple) else (value,), default=1)
            if "positive" in one.metadata and least < 1:
                raise ValueError(f"{one.name}: expected a positive integer, got {value}")


def main(description: str, config: type[ConfigT], build: Callable[[ConfigT], ir.Model]) -> None:
    """Run an exporter: one flag per field of the frozen dataclass `config`, then `-o FILE`.

    A field's flag takes its default's type: a bool is a switch, a tuple takes several integers.
    Prints the file, its parameters and bytes. A mistake ends the process with code 2.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="the .onnx file to write")
    parser.add_argument(
        "--no-weights",
        action="store_true",
        help="declare the weights in a sparse file that reads as zeros",
    )
    for one in fields(config):
        flag = "--" + one.name.replace("_", "-")
        text = str(one.metadata["help"])
        if isinstance(one.default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(one.default, tuple):
            parser.add_argument(flag, type=int, nargs="+", default=one.default, help=text)
        else:
            kind = type(one.default)
            parser.add_argument(flag, type=kind, default=one.default, help=text)
    options = vars(parser.parse_args())
    output: Path = options.pop("output")
    materialise = not options.pop("no_weights")
    try:
        chosen: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in options.items()
        }
        model = build(config(**chosen))
        save(model, output, materialise=materialise)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    parameters = sum(int(np.prod(tensor.shape.numpy())) for tensor in _weights(model))
    print(f"{output}: {parameters:,} parameters, {weight_bytes(model):,} bytes of weights")
