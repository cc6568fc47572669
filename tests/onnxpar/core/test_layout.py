"""`Layout` and tensor maps: MindSpore's forms, and what is refused."""

from collections.abc import Callable

import pytest

from onnxpar.core.errors import StrategyError
from onnxpar.core.layout import Layout
from onnxpar.core.mesh import Mesh
from onnxpar.core.symbols import dim_symbol

LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))
MESH = Mesh.of(dp=2, sp=2, mp=2)
BATCH = dim_symbol("batch")


@pytest.mark.parametrize(
    ("dims", "atoms"),
    [
        (("dp", "mp"), ((0,), (2,))),
        (("dp", ("sp", "mp"), "None"), ((0,), (1, 2), ())),
        ((("mp", "sp"), None), ((2, 1), ())),
        ((["dp"],), ((0,),)),
        (("None",), ((),)),
    ],
)
def test_names_become_atoms(dims: tuple[object, ...], atoms: tuple[tuple[int, ...], ...]) -> None:
    shape = [BATCH, 8, 4][: len(dims)]
    sharding = LAYOUT(*dims).sharding(MESH, shape)  # type: ignore[arg-type]
    assert tuple(sharding.dim_atoms(d) for d in range(len(dims))) == atoms
    assert sharding.shape == tuple(shape)
    assert not sharding.partial


def test_a_small_matrix_repeats_over_the_fastest_devices() -> None:
    mesh = Mesh.refine(8, [(2, 2)])
    sharding = Layout((2, 2), ("x", "y"))("x", "y").sharding(mesh, (4, 4))
    assert mesh.groups(sharding.dim_atoms(0)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups(sharding.dim_atoms(1)) == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout((2, 2), ("dp",)), r"expected 2 names .*got 1"),
        (lambda: Layout((2, 2), ("dp", "dp")), "expected different names"),
        (lambda: Layout((2, 0), ("dp", "mp")), "at least 1 in the device matrix, got 0"),
        (lambda: Layout((2, True), ("dp", "mp")), "at least 1 in the device matrix, got True"),
        (lambda: Layout((2, 2), ("dp", "None")), "got 'None'"),
        (lambda: Layout((2, 2), ("dp", 3)), "got 3"),
        (lambda: Layout(4, ("dp",)), "expected a tuple as device_matrix, got 4"),
        (lambda: Layout((2,), "d"), "expected a tuple as alias_name, got 'd'"),
        (lambda: Layout((), ()), "at least one dim"),
        (lambda: LAYOUT(), "expected a name for each dim"),
        (lambda: LAYOUT("dp", "tp"), r"dim 1: expected one of .*got 'tp'"),
        (lambda: LAYOUT("dp", ("sp", "dp")), r"dim 1: .*got 'dp' twice"),
        (lambda: LAYOUT(("dp", "dp")), r"dim 0: .*got 'dp' twice"),
        (lambda: LAYOUT(("dp", "None")), r"expected 'None' alone"),
        (lambda: LAYOUT(1), "dim 0: expected a name"),
        (lambda: LAYOUT(()), "dim 0: expected a name"),
        (lambda: LAYOUT("dp").sharding(MESH, (4, 4)), r"expected 2 dims .*\(4, 4\), got 1"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        make()
