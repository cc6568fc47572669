"""Text to tokens and back, with a small tokenizer of bytes."""

import json
from pathlib import Path

import pytest

from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.text import Stream, Tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="text: the extra text")

END = "</s>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer whose tokens are the bytes, and one that ends a text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([END, *alphabet])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_text_survives_and_special_tokens_are_not_shown(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    tokens = tokenizer.encode("naïve 🙂")
    assert len(tokens) == len("naïve 🙂".encode())
    assert tokenizer.decode([*tokens, 0]) == "naïve 🙂"


def test_a_character_is_shown_when_its_last_byte_has_come(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    stream = Stream(tokenizer)
    shown = [stream.add(token) for token in tokenizer.encode("é🙂!")]
    assert shown == ["", "é", "", "", "", "🙂", "!"]


@pytest.mark.parametrize(
    ("file", "content", "ends"),
    [
        ("generation_config.json", {"eos_token_id": [0, 5]}, (0, 5)),
        ("config.json", {"eos_token_id": 7}, (7,)),
        ("genai_config.json", {"model": {"eos_token_id": 3}}, (3,)),
        ("config.json", {"eos_token_id": None}, ()),
    ],
)
def test_the_folder_names_the_tokens_that_end_a_text(
    file: str, content: object, ends: tuple[int, ...], folder: Path
) -> None:
    (folder / file).write_text(json.dumps(content))
    assert Tokenizer(folder).eos == ends


def test_the_folder_names_the_token_with_which_a_decoder_begins(folder: Path) -> None:
    assert Tokenizer(folder).start == ()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (folder / "genai_config.json").write_text(json.dumps({"model": {"decoder_start_token_id": 4}}))
    assert (Tokenizer(folder).start, Tokenizer(folder).eos) == ((4,), (1,))


def test_a_folder_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"expected a folder with tokenizer\.json, got none"):
        Tokenizer(folder / "absent")
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        Tokenizer(folder)


def test_a_panic_of_the_package_is_an_error(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is no Exception of Python, and ended `generate` with a traceback."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    model = content["model"]
    model["vocab"]["ab"] = len(model["vocab"])
    path.write_text(json.dumps(content | {"model": model | {"merges": [["a", "b"]]}}))
    assert Tokenizer(folder).encode("ab") == [model["vocab"]["ab"]]
    model["continuing_subword_prefix"] = "true"
    path.write_text(json.dumps(content | {"model": model | {"merges": [["a", "b"]]}}))
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer: range end index"):
        Tokenizer(folder)
    assert capfd.readouterr().err == ""
