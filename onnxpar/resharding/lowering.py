"""Writes the steps of a reshard into a rank-generic graph.

A step works on the component that gains or loses atoms, so a dim of several components is seen with
one axis per component around it. Where a split is not proved even, a dim is padded with zeros up to
whole pieces before it is split, and trimmed level by level after it is gathered; where it is
proved,
nothing but the step itself is emitted. Zeros pad zeros: a reshard never makes padding non-zero.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import Component, Sharding, local_size
from onnxpar.core.symbols import Dim, as_dim, ceil_div
from onnxpar.graph.builder import INT64
from onnxpar.graph.local_builder import LocalBuilder
from onnxpar.resharding.routes import OPERATORS, ReshardStep, Slot

# For these onnxruntime 1.31 has a kernel of Pad on the CPU and on CUDA.
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
        reason: Which node and operand want it, for people.
    """
    if value.dtype is None:
        value.dtype = dtype
    for step in steps:
        value = _Emitter(builder, step, name, reason).run(value)
    return value


class _Emitter:
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
        if step.kind in ("all_reduce", "permute"):
            x = self._collective(x, shape)
        else:
            x, shape = self._change(x, shape)
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

    def _axis(self, slot: Slot) -> int:
        axis = 0
        for d in range(slot[0]):
            axis += len(self.step.before.dims[d]) if d in self.open else 1
        return axis + (slot[1] if slot[0] in self.open else 0)

    def _levels(self, component: Component, atoms: Atoms) -> list[Dim]:
        """Local sizes of a component while `atoms` split it on: first whole, last cut."""
        sizes = [local_size(component, self.mesh, self.builder.table)]
        for atom in atoms:
            sizes.append(ceil_div(sizes[-1], self.mesh.atoms[atom], self.builder.table))
        return sizes

    def _change(self, x: ir.Value, shape: list[Dim]) -> tuple[ir.Value, list[Dim]]:
        step, atoms = self.step, self.step.atoms
        source = None if step.source is None else self._axis(step.source)
        target = None if step.target is None else self._axis(step.target)
        gathered = (
            self._levels(step.after.dims[step.source[0]][step.source[1]], atoms)
            if step.source is not None
            else []
        )
        scattered = (
            self._levels(step.before.dims[step.target[0]][step.target[1]], atoms)
            if step.target is not None
            else []
        )
        if step.kind == "slice":
            assert target is not None
            return self._own(x, shape, target, scattered)
        if target is not None:
            x, shape = self._pad_levels(x, shape, target, scattered)
        shape = list(shape)
        group = self.mesh.count(atoms)
        if target is not None:
            shape[target] = scattered[-1]
        if source is not None:
            shape[source] = gathered[-1] * group
        by_kind: dict[str, dict[str, object]] = {
            "all_gather": {"axis": source},
            "reduce_scatter": {"axis": target, "reduction": step.before.reduction},
            "all_to_all": {"split_axis": target, "concat_axis": source},
        }
        x = self._collective(x, shape, **by_kind[step.kind])
        if source is not None:
            x, shape = self._cut_levels(x, shape, source, gathered)
        return x, shape

    def _pad(
        self, x: ir.Value, shape: list[Dim], axis: int, size: Dim
    ) -> tuple[ir.Value, list[Dim]]:
        """Pads an axis with zeros at its end up to `size`."""
        if self.builder.table.equal(shape[axis], size):
            return x, shape
        build = self.builder
        missing = build.op("Sub", build.size(size), build.size(shape[axis]), dtype=INT64, shape=[1])
        before, shape = shape, [*shape[:axis], size, *shape[axis + 1 :]]
        if x.dtype not in PADDED:
            parts = [build.sizes(before[:axis]), missing, build.sizes(before[axis + 1 :])]
            gap = build.op("Concat", *parts, dtype=INT64, shape=[len(shape)], axis=0)
            added = [*shape[:axis], as_dim(size - before[axis]), *shape[axis + 1 :]]
            zeros = build.op("ConstantOfShape", gap, dtype=ir.DataType.FLOAT, shape=added)
            zeros = build.cast(zeros, x.dtype)
            return build.op("Concat", x, zeros, shape=shape, axis=axis), shape
        ends = [0] * (len(shape) + axis), [0] * (len(shape) - axis - 1)
        parts = [build.const(np.array(ends[0], np.int64)), missing]
        if ends[1]:
            parts.append(build.const(np.array(ends[1], np.int64)))
        pads = build.op("Concat", *parts, dtype=INT64, shape=[2 * len(shape)], axis=0)
        return build.op("Pad", x, pads, build.const(0, x.dtype), shape=shape), shape

    def _cut(
        self, x: ir.Value, shape: list[Dim], axis: int, size: Dim
    ) -> tuple[ir.Value, list[Dim]]:
        """Keeps the first `size` elements of an axis."""
        if self.builder.table.equal(shape[axis], size):
            return x, shape
        shape = [*shape[:axis], size, *shape[axis + 1 :]]
        kept = self.builder.op(
            "Slice",
            x,
            self.builder.const([0]),
            self.builder.size(size),
            self.builder.const([axis]),
            dtype=x.dtype,
            shape=shape,
        )
        return kept, shape

    def _own(
        self, x: ir.Value, shape: list[Dim], axis: int, levels: list[Dim]
    ) -> tuple[ir.Value, list[Dim]]:
        """Keeps this rank's piece of an axis: one Slice for each run of even levels."""
        atoms, first = self.step.atoms, 0
        while first < len(atoms):
            last = first + 1
            while last < len(atoms) and self._is_even(levels, last):
                last += 1
            run, local = atoms[first:last], levels[last]
            x, shape = self._pad(x, shape, axis, as_dim(local * self.mesh.count(run)))
            piece = self.builder.size(local)
            start = self.builder.op(
                "Mul", self.builder.position(run), piece, dtype=INT64, shape=[1]
            )
            stop = self.builder.op("Add", start, piece, dtype=INT64, shape=[1])
            shape = [*shape[:axis], local, *shape[axis + 1 :]]
            x = self.builder.op(
                "Slice", x, start, stop, self.builder.const([axis]), dtype=x.dtype, shape=shape
            )
            first = last
        return x, shape

    def _is_even(self, levels: list[Dim], index: int) -> bool:
        parts = self.mesh.atoms[self.step.atoms[index]]
        return self.builder.table.equal(levels[index], levels[index + 1] * parts)

    def _pad_levels(
        self, x: ir.Value, shape: list[Dim], axis: int, levels: list[Dim]
    ) -> tuple[ir.Value, list[Dim]]:
        """Lays an axis out as whole pieces of pieces, so that one collective can cut it."""
        group = self.mesh.count(self.step.atoms)
        if self.builder.table.equal(levels[0], levels[-1] * group):
            return x, shape
        outer = 1
        for atom, local in zip(self.step.atoms, levels[1:], strict=True):
            parts = self.mesh.atoms[atom]
            tall = [*shape[:axis], outer, *shape[axis:]] if outer > 1 else shape
            position = axis + (outer > 1)
            if outer > 1:
                tall[position] = levels[self.step.atoms.index(atom)]
                x = self.builder.reshape(x, tall)
            x, tall = self._pad(x, list(tall), position, local * parts)
            outer *= parts
            shape = [*shape[:axis], outer * local, *shape[axis + 1 :]]
            x = self.builder.reshape(x, shape)
        return x, shape

    def _cut_levels(
        self, x: ir.Value, shape: list[Dim], axis: int, levels: list[Dim]
    ) -> tuple[ir.Value, list[Dim]]:
        """Cuts the padding of gathered pieces back, innermost atom first."""
        group = self.mesh.count(self.step.atoms)
        if self.builder.table.equal(levels[0], levels[-1] * group):
            return x, [*shape[:axis], levels[0], *shape[axis + 1 :]]
        outer = group
        for index in range(len(self.step.atoms) - 1, -1, -1):
            parts = self.mesh.atoms[self.step.atoms[index]]
            outer //= parts
            tall = [*shape[:axis], outer, parts * levels[index + 1], *shape[axis + 1 :]]
            x = self.builder.reshape(x, tall)
            x, tall = self._cut(x, tall, axis + 1, levels[index])
            shape = [*shape[:axis], outer * levels[index], *shape[axis + 1 :]]
            x = self.builder.reshape(x, shape)
        return x, shape

    def _collective(self, x: ir.Value, shape: Sequence[Dim], **attributes: Any) -> ir.Value:
        step = self.step
        if step.kind == "all_reduce":
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

    A destination needs the block that `after` gives it. The sources that hold it under `before` and
    the destinations that need it are equally many; who holds it already keeps it, the others are
    paired in order.
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
