"""The mark of a node in a rank's graph that sets padding and does nothing else.

Its result equals one of its operands where no shard has padding.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnxpar_format.expressions import ExpressionError, Size, evaluate

KEY = "onnxpar.padding"
"""The key of the mark in a node's metadata."""
_FORM = re.compile(r"(\d{1,9}): (.+) / ([1-9]\d{0,17})")


@dataclass(frozen=True)
class PaddingMark:
    """What the mark says, written as `1: batch / 2`.

    Attributes:
        operand: Index of the operand.
        size: The global size that is sharded.
        divisor: There is no padding if it divides the size.
    """

    operand: int
    size: Size
    divisor: int

    def __str__(self) -> str:
        """Returns the mark as it is written."""
        return f"{self.operand}: {self.size} / {self.divisor}"

    @staticmethod
    def read(text: str) -> "PaddingMark":
        """Reads a mark.

        Raises:
            ValueError: It has another form.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"expected 'OPERAND: SIZE / DIVISOR', got {text!r:.80}")
        operand, size, divisor = found.groups()
        return PaddingMark(int(operand), size, int(divisor))

    def needless(self, values: Mapping[str, int]) -> bool:
        """Whether there is certainly no padding with these values of symbols."""
        try:
            return evaluate(self.size, values) % self.divisor == 0
        except ExpressionError:
            return False
