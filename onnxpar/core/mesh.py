"""The device mesh: named axes over a row of prime-sized atoms.

A mesh of N devices numbers them 0…N-1 in row-major order of its axes. Its *atoms* are prime factors
of N whose product is N, major first. A named axis is a run of neighbouring atoms, so the views `8`,
`2x4` and `2x2x2` of the same devices share atoms and need no special cases (GSPMD's device
assignments, Xu et al. 2021, and Shardy's sub-axes express the same idea).
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

from onnxpar.core.errors import MeshError
from onnxpar.core.html import MOST_ROWS, table
from onnxpar_format.boxes import coordinates

Atoms = tuple[int, ...]
MAX_AXES = 32
"""Each axis costs time wherever shardings are compared. Not even 65,536 devices need 17."""
_AXIS = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


def prime_factors(n: int) -> tuple[int, ...]:
    """Returns the prime factors of `n >= 1` in ascending order, with multiplicity."""
    factors = []
    divisor = 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    if n > 1:
        factors.append(n)
    return tuple(factors)


def is_integer(value: object) -> bool:
    """Whether a value that a user gave is an integer; `bool` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_axes(axes: Collection[tuple[str, int]]) -> None:
    if len(axes) > MAX_AXES:
        raise MeshError(f"expected at most {MAX_AXES} mesh axes, got {len(axes)}")
    for name, size in axes:
        # Strategy files write several axes as `a.b`, and runs of devices as `4@2`.
        if not _AXIS.fullmatch(name):
            raise MeshError(
                f"mesh axis {name!r}: expected a name of letters, digits, _ and -, not beginning "
                "with a digit or -"
            )
        if not is_integer(size) or size < 1:
            raise MeshError(
                f"mesh axis {name!r}: expected an integer >= 1 as its size, got {size!r}"
            )


@dataclass(frozen=True)
class Mesh:
    """A device mesh.

    Attributes:
        axes: `(name, size)` pairs, major first; the product of the sizes is the device count.
            Empty if strategies are numeric and need no names.
        atoms: Sizes of the atoms, primes, major first; their product is the device count.

    Raises:
        MeshError: A malformed or repeated axis, or axes that are not runs of atoms.
    """

    axes: tuple[tuple[str, int], ...]
    atoms: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks names and sizes, and that each axis is a run of atoms."""
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise MeshError(f"expected mesh axes with different names, got {names}")
        _check_axes(self.axes)
        if self.axes and prod(size for _, size in self.axes) != self.size:
            raise MeshError(f"mesh axes {dict(self.axes)} do not multiply to {self.size} devices")
        for name, _ in self.axes:
            self.axis_atoms(name)

    @staticmethod
    def of(axes: Mapping[str, int] | None = None, /, **sizes: int) -> "Mesh":
        """Builds a mesh from named axes, major first: `Mesh.of(dp=2, tp=4)`.

        Raises:
            MeshError: A size is not an integer >= 1.
        """
        named = {**(axes or {}), **sizes}
        _check_axes(named.items())
        atoms = tuple(p for size in named.values() for p in prime_factors(size))
        return Mesh(tuple(named.items()), atoms)

    @staticmethod
    def refine(
        devices: int,
        matrices: Iterable[Sequence[int]] = (),
        axes: Mapping[str, int] | None = None,
    ) -> "Mesh":
        """Builds the coarsest mesh that contains all the given device matrices.

        A matrix `(a, b, …)` whose product is less than `devices` is repeated over the remaining
        devices. The repetition is the fastest-varying factor (MindSpore's convention).

        Args:
            devices: Device count.
            matrices: Device matrices used by numeric strategies, outermost factor first.
            axes: Named axes, major first, whose product is `devices`.

        Raises:
            MeshError: A product does not divide `devices`, or two matrices have no common
                refinement in one device order (such as 3x8 and 8x3 on 24 devices).
        """
        if devices < 1:
            raise MeshError(f"expected at least 1 device, got {devices}")
        bounds: dict[int, tuple[int, ...]] = {1: (), devices: (devices,)}
        rows = [tuple(m) for m in matrices]
        if axes:
            rows.append(tuple(axes.values()))
        for row in rows:
            if any(not is_integer(f) or f < 1 for f in row):
                raise MeshError(f"device matrix {row}: expected only integers >= 1")
            if devices % prod(row):
                raise MeshError(
                    f"device matrix {row}: its product {prod(row)} does not divide "
                    f"the {devices} devices"
                )
            prefix = 1
            for factor in row:
                prefix *= factor
                bounds.setdefault(prefix, row)
        chain = sorted(bounds)
        for small, large in pairwise(chain):
            if large % small:
                raise MeshError(
                    f"device matrices {bounds[small]} and {bounds[large]} cannot be combined on "
                    f"{devices} devices in one device order: one splits the devices into {small} "
                    f"blocks, the other into {large}, and {small} does not divide {large}"
                )
        atoms = tuple(p for small, large in pairwise(chain) for p in prime_factors(large // small))
        return Mesh(tuple((axes or {}).items()), atoms)

    @cached_property
    def size(self) -> int:
        """Number of devices."""
        return prod(self.atoms)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Distance in device numbers between neighbours along each atom."""
        return tuple(prod(self.atoms[i + 1 :]) for i in range(len(self.atoms)))

    def axis_atoms(self, name: str) -> Atoms:
        """Returns the run of atoms that makes up the named axis, major first.

        Raises:
            MeshError: There is no such axis, or it is not a run of atoms.
        """
        before = 1
        for axis, size in self.axes:
            if axis == name:
                return self.run(before, size)
            before *= size
        raise MeshError(f"no mesh axis {name!r}; the mesh has {[a for a, _ in self.axes]}")

    def run(self, before: int, size: int) -> Atoms:
        """Returns the atoms of one factor of a device matrix.

        Args:
            before: The product of the more major factors.
            size: The factor.

        Raises:
            MeshError: The factor is not a run of atoms.
        """
        position, index = 1, 0
        while position < before and index < len(self.atoms):
            position *= self.atoms[index]
            index += 1
        first, span = index, 1
        while span < size and index < len(self.atoms):
            span *= self.atoms[index]
            index += 1
        if position != before or span != size:
            raise MeshError(
                f"the atoms {self.atoms} of the mesh: expected a run of atoms with the product "
                f"{size} after atoms with the product {before}, got none"
            )
        return tuple(range(first, index))

    def matrix(self, factors: Sequence[int]) -> tuple[Atoms, ...]:
        """Returns the atoms of each factor of a device matrix, outermost first."""
        runs, before = [], 1
        for factor in factors:
            runs.append(self.run(before, factor))
            before *= factor
        return tuple(runs)

    def count(self, atoms: Iterable[int]) -> int:
        """Returns the number of shards that `atoms` make."""
        return prod([self.atoms[a] for a in atoms])

    def coords(self, rank: int) -> tuple[int, ...]:
        """Returns the coordinate of device `rank` along each atom."""
        return coordinates(rank, self.atoms)

    def index(self, rank: int, atoms: Sequence[int]) -> int:
        """Returns the position of `rank` in its group over `atoms` (first atom outermost)."""
        coords = self.coords(rank)
        position = 0
        for atom in atoms:
            position = position * self.atoms[atom] + coords[atom]
        return position

    def group(self, rank: int, atoms: Sequence[int]) -> tuple[int, ...]:
        """Returns the devices that differ from `rank` in `atoms` only, first atom outermost."""
        coords = self.coords(rank)
        base = rank - sum(coords[a] * self.strides[a] for a in atoms)
        steps = [range(self.atoms[a]) for a in atoms]
        return tuple(
            base + sum(c * self.strides[a] for c, a in zip(combo, atoms, strict=True))
            for combo in product(*steps)
        )

    def groups(self, atoms: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Returns every group over `atoms`, each device in exactly one, ordered by first device."""
        firsts = (
            rank
            for rank in range(self.size)
            if not any(rank // self.strides[a] % self.atoms[a] for a in atoms)
        )
        return tuple(self.group(rank, atoms) for rank in firsts)

    def describe(self, atoms: Sequence[int]) -> str:
        """Names a run of atoms: by mesh axes, else `4@2` for 4 devices that are 2 apart."""
        left = tuple(atoms)
        names = []
        while left:
            for name, _ in self.axes:
                run = self.axis_atoms(name)
                if run and left[: len(run)] == run:
                    names.append(name)
                    left = left[len(run) :]
                    break
            else:
                length = 1
                while left[length : length + 1] == (left[0] + length,):
                    length += 1
                names.append(f"{self.count(left[:length])}@{self.strides[left[length - 1]]}")
                left = left[length:]
        return ".".join(names)

    def _repr_html_(self) -> str:
        """Shows each device with its place on every axis, in a notebook."""
        names = [name for name, _ in self.axes]
        title = ", ".join(f"{name}={size}" for name, size in self.axes) or f"{self.size} devices"
        rows = [
            [rank, *(self.index(rank, self.axis_atoms(name)) for name in names)]
            for rank in range(min(self.size, MOST_ROWS + 1))
        ]
        return table(f"Mesh {title}", ["device", *names], rows, self.size)
