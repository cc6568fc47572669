"""Small convolutions in 1, 2 and 3 dims, with sizes that 2, 3 and 4 divide evenly and unevenly."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from onnxpar.core.symbols import Symbol
from onnxpar.frontend.load import symbol_table
from onnxpar.graph.shapes import ShapeEnv, shapes
from tests.onnxpar.ops.op_harness import Case


@dataclass(frozen=True)
class Bounded(Case):
    """A case whose symbols have constraints."""

    symbols: Mapping[str, Symbol] = field(default_factory=dict)

    @cached_property
    def env(self) -> ShapeEnv:
        return shapes(self.global_model, symbol_table(self.global_model, self.symbols))


# Sums of up to 3 * 27 products of both signs round by 1e-6 of the greatest.
_RTOL = 1e-5
# Split by 2, 3, 4 and, with a stride of 2, still evenly.
TWELVES = {"H": Symbol(divisor=12)}


def _case(
    op_type: str, x: str, w: str, attributes: str = "", bias: str = "", **more: object
) -> Case:
    """A convolution of an image and weights of these types."""
    operands = {"x": x, "w": w} | ({"b": bias} if bias else {})
    call = f"{op_type}<{attributes}>" if attributes else op_type
    kind = Bounded if "symbols" in more else Case
    text = f"y = {call}({', '.join(operands)})"
    return kind(text, operands, **{"sizes": {"N": 3}, "rtol": _RTOL} | more)  # type: ignore[arg-type]


_conv = partial(_case, "Conv")
_back = partial(_case, "ConvTranspose")

CONV = (
    _conv("float[N,3,8]", "float[4,3,3]", "pads=[1,1]", "float[4]"),
    _conv("float[N,3,9]", "float[5,3,3]", "strides=[2]"),
    _conv("float[N,4,10]", "float[6,2,2]", "group=2, strides=[2]", "float[6]"),
    _conv("float[2,4,13]", "float[4,1,3]", "group=4, dilations=[2], pads=[2,2]"),
    _conv("float[2,3,9]", "float[4,3,1]", "strides=[2]"),
    _conv("float[2,3,6]", "float[4,3,1]", "", "float[4]"),
    # A halo wider than a neighbour's block; more padding than the kernel has.
    _conv("float[1,2,6]", "float[2,2,5]", "pads=[4,4], dilations=[1]"),
    _conv("float[1,1,7]", "float[1,1,2]", "pads=[5,3]"),
    _conv("float[1,2,12]", "float[1,2,3]", "dilations=[4], pads=[4,4]"),
    # Gaps between what results read.
    _conv("float[1,2,13]", "float[1,2,2]", "strides=[5]"),
    _conv("float[N,2,8,7]", "float[3,2,3,3]", "pads=[1,1,1,1]", "float[3]"),
    _conv("float[N,2,8,7]", "float[3,2,3,2]", "strides=[2,3], pads=[1,0,1,1]"),
    _conv("float[1,2,9,6]", "float[2,2,3,3]", 'auto_pad="SAME_UPPER", strides=[2,1]'),
    _conv("float[1,2,7,6]", "float[2,2,2,3]", 'auto_pad="SAME_LOWER"'),
    _conv("float[1,2,7,6]", "float[2,2,2,3]", 'auto_pad="VALID", dilations=[2,1]'),
    _conv("float[1,2,4,6,5]", "float[3,2,3,1,2]", "pads=[1,0,0,1,0,1], strides=[1,2,1]"),
    # Symbolic sizes: proved even, not proved, a halo that may be wider than a block.
    _conv("float[N,2,H]", "float[2,2,3]", "pads=[1,1]", sizes={"N": 2, "H": 12}, symbols=TWELVES),
    _conv(
        "float[N,2,H]",
        "float[2,2,3]",
        "pads=[1,1], strides=[2]",
        sizes={"N": 2, "H": 24},
        symbols=TWELVES,
    ),
    _conv("float[N,2,H]", "float[2,2,3]", "pads=[1,1]", sizes={"N": 2, "H": 7}),
    _conv("float[N,2,H]", "float[2,2,3]", "strides=[2]", sizes={"N": 2, "H": 11}),
    _conv("float[1,1,H]", "float[1,1,9]", "pads=[4,4]", sizes={"H": 12}, symbols=TWELVES),
)

CONV_TRANSPOSE = (
    _back("float[N,3,7]", "float[3,2,3]", "", "float[2]"),
    _back("float[N,3,6]", "float[3,2,3]", "strides=[2], pads=[1,1], output_padding=[1]"),
    _back("float[N,4,5]", "float[4,3,3]", "group=2, strides=[2], pads=[0,1]", "float[6]"),
    _back("float[2,4,5]", "float[4,1,3]", "group=4, strides=[2]"),
    _back("float[1,2,5]", "float[2,2,2]", "strides=[3], dilations=[2]"),
    _back("float[1,2,5]", "float[2,1,1]", "strides=[3]"),
    _back("float[1,2,6]", "float[2,2,5]", "pads=[4,0]"),
    _back("float[1,2,5]", "float[2,1,3]", "strides=[2], output_shape=[10]"),
    _back("float[1,2,5]", "float[2,1,3]", 'strides=[2], auto_pad="SAME_UPPER"'),
    _back("float[1,2,5]", "float[2,1,4]", 'strides=[2], auto_pad="SAME_LOWER"'),
    _back("float[N,2,4,5]", "float[2,2,3,3]", "strides=[2,1], pads=[1,1,0,1]"),
    _back("float[1,2,3,4,3]", "float[2,1,2,3,2]", "strides=[1,2,1]"),
    _back(
        "float[2,2,H]",
        "float[2,2,4]",
        "strides=[2], pads=[1,1]",
        sizes={"H": 12},
        symbols=TWELVES,
    ),
    _back("float[N,2,H]", "float[2,2,3]", "strides=[2]", sizes={"N": 2, "H": 5}),
    _back("float[N,2,H]", "float[2,2,3]", "pads=[1,1]", sizes={"N": 2, "H": 5}),
)

CASES = (*CONV, *CONV_TRANSPOSE)
