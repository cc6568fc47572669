"""A plain loop over an undivided decoder in onnxruntime, one prompt at a time, without padding."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

Prompt = Sequence[int]


def greedy(
    path: Path,
    prompts: Sequence[Prompt],
    count: int,
    read: Sequence[Mapping[str, Any]] | None = None,
) -> list[list[int]]:
    """Returns the best new tokens of each prompt.

    Args:
        path: The decoder.
        prompts: Its prompts.
        count: New tokens.
        read: For each prompt, the inputs that an encoder left.
    """
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {value.name: value.shape for value in session.get_inputs()}
    left = read or [{}] * len(prompts)
    caches = [name for name in inputs if name.startswith("past") and name not in left[0]]
    found = []
    for prompt, crossed in zip(prompts, left, strict=True):
        held = {n: np.zeros((1, inputs[n][1], 0, inputs[n][3]), np.float32) for n in caches}
        tokens, new = list(prompt), list(prompt)
        for _ in range(count):
            feeds = {
                "input_ids": np.array([new]),
                "attention_mask": np.ones((1, len(tokens)), np.int64),
                "position_ids": np.arange(len(tokens) - len(new), len(tokens))[None],
                **held,
                **crossed,
            }
            logits, *made = session.run(None, {n: a for n, a in feeds.items() if n in inputs})
            new = [int(logits[0, -1].argmax())]
            tokens += new
            held = dict(zip(caches, made, strict=True))
        found.append(tokens[len(prompt) :])
    return found


@cache
def _session(path: Path) -> Any:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def last_logits(path: Path, tokens: Sequence[int], read: Mapping[str, Any] | None = None) -> Any:
    """Returns the logits of a decoder for the token after some tokens, [vocabulary].

    Args:
        path: The decoder.
        tokens: The tokens.
        read: The inputs that an encoder left.
    """
    session = _session(path)
    feeds: dict[str, Any] = {
        "input_ids": np.array([tokens]),
        "attention_mask": np.ones((1, len(tokens)), np.int64),
        "position_ids": np.arange(len(tokens))[None],
    }
    for value in session.get_inputs():
        if value.name.startswith("past") and value.name not in (read or {}):
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    names = {value.name for value in session.get_inputs()}
    feeds |= read or {}
    return session.run(["logits"], {n: a for n, a in feeds.items() if n in names})[0][0, -1]


def encoded(folder: Path, feeds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns what the undivided encoder of a folder leaves for each sequence's inputs."""
    session = onnxruntime.InferenceSession(
        folder / "encoder.onnx", providers=["CPUExecutionProvider"]
    )
    names = [value.name.replace("present", "past", 1) for value in session.get_outputs()]
    return [dict(zip(names, session.run(None, dict(one)), strict=True)) for one in feeds]
