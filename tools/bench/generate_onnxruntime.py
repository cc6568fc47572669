"""onnxruntime's side of tools/bench/generate.py: a plain loop with all caches bound.

The loop that somebody writes who knows onnxruntime well: caches are one buffer each for past and
present, tokens and logits are written where they lie, and only the mask, which grows, is bound anew
for each token.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
from generate_cases import Job, serve
from started_script import expect_driver


def main(text: str) -> None:
    """Serves a job."""
    job = Job.read(text)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    for pair in job.options:
        options.add_session_config_entry(*pair.split("=", 1))
    path = str(Path(job.files) / "model.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def tokens() -> Iterator[int]:
        for new in job.sequences():
            yield from sequence(session, job, new)

    serve(job, 0, tokens())


def value(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> onnxruntime.OrtValue:
    """Returns a value that shares an array's memory."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def sequence(session: onnxruntime.InferenceSession, job: Job, new: int) -> Iterator[int]:
    """Yields the new tokens of one sequence."""
    length = job.prompt + new - 1  # the last token is not read
    io = session.io_binding()
    for given in session.get_inputs():
        if given.name.startswith("past_key_values."):
            heads, width = given.shape[1], given.shape[3]
            cache = value(np.zeros((1, heads, length, width), np.float32))
            io.bind_ortvalue_input(given.name, cache)
            io.bind_ortvalue_output(given.name.replace("past_key_values", "present"), cache)
    ids = np.array([job.tokens])
    for width in (job.prompt, 1):
        logits = np.zeros((1, width, job.vocabulary), np.float32)
        bound = [value(ids), value(logits)]
        io.bind_ortvalue_input("input_ids", bound[0])
        io.bind_ortvalue_output("logits", bound[1])
        for total in [job.prompt] if width > 1 else range(job.prompt + 1, length + 1):
            io.bind_ortvalue_input("attention_mask", value(np.ones((1, total), np.int64)))
            session.run_with_iobinding(io)
            token = int(logits[0, -1].argmax())
            yield token
            ids[0, 0] = token
        ids = np.array([[token]])


if __name__ == "__main__":
    expect_driver("tools/bench/generate.py")
    main(sys.argv[1])
