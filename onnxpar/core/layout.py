"""`Layout`: a device matrix with names, called with one name for each dim of a tensor.

The form is MindSpore's `Layout`:

    layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
    layout("dp", ("sp", "mp"), "None")  # dim 1: sharded over sp (outer) and mp; dim 2: replicated

A device matrix whose product is less than the number of devices is repeated over the remaining
devices. The repetition is the fastest-varying factor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from onnxpar.core.errors import StrategyError
from onnxpar.core.mesh import Mesh, is_integer
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Dim

REPLICATED = "None"


@dataclass(frozen=True)
class TensorLayout:
    """How one tensor is placed on a device matrix.

    Attributes:
        device_matrix: Sizes of the matrix, outermost first.
        alias_name: A name for each of them.
        dims: For each dim of the tensor the names that shard it, outermost first.

    Raises:
        StrategyError: A malformed matrix, an unknown name, or a name that is used twice.
    """

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        """Checks matrix and names."""
        _check_matrix(self.device_matrix, self.alias_name)
        used: set[str] = set()
        for position, names in enumerate(self.dims):
            for name in names:
                if name not in self.alias_name:
                    raise StrategyError(
                        f"layout, dim {position}: expected one of {list(self.alias_name)} or "
                        f"{REPLICATED!r}, got {name!r}"
                    )
                if name in used:
                    raise StrategyError(
                        f"layout, dim {position}: expected each name at most once in a tensor, "
                        f"got {name!r} twice"
                    )
                used.add(name)

    def axis(self, name: str) -> tuple[int, int]:
        """Returns the product of the matrix dims before one, and its size."""
        index = self.alias_name.index(name)
        return prod(self.device_matrix[:index]), self.device_matrix[index]

    def sharding(self, mesh: Mesh, shape: Sequence[Dim]) -> Sharding:
        """Returns the sharding of a tensor of `shape` (global, elements) on `mesh`.

        Raises:
            StrategyError: The layout has another number of dims than the tensor.
            MeshError: The mesh is not fine enough for the device matrix.
        """
        if len(shape) != len(self.dims):
            raise StrategyError(
                f"layout: expected {len(shape)} dims for a tensor of shape "
                f"({', '.join(map(str, shape))}), got {len(self.dims)}"
            )
        atoms = [[a for name in names for a in mesh.run(*self.axis(name))] for names in self.dims]
        return Sharding.of(shape, atoms)


@dataclass(frozen=True)
class Layout:
    """A device matrix with a name for each of its dims; calling it gives a `TensorLayout`.

    Attributes:
        device_matrix: Sizes, integers of at least 1, outermost first.
        alias_name: A name for each size, all different; "None" means a replicated dim and is not
            allowed.

    Raises:
        StrategyError: The matrix or the names do not have this form.
    """

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]

    def __post_init__(self) -> None:
        """Checks matrix and names, and makes tuples of lists."""
        for what in ("device_matrix", "alias_name"):
            value = getattr(self, what)
            if not isinstance(value, tuple | list):
                raise StrategyError(f"layout: expected a tuple as {what}, got {value!r}")
            object.__setattr__(self, what, tuple(value))
        _check_matrix(self.device_matrix, self.alias_name)

    def __call__(self, *dims: str | Sequence[str] | None) -> TensorLayout:
        """Returns the layout of a tensor.

        Args:
            dims: For each dim of the tensor a name, a tuple of names (first outermost), or "None"
                or None for a replicated dim.

        Raises:
            StrategyError: No dims, something other than names, or an unknown or repeated name.
        """
        if not dims:
            raise StrategyError("layout: expected a name for each dim of the tensor, got none")
        return TensorLayout(
            self.device_matrix,
            self.alias_name,
            tuple(_names(position, entry) for position, entry in enumerate(dims)),
        )


def _names(position: int, entry: object) -> tuple[str, ...]:
    if entry is None or entry == REPLICATED:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple | list) and entry and all(isinstance(n, str) for n in entry):
        if REPLICATED in entry:
            raise StrategyError(
                f"layout, dim {position}: expected {REPLICATED!r} alone, got {entry!r}"
            )
        return tuple(entry)
    raise StrategyError(
        f"layout, dim {position}: expected a name, a tuple of names or {REPLICATED!r}, "
        f"got {entry!r}"
    )


def _check_matrix(matrix: tuple[int, ...], names: tuple[str, ...]) -> None:
    if not matrix:
        raise StrategyError("layout: expected a device matrix of at least one dim, got ()")
    for size in matrix:
        if not is_integer(size) or size < 1:
            raise StrategyError(
                f"layout: expected integers of at least 1 in the device matrix, got {size!r}"
            )
    for name in names:
        if not isinstance(name, str) or name in ("", REPLICATED):
            raise StrategyError(
                f"layout: expected names other than '' and {REPLICATED!r}, got {name!r}"
            )
    if len(names) != len(matrix):
        raise StrategyError(
            f"layout: expected {len(matrix)} names for the device matrix {matrix}, "
            f"got {len(names)}: {names}"
        )
    if len(set(names)) != len(names):
        raise StrategyError(f"layout: expected different names, got {names}")
