"""The text of answers: as it streams it is that of all tokens, up to the text that stops it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from onnxpar_runtime.generation.text import Stream, Tokenizer
from onnxpar_runtime.serving.answers import Text
from tests.runtime.serving.folders import byte_level, pieces, words

SENTENCE = "a naïve übung – bc, 日本語 and 🙂🙂 b a"


@pytest.mark.parametrize("kind", [words, pieces, byte_level])
def test_a_stream_is_the_text_of_all_tokens(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer(kind(tmp_path / "tokenizer"))
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 96, 40).tolist() for _ in range(20)]
    for tokens in ([tokenizer.encode(SENTENCE)] if kind is not words else []) + drawn:
        stream = Stream(tokenizer)
        parts = [stream.add(token) for token in tokens]
        assert "".join(parts) + stream.rest() == tokenizer.decode(tokens)
    if kind is not words:
        assert tokenizer.decode(tokenizer.encode(SENTENCE)) == SENTENCE


def test_no_part_of_a_character_is_shown(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path / "tokenizer"))
    stream = Stream(tokenizer)
    parts = [stream.add(token) for token in tokenizer.encode("🙂é!")]
    assert parts == ["", "", "", "🙂", "", "é", "!"]
    stream = Stream(tokenizer)
    assert [stream.add(token) for token in tokenizer.encode("🙂")[:2]] == ["", ""]
    assert stream.rest() == "�"


@pytest.mark.parametrize(
    ("stops", "shown"),
    [
        (["w7"], "w1 w2 "),
        (["w9"], "w1 w2 w7 w7 w8"),
        (["2 w7 w8", "7 w7"], "w1 w2 w"),
        (["w7 w8"], "w1 w2 w7 "),
        (["w8 w1"], "w1 w2 w7 w7 w8"),
    ],
)
def test_an_answer_ends_before_what_stops_it(stops: list[str], shown: str, tmp_path: Path) -> None:
    """What may be the beginning of such a text is not shown before it is clear that it is not."""
    tokenizer = Tokenizer(words(tmp_path / "tokenizer"))
    tokens = tokenizer.encode("w1 w2 w7 w7 w8")
    text, parts = Text(tokenizer, stops), [""]
    for number, token in enumerate(tokens):
        parts.append(text.add(token, last=number == len(tokens) - 1))
        assert shown.startswith("".join(parts))
        if text.stopped:
            break
    assert "".join(parts) == shown
    assert text.stopped == (shown != "w1 w2 w7 w7 w8")
