"""Decides whether micro-batches take turns, by the price of the step."""

from onnxpar.autodiff.recomputation.clones import Planned
from onnxpar.core.errors import ShardingError, StrategyError
from onnxpar.core.symbols import dim_symbol
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.price import InTurns
from onnxpar.graph.plan import Plan
from onnxpar.search.rival_plans import Pricing, Way
from onnxpar.strategy.save import PAIR
from onnxpar.strategy.schema import Strategy
from onnxpar_format.texts import bytes_text


def in_turns(
    strategy: Strategy, pricing: Pricing, plan: Plan, best: Way, limit: int
) -> InTurns | None:
    """Returns what a step costs whose micro-batches take turns, if they do.

    They do if the user says so, or if the step then takes less time and fits. A step of one
    micro-batch has two halves of it. None if they do not, or if the step has stages.

    Args:
        strategy: What the user says.
        pricing: The program, the machine, the sizes and what is recomputed.
        plan: The best plan, without recomputation.
        best: The same, priced.
        limit: Bytes that a device may hold.

    Raises:
        ShardingError: The user says so, and it does not fit.
        StrategyError: The user says so, and the batch cannot be divided equally.
    """
    if best.staged is not None:
        return None
    wanted = strategy.pair_micro_batches
    # Otherwise nothing travels while the devices compute.
    overlaps = any(link.overlaps for link in pricing.machine.links)
    if not (wanted or (wanted is None and overlaps)):
        return None
    found = priced_in_turns(strategy, pricing, pricing.planned(plan), best)
    if found is None or found.peak <= limit:
        pays = found is not None and found.seconds < best.seconds
        return found if wanted or pays else None
    if wanted:
        raise ShardingError(
            f"{strategy.where(PAIR)}: expected micro-batches that need at most "
            f"{bytes_text(limit)} of memory on a device, got {bytes_text(found.peak)} for two that "
            f"take turns, and {bytes_text(best.peak)} without pair_micro_batches: true"
        )
    return None


def priced_in_turns(
    strategy: Strategy, pricing: Pricing, planned: Planned, best: Way
) -> InTurns | None:
    """Returns what a step costs whose micro-batches take turns, whether it fits or not.

    None if they cannot, and the user does not say that they do.

    Args:
        strategy: As in `in_turns`.
        pricing: As in `in_turns`.
        planned: The plan, with what is recomputed.
        best: As in `in_turns`.

    Raises:
        StrategyError: The user says so, and the batch cannot be divided equally.
    """
    wanted, workload = strategy.pair_micro_batches, pricing.workload
    if not workload.gradients or best.staged is not None:
        return None
    count = max(best.micro_batches, 2)
    sizes = workload.equal_parts(pricing.sizes, count)
    if not workload.batch:
        # Each micro-batch has the size that the model states.
        sizes = dict(pricing.sizes) if wanted else None
    elif sizes is None and wanted:
        table = workload.program.env.table
        given = ", ".join(
            f"{name}: {table.typical(dim_symbol(name), pricing.sizes)}" for name in workload.batch
        )
        raise StrategyError(
            f"{strategy.where(PAIR)}: expected a batch of {count} micro-batches of one size, got "
            f"{given}"
        )
    if sizes is None:
        return None
    cost = CostModel(pricing.machine, planned.plan.mesh, planned.program.env.table, sizes)
    return pricing.of(planned).in_turns(planned.plan, cost, count)
