#!/usr/bin/env python3
"""Measures the tokens per second of requests that run side by side, under mpirun.

    mpirun -n 2 tools/bench/requests.py DIR --slots 8

All requests are submitted at once, with prompts and answers of one length, greedily. One round is
not counted. In a pipeline, groups of requests take turns if the slots can be divided by the number
of stages (`--slots 8` on two stages), and do not otherwise (`--slots 9`).
"""

import argparse
import time

import numpy as np

from onnxpar_runtime import Generator, guarded, init


def main() -> int:
    """Measures a directory; the exit code is that of a rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", help="the directory of a decoder with a cache")
    parser.add_argument("--slots", type=int, default=8, help="slots (default: 8)")
    parser.add_argument("--requests", type=int, default=0, help="requests (default: the slots)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a request")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank")
    options = parser.parse_args()
    rank = init()

    def body() -> int:
        ort = {"intra_op_num_threads": str(options.threads)}
        with Generator(options.directory, rank=rank, ort_options=ort) as generator:
            requests = generator.requests(slots=options.slots, length=options.prompt + options.new)
            number = options.requests or options.slots
            rng = np.random.default_rng(0)
            for turn in range(options.rounds + 1):
                if rank.index == 0:
                    for _ in range(number):
                        prompt = rng.integers(0, 256, options.prompt).tolist()
                        requests.submit(prompt, max_new_tokens=options.new)
                begun = time.perf_counter()
                tokens = sum(event.token is not None for event in requests.events())
                seconds = time.perf_counter() - begun
                if rank.index == 0 and turn:
                    print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s")
        return 0

    return guarded(rank, body)


if __name__ == "__main__":
    raise SystemExit(main())
