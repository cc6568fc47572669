"""Gradients of Conv and ConvTranspose, in 1, 2 and 3 dims."""

from typing import Any

import pytest

from tests.onnxpar.ops.gradient_harness import GradCase, chosen

_F = ("conv1d", "conv2d", "conv3d")


def _torch(transposed: bool = False, **options: Any) -> Any:
    """The function of PyTorch with these options."""

    def run(torch: Any, x: Any, w: Any, b: Any = None) -> Any:
        f = torch.nn.functional
        name = _F[x.dim() - 3].replace("conv", "conv_transpose") if transposed else _F[x.dim() - 3]
        return getattr(f, name)(x, w, b, **options)

    return run


def _case(node: str, x: str, w: str, b: str = "", torch: Any = None) -> GradCase:
    operands = {"x": x, "w": w} | ({"b": b} if b else {})
    return GradCase(f"y = {node}({', '.join(operands)})", operands, torch, {"N": 3})


CONV = (
    _case("Conv<pads=[1,1]>", "double[N,2,5]", "double[3,2,3]", "double[3]", _torch(padding=1)),
    _case("Conv<strides=[2]>", "double[N,2,6]", "double[2,2,3]", "", _torch(stride=2)),
    _case("Conv<pads=[2,0], strides=[3]>", "double[N,1,7]", "double[2,1,2]"),
    # Fewer strides than padding; a kernel that the padding exceeds.
    _case("Conv<pads=[3,2]>", "double[2,1,4]", "double[1,1,2]"),
    _case(
        "Conv<group=2, dilations=[2], pads=[2,2]>",
        "double[2,4,5]",
        "double[4,2,3]",
        "double[4]",
        _torch(groups=2, dilation=2, padding=2),
    ),
    _case(
        "Conv<group=3, pads=[1,1], strides=[2]>",
        "double[N,3,5]",
        "double[3,1,3]",
        "",
        _torch(groups=3, padding=1, stride=2),
    ),
    # Enough channels for one product after another.
    _case("Conv<pads=[1,1]>", "double[1,16,3]", "double[1,16,3]", "", _torch(padding=1)),
    # More filters than elements of an image: batch and channels are exchanged.
    _case(
        "Conv<group=2, pads=[2,2], strides=[2]>",
        "double[2,4,3]",
        "double[8,2,3]",
        "",
        _torch(groups=2, padding=2, stride=2),
    ),
    _case("Conv<pads=[1,1]>", "double[N,16,2]", "double[2,16,3]", "", _torch(padding=1)),
    _case("Conv<strides=[2]>", "double[2,4,3]", "double[7,4,1]", "", _torch(stride=2)),
    _case("Conv", "double[N,2,3,2]", "double[2,2,1,1]", "double[2]", _torch()),
    _case("Conv<strides=[2,2]>", "double[1,2,5,4]", "double[2,2,1,1]", "", _torch(stride=2)),
    _case(
        "Conv<pads=[1,1,1,1], strides=[2,1]>",
        "double[2,2,4,3]",
        "double[2,2,3,3]",
        "",
        _torch(padding=1, stride=(2, 1)),
    ),
    _case('Conv<auto_pad="SAME_UPPER", strides=[2,1]>', "double[1,1,4,3]", "double[2,1,3,2]"),
    _case(
        "Conv<pads=[1,0,0,1,0,0], strides=[1,2,1]>",
        "double[1,1,2,3,3]",
        "double[2,1,2,3,2]",
        "",
        None,
    ),
)

CONV_TRANSPOSE = (
    _case(
        "ConvTranspose<strides=[2], pads=[1,1], output_padding=[1]>",
        "double[N,2,3]",
        "double[2,2,3]",
        "double[2]",
        _torch(True, stride=2, padding=1, output_padding=1),
    ),
    _case(
        "ConvTranspose<group=2, dilations=[2]>",
        "double[N,2,4]",
        "double[2,2,2]",
        "",
        _torch(True, groups=2, dilation=2),
    ),
    _case('ConvTranspose<auto_pad="SAME_UPPER", strides=[2]>', "double[1,2,4]", "double[2,1,3]"),
    _case(
        "ConvTranspose<strides=[1,2]>",
        "double[1,2,3,2]",
        "double[2,2,2,2]",
        "double[2]",
        _torch(True, stride=(1, 2)),
    ),
)


@pytest.mark.parametrize(
    "case", [*chosen(CONV, 5), *chosen(CONV_TRANSPOSE, 2)], ids=lambda c: c.nodes
)
def test_convolutions(case: GradCase) -> None:
    case.check()
