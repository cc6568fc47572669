"""What `generate` gives to a decoder, and to an encoder before it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar_format.entries import DimComponent, ProgramEntry, TensorEntry
from onnxpar_format.options import BeamSearch, GenerationRun, Sampling
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.commands import check_options, given, prompts_of
from onnxpar_runtime.generation.encoder import token_feeds
from onnxpar_runtime.generation.text import Tokenizer

pytest.importorskip("tokenizers", reason="the extra text")
from tests.runtime.serving.folders import TEMPLATE, WORDS, pieces, words


def spec(name: str, dtype: str, *sizes: int | str) -> TensorEntry:
    return TensorEntry(name, dtype, sizes, tuple((DimComponent(size, ()),) for size in sizes))


def encoder(*inputs: TensorEntry) -> ProgramEntry:
    return ProgramEntry("encoder", (None,), inputs, (), (), ())


IDS, MASK = spec("input_ids", "int64", "batch", "n"), spec("attention_mask", "int32", "batch", "n")
TEXT = encoder(IDS, MASK)
SOUND = encoder(spec("input_features", "float32", "batch", 4, 6))


def written(folder: Path, prompts: Any) -> Path:
    (folder / "t.json").write_text(json.dumps(prompts))
    return folder / "t.json"


def test_an_encoder_of_tokens_reads_the_prompts(tmp_path: Path) -> None:
    run = GenerationRun(tokens=written(tmp_path, [[5, 6, 7], [8]]), start=(2, 3))
    prompts, feeds = given(run, None, TEXT)
    assert prompts == [[2, 3], [2, 3]] and feeds is not None
    assert feeds["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert feeds["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert feeds["attention_mask"].dtype == np.int32


def test_inputs_of_a_file_go_to_the_encoder_and_prompts_to_the_decoder(tmp_path: Path) -> None:
    features = np.ones((2, 4, 6), np.float32)
    np.savez(tmp_path / "in.npz", input_features=features)
    run = GenerationRun(inputs=tmp_path / "in.npz", start=(9,))
    prompts, feeds = given(run, None, SOUND)
    assert prompts == [[9], [9]] and feeds is not None
    assert feeds["input_features"].shape == features.shape
    tokens = written(tmp_path, [[5], [6, 7]])
    both = GenerationRun(inputs=tmp_path / "in.npz", tokens=tokens)
    assert given(both, None, SOUND)[0] == [[5], [6, 7]]
    after = GenerationRun(inputs=tmp_path / "in.npz", tokens=tokens, start=(9,))
    assert given(after, None, SOUND)[0] == [[9, 5], [9, 6, 7]]


@pytest.mark.parametrize(
    ("options", "program", "message"),
    [
        ({"start": (1,)}, None, "--start: only for an encoder-decoder"),
        ({"inputs": Path("x.npz")}, None, "--inputs: only for an encoder-decoder"),
        ({}, TEXT, "--start: expected the token with which the decoder begins, got none"),
        ({"start": (1,)}, SOUND, "expected an encoder of tokens, got one with the inputs"),
        ({"inputs": Path("x.npz"), "start": (1,)}, SOUND, "x.npz: no such file"),
    ],
)
def test_options_of_another_kind_of_model_are_refused(
    options: Any, program: ProgramEntry | None, message: str, tmp_path: Path
) -> None:
    run = GenerationRun(tokens=written(tmp_path, [[5]]), **options)
    with pytest.raises(InputError, match=message):
        given(run, None, program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": 2}, "--logprobs: expected --json as well, got none"),
        ({"search": BeamSearch(1, 2.0)}, "--length-penalty, --early-stopping: expected --beams"),
        ({"sampling": Sampling(top_k=3)}, "--seed: expected no --beams"),
        ({"stop": ("x",)}, "--stop: expected no --beams"),
        ({"logprobs": 2, "as_json": True}, "--logprobs: expected no --beams"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    more = {"search": BeamSearch(2)} if "expected no --beams" in message else {}
    with pytest.raises(InputError, match=message):
        check_options(GenerationRun(**more, **options))


def test_inputs_with_different_rows_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", a=np.ones((2, 3)), b=np.ones((3, 3)))
    run = GenerationRun(inputs=tmp_path / "in.npz", start=(1,))
    with pytest.raises(InputError, match=r"expected arrays with one number of rows, got \[2, 3\]"):
        given(run, None, SOUND)


def test_texts_that_a_program_cannot_tell_apart_from_padding_are_refused() -> None:
    with pytest.raises(InputError, match="expected equal lengths, since the encoder has no mask"):
        token_feeds(encoder(IDS), [[1], [1, 2]])
    with pytest.raises(InputError, match="prompt 1: expected at least one token"):
        token_feeds(TEXT, [[1], []])
    assert token_feeds(encoder(IDS), [[1, 2], [3, 4]])["input_ids"].tolist() == [[1, 2], [3, 4]]


def test_a_chat_template_makes_a_prompt_of_each_message(tmp_path: Path) -> None:
    """As transformers does, whose template ends where the answer begins."""
    pytest.importorskip("jinja2", reason="the extra text")
    folder = words(tmp_path / "words")
    tokenizer = Tokenizer(folder)
    run = GenerationRun(prompt=("w4 w5", "w6"), chat=True, system="w9", tokenizer=folder)
    start, end = ["<s>", "<system>", "w9", "<user>"], ["<assistant>"]
    want = [[WORDS.index(w) for w in (*start, *text, *end)] for text in (["w4", "w5"], ["w6"])]
    assert given(run, tokenizer, None) == (want, None)
    transformers = pytest.importorskip("transformers", reason="the extra zoo")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", chat_template=TEMPLATE
    )
    messages = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w6"}]
    text = made.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert made.encode(text, add_special_tokens=False) == want[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ("w4",), "system": "w9"}, "--system: expected --chat as well"),
        ({"chat": True, "tokens": True}, "--chat: expected --prompt and --tokenizer as well"),
        ({"prompt": ("w4",), "chat": True}, "expected a chat template .*, got none"),
    ],
)
def test_chats_that_cannot_be_made_are_refused(options: Any, message: str, tmp_path: Path) -> None:
    folder = pieces(tmp_path / "pieces")
    if "tokens" in options:
        options = {**options, "tokens": written(tmp_path, [[5]])}
    with pytest.raises(InputError, match=message):
        given(GenerationRun(**options, tokenizer=folder), Tokenizer(folder), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"[[{2**31}]]", "each a list of numbers from 0 to 2147483647"),
        (f"[[{10**30}]]", "each a list of numbers from 0 to 2147483647"),
        ("[" * 100_000, "not valid JSON: maximum recursion depth"),
    ],
)
def test_files_of_tokens_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        prompts_of(GenerationRun(tokens=path), None)
