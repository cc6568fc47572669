#!/usr/bin/env python3
"""Compares attention and its gradient: one operator, the exporter's operators, and PyTorch.

    tools/bench/attention.py                 # several lengths, one thread
    tools/bench/attention.py --keys 4096 --threads 2

There are 2,048 queries of all samples together, and at least one sample; 8 heads of 64.

Each side computes Softmax(q·kt + bias)·v and the gradients of q, kt and v, in one process and in
turn; PyTorch by scaled_dot_product_attention and its backward. Numbers are milliseconds of
processor time, the median of the rounds; a ratio is the median of those of single rounds. `scores`
is the size of one matrix of all scores, MiB, which the operators keep for the gradient.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import torch
from bench_options import add_results, conditions, parser_of, report_results, with_rounds
from numpy.typing import NDArray

from onnxpar_runtime.library import custom_op_library

Arrays = Mapping[str, NDArray[np.float32]]
OPERATORS = """
    product = MatMul(q, kt)
    scores = Add(product, bias)
    shares = Softmax<axis = -1>(scores)
    y = MatMul(shares, v)
    dshares = com.microsoft.FusedMatMul<transB = 1>(dy, v)
    slopes = onnxpar.SoftmaxGrad<axis = -1>(dshares, shares)
    dq = com.microsoft.FusedMatMul<transB = 1>(slopes, kt)
    dkt = com.microsoft.FusedMatMul<transA = 1>(q, slopes)
    dv = com.microsoft.FusedMatMul<transA = 1>(shares, dy)
"""
FUSED = """
    y = onnxpar.ScaledDotProductAttention<scale = 1.0>(q, kt, v, bias)
    dq, dkt, dv = onnxpar.ScaledDotProductAttentionGrad<scale = 1.0>(dy, q, kt, v, bias)
"""
TOKENS, WIDTH, HEAD = 2048, 512, 64
"""Queries of all samples together, elements of a token, elements of a head."""


def arrays(keys: int, causal: bool) -> Arrays:
    """Operands of samples of some length."""
    rng = np.random.default_rng(0)
    shape = (max(TOKENS // keys, 1), WIDTH // HEAD, keys, HEAD)
    q, k, v, dy = (rng.standard_normal(shape, dtype=np.float32) for _ in range(4))
    hidden = np.triu(np.full((keys, keys), -np.inf, np.float32), 1)
    bias = hidden if causal else np.zeros_like(hidden)
    return {
        "q": q / np.float32(HEAD**0.5),
        "kt": np.ascontiguousarray(k.swapaxes(-1, -2)),
        "v": v,
        "bias": bias,
        "dy": dy,
    }


def graph(body: str, given: Arrays, threads: int) -> Callable[[], list[Any]]:
    """Runs a graph."""
    texts = {n: f"float[{','.join(map(str, a.shape))}]" for n, a in given.items()}
    inputs = ", ".join(f"{text} {name}" for name, text in texts.items())
    outputs = f"{texts['q']} y, {texts['q']} dq, {texts['kt']} dkt, {texts['v']} dv"
    head = '<ir_version: 10, opset_import: ["": 20, "onnxpar": 1, "com.microsoft": 1]>'
    model = onnx.parser.parse_model(f"{head} g ({inputs}) => ({outputs}) {{ {body} }}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = False  # as in training programs
    options.register_custom_ops_library(str(custom_op_library()))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, dict(given))


def pytorch(given: Arrays, causal: bool) -> Callable[[], list[Any]]:
    """Runs PyTorch."""
    k = np.ascontiguousarray(given["kt"].swapaxes(-1, -2))
    q, k, v = (torch.from_numpy(a).requires_grad_() for a in (given["q"], k, given["v"]))
    dy = torch.from_numpy(given["dy"])

    def run() -> list[Any]:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)
        dq, dk, dv = torch.autograd.grad(y, (q, k, v), dy)
        return [y.detach(), dq, dk.transpose(-1, -2), dv]

    return run


def measure(keys: int, causal: bool, threads: int, rounds: int, turn: float) -> dict[str, Any]:
    """Measures all sides; raises SystemExit if their results differ."""
    given = arrays(keys, causal)
    sides = {
        "operators": graph(OPERATORS, given, threads),
        "fused": graph(FUSED, given, threads),
        "torch": pytorch(given, causal),
    }
    results = {name: [np.asarray(a) for a in run()] for name, run in sides.items()}
    for name, found in results.items():
        # Sums of some thousand terms of about 1.
        if not all(
            np.allclose(a, b, 0, 1e-3) for a, b in zip(found, results["torch"], strict=True)
        ):
            raise SystemExit(f"{keys} keys: {name} and PyTorch differ")
    start = time.perf_counter()
    sides["fused"]()
    count = max(1, round(turn / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            start = time.process_time()
            for _ in range(count):
                run()
            times[name].append((time.process_time() - start) / count * 1e3)
    batch, heads = given["q"].shape[:2]
    return {
        "keys": keys,
        "causal": causal,
        "scores": batch * heads * keys * keys * 4 / 2**20,
        "times": times,
    }


def ratio(times: Mapping[str, Sequence[float]], other: str) -> float:
    """The time of the fused operators by that of another side."""
    return median(a / b for a, b in zip(times["fused"], times[other], strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--keys", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--threads", type=int, default=1)
    add_results(parser)
    options = with_rounds(parser, 0.2, arguments)
    torch.set_num_threads(options.threads)
    print(
        f"{conditions()}, {options.threads} threads\n"
        f"{'keys':>5s} {'mask':7s} {'scores':>7s} {'operators':>9s} {'fused':>8s} {'torch':>8s} "
        f"{'/operators':>10s} {'/torch':>7s}"
    )
    rows = []
    for keys in [16] if options.quick else options.keys:
        for causal in (False, True):
            row = measure(keys, causal, options.threads, options.rounds, options.turn)
            rows.append(row)
            times = row["times"]
            print(
                f"{keys:5d} {'causal' if causal else 'none':7s} {row['scores']:7.1f} "
                f"{median(times['operators']):9.2f} {median(times['fused']):8.2f} "
                f"{median(times['torch']):8.2f} {ratio(times, 'operators'):10.3f} "
                f"{ratio(times, 'torch'):7.3f}",
                flush=True,
            )
    return report_results(options, rows, [])


if __name__ == "__main__":
    sys.exit(main())
