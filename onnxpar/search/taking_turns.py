"""Decides whether two halves of the batch take turns, by the price of the step."""

from onnxpar.core.machine import Machine
from onnxpar.cost.cost_model import CostModel
from onnxpar.search.rival_plans import Way
from onnxpar.search.workload import Workload
from onnxpar.strategy.schema import Strategy


def in_turns(strategy: Strategy, workload: Workload, machine: Machine, best: Way) -> float | None:
    """Returns the seconds of a step of two halves of the batch, if they are fewer than without.

    None if the user has decided, if the step has several micro-batches or stages already, or if
    nothing travels while the devices compute.

    Args:
        strategy: What the user says.
        workload: The program.
        machine: The machine.
        best: The best plan.
    """
    open_ = strategy.pair_micro_batches is None and bool(workload.gradients)
    alone = best.micro_batches == 1 and best.staged is None
    sizes = workload.halves(strategy.search.sizes)
    overlaps = any(link.overlaps for link in machine.links)
    if not (open_ and alone and overlaps) or sizes is None or best.plan is None:
        return None
    cost = CostModel(machine, best.plan.mesh, workload.program.env.table, sizes)
    seconds = workload.in_turns(best.plan, cost)
    return seconds if seconds < best.seconds else None
