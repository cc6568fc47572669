"""Beam search: the likeliest sequences, several of which grow side by side.

It finds what `generate` of Hugging Face's transformers finds with the same settings. Each prompt
has as many beams as are asked for. In each step, the best continuations of all beams of a prompt
are chosen by the sum of the log-probabilities of their tokens. Those that end are kept aside, and
are compared by this sum divided by the number of tokens to the power of the penalty on length (Wu
et al. 2016 normalise likewise).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from onnxpar_format.options import BeamSearch
from onnxpar_runtime.errors import InputError

_WHEN = ("false", "true", "never")
_EXCLUDED = -1e9
"""The score of beams that do not count yet: at first all beams of a prompt are equal."""


@dataclass(frozen=True)
class Hypothesis:
    """A complete sequence.

    Attributes:
        tokens: Its new tokens; the last one may be a token that completes a sequence.
        score: The sum of the logarithms of their probabilities, divided by their number to the
            power of the penalty on length.
    """

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Continuation:
    """A beam with one more token.

    Attributes:
        score: The sum of the logarithms of the probabilities of its new tokens.
        beam: The beam.
        token: The token.
    """

    score: float
    beam: int
    token: int


def check_search(how: BeamSearch) -> None:
    """Checks the settings.

    Raises:
        InputError: One of them is outside its range.
    """
    if how.beams < 1:
        raise InputError(f"beams: expected at least 1, got {how.beams}")
    # Beyond, scores of long sequences are all 0 or infinite in float64.
    if not -10 <= how.length_penalty <= 10:
        raise InputError(f"length_penalty: expected from -10 to 10, got {how.length_penalty}")
    if how.early_stopping not in _WHEN:
        expected = ", ".join(_WHEN)
        raise InputError(f"early_stopping: expected one of {expected}, got {how.early_stopping!r}")


class Beams:
    """The beams of one prompt.

    Args:
        how: The settings.
        eos: Tokens that complete a sequence.
        divisors: By number of new tokens, what the score of such a sequence is divided by. The last
            one is that of the longest sequence.

    Attributes:
        scores: The sum of the logarithms of the probabilities of each beam's tokens.
        done: Whether the search has ended; the beams are then ignored.
    """

    def __init__(self, how: BeamSearch, eos: Collection[int], divisors: Sequence[float]) -> None:
        """Begins with equal beams, of which one counts."""
        self._how, self._eos, self._divisors = how, eos, divisors
        self.scores = [0.0] + [_EXCLUDED] * (how.beams - 1)
        self._tokens: list[tuple[int, ...]] = [()] * how.beams
        self._finished: list[Hypothesis] = []
        self.done = False

    def advance(self, found: Sequence[Continuation]) -> list[Continuation]:
        """Takes the best continuations, best first, and returns those that become the new beams."""
        beams, length = self._how.beams, len(self._tokens[0]) + 1
        longest = length == len(self._divisors) - 1
        divisor = self._divisors[length]
        open_ones = []
        for place, one in enumerate(found[: needed(self._how, self._eos)]):
            if not (longest or one.token in self._eos):
                open_ones.append(one)
            elif place < beams:
                tokens = (*self._tokens[one.beam], one.token)
                self._finished.append(Hypothesis(tokens, one.score / divisor))
        self._finished = self.hypotheses()
        if not open_ones:
            self.done = True
            return []
        # There may be fewer than beams if the vocabulary is tiny.
        last = replace(open_ones[-1], score=2 * _EXCLUDED)
        chosen = (open_ones + [last] * beams)[:beams]
        self._tokens = [(*self._tokens[one.beam], one.token) for one in chosen]
        self.scores = [one.score for one in chosen]
        self.done = len(self._finished) == beams and not self._may_improve(divisor)
        return chosen

    def _may_improve(self, divisor: float) -> bool:
        """Returns whether a beam may become better than the worst complete sequence."""
        how = self._how
        if how.early_stopping == "true":
            return False
        if how.early_stopping == "never" and how.length_penalty > 0:
            divisor = self._divisors[-1]
        return self.scores[0] / divisor > self._finished[-1].score

    def hypotheses(self) -> list[Hypothesis]:
        """Returns the best complete sequences, as many as there are beams at most, best first."""
        return sorted(self._finished, key=lambda one: -one.score)[: self._how.beams]


def needed(how: BeamSearch, eos: Collection[int]) -> int:
    """Returns how many continuations of a prompt must be compared so that enough of them go on."""
    return max(2, 1 + len(eos)) * how.beams
