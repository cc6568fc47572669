"""The text of answers as it grows, and OpenAI's objects that hold them."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxpar_runtime.generation.candidates import Likelihood
from onnxpar_runtime.generation.text import Stream, Tokenizer

Logprob = dict[str, Any] | None
"""The object of some tokens' log-probabilities; None if nobody asked for it."""


class Text:
    """The text of one answer, which ends before the first of some texts.

    Args:
        tokenizer: What makes text of tokens; without one, the text is the tokens, as numbers.
        stops: Texts that complete the answer.

    Attributes:
        tokens: The tokens so far.
        likelihoods: How likely they were, if that was asked for.
        stopped: Whether a text has completed it; later tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        """Has no token."""
        self._stream = None if tokenizer is None else Stream(tokenizer)
        self._stops = stops
        self.tokens: list[int] = []
        self.likelihoods: list[Likelihood] = []
        self.stopped = False
        self._held = ""

    def add(self, token: int, likelihood: Likelihood | None = None, *, last: bool) -> str:
        """Returns the text that a token adds, as far as no later token can take it back.

        Args:
            token: The token.
            likelihood: How likely it was.
            last: Whether it is the last one.
        """
        self.tokens.append(token)
        if likelihood is not None:
            self.likelihoods.append(likelihood)
        if self._stream is None:
            return str(token) if last else f"{token} "
        self._held += self._stream.add(token) + (self._stream.rest() if last else "")
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        kept = 0 if last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - kept]
        self._held = self._held[len(shown) :]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text are the beginning of another."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class Usage:
    """Numbers of tokens of a request.

    Attributes:
        prompt: Of its prompts.
        new: Of its answers.
    """

    prompt: int
    new: int = 0

    def json(self) -> dict[str, int]:
        """Returns OpenAI's object."""
        total = self.prompt + self.new
        return {"prompt_tokens": self.prompt, "completion_tokens": self.new, "total_tokens": total}


@dataclass(frozen=True)
class Form:
    """The objects of one request.

    Attributes:
        chat: Whether it is a chat.
        model: The name of the model.
        id: Its name.
        created: When it came, in seconds since 1970.
    """

    chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Returns the object of complete answers."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": list(choices), "usage": usage.json()}

    def choice(
        self, index: int, text: str, tokens: Sequence[int], logprobs: Logprob, why: str
    ) -> dict[str, Any]:
        """Returns one complete answer."""
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        ids = {"token_ids": list(tokens)}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": why, **ids}

    def part(
        self,
        index: int,
        text: str | None,
        tokens: Sequence[int],
        logprobs: Logprob,
        why: str | None,
    ) -> dict[str, Any]:
        """Returns a part of an answer; the first part of a chat has no text (None)."""
        content: dict[str, Any] = {"text": text}
        if self.chat:
            first = {"role": "assistant", "content": ""}
            content = {"delta": first if text is None else {"content": text} if text else {}}
        ids = {"token_ids": list(tokens)}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": why, **ids}
        return {**self._head(self._kind_of_part), "choices": [choice]}

    def counted(self, usage: Usage) -> dict[str, Any]:
        """Returns the part that has the numbers of tokens."""
        return {**self._head(self._kind_of_part), "choices": [], "usage": usage.json()}

    @property
    def _kind_of_part(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}
