"""Templates that make one text of the messages of a chat, as tokenizers of Hugging Face have."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from onnxpar_format.records import FormatError, load_json
from onnxpar_format.regular_file import read_regular
from onnxpar_runtime.errors import InputError

_TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate:
    """The template of a tokenizer; it runs in jinja's sandbox.

    Args:
        text: The template.
        special: Texts of special tokens by name, such as `bos_token`.

    Raises:
        InputError: The package is not installed, or the text is not a template.
    """

    def __init__(self, text: str, special: dict[str, str]) -> None:
        """Compiles the template."""
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise InputError(
                "chat template: the package jinja2 is not installed (pip install 'onnxpar[text]')"
            ) from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self._special = special
        try:
            self._template = environment.from_string(text)
        except Exception as error:
            # Of jinja, or of Python, which compiles what jinja makes of it.
            raise InputError(f"chat template: {_short(error)}") from None

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Returns the text of messages, up to where the next one begins.

        Raises:
            InputError: The template refuses them.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, tools=None, **self._special
            )
        except Exception as error:
            # A template computes as any program does.
            raise InputError(f"messages: {_short(error)}") from None


def template_of(folder: Path) -> ChatTemplate | None:
    """Returns the template of a tokenizer's folder; None if it has none.

    Raises:
        InputError: A file cannot be read, or as `ChatTemplate`.
    """
    config: dict[str, Any] = {}
    path = folder / _CONFIG
    if path.is_file():
        try:
            found = load_json(path, f"expected {_CONFIG}, got none")
        except FormatError as error:
            raise InputError(str(error)) from None
        config = found if isinstance(found, dict) else {}
    template = config.get("chat_template")
    if isinstance(template, list):
        # Some have several, by purpose.
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if (folder / _TEMPLATE).is_file():
        path = folder / _TEMPLATE
        try:
            template = read_regular(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(template, str):
        return None
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            special[name] = text
    return ChatTemplate(template, special)


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return "nested too deeply" if isinstance(error, RecursionError) else text


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
