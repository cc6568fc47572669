"""Text to tokens and back, by the `tokenizers` package, from the folder of a Hugging Face model."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnxpar_format.records import FormatError, load_json
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.chats import template_of

_FILE = "tokenizer.json"
_PANIC = "PanicException"
_CONFIGS = ("generation_config.json", "config.json", "genai_config.json")
UNFINISHED = "\ufffd"
"""What decoders give for the first bytes of a character."""


class Tokenizer:
    """A tokenizer, and the tokens that end a text.

    Args:
        folder: A folder with `tokenizer.json`.

    Attributes:
        eos: The tokens that end a text, by the folder's configuration; empty if it names none.
        start: Those with which the decoder of an encoder-decoder begins, likewise.

    Raises:
        InputError: The package is not installed, or a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the folder."""
        try:
            import tokenizers
        except ImportError:
            raise InputError(
                "--tokenizer: the package tokenizers is not installed (pip install 'onnxpar[text]')"
            ) from None
        path = folder / _FILE
        if not path.is_file():
            raise InputError(f"--tokenizer {folder}: expected a folder with {_FILE}, got none")
        with _blamed_on(path), _quiet():
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        self._folder, self._path = folder, path
        self.eos = configured(folder, "eos_token_id")
        self.start = configured(folder, "decoder_start_token_id")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the tokens of a text.

        Args:
            text: The text.
            special: Whether to add those that begin a text.
        """
        with _blamed_on(self._path):
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Returns the tokens of a chat, up to where the model's answer begins.

        Args:
            messages: Its messages, each with a `role` and a `content`, a text.

        Raises:
            InputError: The folder has no chat template, or the template refuses the messages.
        """
        template = template_of(self._folder)
        if template is None:
            raise InputError(
                f"--tokenizer {self._folder}: expected a chat template (chat_template.jinja, or "
                "in tokenizer_config.json), got none"
            )
        return self.encode(template.render(messages), special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special ones."""
        with _blamed_on(self._path):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """Returns the text of one token by itself, also of a special one."""
        with _blamed_on(self._path):
            return str(self._tokenizer.decode([token], skip_special_tokens=False))


@contextmanager
def _blamed_on(path: Path) -> Iterator[None]:
    """Turns what the package raises into an InputError; it has no class of its own.

    A panic of its Rust code is not even an Exception.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == _PANIC:
            raise InputError(f"{path}: not a tokenizer: {error}") from None
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out what is written to stderr: Rust prints a panic there itself, with its stack."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class Stream:
    """The text of a growing sequence, in parts that later tokens do not change.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Has shown nothing."""
        self._tokenizer, self._tokens = tokenizer, list[int]()
        # The tokens before the first are settled; the text of those between both has been shown,
        # and says what a decoder makes of the later ones, such as whether they begin with a space.
        self._first = self._next = 0

    def add(self, token: int) -> str:
        """Returns the text that a token completes; empty within a character."""
        self._tokens.append(token)
        new = self.rest()
        if new.endswith(UNFINISHED):
            return ""
        if new:
            self._first, self._next = self._next, len(self._tokens)
        return new

    def rest(self) -> str:
        """Returns the text that has not been shown, of a sequence that ends within a character."""
        shown = self._tokenizer.decode(self._tokens[self._first : self._next])
        return self._tokenizer.decode(self._tokens[self._first :])[len(shown) :]


def configured(folder: Path, key: str) -> tuple[int, ...]:
    """Returns the token or the tokens of this name in the first configuration that has it."""
    for name in _CONFIGS:
        path = folder / name
        if not path.is_file():
            continue
        try:
            read = load_json(path, f"expected {name}, got none")
        except FormatError as error:
            raise InputError(str(error)) from None
        found = read.get("model", read) if isinstance(read, dict) else {}
        tokens = found.get(key) if isinstance(found, dict) else None
        tokens = [tokens] if isinstance(tokens, int) else tokens
        if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens):
            return tuple(tokens)
    return ()
