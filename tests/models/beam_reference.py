"""What beam search of transformers finds."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from onnxpar_format.options import BeamSearch
from onnxpar_runtime.generation.beams import Hypothesis


def compare(
    found: Sequence[Sequence[Hypothesis]],
    module: Any,
    inputs: Mapping[str, Any],
    how: BeamSearch,
    eos: Sequence[int],
    new: int,
    *,
    prompt: int = 1,
    rtol: float,
) -> None:
    """Compares the tokens and scores of all sequences with those that transformers finds.

    Args:
        found: The sequences.
        module: The network.
        inputs: The inputs of its `generate`.
        how: The settings.
        eos: Tokens that complete a sequence.
        new: New tokens at most.
        prompt: Tokens before the new ones.
        rtol: How much a logit may differ, relative to the largest one.
    """
    early: Any = {"true": True, "false": False, "never": "never"}[how.early_stopping]
    settings = transformers.GenerationConfig(
        num_beams=how.beams, num_return_sequences=how.beams, length_penalty=how.length_penalty,
        early_stopping=early, max_new_tokens=new, eos_token_id=list(eos), pad_token_id=1,
        decoder_start_token_id=3, do_sample=False, return_dict_in_generate=True,
        output_scores=True, output_logits=True,
    )  # fmt: skip
    module.generation_config = transformers.GenerationConfig()
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    with torch.no_grad():
        # Whisper's own `generate` cuts sound into pieces first.
        want = transformers.GenerationMixin.generate(module, **tensors, generation_config=settings)
    largest = max(float(logits.abs().max()) for logits in want.logits)
    scores = want.sequences_scores.reshape(-1, how.beams).tolist()
    sequences = want.sequences.reshape(len(scores), how.beams, -1).tolist()
    for row, lines in enumerate(sequences):
        for place, tokens in enumerate(lines):
            hypothesis = found[row][place]
            length = len(hypothesis.tokens)
            padding = [1] * (len(tokens) - prompt - length)
            assert tokens[prompt:] == [*hypothesis.tokens, *padding]
            # Each logarithm of a probability may differ by twice the error of a logit. float32
            # rounds each sum, whose size is at most that of the score times the divisor.
            divisor = length**how.length_penalty
            rounding = length * 2.0**-24 * abs(hypothesis.score)
            error = length * 2 * rtol * largest / divisor + rounding
            assert abs(scores[row][place] - hypothesis.score) <= error
