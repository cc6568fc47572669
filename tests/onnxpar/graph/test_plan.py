"""What the sharding of a merged dim says about its factors."""

import pytest

from onnxpar.core.mesh import Mesh
from onnxpar.core.rule import Operand
from onnxpar.core.sharding import Component, DimSharding, Sharding
from onnxpar.core.symbols import SymbolTable
from onnxpar.graph.plan import project

MESH = Mesh.of(a=2, b=2, c=3)


@pytest.mark.parametrize(
    ("dim", "sizes", "expected"),
    [
        # Both atoms split heads evenly.
        ([(8, (0, 1))], (8, 4), {"h": [(8, (0, 1))]}),
        ([(32, (0, 1))], (8, 4), {"h": [(8, (0, 1))]}),
        # Two groups: the first atom takes them all, the second one splits what is inside.
        ([(64, (0, 1))], (2, 32), {"h": [(2, (0,))], "e": [(32, (1,))]}),
        ([(10, (0, 1))], (2, 5), {"h": [(2, (0,))], "e": [(5, (1,))]}),
        ([(48, (0, 1, 2))], (4, 12), {"h": [(4, (0, 1))], "e": [(12, (2,))]}),
        # Three groups over two devices do not line up with blocks of 32.
        ([(96, (0, 1))], (3, 32), {}),
        # Six groups over two and two devices: one block has parts of two groups.
        ([(96, (0, 1))], (6, 16), {}),
    ],
)
def test_a_merged_dim(
    dim: list[tuple[int, tuple[int, ...]]],
    sizes: tuple[int, int],
    expected: dict[str, list[tuple[int, tuple[int, ...]]]],
) -> None:
    def components(pairs: list[tuple[int, tuple[int, ...]]]) -> DimSharding:
        return tuple(Component(size, atoms) for size, atoms in pairs)

    found = project(
        Operand((("h", "e"),)),
        Sharding((components(dim),)),
        dict(zip("he", sizes, strict=True)),
        MESH,
        SymbolTable({}),
    )
    assert found == {name: components(pairs) for name, pairs in expected.items()}
