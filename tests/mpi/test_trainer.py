"""A Trainer on each rank under mpirun: the same steps as one device, and an end for all."""

from pathlib import Path

import numpy as np

from tests.runtime.hand_trained import Reference, batch_of, regression
from tests.runtime.launching import LIMIT, mpirun

SCRIPT = """
import sys
import numpy as np
from tests.runtime.hand_trained import batch_of
from onnxpar_runtime import Trainer, guarded, init

rank = init()
def body():
    with Trainer(sys.argv[1], rank=rank, device='cpu') as trainer:
        for step in range(1, 4):
            batch = batch_of(5, step)
            if sys.argv[2] == str(step):
                batch['x'][0, 0] = np.nan
            hyper = dict(lr=0.1, momentum=0.9, clip_norm=1.0, momentum_first=float(step == 1))
            result = trainer.train_step([batch], hyper)
            print(rank.index, repr(result.loss), repr(result.grad_norm), flush=True)
        gradient = trainer.gather('onnxpar.grad.w')
        if gradient is not None:
            np.save(sys.argv[3], gradient)
    return 0
raise SystemExit(guarded(rank, body))
"""


def script_in(folder: Path) -> Path:
    script = folder / "body.py"
    script.write_text(SCRIPT)
    return script


def test_steps_over_mpi(tmp_path: Path) -> None:
    directory, gradient = regression(tmp_path / "a"), tmp_path / "gradient.npy"
    outcome = mpirun(2, [str(script_in(tmp_path)), str(directory), "none", str(gradient)])
    assert outcome.code == 0, outcome.err
    lines = [line.split() for line in outcome.out.splitlines()]
    reference = Reference()
    for step in range(1, 4):
        hyper = {"lr": 0.1, "momentum": 0.9, "clip_norm": 1.0}
        last = reference.gradient(batch_of(5, step))[1]
        expected = reference.step(batch_of(5, step), hyper)
        for rank in ("0", "1"):
            mine = [line[1:] for line in lines if line[0] == rank][step - 1]
            # float64 sums of some twenty terms of size 1 in another order.
            np.testing.assert_allclose([float(n) for n in mine], expected, rtol=1e-12)
    np.testing.assert_allclose(np.load(gradient), last, rtol=1e-12, atol=1e-13)


def test_a_loss_that_is_no_number_ends_all_ranks(tmp_path: Path) -> None:
    directory = regression(tmp_path / "a")
    outcome = mpirun(2, [str(script_in(tmp_path)), str(directory), "2", "none"])
    assert outcome.code == 1 and outcome.seconds < LIMIT / 2
    (message,) = outcome.messages
    assert message.startswith("onnxpar: error: step 2: the loss is nan")
    assert "Traceback" not in outcome.err
