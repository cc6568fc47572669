"""How much a step computes: operations and tokens, from the sizes of symbols."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from onnxpar_format.expressions import ExpressionError, Size, evaluate
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.training.programs import TRAINING

Values = Mapping[str, int]
"""The global sizes of symbols in a micro-batch."""


@dataclass(frozen=True)
class Amounts:
    """The expressions of a directory that trains.

    Attributes:
        flops: Operations of a micro-batch, as `onnxpar_format.manifest.Training`.
        tokens: The shapes of the inputs whose elements are tokens.
    """

    flops: Size | None
    tokens: tuple[tuple[Size, ...], ...]

    @staticmethod
    def of(manifest: Manifest) -> "Amounts":
        """Returns the expressions of a directory.

        Tokens are the elements of an input of two dims, such as [batch, seq], that selects rows of
        a table. Labels are not counted, nor sizes that may differ between data ranks.
        """
        training, program = manifest.trained(), manifest.program(TRAINING)
        if any(symbol.per_rank for symbol in manifest.symbols.values()):
            return Amounts(training.flops, ())
        read = {entry.input for entry in program.index_ranges} - {training.loss.labels}
        shapes = [spec.shape for spec in program.inputs if spec.name in read]
        return Amounts(training.flops, tuple(shape for shape in shapes if len(shape) == 2))

    def flops_of(self, micro_batches: Iterable[Values]) -> int | None:
        """Returns the operations of a step, on all devices together; None if they are unknown."""
        if self.flops is None:
            return None
        try:
            return sum(evaluate(self.flops, values) for values in micro_batches)
        except ExpressionError:
            # An input such as [rows + columns] does not determine its symbols.
            return None

    def tokens_of(self, micro_batches: Iterable[Values]) -> int | None:
        """Returns the tokens of a step, of the input that has most; None if no input has any."""
        if not self.tokens:
            return None
        try:
            return sum(
                max(prod(evaluate(size, values) for size in shape) for shape in self.tokens)
                for values in micro_batches
            )
        except ExpressionError:
            return None
