"""What halos cost: which nodes a split convolution or pool gets, and how many bytes move."""

from collections.abc import Sequence

import pytest

from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component
from onnxpar.core.symbols import dim_str
from onnxpar.graph.plan import factor_sizes
from tests.onnxpar.ops.conv_cases import TWELVES, Bounded
from tests.onnxpar.ops.op_harness import Case, Run

_FLOAT = 4


def _split(case: Case, atoms: Sequence[int], factor: str = "a") -> Run:
    """Runs a case with one factor split by all atoms of a mesh, and checks the results."""
    mesh = Mesh((), tuple(atoms))
    size = factor_sizes(case.rule, case.view)[factor]
    run = case.run(mesh, {factor: (Component(size, tuple(range(len(atoms)))),)}, {})
    assert not run.wrong(case), run.wrong(case)
    return run


def _types(run: Run) -> list[str]:
    return [node.op_type for node in run.program.builder.nodes]


def _moved(run: Run) -> list[tuple[str, str]]:
    return [(c.op, dim_str(c.bytes)) for c in run.program.builder.collectives]


def _conv(x: str, w: str, attributes: str, kind: str = "Conv") -> Case:
    return Case(f"y = {kind}<{attributes}>(x, w)", {"x": f"float[{x}]", "w": f"float[{w}]"})


@pytest.mark.parametrize(
    ("case", "nodes"),
    [
        (_conv("1,2,12", "3,2,2", "strides=[2]"), ["Conv"]),
        (_conv("1,2,12", "3,2,1", "strides=[2]"), ["Conv"]),
        (_conv("1,2,12", "3,2,1", "strides=[1]"), ["Conv"]),
        (_conv("1,2,6", "2,2,2", "strides=[2]", "ConvTranspose"), ["ConvTranspose"]),
        (
            Case("y = MaxPool<kernel_shape=[3], strides=[3]>(x)", {"x": "float[2,2,18]"}),
            ["MaxPool"],
        ),
        (
            Case("y = AveragePool<kernel_shape=[2], strides=[2]>(x)", {"x": "float[2,2,8]"}),
            ["AveragePool"],
        ),
        (
            Bounded(
                "y = MaxPool<kernel_shape=[2], strides=[2]>(x)",
                {"x": "float[2,2,H]"},
                sizes={"H": 12},
                symbols=TWELVES,
            ),
            ["MaxPool"],
        ),
    ],
    ids=str,
)
def test_windows_side_by_side_exchange_and_copy_nothing(case: Case, nodes: list[str]) -> None:
    assert _types(_split(case, (2,))) == nodes


def test_an_even_split_sends_the_halo_alone() -> None:
    """A row of 2 channels and 5 columns goes each way, and nothing is copied twice."""
    run = _split(_conv("1,2,8,5", "3,2,3,3", "pads=[1,1,1,1]"), (2, 2))
    assert _moved(run) == [("Permute", str(2 * 5 * _FLOAT))] * 2
    assert _types(run) == ["Slice", "Permute", "Slice", "Permute", "Concat", "Conv"]


def test_a_stride_needs_a_halo_on_one_side() -> None:
    run = _split(_conv("1,2,8", "3,2,3", "pads=[1,1], strides=[2]"), (2, 2))
    assert _moved(run) == [("Permute", str(2 * _FLOAT))]


def test_symbolic_sizes_that_divide_send_the_halo_alone() -> None:
    case = Bounded(
        "y = Conv<pads=[1,1]>(x, w)",
        {"x": "float[N,2,H]", "w": "float[3,2,3]"},
        sizes={"N": 2, "H": 24},
        symbols=TWELVES,
    )
    run = _split(case, (2,))
    assert _moved(run) == [("Permute", "8*N")] * 2


def test_a_halo_wider_than_a_block_comes_from_several_devices() -> None:
    """Blocks of 2, halos of 4: from both neighbours and from the next."""
    run = _split(_conv("1,1,8", "1,1,9", "pads=[4,4]"), (2, 2))
    assert _moved(run) == [("Permute", str(2 * _FLOAT))] * 4


def test_a_maximum_never_takes_the_border() -> None:
    """All elements are below zero, which a Permute leaves where nothing came."""
    case = Case("y, i = MaxPool<kernel_shape=[3], pads=[1,1]>(x)", {"x": "float[1,1,8]"})
    case.arrays["x"][:] = -abs(case.arrays["x"]) - 1
    run = _split(case, (2, 2))
    assert "Where" in _types(run)


def test_sizes_that_nothing_is_known_of_are_gathered() -> None:
    case = Case(
        "y = Conv<pads=[1,1]>(x, w)", {"x": "float[1,1,H]", "w": "float[1,1,3]"}, sizes={"H": 7}
    )
    assert [op for op, _ in _moved(_split(case, (2,)))] == ["AllGather"]
