"""Small decoders with both kinds of cache."""

from pathlib import Path

import llama_4bit
from _exporter import save

from tests.decoders import growing


def decoder(kind: str, folder: Path) -> Path:
    """Writes the decoder whose cache is `growing` or extended `in_place`."""
    path = folder / f"{kind}.onnx"
    if kind == "growing":
        return growing(path)
    sizes = {
        "layers": 2,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 4,
        "ffn": 128,
        "seed": 1,
        "max_positions": 256,
    }
    save(llama_4bit.build(llama_4bit.Config(**sizes)), path)  # type: ignore[arg-type]
    return path
