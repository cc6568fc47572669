"""The device mesh: atoms, coordinates, groups, and device matrices in one device order."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.core.errors import MeshError
from onnxpar.core.mesh import Mesh, prime_factors

AXES = st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda s: prod(s) <= 64)


def mesh_of(sizes: list[int]) -> Mesh:
    return Mesh.of({f"x{i}": size for i, size in enumerate(sizes)})


@given(st.integers(1, 5000))
def test_prime_factors_multiply_to_the_number(n: int) -> None:
    factors = prime_factors(n)
    assert prod(factors) == n
    assert list(factors) == sorted(factors)
    assert all(all(p % q for q in range(2, p)) for p in factors)


@given(AXES)
def test_coordinates_number_the_devices_in_row_major_order(sizes: list[int]) -> None:
    mesh = mesh_of(sizes)
    assert mesh.size == prod(sizes)
    for rank in range(mesh.size):
        position = 0
        for coordinate, atom in zip(mesh.coords(rank), mesh.atoms, strict=True):
            assert 0 <= coordinate < atom
            position = position * atom + coordinate
        assert position == rank


@given(AXES)
def test_an_axis_is_a_run_of_neighbouring_atoms(sizes: list[int]) -> None:
    mesh = mesh_of(sizes)
    runs = [mesh.axis_atoms(name) for name, _ in mesh.axes]
    assert [a for run in runs for a in run] == list(range(len(mesh.atoms)))
    assert [mesh.count(run) for run in runs] == sizes


@given(AXES, st.data())
def test_groups_partition_the_devices_into_equal_disjoint_sets(
    sizes: list[int], data: st.DataObject
) -> None:
    mesh = mesh_of(sizes)
    atoms = data.draw(st.permutations(range(len(mesh.atoms))))
    atoms = atoms[: data.draw(st.integers(0, len(atoms)))]
    groups = mesh.groups(atoms)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.count(atoms)
        for position, rank in enumerate(group):
            # The group is listed in the order of the positions in it, from any member's view.
            assert mesh.index(rank, atoms) == position
            assert mesh.group(rank, atoms) == group
            other = set(range(len(mesh.atoms))) - set(atoms)
            assert all(mesh.coords(rank)[a] == mesh.coords(group[0])[a] for a in other)


def test_groups_of_a_mesh_of_two_by_four() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    assert mesh.atoms == (2, 2, 2)
    assert mesh.groups(mesh.axis_atoms("dp")) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups(mesh.axis_atoms("tp")) == ((0, 1, 2, 3), (4, 5, 6, 7))
    # Outermost first: with the atoms turned round, so are the members.
    assert mesh.group(0, (2, 1)) == (0, 2, 1, 3)


def test_views_of_the_same_devices_share_atoms() -> None:
    mesh = Mesh.refine(8, [(2, 4), (4, 2), (8,)])
    assert mesh.atoms == (2, 2, 2)
    assert mesh.matrix((2, 4)) == ((0,), (1, 2))
    assert mesh.matrix((4, 2)) == ((0, 1), (2,))
    assert mesh.matrix((8,)) == ((0, 1, 2),)
    assert mesh.matrix((4, 1)) == ((0, 1), ())


def test_a_matrix_smaller_than_the_mesh_repeats_fastest() -> None:
    mesh = Mesh.refine(8, [(2, 2)])
    rows, columns = mesh.matrix((2, 2))
    assert mesh.groups((*rows, *columns)) == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize("matrix", [(3, 8), (8, 3)])
def test_either_of_3x8_and_8x3_fits_24_devices(matrix: tuple[int, int]) -> None:
    mesh = Mesh.refine(24, [matrix])
    assert tuple(mesh.count(run) for run in mesh.matrix(matrix)) == matrix


def test_3x8_and_8x3_together_are_refused_with_the_reason() -> None:
    with pytest.raises(MeshError, match=r"\(3, 8\) and \(8, 3\).*24 devices.*3 does not divide 8"):
        Mesh.refine(24, [(3, 8), (8, 3)])


def test_named_axes_and_matrices_must_share_a_refinement() -> None:
    with pytest.raises(MeshError, match="cannot be combined"):
        Mesh.refine(24, [(8, 3)], {"dp": 3, "tp": 8})
    assert Mesh.refine(24, [(3, 2)], {"dp": 3, "tp": 8}).atoms == (3, 2, 2, 2)


@pytest.mark.parametrize(
    ("devices", "matrices", "message"),
    [
        (0, [], "at least 1"),
        (8, [(3,)], "product 3 does not divide the 8 devices"),
        (8, [(16,)], "product 16 does not divide"),
        (8, [(0, 8)], "expected only integers >= 1"),
        (8, [(True, 8)], "expected only integers >= 1"),
        (8, [(2.0, 4)], "expected only integers >= 1"),
    ],
)
def test_refused_matrices(devices: int, matrices: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Mesh.refine(devices, matrices)


@pytest.mark.parametrize("size", [0, -2, True, 2.0, "2"])
def test_a_size_that_is_no_positive_integer_is_refused(size: object) -> None:
    with pytest.raises(MeshError, match="integer >= 1"):
        Mesh.of({"dp": size})  # type: ignore[dict-item]


def test_axes_that_do_not_fit_the_atoms_are_refused() -> None:
    for name in ("", "~", "a.b", "2x", "a b", "-a"):
        with pytest.raises(MeshError, match="expected a name of letters"):
            Mesh.of({name: 2})
    with pytest.raises(MeshError, match="different names"):
        Mesh((("a", 2), ("a", 2)), (2, 2))
    with pytest.raises(MeshError, match="do not multiply"):
        Mesh((("a", 2), ("b", 2)), (2, 2, 2))
    with pytest.raises(MeshError, match="product 2 after atoms"):
        Mesh((("a", 2), ("b", 3)), (3, 2))


def test_an_unknown_axis_is_named_with_those_there_are() -> None:
    with pytest.raises(MeshError, match=r"'pp'.*'dp', 'tp'"):
        Mesh.of(dp=2, tp=4).axis_atoms("pp")


def test_runs_are_described_by_axes_where_they_are_complete() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    assert mesh.describe((0, 1, 2)) == "dp.tp"
    assert mesh.describe((1, 2, 0)) == "tp.dp"
    assert mesh.describe((2,)) == "2@1"
