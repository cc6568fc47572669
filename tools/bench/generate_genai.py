"""onnxruntime-genai's side of tools/bench/generate.py, in an environment of its own."""

import json
import sys
from collections.abc import Iterator

from started_script import expect_driver

if __name__ == "__main__":
    # Before the import of onnxruntime-genai, which may not be installed.
    expect_driver("tools/bench/generate.py")

import onnxruntime_genai
from generate_cases import Job, serve


def main(text: str) -> None:
    """Serves a job."""
    job = Job.read(text)
    config = onnxruntime_genai.Config(job.files)
    options = {"intra_op_num_threads": job.threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = onnxruntime_genai.Model(config)

    def tokens() -> Iterator[int]:
        for new in job.sequences():
            length = job.prompt + new
            search = onnxruntime_genai.GeneratorParams(model)
            # Its tokens include the last one, and it must not end before.
            search.set_search_options(max_length=length, min_length=length, do_sample=False)
            generator = onnxruntime_genai.Generator(model, search)
            generator.append_tokens(job.tokens)
            for _ in range(new):
                generator.generate_next_token()
                yield int(generator.get_next_tokens()[0])

    serve(job, 0, tokens())


if __name__ == "__main__":
    main(sys.argv[1])
