"""Folders of small tokenizers."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
 <{{ message['role'] }}> {{ message['content'] }}
{%- endfor %}
{%- if add_generation_prompt %} <assistant>{% endif %}"""
WORDS = ["<s>", "</s>", "<user>", "<system>", "<assistant>", *(f"w{n}" for n in range(91))]


def words(folder: Path) -> Path:
    """Writes a tokenizer of 96 words, with a template for chats."""
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:5])
    write(tokenizer, folder)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def pieces(folder: Path) -> Path:
    """Writes a tokenizer of pieces that begin with a space, and of bytes, as SentencePiece has."""
    listed = ["<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "▁a", "b", "▁bc", "ü", "!"]
    model = models.BPE({w: n for n, w in enumerate(listed)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return write(tokenizer, folder)


def byte_level(folder: Path) -> Path:
    """Writes a tokenizer of single bytes, as GPT-2 has."""
    listed = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({w: n for n, w in enumerate(listed)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return write(tokenizer, folder)


def write(tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
