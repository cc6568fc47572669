"""The networks that tools/bench/step.py exports from PyTorch, and their stages.

Weights are drawn from a fixed seed, so that every process has the same ones.
"""

# mypy: ignore-errors
# PyTorch is installed only where this is measured, and its types are not strict.

from collections.abc import Sequence
from itertools import combinations, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class Perceptron(nn.Sequential):
    """The network of models/mlp.py: 784 - hidden - hidden - 10."""

    def __init__(self, hidden: int) -> None:
        """Draws the weights."""
        first = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU())
        second = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU())
        super().__init__(first, second, nn.Linear(hidden, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, 10] of images [batch, 1, 28, 28]."""
        return super().forward(x)

    def parallel(self) -> tuple[list[str], list[str]]:
        """The layers that tensor parallel splits by columns, and those by rows."""
        return ["0.1"], ["1.0"]


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, vocab: int, seq: int, width: int) -> None:
        """Draws the tables."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors [batch, seq, width] of tokens [batch, seq]."""
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))


class Block(nn.Module):
    """A block with one matrix for queries, keys and values, and tanh-Gelu."""

    def __init__(self, width: int, heads: int) -> None:
        """Draws the weights."""
        super().__init__()
        self.head = width // heads
        self.by_heads = False
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def order_by_heads(self) -> None:
        """Sorts the rows of `qkv` by heads, so that a half of them is a half of the heads."""
        self.by_heads = True
        with torch.no_grad():
            for tensor in (self.qkv.weight, self.qkv.bias):
                parts = tensor.unflatten(0, (3, -1, self.head))
                tensor.copy_(parts.transpose(0, 1).flatten(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream [batch, seq, width] after the block."""
        packed = self.qkv(self.ln1(x))
        if self.by_heads:
            parts = packed.unflatten(-1, (-1, 3, self.head)).unbind(3)
        else:
            parts = packed.unflatten(-1, (3, -1, self.head)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Sequential):
    """A GPT, the head not tied to the table of tokens."""

    def __init__(
        self, layers: int, width: int, heads: int, seq: int, vocab: int, spread: float = 0.02
    ) -> None:
        """Draws the weights; those of matrices have the given standard deviation."""
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab, bias=False))
        blocks = (Block(width, heads) for _ in range(layers))
        super().__init__(Embedding(vocab, seq, width), *blocks, head)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=spread)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, seq, vocab] of tokens [batch, seq]."""
        return super().forward(input_ids)

    def parallel(self) -> tuple[list[str], list[str]]:
        """The layers that tensor parallel splits by columns, and those by rows."""
        layers = range(1, len(self) - 1)
        columns = [f"{n}.{part}" for n in layers for part in ("qkv", "fc1")]
        return columns, [f"{n}.{part}" for n in layers for part in ("out", "fc2")]


def network(name: str, sizes: Sequence[int]) -> nn.Sequential:
    """The network of a name and its sizes, always with the same weights."""
    torch.manual_seed(0)
    return (Perceptron if name == "mlp" else Gpt)(*sizes)


def stages(net: nn.Sequential, count: int) -> list[nn.Sequential]:
    """Cuts a network into stages, so that the one with the most products has as few as possible."""
    parts = list(net)
    # Tables are looked up, not multiplied.
    work = [
        sum(p.numel() for p in part.parameters() if p.ndim > 1 and not isinstance(part, Embedding))
        for part in parts
    ]
    cuts = [(0, *inner, len(parts)) for inner in combinations(range(1, len(parts)), count - 1)]
    if not cuts:
        raise ValueError(f"{count} stages: the network has only {len(parts)} parts")
    best = min(cuts, key=lambda cut: max(sum(work[a:b]) for a, b in pairwise(cut)))
    return [nn.Sequential(*parts[a:b]) for a, b in pairwise(best)]
