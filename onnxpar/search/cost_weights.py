"""What the sum that a search minimises counts, and how much."""

from dataclasses import dataclass

from onnxpar.cost.optimizer_parallel import NOT_PARALLEL, OptimizerParallel

WORKING = 0.25
"""The default of `CostWeights.working`."""


@dataclass(frozen=True)
class CostWeights:
    """The weights of the sum.

    Attributes:
        communication: Weight of a second of communication, relative to a second of computing.
        memory_first: Whether memory is minimised first, and time second.
        parallel: Optimizer parallel, in training.
        micro_batches: Micro-batches of a step, which share its reductions of gradients and its
            update.
        parameters_only: Whether memory is that of parameters alone, and nothing that is computed
            from parameters alone is resharded, since that would undo what sharding them saves.
        stage: The share of the nodes and parameters that one device has, in a pipeline.
        kept: The share of what the backward reads that one device keeps: the stage's share, for
            each micro-batch of which it keeps activations.
        working: The share of every result that counts as held, in addition to what is saved for
            the backward. Only one node's results exist at a time, but a sum has no maximum. Without
            this share, the search for least memory would choose products whose complete results are
            partial on every device.
    """

    communication: float = 1.0
    memory_first: bool = False
    parallel: OptimizerParallel = NOT_PARALLEL
    micro_batches: int = 1
    parameters_only: bool = False
    stage: float = 1.0
    kept: float = 1.0
    working: float = WORKING


PLAIN = CostWeights()
"""The weights by default: seconds alone."""
