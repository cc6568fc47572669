"""The batch of a program, and the sizes of a micro-batch of a step."""

from collections.abc import Mapping

from onnxpar.facts.program import Program


def batch_symbols(program: Program) -> frozenset[str]:
    """Returns the symbols that are the batch: dim 0 of an input."""
    shapes = (program.env.shapes[v.name or ""] for v in program.graph.inputs)
    sizes = (shape[0] for shape in shapes if shape)
    return frozenset(str(s) for s in sizes if not isinstance(s, int) and s.is_Symbol)


def micro_batch_sizes(
    sizes: Mapping[str, int], batch: frozenset[str], micro_batches: int
) -> dict[str, int]:
    """Returns the sizes of symbols in the largest micro-batch of a step.

    Args:
        sizes: Sizes of symbols in a step. Symbols without a size have their typical size in each
            micro-batch.
        batch: The symbols that are the batch.
        micro_batches: Micro-batches of a step.
    """
    return {
        name: -(-size // micro_batches) if name in batch else size for name, size in sizes.items()
    }
