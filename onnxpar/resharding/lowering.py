"""Writes the steps of a reshard into a rank-generic graph.

A step changes the atoms of one or two components. A dim of several components is therefore reshaped
for the step, so that each component has its own axis. Where sharding is not proved even, an axis is
padded with zeros before it is split, and trimmed, level by level, after it is gathered; where it is
proved even, only the step itself is emitted. Padding that is zero stays zero.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Sharding, local_size
from onnxpar.core.symbols import Dim, as_dim, ceil_div
from onnxpar.graph.builder import INT64
from onnxpar.graph.local_builder import LocalBuilder
from onnxpar.resharding.routes import OPERATORS, ReshardStep, Slot

# onnxruntime 1.31 has kernels of Pad for these on the CPU and on CUDA.
PADDED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BOOL)


def emit_reshard(
    builder: LocalBuilder,
    value: ir.Value,
    steps: Sequence[ReshardStep],
    *,
    dtype: ir.DataType,
    name: str,
    reason: str,
) -> ir.Value:
    """Emits the steps and returns the local value in the last step's sharding.

    Args:
        builder: Where nodes are emitted.
        value: Local value in the first step's sharding.
        steps: From `onnxpar.resharding.routes.plan_reshard`.
        dtype: Its element type.
        name: Name of the global value, for people.
        reason: Which node and operand need it, for people.
    """
    if value.dtype is None:
        value.dtype = dtype
    for step in steps:
        value = _Emitter(builder, step, name, reason).run(value)
    return value


class _Emitter:
    """Writes one step. The shape of each value is that in which the builder has stored it."""

    def __init__(self, builder: LocalBuilder, step: ReshardStep, name: str, reason: str) -> None:
        self.builder = builder
        self.mesh: Mesh = builder.mesh
        self.step = step
        self.name = name
        self.reason = reason
        # The dims whose components get axes of their own while the step runs.
        self.open = {
            slot[0]
            for slot in (step.source, step.target)
            if slot is not None and len(step.before.dims[slot[0]]) > 1
        }

    def run(self, x: ir.Value) -> ir.Value:
        step = self.step
        shape = self._view(step.before)
        x = self.builder.reshape(x, shape)
        self.builder.note_shape(x, shape)
        if step.kind in ("all_reduce", "permute"):
            x = self._collective(x, shape)
        else:
            x = self._change(x)
        return self.builder.reshape(x, step.after.local_shape(self.mesh, self.builder.table))

    def _view(self, sharding: Sharding) -> list[Dim]:
        """The local shape with one axis for each component of the open dims."""
        table = self.builder.table
        shape: list[Dim] = []
        for d, size in enumerate(sharding.local_shape(self.mesh, table)):
            if d in self.open:
                shape += [local_size(c, self.mesh, table) for c in sharding.dims[d]]
            else:
                shape.append(size)
        return shape

    def _levels(self, slot: Slot, sharding: Sharding) -> tuple[int, list[Dim]]:
        """The axis of a component, and its local sizes: before, and after each atom of the step."""
        d, c = slot
        axes = (len(self.step.before.dims[i]) if i in self.open else 1 for i in range(d))
        sizes = [local_size(sharding.dims[d][c], self.mesh, self.builder.table)]
        for atom in self.step.atoms:
            sizes.append(ceil_div(sizes[-1], self.mesh.atoms[atom], self.builder.table))
        return sum(axes) + (c if d in self.open else 0), sizes

    def _change(self, x: ir.Value) -> ir.Value:
        step = self.step
        source = None if step.source is None else self._levels(step.source, step.after)
        target = None if step.target is None else self._levels(step.target, step.before)
        if target is not None:
            if step.kind == "slice":
                return self._own(x, *target)
            x = self._pad_levels(x, *target)
        shape = list(self.builder.shape_of(x))
        attributes: dict[str, object] = {}
        if target is not None:
            axis, levels = target
            shape[axis] = levels[-1]
            attributes["axis" if source is None else "split_axis"] = axis
        if source is not None:
            axis, levels = source
            shape[axis] = levels[-1] * self.mesh.count(step.atoms)
            attributes["axis" if target is None else "concat_axis"] = axis
        x = self._collective(x, shape, **attributes)
        return x if source is None else self._trim_levels(x, *source)

    def _with(self, x: ir.Value, axis: int, size: Dim) -> list[Dim]:
        """The shape of a value with another size of one axis."""
        shape = self.builder.shape_of(x)
        return [*shape[:axis], size, *shape[axis + 1 :]]

    def _pad(self, x: ir.Value, axis: int, size: Dim) -> ir.Value:
        """Pads an axis with zeros at its end up to `size`."""
        build, before = self.builder, self.builder.shape_of(x)
        if build.table.equal(before[axis], size):
            return x
        missing = build.op(
            "Sub", build.size(size), build.size(before[axis]), dtype=INT64, shape=[1]
        )
        shape = self._with(x, axis, size)
        if x.dtype not in PADDED:
            parts = [build.sizes(before[:axis]), missing, build.sizes(before[axis + 1 :])]
            gap = build.op("Concat", *parts, dtype=INT64, shape=[len(shape)], axis=0)
            added = self._with(x, axis, as_dim(size - before[axis]))
            zeros = build.op("ConstantOfShape", gap, dtype=ir.DataType.FLOAT, shape=added)
            zeros = build.cast(zeros, x.dtype)
            return build.op("Concat", x, zeros, shape=shape, axis=axis)
        ends = [0] * (len(shape) + axis), [0] * (len(shape) - axis - 1)
        parts = [build.const(np.array(ends[0], np.int64)), missing]
        if ends[1]:
            parts.append(build.const(np.array(ends[1], np.int64)))
        pads = build.op("Concat", *parts, dtype=INT64, shape=[2 * len(shape)], axis=0)
        return build.op("Pad", x, pads, build.const(0, x.dtype), shape=shape)

    def _trim(self, x: ir.Value, axis: int, size: Dim) -> ir.Value:
        """Keeps the first `size` elements of an axis."""
        build, shape = self.builder, self._with(x, axis, size)
        if build.table.equal(build.shape_of(x)[axis], size):
            return x
        bounds = build.const([0]), build.size(size), build.const([axis])
        return build.op("Slice", x, *bounds, dtype=x.dtype, shape=shape)

    def _own(self, x: ir.Value, axis: int, levels: list[Dim]) -> ir.Value:
        """Keeps this rank's shard of an axis: one Slice for each run of even levels."""
        build, atoms, first = self.builder, self.step.atoms, 0
        while first < len(atoms):
            last = first + 1
            while last < len(atoms) and self._is_even(levels, last):
                last += 1
            run, local = atoms[first:last], levels[last]
            x = self._pad(x, axis, as_dim(local * self.mesh.count(run)))
            length = build.size(local)
            start = build.op("Mul", build.position(run), length, dtype=INT64, shape=[1])
            stop = build.op("Add", start, length, dtype=INT64, shape=[1])
            shape = self._with(x, axis, local)
            x = build.op("Slice", x, start, stop, build.const([axis]), dtype=x.dtype, shape=shape)
            first = last
        return x

    def _is_even(self, levels: list[Dim], index: int) -> bool:
        count = self.mesh.atoms[self.step.atoms[index]]
        return self.builder.table.equal(levels[index], levels[index + 1] * count)

    def _pad_levels(self, x: ir.Value, axis: int, levels: list[Dim]) -> ir.Value:
        """Pads an axis at every level, so that one collective can split it into equal shards."""
        group = self.mesh.count(self.step.atoms)
        if self.builder.table.equal(levels[0], levels[-1] * group):
            return x
        shape, outer = self.builder.shape_of(x), 1
        head, tail = shape[:axis], shape[axis + 1 :]
        for before, local, atom in zip(levels, levels[1:], self.step.atoms, strict=False):
            count = self.mesh.atoms[atom]
            if outer > 1:
                x = self.builder.reshape(x, [*head, outer, before, *tail])
            x = self._pad(x, axis + (outer > 1), local * count)
            outer *= count
            x = self.builder.reshape(x, [*head, outer * local, *tail])
        return x

    def _trim_levels(self, x: ir.Value, axis: int, levels: list[Dim]) -> ir.Value:
        """Removes the padding of gathered shards, innermost atom first."""
        outer = self.mesh.count(self.step.atoms)
        if self.builder.table.equal(levels[0], levels[-1] * outer):
            return x
        shape = self.builder.shape_of(x)
        head, tail = shape[:axis], shape[axis + 1 :]
        for index, atom in reversed(list(enumerate(self.step.atoms))):
            outer //= self.mesh.atoms[atom]
            gathered = self.mesh.atoms[atom] * levels[index + 1]
            x = self.builder.reshape(x, [*head, outer, gathered, *tail])
            x = self._trim(x, axis + 1, levels[index])
            x = self.builder.reshape(x, [*head, outer * levels[index], *tail])
        return x

    def _collective(self, x: ir.Value, shape: Sequence[Dim], **attributes: Any) -> ir.Value:
        step = self.step
        if step.kind in ("all_reduce", "reduce_scatter"):
            attributes["reduction"] = step.before.reduction
        return self.builder.collective(
            OPERATORS[step.kind],
            x,
            step.atoms,
            shape=shape,
            moved=step.bytes,
            value=self.name,
            reason=self.reason,
            before=step.before,
            after=step.after,
            pairs=permutation(step, self.mesh) if step.kind == "permute" else (),
            **attributes,
        )


def permutation(step: ReshardStep, mesh: Mesh) -> list[tuple[int, int]]:
    """Returns (source, destination) positions in the group, each once, for a Permute step.

    A destination needs the block that `after` gives it. As many sources hold a block under `before`
    as destinations need it. A device that already holds its block keeps it; the others are paired
    in order.
    """
    atoms = step.atoms
    positions = list(product(*(range(mesh.atoms[a]) for a in atoms)))

    def blocks(sharding: Sharding, position: tuple[int, ...]) -> tuple[int, ...]:
        at = dict(zip(atoms, position, strict=True))
        keys = []
        for dim in sharding.dims:
            for component in dim:
                key = 0
                for atom in component.atoms:
                    if atom in at:
                        key = key * mesh.atoms[atom] + at[atom]
                keys.append(key)
        return tuple(keys)

    holders: dict[tuple[int, ...], list[int]] = {}
    for index, position in enumerate(positions):
        holders.setdefault(blocks(step.before, position), []).append(index)
    needs = [blocks(step.after, position) for position in positions]
    pairs = {}
    for index, need in enumerate(needs):
        if index in holders[need]:
            holders[need].remove(index)
            pairs[index] = index
    for index, need in enumerate(needs):
        if index not in pairs:
            pairs[index] = holders[need].pop(0)
    return [(pairs[index], index) for index in range(len(positions))]
