"""Random small PyTorch networks, each from one seed: what is trained is what they differ in.

A network begins with tokens, rows, sequences or images, has some layers of `network_layers.py` and
of `torch.nn`, and ends in logits, a prediction or a loss of its own.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import network_layers as layers
from tests.network_layers import (
    ACTIVATIONS,
    WAYS,
    Complete,
    Cosine,
    Residual,
    SelfAttention,
    Tied,
    Transposed,
)

VOCABULARY, CLASSES = 11, 5
EXAMPLE = {"batch": 6, "seq": 13}
"""Sizes for tracing, none of which a layer has."""


@dataclass(frozen=True)
class Network:
    """A module and what its inputs and its loss are.

    Attributes:
        module: The module, of one input.
        tokens: Whether the input is tokens, below `VOCABULARY`; else it is normal floats.
        shape: Shape of the input, symbols by name.
        loss: `softmax_cross_entropy`, `mse` or `output:loss`.
        outputs: Names of the outputs.
        layers: What was drawn, for people.
        batches: Sizes of the symbols in each of the steps.
    """

    module: nn.Module
    tokens: bool
    shape: tuple[int | str, ...]
    loss: str
    outputs: tuple[str, ...]
    layers: tuple[str, ...]
    batches: tuple[Mapping[str, int], ...]

    @property
    def dims(self) -> dict[int, str]:
        """The symbol of each open dim."""
        return {axis: size for axis, size in enumerate(self.shape) if isinstance(size, str)}

    def draw(self, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        """Returns a random input."""
        shape = [sizes[d] if isinstance(d, str) else d for d in self.shape]
        if self.tokens:
            return torch.randint(0, VOCABULARY, shape, generator=generator)
        return torch.randn(shape, generator=generator)


@dataclass
class Draft:
    """A network that is being drawn: layers, and what the last gives.

    Attributes:
        draw: What decides.
        form: "rows" [batch, width], "sequence" [batch, seq, width] or "image" [batch, width,
            height, height].
        width: Its width.
        height: Height and breadth of an image.
        modules: The layers.
        names: What they are.
        statistics: Whether one of them has running statistics.
    """

    draw: random.Random
    form: str
    width: int
    height: int = 0
    modules: list[nn.Module] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    statistics: bool = False

    def way(self) -> str:
        """Returns how a constant is kept."""
        return self.draw.choice(WAYS)

    def activation(self) -> str:
        """Returns the name of a smooth function."""
        return self.draw.choice(list(ACTIVATIONS))

    def flag(self, chance: float = 0.5) -> bool:
        """Returns whether."""
        return self.draw.random() < chance

    def linear(self) -> nn.Module:
        """Returns a small function of the last dim."""
        act = layers.Apply(ACTIVATIONS[self.activation()])
        return nn.Sequential(nn.Linear(self.width, self.width, bias=self.flag(0.7)), act)


Made = tuple[nn.Module, str]
Piece = Callable[[Draft], Made]


# -- layers of any form: of the last dim ---------------------------------------------------------


def layer_norm(d: Draft) -> Made:
    affine, bias = d.flag(0.7), d.flag(0.8)
    norm = nn.LayerNorm(d.width, elementwise_affine=affine, bias=bias)
    return norm, f"LayerNorm({affine}, {bias})"


def rms_norm(d: Draft) -> Made:
    if d.flag(0.3):
        return nn.RMSNorm(d.width, elementwise_affine=d.flag()), "nn.RMSNorm"
    return layers.HandRms(d.width, offset=d.flag(0.3)), "rms by hand"


def hand_norm(d: Draft) -> Made:
    return layers.HandLayerNorm(d.width, -1), "LayerNorm by hand"


def standardised(d: Draft) -> Made:
    way = d.way()
    return layers.Standardised(d.width, 0, way), f"standardised by {way}"


def mlp(d: Draft) -> Made:
    hidden = d.draw.choice([d.width, 2 * d.width, 10])
    act = layers.Apply(ACTIVATIONS[d.activation()])
    return nn.Sequential(nn.Linear(d.width, hidden), act, nn.Linear(hidden, d.width)), "mlp"


def twice(d: Draft) -> Made:
    layer: nn.Module = nn.Linear(d.width, d.width, bias=d.flag())
    if d.flag(0.3):
        layer = nn.Sequential(layer, nn.LayerNorm(d.width))
    return layers.Twice(layer, d.activation()), "one layer twice"


def two_names(d: Draft) -> Made:
    first, second = (nn.Linear(d.width, d.width, bias=d.flag(0.7)) for _ in range(2))
    return layers.TwoNames(first, second, d.activation()), "one weight in two layers"


def tied_pair(d: Draft) -> Made:
    products = d.flag()
    return layers.TiedPair(d.width, 10, d.activation(), products=products), f"W, W.T ({products})"


def copies(d: Draft) -> Made:
    count = d.draw.choice([2, 3])
    return layers.Copies(nn.Linear(d.width, d.width), count, d.activation()), f"{count} copies"


def copies_of_norms(d: Draft) -> Made:
    layer = nn.Sequential(nn.LayerNorm(d.width), nn.Linear(d.width, d.width))
    return layers.Copies(layer, 2, d.activation()), "2 copies with norms"


def factors(d: Draft) -> Made:
    merged = d.flag()
    return layers.Factors(d.width, merged=merged), f"low rank (merged {merged})"


def gate(d: Draft) -> Made:
    shape = d.draw.choice([(), (1,), (d.width,)])
    form = d.draw.choice(["plain", "tanh", "sigmoid"])
    start = d.draw.choice([0.0, 0.1, 1.0])
    return layers.Gate(d.linear(), shape, start, form), f"gate {form} {list(shape)} {start}"


def gates(d: Draft) -> Made:
    """Several of one number, the same."""
    one, two = (layers.Gate(d.linear(), (1,), 0.1, "plain") for _ in range(2))
    return nn.Sequential(one, two), "two gates of one number"


def temperature(d: Draft) -> Made:
    form = d.draw.choice(["exp", "divide", "softplus", "times"])
    shape = d.draw.choice([(), (1,)])
    return layers.Temperature(form, shape), f"temperature {form} {list(shape)}"


def mix(d: Draft) -> Made:
    return layers.Mix(d.linear()), "mix"


def prelu(d: Draft) -> Made:
    width = d.width if d.form == "image" or d.flag() else 1
    if d.form == "sequence" and width > 1:
        return Transposed(nn.PReLU(width)), "prelu of each"
    return nn.PReLU(width), f"prelu {width}"


def projection(d: Draft) -> Made:
    way = d.way()
    return layers.Projection(d.width, way), f"fixed projection by {way}"


def fourier(d: Draft) -> Made:
    way = d.way()
    return layers.Fourier(d.width, way), f"fourier by {way}"


def frozen(d: Draft) -> Made:
    inner = nn.Sequential(nn.Linear(d.width, d.width), nn.LayerNorm(d.width))
    (inner if d.flag() else inner[0]).requires_grad_(False)
    return Residual(inner), "frozen"


def halves(d: Draft) -> Made:
    form = d.draw.choice(["chunk", "slice", "unflatten"])
    return layers.GatedHalves(d.width, form, d.activation()), f"halves by {form}"


def weight_normed(d: Draft) -> Made:
    linear = nn.Linear(d.width, d.width)
    return nn.utils.parametrizations.weight_norm(linear), "weight_norm"


OF_LAST: tuple[Piece, ...] = (
    layer_norm, rms_norm, hand_norm, standardised, mlp, twice, two_names, tied_pair, copies,
    copies_of_norms, factors, gate, gates, temperature, mix, prelu, projection, fourier, frozen,
    halves, weight_normed,
)  # fmt: skip


# -- sequences -----------------------------------------------------------------------------------


def attention(d: Draft) -> Made:
    bias = d.draw.choice(
        ["none", "alibi", "causal", "additive", "made", "scaled", "relative", "sdpa"]
    )
    way, fused = d.way(), d.flag()
    inner = layers.Attention(d.width, 2, bias, way, fused=fused)
    return Residual(inner), f"attention {bias} by {way} (fused {fused})"


def multihead(d: Draft) -> Made:
    return SelfAttention(d.width), "nn.MultiheadAttention"


def encoder(d: Draft) -> Made:
    layer = nn.TransformerEncoderLayer(
        d.width, 2, 10, 0.0, batch_first=True, norm_first=d.flag(), activation="gelu"
    )
    norm = nn.LayerNorm(d.width) if d.flag() else None
    return nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False), "nn.Transformer"


def sinusoids(d: Draft) -> Made:
    form, way = d.draw.choice(["table", "frequencies", "made"]), d.way()
    return layers.Sinusoids(d.width, form, way), f"sinusoids {form} by {way}"


def positions(d: Draft) -> Made:
    form = d.draw.choice(["slice", "buffer", "hidden", "arange"])
    return layers.Positions(d.width, form), f"positions {form}"


def rotary(d: Draft) -> Made:
    way = d.way()
    return layers.Rotary(d.width, way), f"rotary by {way}"


def windows(d: Draft) -> Made:
    k = d.draw.choice([2, 3, 4])
    return layers.Windows(d.width, k, attend=d.flag()), f"windows of {k}"


def class_token(d: Draft) -> Made:
    return layers.ClassToken(d.width), "class token"


def strided(d: Draft) -> Made:
    return layers.Apply(lambda x: x[:, ::2] * 2), "every second"


def moved(d: Draft) -> Made:
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "flipped": lambda x: x.flip(1),
        "rolled": lambda x: x.roll(1, 1),
        "last half": lambda x: x[:, (x.shape[1] + 1) // 2 :],
        "first half": lambda x: x[:, : x.shape[1] // 2],
        "without the first": lambda x: x[:, 1:] - x[:, :-1],
    }
    name = d.draw.choice(list(ways))
    return layers.Apply(ways[name]), name


def doubled(d: Draft) -> Made:
    def double(x: Tensor) -> Tensor:
        y = functional.interpolate(x.transpose(1, 2), scale_factor=2.0, mode="nearest")
        return y.transpose(1, 2)[:, : x.shape[1]]

    return layers.Apply(double), "doubled and sliced"


def cumulative(d: Draft) -> Made:
    def mean(x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    return Residual(layers.Apply(mean)), "cumulative mean"


def conv_of_sequence(d: Draft) -> Made:
    groups = d.draw.choice([1, d.width])
    conv = nn.Conv1d(d.width, d.width, 3, padding=1, groups=groups, bias=d.flag())
    return Transposed(conv), f"conv1d of {groups} groups"


def norm_of_sequence(d: Draft) -> Made:
    kind = d.draw.choice(["group", "group", "instance", "batch"])
    affine = d.flag()
    if kind == "group":
        norm: nn.Module = nn.GroupNorm(2, d.width, affine=affine)
    elif kind == "instance":
        norm = nn.InstanceNorm1d(d.width, affine=affine)
    else:
        norm, d.statistics = nn.BatchNorm1d(d.width, affine=affine), True
    return Transposed(norm), f"{kind} norm of sequence ({affine})"


OF_SEQUENCES: tuple[Piece, ...] = (
    attention, attention, multihead, encoder, sinusoids, positions, rotary, windows, class_token,
    strided, moved, doubled, cumulative, conv_of_sequence, norm_of_sequence,
)  # fmt: skip


# -- images --------------------------------------------------------------------------------------


def conv(d: Draft) -> Made:
    groups = d.draw.choice([1, 2, d.width])
    way = d.draw.choice(["plain", "stride", "dilated", "transposed", "zeros"])
    bias = d.flag(0.7)
    if way == "stride" and d.height > 4:
        d.height = (d.height - 1) // 2 + 1
        return nn.Conv2d(d.width, d.width, 3, 2, 1, groups=groups, bias=bias), "conv of stride 2"
    if way == "transposed" and d.height < 8:
        d.height = 2 * d.height
        return nn.ConvTranspose2d(d.width, d.width, 2, 2, bias=bias), "conv transposed"
    reach = 2 if way == "dilated" else 1
    layer = nn.Conv2d(d.width, d.width, 3, 1, reach, reach, groups, bias)
    return layer, f"conv of {groups} groups"


def norm_of_image(d: Draft) -> Made:
    kind = d.draw.choice(["group", "instance", "batch", "channels", "norm", "one group"])
    affine = d.flag()
    if kind in ("group", "one group"):
        norm: nn.Module = nn.GroupNorm(2 if kind == "group" else 1, d.width, affine=affine)
    elif kind == "instance":
        norm = nn.InstanceNorm2d(d.width, affine=affine)
    elif kind == "batch":
        norm, d.statistics = nn.BatchNorm2d(d.width, affine=affine), True
    elif kind == "channels":
        norm = layers.HandLayerNorm(d.width, -3)
    else:
        norm = nn.LayerNorm([d.width, d.height, d.height], elementwise_affine=affine)
    return norm, f"{kind} norm of image ({affine})"


def conv_and_norm(d: Draft) -> Made:
    first, one = conv(d)
    second, two = norm_of_image(d)
    return nn.Sequential(first, second), f"{one}, {two}"


def standardised_image(d: Draft) -> Made:
    way = d.way()
    return layers.Standardised(d.width, 2, way), f"standardised image by {way}"


def blur(d: Draft) -> Made:
    way = d.way()
    return layers.Blur(d.width, way), f"blur by {way}"


def coordinates(d: Draft) -> Made:
    way = d.way()
    return layers.Coordinates(d.width, d.height, way), f"coordinates by {way}"


def interpolated(d: Draft) -> Made:
    mode = d.draw.choice(["nearest", "bilinear"])
    return layers.Interpolated(d.width, mode), f"interpolated {mode}"


def squeeze(d: Draft) -> Made:
    return layers.Squeeze(d.width), "squeeze"


def shuffle(d: Draft) -> Made:
    return layers.Shuffle(d.draw.choice([2, d.width // 2])), "shuffle"


def image_gate(d: Draft) -> Made:
    inner = nn.Conv2d(d.width, d.width, 1)
    shape = d.draw.choice([(), (1,), (d.width, 1, 1), (1, d.width, 1, 1)])
    start, form = d.draw.choice([0.0, 0.1]), d.draw.choice(["plain", "tanh"])
    return layers.Gate(inner, shape, start, form), f"image gate {form} {list(shape)} {start}"


def image_copies(d: Draft) -> Made:
    layer: nn.Module = nn.Conv2d(d.width, d.width, 3, padding=1)
    if d.flag():
        layer = nn.Sequential(layer, nn.GroupNorm(2, d.width))
    return layers.Copies(layer, 2, d.activation()), "copies of convs"


def image_twice(d: Draft) -> Made:
    layer = nn.Conv2d(d.width, d.width, 3, padding=1)
    return layers.Twice(layer, d.activation()), "one conv twice"


def pool(d: Draft) -> Made:
    if d.height < 4:
        return layers.Apply(torch.sin), "sin"
    d.height //= 2
    return nn.AvgPool2d(2), "pool"


OF_IMAGES: tuple[Piece, ...] = (
    conv, norm_of_image, norm_of_image, conv_and_norm, conv_and_norm, standardised_image, blur,
    coordinates, interpolated, squeeze, shuffle, image_gate, image_copies, image_twice, pool,
    temperature, prelu,
)  # fmt: skip


# -- rows ----------------------------------------------------------------------------------------


def norm_of_rows(d: Draft) -> Made:
    affine = d.flag()
    if d.flag():
        d.statistics = True
        return nn.BatchNorm1d(d.width, affine=affine), f"batch norm of rows ({affine})"
    return nn.GroupNorm(2, d.width, affine=affine), f"group norm of rows ({affine})"


def classes_first(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


# -- all of it -----------------------------------------------------------------------------------


def network(seed: int) -> Network:
    """Returns the network of a seed; equal on every machine."""
    draw = random.Random(f"network {seed}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _drawn(draw)


def _drawn(draw: random.Random) -> Network:
    kind = draw.choice(["tokens", "tokens", "sequence", "image", "image", "rows"])
    d = Draft(draw, "sequence" if kind == "tokens" else kind, 8)
    first: nn.Module | None = None
    shape: tuple[int | str, ...] = ("batch", 8)
    if kind == "tokens":
        shape, embedding = ("batch", "seq"), nn.Embedding(VOCABULARY, d.width)
        first = embedding
        if d.flag(0.15):
            embedding.requires_grad_(False)
    elif kind == "sequence":
        shape = ("batch", "seq", d.width)
    elif kind == "image":
        d.height = draw.choice([6, 8, 9])
        shape = ("batch", 3, d.height, d.height)
        first = nn.Conv2d(3, d.width, 3, padding=1, bias=d.flag())
        if d.flag(0.4):
            way = d.way()
            first = nn.Sequential(layers.Standardised(3, 2, way), first)
            d.names.append(f"image standardised by {way}")
    _layers(d, draw.choice([1, 2, 3]))
    tied = kind == "tokens" and "class token" not in d.names and d.flag(0.35)
    if d.form == "image":
        _after_images(d)
    pooled = d.form == "sequence" and not tied and d.flag()
    if pooled:
        d.modules.append(layers.Apply(lambda x: _pooled(x, (1,))))
        d.form = "rows"
        _layers(d, draw.choice([0, 1]))
    body = nn.Sequential(*d.modules)
    loss = draw.choice(["softmax_cross_entropy"] * 3 + ["mse", "output:loss"])
    if tied and isinstance(first, nn.Embedding):
        form = draw.choice(["layer", "layer", "bias", "product", "scaled"])
        d.names.append(f"tied head ({form})")
        module: nn.Module = Tied(first, body, form)
    else:
        head: nn.Module = nn.Linear(d.width, CLASSES, bias=d.flag(0.7))
        if d.form == "rows" and d.flag(0.2):
            head = Cosine(d.width, CLASSES)
            d.names.append("cosine head")
        module = nn.Sequential(*([] if first is None else [first]), body, head)
    own = draw.choice(["square", "first"]) if loss == "output:loss" else ""
    module = Complete(module, own)
    if d.flag(0.5):
        _perturb(module)
    if d.flag(0.05):
        # A part of the network, as a second stage of training has.
        next(iter(module.inner.children())).requires_grad_(False)
    if not any(p.requires_grad for p in module.parameters()):
        module.requires_grad_(True)
    module.train(d.statistics or d.flag())
    return Network(
        module,
        kind == "tokens",
        shape,
        loss,
        ("logits", "loss") if own else ("logits",),
        (kind, *d.names, loss),
        tuple(_sizes(draw, shape, statistics=d.statistics) for _ in range(3)),
    )


def _layers(d: Draft, count: int) -> None:
    own = {"sequence": OF_SEQUENCES, "image": OF_IMAGES, "rows": (norm_of_rows,)}[d.form]
    for _ in range(count):
        choices = own if d.form == "image" or d.flag(0.2 if d.form == "rows" else 0.5) else OF_LAST
        module, name = d.draw.choice(choices)(d)
        d.modules.append(module)
        d.names.append(name)


def _after_images(d: Draft) -> None:
    if d.flag(0.3):
        d.modules.append(layers.Apply(classes_first))
        d.form = "sequence"
        d.names.append("as a sequence")
    elif d.flag(0.3):
        d.modules.append(nn.Flatten())
        d.modules.append(nn.Linear(d.width * d.height * d.height, d.width))
        d.form = "rows"
        d.names.append("flattened")
    else:
        d.modules.append(layers.Apply(lambda x: _pooled(x, (2, 3))))
        d.form = "rows"


def _pooled(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    # Not the mean of x itself, which behind an instance norm is nothing but rounding.
    return functional.silu(x).mean(dims)


def _perturb(module: nn.Module) -> None:
    """Makes scales and biases differ, as of a network that was trained a little."""
    for parameter in module.parameters():
        if parameter.ndim == 1 and parameter.numel() > 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)


def _sizes(
    draw: random.Random, shape: tuple[int | str, ...], *, statistics: bool
) -> dict[str, int]:
    sizes = {"batch": draw.choice([4, 5, 6, 7] if statistics else [2, 3, 4, 5, 6])}
    if "seq" in shape:
        sizes["seq"] = draw.choice([5, 6, 7, 8, 9])
    return sizes
