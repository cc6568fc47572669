"""Modules of transformers as operators of onnxruntime: attention on a shared cache, few bits.

PyTorch has no such operators. While a module is exported, `torch.onnx.ops.symbolic` stands for
them, so that the modules can be exported but not run.
"""

# mypy: allow-subclassing-any
# To mypy, modules of PyTorch are of any type.

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from llama_4bit import quantise
from torch import nn

ATTENTION = "onnxruntime"
"""The name under which transformers finds the attention of a shared cache."""


class SharedCache:
    """Keys and values in buffers of a fixed length, and the attention that updates them.

    It takes the place of a cache of transformers during one forward pass. Rotary embedding is left
    to the operator, which knows the position of each token from the lengths of the sequences.

    Args:
        module: The decoder; `tables_of_angles` has changed it.
        past: Keys and values of each layer, [batch, kv_heads, past, head_dim].
        mask: 1 for each token of a sequence, these included, [batch, total].
    """

    def __init__(
        self,
        module: nn.Module,
        past: Sequence[tuple[torch.Tensor, torch.Tensor]],
        mask: torch.Tensor,
    ) -> None:
        self._module = module
        self._past = past
        self._total = mask.shape[1]
        last = mask.sum(1, keepdim=True) - 1
        longest = torch.full((), self._total, dtype=torch.int32)
        self._lengths = (last.to(torch.int32), longest)
        self._present: dict[int, Sequence[torch.Tensor]] = {}
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    @contextmanager
    def attending(self) -> Iterator[None]:
        """While it is entered, the module's attention is the operator."""
        transformers.AttentionInterface.register(ATTENTION, self._attend)
        self._module.set_attn_implementation(ATTENTION)
        code = sys.modules[type(self._module).__module__]
        with mock.patch.object(code, "apply_rotary_pos_emb", self._keep_angles):
            yield

    def present(self) -> list[torch.Tensor]:
        """Returns the keys and values of all layers with those of the new tokens."""
        return [tensor for n in range(len(self._past)) for tensor in self._present[n]]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0: the positions of tokens are not taken from it."""
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new keys and values alone: attention adds them to the cache."""
        return key, value

    def _keep_angles(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._angles = cos, sin
        return q, k

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of transformers: operands [batch, heads, seq, head_dim]."""
        batch, heads, seq, width = query.shape
        kv = key.shape[1]
        layer: int = module.layer_idx
        assert self._angles is not None, "layers apply rotary positions before attention"
        attributes: dict[str, Any] = {
            "num_heads": heads, "kv_num_heads": kv, "do_rotary": 1, "rotary_interleaved": 0,
            "scale": 1 / math.sqrt(width) if scaling is None else scaling,
            **({"local_window_size": sliding_window} if sliding_window else {}),
            **({"softcap": softcap} if softcap else {}),
        }  # fmt: skip
        flat = [x.transpose(1, 2).reshape(batch, seq, -1) for x in (query, key, value)]
        grown = (batch, kv, self._total, width)
        out, *self._present[layer] = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            [*flat, *self._past[layer], *self._lengths, *self._angles],
            attributes,
            dtypes=[query.dtype] * 3,
            shapes=[(batch, seq, heads * width), grown, grown],
        )
        return out.view(batch, seq, heads, width), None


class _Angles(nn.Module):
    """Takes the place of a rotary embedding: its cosines and sines of all positions."""

    def __init__(
        self, rotary: nn.Module, positions: int, kinds: Sequence[str], dtype: torch.dtype
    ) -> None:
        super().__init__()
        every, like = torch.arange(positions)[None], torch.zeros(1, dtype=dtype)
        for kind in kinds or ("",):
            pair = rotary(like, every, *([kind] if kind else []))
            for name, table in zip(("cos", "sin"), pair, strict=True):
                half = table.shape[-1] // 2
                self.register_buffer(f"{kind}{name}_cache", table[0, :, :half].contiguous())

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, kind: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(self, f"{kind}cos_cache"), getattr(self, f"{kind}sin_cache")


def tables_of_angles(module: nn.Module) -> None:
    """Replaces the rotary embeddings of a decoder by tables of all its positions.

    Raises:
        ValueError: It has none.
    """
    config: Any = module.config
    # The operator wants them in the type of queries and keys.
    dtype = next(module.parameters()).dtype
    named = list(module.named_modules())
    rotary = [(n, m) for n, m in named if type(m).__name__.endswith("RotaryEmbedding")]
    if not rotary:
        raise ValueError(f"{type(module).__name__}: a shared cache needs rotary positions")
    for name, part in rotary:
        parent, _, last = name.rpartition(".")
        kinds = getattr(part, "layer_types", ())
        tables = _Angles(part, config.max_position_embeddings, kinds, dtype)
        setattr(module.get_submodule(parent), last, tables)


class _FewBits(nn.Module):
    """A product with a weight of few bits in blocks, which share a scale (MatMulNBits)."""

    def __init__(self, linear: nn.Linear, bits: int, block: int) -> None:
        super().__init__()
        numbers, scales = quantise(linear.weight.detach().float().numpy(), block, bits)
        self.register_buffer("weight_quantised", torch.from_numpy(numbers))
        self.register_buffer("weight_scales", torch.from_numpy(scales).to(linear.weight.dtype))
        self.bias = linear.bias
        self.sizes = {
            "K": linear.in_features, "N": linear.out_features, "bits": bits, "block_size": block,
            "accuracy_level": 0,
        }  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            [x, self.weight_quantised, self.weight_scales],
            self.sizes,
            dtype=x.dtype,
            shape=(*x.shape[:-1], self.sizes["N"]),
        )
        return y if self.bias is None else y + self.bias


def few_bits(module: nn.Module, bits: int, block: int) -> None:
    """Replaces every product with a weight by one with few bits.

    Raises:
        ValueError: A weight has no whole number of blocks.
    """
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.Linear):
            if part.in_features % block:
                raise ValueError(
                    f"{name}: expected a multiple of {block} columns, got {part.in_features}"
                )
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, _FewBits(part, bits, block))
