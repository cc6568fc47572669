"""Layers that `random_networks.py` draws: each has something that training may get wrong.

Norms with constants of their own, parameters that several layers share, copies that are equal and
not shared, scalars, constants that are no parameters, frozen parameters, and sizes that are
computed.
Sequences are [batch, seq, width], images [batch, width, height, height].
"""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "elu": functional.elu,
    "sigmoid": torch.sigmoid,
    "mish": functional.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh_gelu": lambda x: functional.gelu(x, approximate="tanh"),
}
"""Smooth ones: a kink would let a rounding change a gradient by more than rounding."""

WAYS = ("buffer", "hidden buffer", "attribute", "frozen")
"""Ways in which a module keeps a constant."""


def keep(module: nn.Module, name: str, tensor: Tensor, way: str) -> None:
    """Gives a module a constant: a buffer, one outside of `state_dict`, a tensor, a parameter."""
    if way == "attribute":
        setattr(module, name, tensor)
    elif way == "frozen":
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(name, tensor, persistent=way == "buffer")


class Apply(nn.Module):
    """A function without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Transposed(nn.Module):
    """A layer of [batch, width, seq] for [batch, seq, width]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


# -- norms ---------------------------------------------------------------------------------------


class HandRms(nn.Module):
    """RMSNorm as language models write it, the scale perhaps 1 + weight (Gemma)."""

    def __init__(self, width: int, *, offset: bool) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed * (1 + self.weight) if self.offset else self.weight * normed


class HandLayerNorm(nn.Module):
    """LayerNorm of one dim by hand; of images the channels (ConvNeXt)."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        shape = [width] + [1] * (-1 - dim)
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(self.dim, keepdim=True)
        variance = (x - mean).pow(2).mean(self.dim, keepdim=True)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return normed * self.gamma.view(self.shape) + self.beta.view(self.shape)


class Standardised(nn.Module):
    """(x - mean) / std with constants."""

    def __init__(self, width: int, rank: int, way: str) -> None:
        super().__init__()
        shape = [width] + [1] * rank
        keep(self, "mean", torch.linspace(-0.2, 0.3, width).view(shape), way)
        keep(self, "std", torch.linspace(0.8, 1.3, width).view(shape), way)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


# -- parameters that are shared, and that are not ------------------------------------------------


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self, layer: nn.Module, activation: str) -> None:
        super().__init__()
        self.layer, self.activation = layer, ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.activation(self.layer(x)))


class TwoNames(nn.Module):
    """Two layers whose weight is one parameter; their biases are two."""

    def __init__(self, first: nn.Linear, second: nn.Linear, activation: str) -> None:
        super().__init__()
        self.first, self.second, self.activation = first, second, ACTIVATIONS[activation]
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


class TiedPair(nn.Module):
    """Into a hidden width and back with the transposed weight, as an autoencoder's."""

    def __init__(self, width: int, hidden: int, activation: str, *, products: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, width) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.activation, self.products = ACTIVATIONS[activation], products

    def forward(self, x: Tensor) -> Tensor:
        if self.products:
            return self.activation(x @ self.weight.t()) @ self.weight + self.bias
        hidden = self.activation(functional.linear(x, self.weight))
        return functional.linear(hidden, self.weight.t(), self.bias)


class Copies(nn.Module):
    """Equal layers that share nothing, as `nn.TransformerEncoder` makes them."""

    def __init__(self, layer: nn.Module, count: int, activation: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(count))
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.activation(layer(x))
        return x


class Factors(nn.Module):
    """A frozen weight and a trained product of two, as LoRA's, added before or after the input."""

    def __init__(self, width: int, *, merged: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, width) / math.sqrt(width))
        self.up = nn.Parameter(torch.randn(width, 2) / 4)
        self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            weight = self.base.weight + 0.5 * self.up @ self.down
            return functional.linear(x, weight, self.base.bias)
        return self.base(x) + 0.5 * functional.linear(functional.linear(x, self.down), self.up)


# -- scalars -------------------------------------------------------------------------------------


class Gate(nn.Module):
    """x + g f(x), g a scalar or one number for each of the width."""

    def __init__(self, inner: nn.Module, shape: Sequence[int], start: float, form: str) -> None:
        super().__init__()
        self.inner, self.form = inner, form
        self.gate = nn.Parameter(torch.full(tuple(shape), start))

    def forward(self, x: Tensor) -> Tensor:
        gate = {"plain": lambda g: g, "tanh": torch.tanh, "sigmoid": torch.sigmoid}[self.form]
        return x + gate(self.gate) * self.inner(x)


class Temperature(nn.Module):
    """Multiplies or divides by a positive function of a scalar."""

    def __init__(self, form: str, shape: Sequence[int]) -> None:
        super().__init__()
        start = {"exp": 0.3, "divide": 1.5, "softplus": 1.0, "times": 0.7}[form]
        self.form = form
        self.scale = nn.Parameter(torch.full(tuple(shape), start))

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "exp":
            return x * self.scale.exp()
        if self.form == "divide":
            return x / self.scale
        if self.form == "softplus":
            return x * functional.softplus(self.scale)
        return self.scale * x


class Mix(nn.Module):
    """a x + (1 - a) f(x), and a bias that is a scalar."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.share, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.share * x + (1 - self.share) * self.inner(x) + self.shift


# -- constants -----------------------------------------------------------------------------------


class Projection(nn.Module):
    """A fixed random matrix, the same size as a layer's."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        keep(self, "matrix", torch.randn(width, width) / math.sqrt(width), way)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix)


class Fourier(nn.Module):
    """Random Fourier features: sine and cosine of a fixed projection."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        keep(self, "frequencies", torch.randn(width, width // 2), way)

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.frequencies
        return torch.cat([angles.sin(), angles.cos()], -1)


class Blur(nn.Module):
    """A fixed convolution of each channel."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        kernel = torch.tensor([1.0, 2.0, 1.0])
        kernel = torch.outer(kernel, kernel) / 16
        keep(self, "kernel", kernel.repeat(width, 1, 1, 1), way)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.kernel, padding=1, groups=x.shape[1])


class Sinusoids(nn.Module):
    """Adds sinusoids of the position: a table, or frequencies that are multiplied."""

    def __init__(self, width: int, form: str, way: str) -> None:
        super().__init__()
        frequencies = torch.exp(-math.log(100.0) * torch.arange(0, width, 2) / width)
        self.form, self.width = form, width
        if form == "table":
            angles = torch.arange(64.0)[:, None] * frequencies
            keep(self, "table", torch.cat([angles.sin(), angles.cos()], -1), way)
        elif form == "frequencies":
            keep(self, "frequencies", frequencies, way)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "table":
            return x + self.table[: x.shape[1]]
        frequencies = (
            self.frequencies
            if self.form == "frequencies"
            else torch.exp(-math.log(100.0) * torch.arange(0, self.width, 2) / self.width)
        )
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        return x + torch.cat([angles.sin(), angles.cos()], -1)


class Coordinates(nn.Module):
    """Concatenates where a pixel is, and convolves."""

    def __init__(self, width: int, height: int, way: str) -> None:
        super().__init__()
        line = torch.linspace(-1, 1, height)
        grid = torch.stack(torch.meshgrid(line, line, indexing="ij"))
        keep(self, "grid", grid[None], way)
        self.conv = nn.Conv2d(width + 2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grid.expand(x.shape[0], -1, -1, -1)
        return self.conv(torch.cat([x, grid], 1))


# -- positions that are learnt -------------------------------------------------------------------


class Positions(nn.Module):
    """Adds learnt positions: rows of a table that is sliced, or looked up."""

    def __init__(self, width: int, form: str) -> None:
        super().__init__()
        self.form = form
        if form == "slice":
            self.table = nn.Parameter(torch.randn(1, 64, width) / 4)
        else:
            self.table = nn.Embedding(64, width)
            self.register_buffer("places", torch.arange(64), persistent=form == "buffer")

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "slice":
            return x + self.table[:, : x.shape[1]]
        if self.form == "buffer":
            return x + self.table(self.places[: x.shape[1]])
        return x + self.table(torch.arange(x.shape[1]))


class ClassToken(nn.Module):
    """Puts a learnt row before each sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)


# -- attention -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention by hand, with what biases its scores kept in several ways."""

    def __init__(self, width: int, heads: int, bias: str, way: str, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.bias, self.fused = heads, bias, fused
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        if bias == "alibi":
            slopes = 2.0 ** -torch.arange(1.0, heads + 1)
            keep(self, "slopes", slopes.view(heads, 1, 1), way)
        elif bias == "causal":
            self.register_buffer("mask", torch.ones(64, 64).tril().bool(), persistent=False)
        elif bias == "additive":
            keep(self, "scores", torch.full((64, 64), -1e4).triu(1), way)
        elif bias == "scaled":
            self.scale = nn.Parameter(torch.full((heads, 1, 1), 2.0).log())
        elif bias == "relative":
            self.table = nn.Embedding(32, heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        projected = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.view(batch, seq, self.heads, -1).transpose(1, 2) for y in projected)
        if self.bias == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            if self.bias == "scaled":
                q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
            scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
            y = self._biased(scores, seq).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))

    def _biased(self, scores: Tensor, seq: int) -> Tensor:
        places = torch.arange(seq)
        distance = places[None] - places[:, None]
        if self.bias == "alibi":
            return scores - self.slopes * distance.abs()
        if self.bias == "causal":
            return scores.masked_fill(~self.mask[:seq, :seq], -1e4)
        if self.bias == "made":
            return scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -1e4)
        if self.bias == "additive":
            return scores + self.scores[:seq, :seq]
        if self.bias == "scaled":
            return scores * self.scale.exp()
        if self.bias == "relative":
            return scores + self.table(distance.clamp(-15, 15) + 15).permute(2, 0, 1)
        return scores


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` of a sequence with itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=False)[0]


class Rotary(nn.Module):
    """Turns pairs by angles of the position."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        keep(self, "inverse", 100.0 ** -(torch.arange(0, width, 2) / width), way)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * self.inverse
        angles = torch.cat([angles, angles], -1)
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return self.linear(x * angles.cos() + turned * angles.sin())


# -- sizes that are computed ---------------------------------------------------------------------


class Windows(nn.Module):
    """Pads sequences to a multiple of k, mixes within windows, and slices the padding off."""

    def __init__(self, width: int, k: int, *, attend: bool) -> None:
        super().__init__()
        self.k, self.attend = k, attend
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        padded = functional.pad(x, (0, 0, 0, (-seq) % self.k))
        y = padded.reshape(batch, -1, self.k, width)
        y = self.linear(y)
        if self.attend:
            y = (y @ y.transpose(-2, -1) / width).softmax(-1) @ y
        else:
            y = y - y.mean(2, keepdim=True)
        return y.reshape(batch, -1, width)[:, :seq]


class GatedHalves(nn.Module):
    """A gated linear unit: chunks, slices at half the width, or a view of two."""

    def __init__(self, width: int, form: str, activation: str) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.form, self.activation = form, ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.form == "chunk":
            a, b = y.chunk(2, -1)
        elif self.form == "slice":
            a, b = y[..., : y.shape[-1] // 2], y[..., y.shape[-1] // 2 :]
        else:
            a, b = y.unflatten(-1, (2, y.shape[-1] // 2)).unbind(-2)
        return self.outer(a * self.activation(b))


class Shuffle(nn.Module):
    """Channels regrouped (ShuffleNet)."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, across = x.shape
        y = x.view(batch, self.groups, width // self.groups, height, across)
        return y.transpose(1, 2).reshape(batch, -1, height, across)


class Squeeze(nn.Module):
    """Squeeze-and-excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 2, 1), nn.Linear(width // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.down(x.mean((2, 3), keepdim=True))).flatten(1)
        return x * torch.sigmoid(self.up(y))[..., None, None]


class Interpolated(nn.Module):
    """Resized to a size that is computed, convolved, and added back at the first size."""

    def __init__(self, width: int, mode: str) -> None:
        super().__init__()
        self.conv, self.mode = nn.Conv2d(width, width, 3, padding=1), mode

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[2] // 2, (x.shape[3] * 2) // 3)
        align = None if self.mode == "nearest" else False
        y = functional.interpolate(x, size=size, mode=self.mode, align_corners=align)
        y = functional.interpolate(self.conv(y), size=x.shape[2:], mode=self.mode)
        return x + y


# -- ends ----------------------------------------------------------------------------------------


class Cosine(nn.Module):
    """Logits that are scaled cosines."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(classes, width))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        cosines = functional.normalize(x, dim=-1) @ functional.normalize(self.prototypes).t()
        return cosines * self.logit_scale.exp()


class Tied(nn.Module):
    """Tokens to logits, the head being the embedding, perhaps transposed, perhaps scaled."""

    def __init__(self, embedding: nn.Embedding, body: nn.Module, form: str) -> None:
        super().__init__()
        self.embedding, self.body, self.form = embedding, body, form
        if form == "layer":
            self.head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
            self.head.weight = embedding.weight
        elif form == "bias":
            self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.form == "scaled":
            x = x * self.embedding.embedding_dim**0.5
        y = self.body(x)
        if self.form == "layer":
            return self.head(y)
        if self.form == "bias":
            return y @ self.embedding.weight.t() + self.bias
        return y @ self.embedding.weight.transpose(0, 1)


class Complete(nn.Module):
    """A network of an input x, perhaps with a loss of what it computes of that and nothing else."""

    def __init__(self, inner: nn.Module, loss: str) -> None:
        super().__init__()
        self.inner, self.loss = inner, loss

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.inner(x)
        if not self.loss:
            return y
        if self.loss == "square":
            return y, (y - 0.5).pow(2).mean()
        return y, -functional.log_softmax(y, -1)[..., 0].mean()
