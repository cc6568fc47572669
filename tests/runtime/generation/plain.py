"""A plain loop over an undivided decoder in onnxruntime, one prompt at a time, without padding."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

Prompt = Sequence[int]


def greedy(path: Path, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
    """Returns the best new tokens of each prompt."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {value.name: value.shape for value in session.get_inputs()}
    caches = [name for name in inputs if name.startswith("past")]
    found = []
    for prompt in prompts:
        held = {n: np.zeros((1, inputs[n][1], 0, inputs[n][3]), np.float32) for n in caches}
        tokens, new = list(prompt), list(prompt)
        for _ in range(count):
            feeds = {
                "input_ids": np.array([new]),
                "attention_mask": np.ones((1, len(tokens)), np.int64),
                "position_ids": np.arange(len(tokens) - len(new), len(tokens))[None],
                **held,
            }
            logits, *made = session.run(None, {n: a for n, a in feeds.items() if n in inputs})
            new = [int(logits[0, -1].argmax())]
            tokens += new
            held = dict(zip(caches, made, strict=True))
        found.append(tokens[len(prompt) :])
    return found
