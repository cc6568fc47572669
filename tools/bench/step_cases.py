"""What tools/bench/step.py measures: models, data, the sides, and the job that each rank gets.

Imported by all of them, so it loads neither onnxruntime nor PyTorch.
"""

import json
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import numpy as np
from bench_options import peak_memory
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
MICRO_BATCHES = 4
"""Of a pipeline's step."""
BATCHES = 20
"""Number of different batches; step t takes batch (t - 1) mod 20."""
INTERFACE = "eth"
"""The link's name on both nodes of tools/two-nodes."""

Batch = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Model:
    """A model and its batches.

    Attributes:
        name: Its name in the table.
        script: The exporter, a file of models/, unless there is a form.
        options: The exporter's options.
        shape: Shape of the first input.
        labels: Shape of the labels.
        classes: Number of classes, and of tokens where the input is tokens.
        tokens: Whether the first input is tokens; else numbers from a normal distribution.
        rates: Learning rate by optimizer.
        sizes: Of a network of step_networks.py, which is exported from PyTorch.
        form: Of the export, as in step_export.py.
    """

    name: str
    script: str
    options: tuple[str, ...]
    shape: tuple[int, ...]
    labels: tuple[int, ...]
    classes: int
    tokens: bool
    rates: dict[str, float]
    sizes: tuple[int, ...] = ()
    form: str = ""

    @property
    def input(self) -> str:
        """Name of the first input."""
        return "input_ids" if self.tokens else "x"

    def export(self, path: Path) -> None:
        """Writes the model as ONNX."""
        if self.form:
            sizes = [str(size) for size in self.sizes]
            script = str(ROOT / "tools" / "bench" / "step_export.py")
            command = [sys.executable, script, self.name, self.form, str(path), *sizes]
        else:
            script = str(ROOT / "models" / self.script)
            command = [sys.executable, script, "-o", str(path), *self.options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def batches(self) -> list[Batch]:
        """The batches, the same in every process."""
        rng = np.random.default_rng(0)
        drawn: list[Batch] = []
        for _ in range(BATCHES):
            if self.tokens:
                data: NDArray[np.generic] = rng.integers(0, self.classes, self.shape)
            else:
                data = rng.standard_normal(self.shape, dtype=np.float32)
            drawn.append({self.input: data, "labels": rng.integers(0, self.classes, self.labels)})
        return drawn


def gpt(layers: int, d_model: int, heads: int, seq: int, batch: int, vocab: int) -> Model:
    """A GPT of models/transformer.py, the head not tied to the token table."""
    sizes = {"layers": layers, "d-model": d_model, "heads": heads, "vocab": vocab}
    sizes["max-positions"] = seq
    options = tuple(text for k, v in sizes.items() for text in (f"--{k}", str(v)))
    shape = (batch, seq)
    # AdamW's first steps have the size of the rate whatever the gradient: a small one.
    rates = {"sgd": 0.1, "adamw": 1e-4}
    own = (layers, d_model, heads, seq, vocab)
    return Model("gpt", "transformer.py", options, shape, shape, vocab, True, rates, own)


def mlp(hidden: int, batch: int) -> Model:
    """The network of models/mlp.py."""
    options, rates = ("--hidden", str(hidden), str(hidden)), {"sgd": 0.01, "adamw": 1e-4}
    shape = (batch, 1, 28, 28)
    return Model("mlp", "mlp.py", options, shape, (batch,), 10, False, rates, (hidden,))


FORMS = ("export", "dynamo", "raw", "legacy")
"""How a network of step_networks.py is exported."""


def with_exports(models: dict[str, Model]) -> dict[str, Model]:
    """The models, and beside each its network as PyTorch exports it, in all forms."""
    found = dict(models)
    for name, model in models.items():
        found |= {f"{name}-{form}": replace(model, form=form) for form in FORMS}
    return found


MODELS = with_exports(
    {
        "mlp": mlp(512, 128),
        "gpt": gpt(4, 512, 8, 128, 8, 8192),
        "long": gpt(4, 512, 8, 1024, 2, 8192),
    }
)
"""`long` has long sequences, whose attention scores take most of the memory."""
LARGE = {"gpt1024": gpt(12, 1024, 16, 1024, 8, 50304)}
"""For GPUs."""
_TINY = gpt(2, 64, 4, 16, 4, 256)
QUICK = with_exports({"mlp": mlp(64, 16), "gpt": _TINY, "long": _TINY}) | {"gpt1024": _TINY}
"""Of the same form and so small that the bench takes a minute; says nothing about speed."""
OPTIMIZERS = ("sgd", "adamw")
WEIGHT_DECAY = {"sgd": 0.0, "adamw": 0.01}
"""For tensors of two dims or more; biases and scales do not decay."""


@dataclass(frozen=True)
class Side:
    """One way to run the steps.

    Attributes:
        system: `onnxpar` or `torch`; or `socket`, which exchanges bytes and computes nothing.
        way: `one`, `dp` (data parallel), `tp` (tensor parallel) or `pp` (pipeline parallel, with
            `MICRO_BATCHES` micro-batches); of PyTorch also `compile`, one
            device with torch.compile; of onnxpar also `forward`, the evaluation under data
            parallel.
        ranks: Number of processes.
        threads: Threads of each.
        device: `cpu` or `cuda`.
        compute: `bfloat16` to compute in it, with parameters in float32; else nothing.
        transport: Of onnxpar's ranks.
        link: Rate of the link between two nodes that have half of the ranks each (`1gbit`); nothing
            if all ranks are on one.
        level: Of optimizer parallel.
        overlap: Whether onnxpar may communicate in the background.
    """

    system: str
    way: str
    ranks: int
    threads: int
    device: str = "cpu"
    compute: str = ""
    transport: str = "auto"
    link: str = ""
    level: int = 0
    overlap: bool = True

    @property
    def label(self) -> str:
        """What the table calls it."""
        transport = "" if self.transport == "auto" else f" {self.transport}"
        level = f" level {self.level}" if self.level else ""
        overlap = "" if self.overlap else " no overlap"
        way = f"{self.way}{self.ranks if self.ranks > 1 else ''}"
        return f"{self.system} {way}{transport}{level}{overlap}"


@dataclass(frozen=True)
class Sent:
    """A record of JSON values, the only argument of a process."""

    options: tuple[str, ...] = field(default=(), kw_only=True)

    @classmethod
    def read(cls, text: str) -> Self:
        """Returns the record of `text`."""
        fields = json.loads(text)
        return cls(**{**fields, "options": tuple(fields["options"])})

    @property
    def text(self) -> str:
        """The record as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Job(Sent):
    """What one process is to do, as its only argument.

    Attributes:
        model: Key of `MODELS` and of `QUICK`.
        optimizer: One of `OPTIMIZERS`.
        quick: Whether of `QUICK`.
        options: `key=value` options of onnxruntime.
        profile: Whether onnxpar writes a trace with operators, to `scratch`.
        files: The directory that onnxpar made, or the ONNX file.
        address: The driver's socket.
        scratch: A folder for files of this side alone.
        way: As `Side.way`.
        ranks: As `Side.ranks`.
        threads: As `Side.threads`.
        device: As `Side.device`.
        compute: As `Side.compute`.
        transport: As `Side.transport`.
        link: As `Side.link`.
        level: As `Side.level`.
        overlap: As `Side.overlap`.
    """

    model: str
    optimizer: str
    quick: bool = False
    profile: bool = False
    files: str = ""
    address: str = ""
    scratch: str = ""
    way: str = "one"
    ranks: int = 1
    threads: int = 1
    device: str = "cpu"
    compute: str = ""
    transport: str = "auto"
    link: str = ""
    level: int = 0
    overlap: bool = True

    @property
    def case(self) -> Model:
        """The model."""
        return (QUICK if self.quick else MODELS | LARGE)[self.model]

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.case.rates[self.optimizer]


class Spent:
    """Adds up what parts of a step take.

    Attributes:
        seconds: By part.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Adds what happens inside to a part."""
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start


def sent(job: Job) -> int:
    """Bytes that this node has sent over the link, headers included."""
    path = Path("/sys/class/net") / INTERFACE / "statistics" / "tx_bytes"
    return int(path.read_text(encoding="ascii")) if job.link else 0


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Divides a batch into equal parts."""
    parts = {name: np.array_split(array, count) for name, array in batch.items()}
    return [{name: arrays[i] for name, arrays in parts.items()} for i in range(count)]


@contextmanager
def driver_at(address: str, rank: int) -> Iterator[Connection]:
    """The line of a rank to the driver, which knows then that the rank is ready."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    with Connection(line.detach()) as driver:
        driver.send(rank)
        yield driver


def serve(
    job: Job,
    rank: int,
    step: Callable[[int, Batch], float],
    spent: Spent | None = None,
    settle: Callable[[], None] | None = None,
) -> None:
    """Does what the driver asks of a rank: a number of steps, until it asks for none.

    The rank waits for the driver on a socket, so that it takes no processor while another side has
    its turn.

    What a step leaves running for the next one to finish would cost nothing at the end of a turn.
    So a step that is not measured begins such a turn and leaves as much.

    Args:
        job: The job.
        rank: Number of the rank.
        step: Does step t = 1, 2, ... on a global batch and returns its loss.
        spent: Where it notes what its parts take.
        settle: Waits for what a step has left running; None if steps leave nothing.
    """
    spent = Spent() if spent is None else spent
    batches, done = job.case.batches(), 0

    def next_loss() -> float:
        nonlocal done
        done += 1
        return step(done, batches[(done - 1) % BATCHES])

    with driver_at(job.address, rank) as driver:
        while count := driver.recv():
            losses = [] if settle is None else [next_loss()]
            spent.seconds.clear()
            before = sent(job)
            start, used = time.perf_counter(), time.process_time()
            for _ in range(count):
                losses.append(next_loss())
            # Of all threads; those that wait for work actively are at work too.
            used, taken = time.process_time() - used, time.perf_counter() - start
            moved = sent(job) - before
            if settle is not None:
                settle()
            answer = taken, used, losses[:count], dict(spent.seconds), moved, peak_memory()
            driver.send(answer)
