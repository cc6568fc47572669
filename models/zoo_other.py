"""Plain modules of the zoo: recurrent, over graphs, and with parameters of unusual kinds."""

# mypy: allow-subclassing-any
# To mypy, modules of PyTorch are of any type.

from dataclasses import replace

import torch
from _zoo import BATCH, CLASSES, VOCAB, WIDTH, Network, language, vision
from torch import nn


def mlp(layers: int) -> Network:
    """A classifier of linear layers with norms between them."""
    modules: list[nn.Module] = [nn.Linear(64, 128)]
    for _ in range(layers):
        modules += [nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128)]
    module = nn.Sequential(*modules, nn.GELU(), nn.Linear(128, CLASSES))
    return Network(module, {"input": torch.zeros(BATCH, 64)}, {"input": {0: "batch"}})


class _Recurrent(nn.Module):
    """A language model around a recurrent module, whose output projection is the token table."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = body
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.body(self.embed(input_ids))
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def lstm(layers: int) -> Network:
    """LSTM (Hochreiter and Schmidhuber 1997) as a language model."""
    return language(_Recurrent(nn.LSTM(WIDTH, WIDTH, layers, batch_first=True)))


def gru(layers: int) -> Network:
    """GRU (Cho et al. 2014) as a language model."""
    return language(_Recurrent(nn.GRU(WIDTH, WIDTH, layers, batch_first=True)))


class _Convolution(nn.Module):
    """A layer over a graph: each node sums the messages of its edges (Gilmer et al. 2017)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.own = nn.Linear(before, after)
        self.brought = nn.Linear(before, after, bias=False)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        messages = self.brought(x)[source]
        gathered = torch.zeros_like(self.own(x)).index_add(0, target, messages)
        own: torch.Tensor = self.own(x)
        return own + gathered


class _Graph(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(12, WIDTH)
        self.convolutions = nn.ModuleList(_Convolution(WIDTH, WIDTH) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + torch.relu(convolution(norm(x), source, target))
        logits: torch.Tensor = self.head(x)
        return logits


def gnn(layers: int) -> Network:
    """A network over a graph that classifies its nodes; edges are pairs of node numbers."""
    edges = torch.zeros(11, dtype=torch.int64)
    inputs = {"x": torch.zeros(5, 12), "source": edges, "target": edges.clone()}
    dims = {"x": {0: "nodes"}, "source": {0: "edges"}, "target": {0: "edges"}}
    integers = {"source": (0, FEWEST_NODES), "target": (0, FEWEST_NODES)}
    return Network(_Graph(layers), inputs, dims, integers=integers)


FEWEST_NODES = 4
"""Edges join nodes with numbers below this, so a graph must have at least so many nodes."""


class _Small(nn.Module):
    """A classifier of small images whose input is normalised."""

    def __init__(self, buffers: bool) -> None:
        super().__init__()
        mean = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
        deviation = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)
        if buffers:
            self.register_buffer("mean", mean)
            self.register_buffer("deviation", deviation)
        else:
            self.mean, self.deviation = mean, deviation
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, WIDTH, 3, stride=2, padding=1)
        self.head = nn.Linear(16 * WIDTH, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = (pixel_values - self.mean) / self.deviation
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        # Without x.mean(): PyTorch 2.13 would give its result the name of the buffer.
        logits: torch.Tensor = self.head(x.flatten(1))
        return logits


def normalised(layers: int) -> Network:
    """Convolutions over a normalised input, whose mean and deviation are buffers."""
    return vision(_Small(buffers=True), 16)


def normalised_tensors(layers: int) -> Network:
    """As `normalised`, but mean and deviation are plain tensors, not buffers."""
    return vision(_Small(buffers=False), 16)


class _Groups(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(layers))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(layers))
        self.last = nn.GroupNorm(1, 16, affine=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.first(pixel_values)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + torch.relu(norm(conv(x)))
        logits: torch.Tensor = self.head(self.last(x).mean((2, 3)))
        return logits


def group_norm(layers: int) -> Network:
    """Convolutions with norms of groups (Wu and He 2018), the last without scale and bias."""
    return vision(_Groups(layers), 16)


class _Temperature(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.hidden:
            x = x + torch.tanh(layer(self.norm(x)))
        logits: torch.Tensor = self.head(self.norm(x)) / self.temperature
        return logits


def temperature(layers: int) -> Network:
    """Norms without scale and bias, a tied head, and logits divided by a scalar parameter."""
    return language(_Temperature(layers))


class _Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(self.embed(input_ids)))
        return logits


def encoder(layers: int) -> Network:
    """PyTorch's own encoder, whose layers begin as copies of one another; it has one layer more."""
    return replace(language(_Encoder(layers + 1)), perturbed=False)


class _Biased(nn.Module):
    """Attention with a bias by distance: learnt for short distances, linear for all."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.near = nn.Embedding(2 * REACH + 1, heads)
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        split = self.qkv(x).view(batch, seq, 3, self.heads, WIDTH // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        places = torch.arange(seq)
        distance = places[None, :] - places[:, None]
        learnt = self.near(distance.clamp(-REACH, REACH) + REACH).permute(2, 0, 1)
        bias = learnt - self.slopes[:, None, None] * distance.abs()
        scores = q @ k.transpose(-1, -2) * (WIDTH // self.heads) ** -0.5 + bias
        scores = scores.masked_fill(distance > 0, torch.finfo(torch.float32).min)
        mixed = scores.softmax(-1) @ v
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, WIDTH))
        return out


REACH = 3
"""Distances up to this have their own learnt bias."""


class _Distances(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attention = nn.ModuleList(_Biased(4) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for attention, norm in zip(self.attention, self.norms, strict=True):
            x = x + attention(norm(x))
        logits: torch.Tensor = self.head(x)
        return logits


def distance_bias(layers: int) -> Network:
    """Attention with a learnt bias of short distances and a linear one of all (ALiBi)."""
    return language(_Distances(layers))


NETWORKS = (
    mlp, lstm, gru, gnn, normalised, normalised_tensors, group_norm, temperature, encoder,
    distance_bias,
)  # fmt: skip
