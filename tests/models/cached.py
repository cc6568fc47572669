"""Runs a decoder with a cache, step by step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

TYPES = {"tensor(float)": "f4", "tensor(float16)": "f2"}


def cached_logits(
    session: onnxruntime.InferenceSession,
    ids: Any,
    ends: range,
    caches: Sequence[str],
    length: int = 0,
    fixed: Mapping[str, Any] | None = None,
) -> Any:
    """The logits of a sequence, in which each run reads what follows the run before.

    Args:
        session: The decoder. Its first result is the logits, and the others are its caches.
        ids: The sequence, [rows, tokens].
        ends: For each run the end of its tokens.
        caches: The inputs that are caches, in the order of the results.
        length: Their length before the first run.
        fixed: Further inputs, the same in all runs.
    """
    shapes = {value.name: value.shape for value in session.get_inputs()}
    types = {value.name: TYPES.get(value.type) for value in session.get_inputs()}
    held = {n: np.zeros((len(ids), shapes[n][1], length, shapes[n][3]), types[n]) for n in caches}
    found, start = [], 0
    for end in ends:
        feeds = {
            "input_ids": ids[:, start:end],
            "attention_mask": np.ones((len(ids), end), np.int64),
            "position_ids": np.arange(start, end)[None].repeat(len(ids), 0),
            **(fixed or {}),
        }
        given = {name: array for name, array in feeds.items() if name in shapes}
        made, *present = session.run(None, {**given, **held})
        found.append(made)
        held, start = dict(zip(caches, present, strict=True)), end
    return np.concatenate(found, 1)
