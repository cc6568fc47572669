"""A choice, what it costs, and what is proved of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from onnxpar.search.problem import Problem


@dataclass(frozen=True)
class Solution:
    """A choice and what is known of it.

    Attributes:
        choice: The option of each variable.
        seconds: What it costs.
        memory: Bytes of one device.
        bound: No choice within the limit costs less seconds.
        timed: Whether the clock stopped the search: on another machine another may be found.
    """

    choice: tuple[int, ...]
    seconds: float
    memory: float
    bound: float
    timed: bool = False

    @property
    def gap(self) -> float:
        """How much better another choice might be, relative to this one's cost."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


def solution(problem: Problem, choice: Sequence[int], bound: float | None = None) -> Solution:
    """Returns a choice with what it costs; its own cost is its bound where none is given."""
    cost = problem.seconds(choice)
    memory = problem.memory(choice)
    return Solution(tuple(choice), cost, memory, cost if bound is None else bound)
