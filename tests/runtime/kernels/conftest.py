"""The `run` fixture: one operator of the domain `onnxpar`, alone."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from one_node import Array, Run, model_of, session


@pytest.fixture(params=[1, 2])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs one node, on 1 and on 2 threads."""

    def call(
        op: str,
        *inputs: Array | None,
        outputs: Sequence[bool] = (True,),
        narrow: int | None = None,
        **attributes: str | int | float,
    ) -> list[Array]:
        made = session(model_of(op, inputs, outputs, attributes, narrow), request.param)
        feeds = {f"i{i}": np.asarray(x) for i, x in enumerate(inputs) if x is not None}
        return [np.asarray(y) for y in made.run(None, feeds)]

    return call
