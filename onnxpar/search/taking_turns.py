"""Decides whether two halves of the batch take turns, by the price of the step."""

from onnxpar.core.machine import Machine
from onnxpar.cost.cost_model import CostModel
from onnxpar.search.rival_plans import Way
from onnxpar.search.workload import Workload
from onnxpar.strategy.schema import Strategy


def in_turns(strategy: Strategy, workload: Workload, machine: Machine, best: Way) -> float | None:
    """Returns the seconds of a step of two halves of the batch, if they take turns.

    They do if the user says so, or if that takes less time than the whole batch. None if they do
    not, or if the step has several micro-batches or stages already.

    Args:
        strategy: What the user says.
        workload: The program.
        machine: The machine.
        best: The best plan.
    """
    wanted = strategy.pair_micro_batches
    # Otherwise nothing travels while the devices compute.
    possible = wanted or (wanted is None and any(link.overlaps for link in machine.links))
    trains_alone = bool(workload.gradients) and best.micro_batches == 1 and best.staged is None
    if not possible or not trains_alone or best.plan is None:
        return None
    sizes = workload.halves(strategy.search.sizes)
    if sizes is None:
        return None
    cost = CostModel(machine, best.plan.mesh, workload.program.env.table, sizes)
    seconds = workload.in_turns(best.plan, cost)
    return seconds if wanted or seconds < best.seconds else None
