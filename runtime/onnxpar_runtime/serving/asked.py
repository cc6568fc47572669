"""What a client asks for: completions of prompts, or the next message of a chat."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onnxpar_format.options import Sampling
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.text import Tokenizer
from onnxpar_runtime.serving.fields import Fields, Refusal, wrong

_STOPS = 4
_CHOICES = 128
_LIKELIEST = 20
_SEEDS = 1 << 63
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
"""Fields of OpenAI that are not supported, and the values with which they change nothing."""


@dataclass(frozen=True)
class Asked:
    """What a client asks for.

    Attributes:
        chat: Whether it is a chat.
        prompts: The tokens of each prompt; a chat has one.
        choices: Answers to each prompt.
        new: New tokens of an answer at most; None for as many as a slot has room for.
        sampling: How tokens are chosen.
        stops: Texts that complete an answer and are left out of it.
        logprobs: For how many of the likeliest tokens log-probabilities are sent beside those of
            each token; None for no log-probabilities.
        streams: Whether answers are sent as they come.
        usage: Whether a stream ends with the number of tokens.
    """

    chat: bool
    prompts: list[list[int]]
    choices: int
    new: int | None
    sampling: Sampling
    stops: list[str]
    logprobs: int | None
    streams: bool
    usage: bool


def completion_of(fields: Fields, name: str, tokenizer: Tokenizer | None) -> Asked:
    """Returns what a request for completions asks for.

    Args:
        fields: Its fields.
        name: The name of the model.
        tokenizer: What makes tokens of texts.

    Raises:
        Refusal: A field is wrong.
    """
    fields.neutral({"echo": (False,), "suffix": ("",), "best_of": (1,)})
    prompt = fields.take("prompt")
    prompts = _prompts(prompt, tokenizer)
    logprobs = fields.integer("logprobs", 0, _LIKELIEST)
    new = fields.integer("max_tokens", 1, _SEEDS)
    return _rest(fields, name, tokenizer, False, prompts, logprobs, 16 if new is None else new)


def chat_of(
    fields: Fields,
    name: str,
    tokenizer: Tokenizer | None,
    render: Callable[[list[dict[str, Any]]], str] | None,
) -> Asked:
    """Returns what a request for the next message of a chat asks for.

    Args:
        fields: Its fields.
        name: The name of the model.
        tokenizer: What makes tokens of texts.
        render: What makes a text of messages.

    Raises:
        Refusal: A field is wrong, or the model has no template for chats.
    """
    if tokenizer is None or render is None:
        raise Refusal(
            "messages: expected a tokenizer with a chat template (serve --tokenizer), got none"
        )
    fields.neutral({"response_format": ({"type": "text"},), "tools": ([],)})
    wanted, likeliest = fields.flag("logprobs"), fields.integer("top_logprobs", 0, _LIKELIEST)
    if likeliest is not None and not wanted:
        raise wrong("top_logprobs", "logprobs: true as well", likeliest)
    logprobs = (likeliest or 0) if wanted else None
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "a non-empty list of messages", messages)
    try:
        text = render([_message(n, one) for n, one in enumerate(messages)])
    except InputError as error:
        raise Refusal(str(error), field="messages") from None
    old, new = (fields.integer(k, 1, _SEEDS) for k in ("max_tokens", "max_completion_tokens"))
    prompts = [tokenizer.encode(text, special=False)]
    return _rest(fields, name, tokenizer, True, prompts, logprobs, new if old is None else old)


def _rest(
    fields: Fields,
    name: str,
    tokenizer: Tokenizer | None,
    chat: bool,
    prompts: list[list[int]],
    logprobs: int | None,
    new: int | None,
) -> Asked:
    """Reads the fields that both kinds of request have."""
    fields.neutral(_NEUTRAL)
    model = fields.text("model")
    if model is None:
        raise Refusal("model: expected a string, got none", field="model")
    if model != name:
        message = f"model: expected {name!r}, got {model!r}"
        raise Refusal(message, 404, field="model", code="model_not_found")
    stops = fields.texts("stop", _STOPS)
    if stops and tokenizer is None:
        raise Refusal("stop: expected a tokenizer (serve --tokenizer), got none", field="stop")
    streams = fields.flag("stream")
    options = fields.take("stream_options")
    if options is not None and not (streams and isinstance(options, dict)):
        raise wrong("stream_options", "an object, and stream: true", options)
    usage = bool((options or {}).get("include_usage"))
    fields.text("user")
    seed = fields.integer("seed", 0, _SEEDS - 1)
    top_p = fields.number("top_p", 1, 0, 1)
    sampling = Sampling(
        temperature=fields.number("temperature", 1, 0, 100),
        top_k=fields.integer("top_k", 1, _SEEDS),
        # A nucleus of no probability has one token, as one of the smallest has.
        top_p=max(top_p, 1e-9),
        repetition_penalty=fields.number("repetition_penalty", 1, 0.01, 100),
        seed=secrets.randbelow(_SEEDS) if seed is None else seed,
    )
    choices = fields.integer("n", 1, _CHOICES) or 1
    fields.done()
    return Asked(chat, prompts, choices, new, sampling, stops, logprobs, streams, usage)


def _prompts(given: Any, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Returns the tokens of a text, a list of texts, tokens, or lists of tokens."""
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list) and given:
        if all(isinstance(one, str) for one in given):
            if tokenizer is None:
                message = (
                    "prompt: expected tokens, since there is no tokenizer (serve --tokenizer), "
                    "got a string"
                )
                raise Refusal(message, field="prompt")
            return [tokenizer.encode(one) for one in given]
        lists = [given] if all(_is_token(one) for one in given) else given
        if all(isinstance(one, list) and one and all(map(_is_token, one)) for one in lists):
            return [list(one) for one in lists]
    raise wrong("prompt", "a string, tokens, or a non-empty list of either", given)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _message(number: int, given: Any) -> dict[str, Any]:
    """Returns a message whose content is one text."""
    place = f"messages[{number}]"
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise wrong(place, "an object with a role and a content", given)
    content = given.get("content")
    if isinstance(content, list):
        texts = [p.get("text") if isinstance(p, dict) else None for p in content]
        if not all(isinstance(text, str) for text in texts):
            raise wrong(f"{place}.content", "parts that each have a text", content)
        content = "".join(str(text) for text in texts)
    if not isinstance(content, str):
        raise wrong(
            f"{place}.content", "a string, or a list of parts that each have a text", content
        )
    return {**given, "content": content}
