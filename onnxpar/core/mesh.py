"""The device mesh: named axes over a row of prime-sized atoms.

A mesh of N devices numbers them 0…N-1 in row-major order of its axes. Inside, the order is cut into
*atoms*, factors of N that are primes, major first. A named axis is a run of neighbouring atoms, so
the views `8`, `2x4` and `2x2x2` of the same devices share atoms and meet without special cases
(GSPMD's device assignments, Xu et al. 2021, and Shardy's sub-axes express the same idea).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

from onnxpar.core.errors import MeshError
from onnxpar_format.boxes import coordinates

Atoms = tuple[int, ...]


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


@dataclass(frozen=True)
class Mesh:
    """A device mesh.

    Attributes:
        axes: `(name, size)` pairs, major first; the product of the sizes is the device count.
            May be empty where strategies are numeric and need no names.
        atoms: Sizes of the atoms, primes, major first; their product is the device count.
    """

    axes: tuple[tuple[str, int], ...]
    atoms: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks names, sizes and that axes begin and end between atoms."""
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise MeshError(f"mesh axes must have different names, got {names}")
        for name, size in self.axes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"mesh axis {name!r}: size must be an integer >= 1, got {size!r}")
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
        for name, size in named.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"mesh axis {name!r}: size must be an integer >= 1, got {size!r}")
        atoms = tuple(p for size in named.values() for p in prime_factors(size))
        return Mesh(tuple(named.items()), atoms)

    @staticmethod
    def refine(
        devices: int,
        matrices: Iterable[Sequence[int]] = (),
        axes: Mapping[str, int] | None = None,
    ) -> "Mesh":
        """Builds the coarsest mesh in whose atoms all the given device matrices can be written.

        A matrix `(a, b, …)` whose product is less than `devices` repeats over the rest, and the
        repeat is the fastest-varying (MindSpore's convention).

        Args:
            devices: Device count.
            matrices: Device matrices used by numeric strategies, outermost factor first.
            axes: Named axes, major first, whose product is `devices`.

        Raises:
            MeshError: A product does not divide `devices`, or two matrices have no common
                refinement in one device order (such as 3x8 and 8x3 on 24 devices).
        """
        if devices < 1:
            raise MeshError(f"the number of devices must be at least 1, got {devices}")
        cuts: dict[int, tuple[int, ...]] = {1: (), devices: (devices,)}
        rows = [tuple(m) for m in matrices]
        if axes:
            rows.append(tuple(axes.values()))
        for row in rows:
            if any(isinstance(f, bool) or not isinstance(f, int) or f < 1 for f in row):
                raise MeshError(f"device matrix {row}: every factor must be an integer >= 1")
            if devices % prod(row):
                raise MeshError(
                    f"device matrix {row}: its product {prod(row)} does not divide "
                    f"the {devices} devices"
                )
            prefix = 1
            for factor in row:
                prefix *= factor
                cuts.setdefault(prefix, row)
        chain = sorted(cuts)
        for small, large in pairwise(chain):
            if large % small:
                raise MeshError(
                    f"device matrices {cuts[small]} and {cuts[large]} cannot be combined on "
                    f"{devices} devices in one device order: one splits the devices after {small}, "
                    f"the other after {large}, and {small} does not divide {large}"
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

    def axis_size(self, name: str) -> int:
        """Returns the size of the named axis; MeshError where there is none."""
        for axis, size in self.axes:
            if axis == name:
                return size
        raise MeshError(f"no mesh axis {name!r}; the mesh has {[a for a, _ in self.axes]}")

    def axis_atoms(self, name: str) -> Atoms:
        """Returns the run of atoms that makes up the named axis, major first.

        Raises:
            MeshError: There is no such axis, or it is not a run of whole atoms.
        """
        self.axis_size(name)
        before = 1
        for axis, size in self.axes:
            if axis == name:
                return self.run(before, size)
            before *= size
        raise AssertionError

    def run(self, before: int, size: int) -> Atoms:
        """Returns the atoms of a device-matrix factor of `size`, `before` devices-blocks in.

        Raises:
            MeshError: The factor does not begin and end between atoms.
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
                f"a factor of {size} after {before} is not a run of atoms of the mesh {self.atoms}"
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
        """Returns the number of pieces that a split over `atoms` makes."""
        return prod(self.atoms[a] for a in atoms)

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
        """Names a run of atoms: by mesh axes, else `4@2` for 4 pieces of devices 2 apart."""
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
