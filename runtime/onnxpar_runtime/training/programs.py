"""The programs of a training directory on one rank, which share their states."""

from collections.abc import Sequence

from onnxpar_runtime.executor import Executor
from onnxpar_runtime.loader import Loader
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.memory import weight_bytes
from onnxpar_runtime.training.state import States
from onnxpar_runtime.without_padding import Values

TRAINING = "training_model"
PAIRED = "paired_model"
OPTIMIZER = "optimizer_model"
EVALUATION = "eval_model"
LOSS = "onnxpar.loss"
GRAD_NORM = "onnxpar.grad_norm"
CORRECT = "onnxpar.correct"


def hyperparameters_read(manifest: Manifest) -> list[str]:
    """Returns the hyperparameters that the optimizer's program reads, on any stage."""
    parts = [manifest.program(name) for name in manifest.parts(OPTIMIZER)]
    names = [s.hyperparameter for part in parts for s in part.system_inputs]
    return list(dict.fromkeys(name for name in names if name is not None))


class Programs:
    """Executors by the program's name, each loaded at its first use.

    Args:
        manifest: The manifest of a directory for training.
        loader: Makes the sessions of the rank.

    Attributes:
        loader: Makes the sessions of the rank.
        states: What the programs share.

    Raises:
        DirectoryError: The directory is not for training.
    """

    def __init__(self, manifest: Manifest, loader: Loader) -> None:
        """Loads nothing yet."""
        self._manifest = manifest
        self.loader = loader
        self._executors: dict[str, Executor] = {}
        self._runs: dict[str, Sequence[Values]] = {}
        pipeline = manifest.pipeline
        self._several = pipeline is not None and pipeline.micro_batches > 1
        self.states = States(manifest, loader)

    def load(self, name: str) -> Executor:
        """Returns a program of this rank, and loads it at the first call.

        Raises:
            DirectoryError: There is no such program, or it cannot be loaded.
        """
        if name not in self._executors:
            # Two micro-batches take turns if their sizes are equal.
            runs = self._runs.get(TRAINING if name == PAIRED else name, ())
            made = Executor(self._manifest, name, self.loader, self.states, runs, self._several)
            self._executors[name] = made
        return self._executors[name]

    def expect(self, name: str, runs: Sequence[Values], micro_batches: int) -> None:
        """Says what runs of a program will come, also of its parts; see `Executor.expect`.

        Args:
            name: The program.
            runs: The values of symbols in each run, if they are known.
            micro_batches: Micro-batches of a step of training.

        Raises:
            DirectoryError: There is no such program, or it cannot be loaded.
        """
        # Two micro-batches that take turns are one run.
        self._several = micro_batches > (2 if PAIRED in self._manifest.programs else 1)
        for part in self._manifest.parts(name):
            self._runs[part] = runs
            if part in self._executors:
                self._executors[part].expect(runs, several=self._several)

    def loaded(self, name: str) -> Executor | None:
        """Returns a program of this rank if it is loaded. Any thread may call it."""
        return self._executors.get(name)

    @property
    def bound_bytes(self) -> int:
        """Bytes of weights, of the states that have memory, and of the bound inputs."""
        inputs = sum(executor.bound_bytes for executor in self._executors.values())
        weights = weight_bytes(self._manifest, self.loader.rank.index)
        return weights + self.states.bytes + inputs

    def close(self) -> None:
        """Frees all of them."""
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()
        self.states.close()
