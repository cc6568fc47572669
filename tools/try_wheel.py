#!/usr/bin/env python3
"""Install a wheel of onnxpar into fresh environments without a compiler, and try it there.

In each environment, which has nothing but the wheel and what it asks for, two MPI ranks run a model
and train one, and the outputs and losses are compared with those of one device:

    tools/wheel -o dist
    tools/try_wheel.py dist/*.whl --python python3.11 --python python3.13 --mpi openmpi --mpi mpich
    tools/try_wheel.py dist/*.whl --onnxruntime 1.30.0 --onnxruntime 1.32.0

A line for each environment has the seconds that `pip install` and the first run took. The exit code
is 1 if one of them failed. PATH has only the environment's programs, so no compiler is found.
`--mpi system` tries the MPI of this machine, such as Debian's Open MPI, beside the machine's other
programs, such as ssh, which it wants. MPICH also places ranks on two names of this machine.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 600
TRAIN = ("--train", "--loss", "softmax_cross_entropy", "--optimizer", "adamw")
# Sums of float32 in another order: 784 and 512 terms of about 1, each rounded by 6e-8.
RTOL = 1e-4
SYSTEM = "system"


class Failed(Exception):
    """A command failed; the text is its output."""


class Environment:
    """A fresh virtual environment in a folder, and commands in it.

    Attributes:
        said: What the last command has printed.
    """

    def __init__(self, folder: Path, python: str, *places: str) -> None:
        """Makes the environment, which also finds the programs in other folders."""
        self.said = ""
        self.folder = folder
        subprocess.run([python, "-m", "venv", folder / "env"], check=True)
        kept = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG", "TMPDIR")}
        allow = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        path = os.pathsep.join([str(folder / "env" / "bin"), *places])
        self._variables = {**kept, **allow, "PATH": path}

    def run(self, *command: str) -> float:
        """Runs a command in the folder, and returns its seconds."""
        begin = time.monotonic()
        program = str(self.folder / "env" / "bin" / command[0])
        done = subprocess.run(
            [program, *command[1:]],
            cwd=self.folder,
            env=self._variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
        self.said = done.stdout
        if done.returncode:
            raise Failed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
        return time.monotonic() - begin


def try_one(
    wheel: Path, python: str, mpi: str, onnxruntime: str | None, folder: Path
) -> tuple[float, float]:
    """Returns the seconds of the installation and of the first run of two ranks.

    Raises:
        Failed: A command failed, or the results differ from those of one device.
    """
    if mpi == SYSTEM and shutil.which("mpirun", path=os.defpath) is None:
        raise Failed(f"no mpirun in {os.defpath}")
    env = Environment(folder, python, *([os.defpath] if mpi == SYSTEM else []))
    # mpi4py alone takes the MPI that the loader finds.
    extra, more = (f"[cpu,{mpi}]", []) if mpi != SYSTEM else ("[cpu]", ["mpi4py"])
    pip = ("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    only = ("--only-binary", ":all:")
    if onnxruntime is None:
        installing = env.run(*pip, *only, f"onnxpar{extra} @ {wheel.resolve().as_uri()}", *more)
    else:
        # Not by the extra: also versions that it does not admit are tried.
        extra = extra.replace("cpu,", "").replace("[cpu]", "")
        asked = f"onnxpar{extra} @ {wheel.resolve().as_uri()}"
        installing = env.run(*pip, *only, asked, f"onnxruntime=={onnxruntime}", *more)
    env.run("python", "-c", "from mpi4py import MPI; print(MPI.Get_library_version())")
    if mpi != SYSTEM and {"openmpi": "Open MPI", "mpich": "MPICH"}[mpi] not in env.said:
        raise Failed(f"mpi4py has another MPI than {mpi}: {env.said}")
    for script in ("mlp", "transformer", "_exporter"):
        shutil.copy(ROOT / "models" / f"{script}.py", folder)
    env.run("python", "mlp.py", "-o", "mlp.onnx")
    code = (
        "import numpy as np; x = np.random.default_rng(1).random((8, 1, 28, 28), np.float32);"
        "np.savez('x.npz', x=x); np.savez('data.npz', x=x, labels=np.arange(8))"
    )
    env.run("python", "-c", code)
    for devices in ("2", "1"):
        strategy = ("--strategy", "replicate" if devices == "1" else "tp=2", "--devices", devices)
        env.run("onnxpar", "shard", "mlp.onnx", *strategy, "-o", f"run{devices}")
        env.run("onnxpar", "shard", "mlp.onnx", *strategy, *TRAIN, "-o", f"train{devices}")
    files = ("--inputs", "x.npz", "--outputs")
    running = env.run("onnxpar", "launch", "--", "run", "run2", *files, "y2.npz")
    env.run("onnxpar", "run", "run1", *files, "y1.npz")
    if mpi == "mpich":
        _place(env, files)
    options = ("--data", "npz:data.npz", "--batch-size", "8", "--steps", "3", "--lr", "0.001")
    env.run("onnxpar", "launch", "--", "train", "train2", *options, "--log", "log2.jsonl")
    env.run("onnxpar", "train", "train1", *options, "--log", "log1.jsonl")
    compare = (
        "import numpy as np; a, b = np.load('y1.npz'), np.load('y2.npz');"
        f"[np.testing.assert_allclose(b[k], a[k], rtol={RTOL}, atol={RTOL}) for k in a]"
    )
    env.run("python", "-c", compare)
    logs = [(folder / f"log{n}.jsonl").read_text().splitlines() for n in (1, 2)]
    losses = [[json.loads(line)["loss"] for line in log] for log in logs]
    if len(losses[0]) != 3 or any(abs(a - b) > RTOL for a, b in zip(*losses, strict=True)):
        raise Failed(f"losses on one device and on two: {losses}")
    env.run("python", "transformer.py", "-o", "gpt.onnx", "--layers", "2", "--d-model", "64")
    env.run("onnxpar", "shard", "gpt.onnx", "--strategy", "tp=2", "-o", "gpt2")
    env.run("onnxpar", "verify", "gpt2", "--model", "gpt.onnx")
    env.run("onnxpar", "verify", "train2", "--model", "mlp.onnx", "--steps", "2")
    env.run("onnxpar", "doctor")
    return installing, running


def _place(env: Environment, files: Sequence[str]) -> None:
    """Runs four ranks on two names of this machine, where the fewest bytes leave one."""
    env.run("onnxpar", "shard", "mlp.onnx", "--strategy", "tp=2,dp=2", "-o", "run4")
    hosts = ("--mpirun=-hosts", "--mpirun=localhost:2,127.0.0.1:2")
    env.run("onnxpar", "launch", *hosts, "--", "run", "run4", *files, "y4.npz")
    if "laid onto machines in the order dp=2,tp=2" not in env.said:
        raise Failed(f"ranks are not placed: {env.said}")
    same = "import numpy as np; a, b = np.load('y1.npz'), np.load('y4.npz');"
    same += f"[np.testing.assert_allclose(b[k], a[k], rtol={RTOL}, atol={RTOL}) for k in a]"
    env.run("python", "-c", same)
    code = (
        "from mpi4py import MPI; w = MPI.COMM_WORLD;"
        "here = w.Split_type(MPI.COMM_TYPE_SHARED).allgather(w.rank);"
        "w.rank or print(here)"
    )
    env.run("mpirun", "-hosts", "localhost:2,127.0.0.1:2", "-rankmap", "0,1,0,1", "-n", "4",
            "python", "-c", code)  # fmt: skip
    if "[0, 2]" not in env.said:
        raise Failed(f"-rankmap 0,1,0,1 puts ranks {env.said} on the first machine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries all combinations, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", action="append", help="default: this one")
    parser.add_argument(
        "--mpi", action="append", choices=["openmpi", "mpich", SYSTEM], help="default: openmpi"
    )
    parser.add_argument(
        "--onnxruntime", action="append", help="a version; default: the newest allowed"
    )
    given = parser.parse_args(arguments)
    failed = False
    print(f"{'python':<12} {'MPI':<8} {'onnxruntime':<12} {'install':>8} {'run':>6}", flush=True)
    for python, mpi, version in product(
        given.python or [sys.executable], given.mpi or ["openmpi"], given.onnxruntime or [None]
    ):
        row = f"{Path(python).name:<12} {mpi:<8} {version or 'newest':<12}"
        with tempfile.TemporaryDirectory(prefix="onnxpar-wheel-") as folder:
            try:
                seconds = try_one(given.wheel, python, mpi, version, Path(folder))
                print(f"{row} {seconds[0]:6.1f} s {seconds[1]:4.1f} s", flush=True)
            except (Failed, subprocess.SubprocessError) as error:
                failed = True
                print(f"{row} failed: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
