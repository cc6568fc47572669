"""onnxpar's side of tools/bench/generate.py: one rank, under mpirun where there are several."""

import sys
from collections.abc import Iterator

from generate_cases import Job, serve
from started_script import expect_driver

from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.launch import guarded, init
from onnxpar_runtime.options import parse_pairs


def main(text: str) -> int:
    """Serves a job; returns the exit code."""
    job = Job.read(text)
    rank = init("auto" if job.ranks > 1 else "threads", "cpu")

    def body() -> int:
        options = {"intra_op_num_threads": str(job.threads), **parse_pairs(job.options)}
        with Generator(job.files, rank=rank, ort_options=options) as generator:

            def tokens() -> Iterator[int]:
                for new in job.sequences():
                    for step in generator.steps([job.tokens], max_new_tokens=new):
                        yield step.tokens[0]

            serve(job, rank.index, tokens())
        return 0

    return guarded(rank, body)


if __name__ == "__main__":
    expect_driver("tools/bench/generate.py")
    sys.exit(main(sys.argv[1]))
