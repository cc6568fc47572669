"""Convolutions and pools in numpy, in any type: onnx.reference has some of their forms only."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.numpy_operators import numpy_operators

Array = NDArray[Any]


class _Geometry:
    """Padding of an image, and what each element of the kernel meets of it."""

    def __init__(
        self,
        image: Sequence[int],
        kernel_shape: Sequence[int],
        strides: Sequence[int] | None,
        dilations: Sequence[int] | None,
        pads: Sequence[int] | None,
        auto_pad: str | None = None,
        ceil_mode: int = 0,
    ) -> None:
        rank, auto_pad = len(kernel_shape), auto_pad or "NOTSET"
        self.kernel = kernel_shape
        self.strides = list(strides or [1] * rank)
        self.dilations = list(dilations or [1] * rank)
        given = list(pads or [0] * (2 * rank))
        self.before, self.after = given[:rank], given[rank:]
        self.extent = [d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True)]
        self.results = []
        for d, size in enumerate(image):
            stride, extent = self.strides[d], self.extent[d]
            if auto_pad == "VALID":
                self.before[d] = self.after[d] = 0
            if auto_pad.startswith("SAME"):
                total = max((-(-size // stride) - 1) * stride + extent - size, 0)
                small = total // 2
                self.before[d] = small if auto_pad == "SAME_UPPER" else total - small
                self.after[d] = total - self.before[d]
            room = size + self.before[d] + self.after[d] - extent
            count = (-(-room // stride) if ceil_mode else room // stride) + 1
            # A window that begins in the padding after the image is none.
            if ceil_mode and (count - 1) * stride >= size + self.before[d]:
                count -= 1
            self.results.append(count)
        self.reach = [
            max((r - 1) * s + e, b + size + a)
            for r, s, e, b, size, a in zip(
                self.results, self.strides, self.extent, self.before, image, self.after, strict=True
            )
        ]

    def padded(self, x: Array, fill: Any) -> Array:
        padded = np.full([*x.shape[:2], *self.reach], fill, x.dtype)
        ends = zip(self.before, x.shape[2:], strict=True)
        padded[(slice(None), slice(None), *(slice(b, b + n) for b, n in ends))] = x
        return padded

    def taps(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        for place in product(*(range(k) for k in self.kernel)):
            window = (
                slice(p * d, p * d + (r - 1) * s + 1, s)
                for p, d, r, s in zip(
                    place, self.dilations, self.results, self.strides, strict=True
                )
            )
            yield place, (Ellipsis, *window)


def conv(x: Array, w: Array, b: Array | None = None, *, group: int = 2, **form: Any) -> Array:
    g = _Geometry(x.shape[2:], **form | {"kernel_shape": w.shape[2:]})
    group = group or 1
    padded = g.padded(x, 0).reshape([len(x), group, -1, *g.reach])
    weights = w.reshape([group, -1, *w.shape[1:]])
    y = np.zeros([len(x), group, weights.shape[1], *g.results], x.dtype)
    for place, window in g.taps():
        tap = weights[(..., *place)]
        y += np.einsum("gmc,ngc...->ngm...", tap, padded[window])
    y = y.reshape([len(x), -1, *g.results])
    return y if b is None else y + b.reshape([-1, *[1] * len(g.kernel)])


def conv_transpose(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    auto_pad: str | None,
    dilations: Sequence[int] | None,
    group: int = 2,
    kernel_shape: Sequence[int] | None,
    output_padding: Sequence[int] | None,
    output_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> Array:
    rank = x.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    extra, group = output_padding or [0] * rank, group or 1
    given = list(pads or [0] * (2 * rank))
    full = [
        s * (n - 1) + e + d * (k - 1) + 1
        for s, n, e, d, k in zip(strides, x.shape[2:], extra, dilations, w.shape[2:], strict=True)
    ]
    if output_shape or (auto_pad or "").startswith("SAME"):
        wanted = output_shape or [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
        total = [f - o for f, o in zip(full, wanted, strict=True)]
        half = [t // 2 for t in total]
        if auto_pad != "SAME_UPPER":
            half = [t - h for t, h in zip(total, half, strict=True)]
        given = [*half, *(t - n for t, n in zip(total, half, strict=True))]
    image = x.reshape([len(x), group, -1, *x.shape[2:]])
    weights = w.reshape([group, -1, *w.shape[1:]])
    y = np.zeros([len(x), group, w.shape[1], *full], x.dtype)
    for place in product(*(range(k) for k in w.shape[2:])):
        window = (
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, n, s in zip(place, dilations, x.shape[2:], strides, strict=True)
        )
        tap = weights[(..., *place)]
        y[(Ellipsis, *window)] += np.einsum("gmc,ngm...->ngc...", tap, image)
    y = y.reshape([len(x), -1, *full])
    ends = zip(given[:rank], given[rank:], full, strict=True)
    y = y[(slice(None), slice(None), *(slice(a, n - z) for a, z, n in ends))]
    return y if b is None else y + b.reshape([-1, *[1] * rank])


def max_pool(x: Array, *, storage_order: int = 0, **form: Any) -> tuple[Array, Array]:
    """With indices in row-major order."""
    if storage_order:
        raise NotImplementedError("column-major indices")
    g = _Geometry(x.shape[2:], **form)
    place = np.broadcast_to(np.arange(x.size).reshape(x.shape), x.shape)
    padded, where = g.padded(x, -np.inf), g.padded(place, -1)
    values = np.stack([padded[window] for _, window in g.taps()])
    best = np.argmax(values, axis=0)[None]
    indices = np.stack([where[window] for _, window in g.taps()])
    y, at = (np.take_along_axis(a, best, 0)[0] for a in (values, indices))
    return y, at


def average_pool(x: Array, *, count_include_pad: int = 0, **form: Any) -> Array:
    g = _Geometry(x.shape[2:], **form)
    counted = g.padded(np.ones_like(x), 0)
    if count_include_pad:
        ends = zip(g.before, x.shape[2:], g.after, strict=True)
        counted[(..., *(slice(0, b + n + a) for b, n, a in ends))] = 1
    padded = g.padded(x, 0)
    total = sum(padded[window] for _, window in g.taps())
    return total / sum(counted[window] for _, window in g.taps())


def lp_pool(x: Array, *, p: int = 2, **form: Any) -> Array:
    g = _Geometry(x.shape[2:], **form)
    padded = g.padded(np.abs(x) ** p, 0)
    total: Array = np.sum([padded[window] for _, window in g.taps()], axis=0)
    return total ** (1 / p)


def global_lp_pool(x: Array, *, p: int = 2) -> Array:
    axes = tuple(range(2, x.ndim))
    return (np.abs(x) ** p).sum(axes, keepdims=True) ** (1 / p)


def global_max_pool(x: Array) -> Array:
    return x.max(tuple(range(2, x.ndim)), keepdims=True)


def deform_conv(
    x: Array,
    w: Array,
    offset: Array,
    b: Array | None = None,
    mask: Array | None = None,
    *,
    group: int = 2,
    offset_group: int = 2,
    **form: Any,
) -> Array:
    """onnx.reference rounds places to float32."""
    g = _Geometry(x.shape[2:], **form | {"kernel_shape": w.shape[2:]})
    group, parts = group or 1, offset_group or 1
    moves = offset.reshape([len(x), parts, -1, 2, *g.results])
    image = x.reshape([len(x), parts, -1, *x.shape[2:]])
    y = np.zeros([len(x), w.shape[0], *g.results], x.dtype)
    batch, part = (a.reshape([-1, 1, 1]) for a in np.indices([len(x), parts]).reshape(2, -1))
    for tap, place in enumerate(product(*(range(k) for k in g.kernel))):
        grid = np.indices(g.results)
        at = [
            grid[d] * g.strides[d]
            - g.before[d]
            + place[d] * g.dilations[d]
            + moves[:, :, tap, d].reshape([-1, *g.results])
            for d in (0, 1)
        ]
        read: Array = np.zeros([len(x) * parts, *g.results, image.shape[2]], x.dtype)
        for step in product((0, 1), repeat=2):
            corner = [np.floor(a).astype(int) + s for a, s in zip(at, step, strict=True)]
            weight = np.prod([1 - np.abs(a - c) for a, c in zip(at, corner, strict=True)], 0)
            for c, size in zip(corner, x.shape[2:], strict=True):
                weight = weight * ((c >= 0) & (c < size))
            row, column = (
                np.clip(c, 0, size - 1) for c, size in zip(corner, x.shape[2:], strict=True)
            )
            read += weight[..., None] * image[batch, part, :, row, column]
        if mask is not None:
            share = mask.reshape([len(x), parts, -1, *g.results])[:, :, tap]
            read = read * share.reshape([-1, *g.results])[..., None]
        columns = np.moveaxis(read, -1, 1).reshape([len(x), group, -1, *g.results])
        weights = w[(..., *place)].reshape([group, -1, w.shape[1]])
        y += np.einsum("gmc,ngc...->ngm...", weights, columns).reshape(y.shape)
    return y if b is None else y + b.reshape([-1, 1, 1])


OPERATORS = numpy_operators(
    "",
    Conv=conv,
    DeformConv=deform_conv,
    ConvTranspose=conv_transpose,
    MaxPool=max_pool,
    AveragePool=average_pool,
    LpPool=lp_pool,
    GlobalLpPool=global_lp_pool,
    GlobalMaxPool=global_max_pool,
)
