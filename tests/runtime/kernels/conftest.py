"""The `run` fixture: one operator of the domain `onnxpar`, alone."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.runtime.kernels.one_node import Array, Attribute, Run, model_of, session


@pytest.fixture
def run() -> Run:
    """Runs one node on 1 and on 2 threads, which must agree to the bit."""

    def call(
        op: str,
        *inputs: Array | None,
        outputs: Sequence[bool] = (True,),
        narrow: int | None = None,
        **attributes: Attribute,
    ) -> list[Array]:
        model = model_of(op, inputs, outputs, attributes, narrow)
        feeds = {f"i{i}": np.asarray(x) for i, x in enumerate(inputs) if x is not None}
        one, two = (session(model, threads).run(None, feeds) for threads in (1, 2))
        for first, second in zip(one, two, strict=True):
            np.testing.assert_array_equal(first, second)
        return [np.asarray(y) for y in one]

    return call
