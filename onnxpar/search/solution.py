"""A choice, what it costs, and what is proved about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from onnxpar.search.problem import Problem


@dataclass(frozen=True)
class Solution:
    """A choice and what is known about it.

    Attributes:
        choice: The option of each variable.
        seconds: What it costs.
        memory: Bytes of one device.
        bound: No choice within the limit costs fewer seconds.
    """

    choice: tuple[int, ...]
    seconds: float
    memory: float
    bound: float

    @property
    def gap(self) -> float:
        """How much less another choice may cost, as a share."""
        return gap(self.seconds, self.bound)


def gap(seconds: float, bound: float) -> float:
    """Returns the share of a cost by which another choice may be better, given a lower bound."""
    return max(0.0, 1 - bound / seconds) if seconds else 0.0


def solution(problem: Problem, choice: Sequence[int], bound: float | None = None) -> Solution:
    """Returns a choice with what it costs; without a `bound`, its own cost is the bound."""
    cost = problem.seconds(choice)
    memory = problem.memory(choice)
    return Solution(tuple(choice), cost, memory, cost if bound is None else bound)
