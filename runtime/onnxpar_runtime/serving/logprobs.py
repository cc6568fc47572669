"""OpenAI's objects for the log-probabilities of an answer's tokens."""

from collections.abc import Sequence
from typing import Any

from onnxpar_runtime.generation.candidates import Likelihood
from onnxpar_runtime.generation.text import UNFINISHED, Tokenizer


class Logprobs:
    """Writes the log-probabilities of one answer, part by part.

    Args:
        chat: Whether it is an answer in a chat, whose objects have another form.
        tokenizer: What makes text of tokens; without one, a token's text is its number.
    """

    def __init__(self, chat: bool, tokenizer: Tokenizer | None) -> None:
        """Has written nothing."""
        self._chat, self._tokenizer = chat, tokenizer
        self._offset = 0

    def json(self, tokens: Sequence[int], likelihoods: Sequence[Likelihood]) -> dict[str, Any]:
        """Returns the object of the next tokens.

        Args:
            tokens: The tokens.
            likelihoods: How likely each was.
        """
        texts = [self._text(token) for token in tokens]
        if self._chat:
            content = [
                {
                    **self._entry(text, one.logprob),
                    "top_logprobs": [self._entry(self._text(t), x) for t, x in one.best],
                }
                for text, one in zip(texts, likelihoods, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in likelihoods],
            "top_logprobs": [{self._text(t): x for t, x in one.best} for one in likelihoods],
            "text_offset": offsets,
        }

    def _entry(self, text: str, logprob: float) -> dict[str, Any]:
        # A token may be a part of a character, whose bytes its text does not have.
        found = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": found}

    def _text(self, token: int) -> str:
        return str(token) if self._tokenizer is None else self._tokenizer.piece(token)
