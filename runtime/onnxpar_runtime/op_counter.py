"""How often a rank has run an operator, and what it has sent."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OpCounter:
    """The calls of one operator on one rank.

    Attributes:
        calls: How often its kernel ran.
        bytes: Bytes that the rank sent, by the formulas in `runtime/csrc/collective/collective.h`.
    """

    calls: int
    bytes: int
