#!/usr/bin/env python3
"""Compares the times in which onnxpar and onnxruntime generate tokens, interleaved in one run.

    tools/bench/generate.py                        # a Llama of 300 M parameters, float32 and 4-bit
    tools/bench/generate.py --bits 4 --genai /tmp/genai/bin/python --models /tmp/models
    tools/bench/generate.py --quick                # tiny: do all sides still run, and agree?

The model is a Llama of models/decoder.py (20 layers, hidden 1024, 16 heads, 8 of keys and values,
vocabulary 32000). Its cache is a shared buffer, and its weights are drawn at random. These sides
are compared; each has the same total number of threads:

- plain onnxruntime with caches bound to its inputs and outputs, in one process;
- onnxpar on 1 device;
- onnxpar with tensor parallelism under mpirun, over as many ranks as there are threads, each rank
  with one thread;
- onnxruntime-genai's own package, if --genai names a Python that has it
  (python -m venv /tmp/genai && /tmp/genai/bin/pip install onnxruntime-genai).

Each side has processes of its own, which wait on a socket while other sides have their turn. In a
round, every side first reads a prompt and makes one token, and then makes the others in turns of
several tokens. A side's ratio is the median, over the turns, of its time divided by that of plain
onnxruntime for the same tokens in the same round. So other work on the machine slows both. The
ratios of the first and of the last third of the tokens tell whether steps become slower as the
cache grows. All sides make the same tokens, unless rounding decides between two logits: the table
names the first token that differs.

Goals: 1 device at most 1.02, ranks at most 1.00, over all tokens and over the last third of them.
With --check, the exit code is 1 if a goal is missed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench_options import add_results, conditions, parser_of, report_results
from generate_cases import WARM, Job
from step_cases import ROOT, Side
from step_sides import PAUSE, Running, Turn

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.launch import find_mpirun, mpirun_environment

HERE = Path(__file__).resolve().parent
SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 4096, "initializer_range": 0.02,
}  # fmt: skip
QUICK = {"vocab_size": 512}
"""Of the same form and so small that the bench takes a minute; it says nothing about speed."""
ONE_GOAL, RANKS_GOAL = 1.02, 1.0


@dataclass(frozen=True)
class Row:
    """What one side took.

    Attributes:
        bits: Of each weight.
        side: The side.
        first: Seconds to the first token, by round.
        each: Seconds of one further token, by round and turn.
        processor: Seconds of processor time of one further token, all ranks together, likewise.
        first_ratios: Of the first token to plain onnxruntime's, by round.
        ratios: Of further tokens, by round and turn.
        differs: The first token that is not plain onnxruntime's; None if all are.
    """

    bits: int
    side: Side
    first: tuple[float, ...]
    each: tuple[tuple[float, ...], ...]
    processor: tuple[tuple[float, ...], ...]
    first_ratios: tuple[float, ...]
    ratios: tuple[tuple[float, ...], ...]
    differs: int | None

    @property
    def ratio(self) -> float:
        """Median of the ratios of further tokens."""
        return middle(self.ratios)

    @property
    def thirds(self) -> tuple[float, float]:
        """Median of the ratios of the first and of the last third of the tokens."""
        third = max(1, len(self.ratios[0]) // 3)
        return middle([r[:third] for r in self.ratios]), middle([r[-third:] for r in self.ratios])

    def missed(self, goal: float | None) -> list[str]:
        """Returns which goals do not hold."""
        if goal is None:
            return []
        what = f"{self.bits} bits, {self.side.label}"
        found = {"": self.ratio, " in the last third": self.thirds[1]}
        return [
            f"{what}: {ratio:.3f} times plain onnxruntime{when}, at most {goal:.2f} is wanted"
            for when, ratio in found.items()
            if ratio > goal
        ]


def middle(turns: Sequence[Sequence[float]]) -> float:
    """Returns the median of numbers by round and turn."""
    return statistics.median(number for taken in turns for number in taken)


def goal_of(side: Side) -> float | None:
    """Returns the greatest ratio that a side may have; None if it is not onnxpar's."""
    if side.system != "onnxpar":
        return None
    return ONE_GOAL if side.ranks == 1 else RANKS_GOAL


def export(folder: Path, bits: int, quick: bool) -> None:
    """Writes the model, unless it is there."""
    if (folder / "model.onnx").exists():
        return
    changes = QUICK if quick else SIZES
    pairs = [text for name, size in changes.items() for text in ("--set", f"{name}={size}")]
    script = str(ROOT / "models" / "decoder.py")
    command = [sys.executable, script, "llama", "-o", str(folder), "--cache", "shared"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [*command, "--bits", str(bits), *pairs],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip


@contextmanager
def start(side: Side, job: Job, python: str, folder: Path) -> Iterator[Running]:
    """Starts a side, whose ranks load then; ends it on leaving."""
    running = Running(side, Path(tempfile.mkdtemp(prefix=f"{side.system}-", dir=folder)))
    job = replace(job, address=running.address, threads=side.threads, ranks=side.ranks)
    command = [python, str(HERE / f"generate_{side.system}.py"), job.text]
    environment: Mapping[str, str] = mpirun_environment()
    if side.ranks > 1:
        launcher = [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(side.ranks)]
        command = [*launcher, *command]
    try:
        running.start([command], environment)
        yield running
    finally:
        running.close()


def measure(
    sides: Mapping[Side, tuple[Job, str]], bits: int, rounds: int, turn: int, folder: Path
) -> list[Row]:
    """Lets the sides take turns.

    Args:
        sides: Job and Python of each side; the first is what the others are compared with.
        bits: Of each weight.
        rounds: Sequences of each side.
        turn: Tokens of a turn.
        folder: For sockets and logs.
    """
    new = next(iter(sides.values()))[0].new
    counts = [1, *([turn] * ((new - 1) // turn))]
    with ExitStack() as stack:
        running = [
            stack.enter_context(start(side, job, python, folder))
            for side, (job, python) in sides.items()
        ]
        for ranks in running:
            ranks.connect()
        for ranks in running:
            ranks.steps(WARM)
        found: list[list[Turn]] = []
        for number in range(rounds):
            for place, count in enumerate(counts):
                turns: dict[int, Turn] = {}
                for k in range(len(running)):
                    # Nobody always comes after the same one, nor first.
                    shift = number + place
                    index = (shift + (k if shift % 2 else -k)) % len(running)
                    time.sleep(PAUSE)
                    turns[index] = running[index].steps(count)
                found.append([turns[index] for index in range(len(running))])
    rows = []
    for index, side in enumerate(sides):
        mine, base = [t[index] for t in found], [t[0] for t in found]
        tokens = [[t for taken in s for t in taken.losses] for s in (mine, base)]
        unequal = [n for n, (a, b) in enumerate(zip(*tokens, strict=True)) if a != b]
        starts = range(0, len(found), len(counts))
        later = [range(s + 1, s + len(counts)) for s in starts]
        rows.append(
            Row(
                bits=bits,
                side=side,
                first=tuple(mine[n].seconds for n in starts),
                each=tuple(tuple(mine[n].seconds / turn for n in ns) for ns in later),
                processor=tuple(tuple(mine[n].processor / turn for n in ns) for ns in later),
                first_ratios=tuple(mine[n].seconds / base[n].seconds for n in starts),
                ratios=tuple(tuple(mine[n].seconds / base[n].seconds for n in ns) for ns in later),
                differs=unequal[0] if unequal else None,
            )
        )
    return rows


def tell(rows: Sequence[Row]) -> list[str]:
    """Prints the lines of a table; returns which goals do not hold."""
    missed = []
    for row in rows:
        goal = goal_of(row.side)
        missed += row.missed(goal)
        milliseconds = [1e3 * x for x in (statistics.median(row.first), middle(row.each))]
        milliseconds.append(1e3 * middle(row.processor))
        ratios = [statistics.median(row.first_ratios), row.ratio, *row.thirds]
        print(
            f"{row.bits:4d} {row.side.label:16s}{' '.join(f'{x:8.2f}' for x in milliseconds)} "
            f"{' '.join(f'{x:7.3f}' for x in ratios)} {'' if goal is None else f'{goal:.2f}':>5s} "
            f"{'none' if row.differs is None else row.differs:>7}",
            flush=True,
        )
    return missed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--bits", nargs="+", type=int, choices=(4, 8, 32), default=[32, 4])
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of each side, over all its ranks"
    )
    parser.add_argument("--prompt", type=int, default=64, help="tokens in the prompt")
    parser.add_argument("--new", type=int, default=129, help="new tokens of a sequence")
    parser.add_argument("--turn", type=int, default=16, help="tokens in a turn")
    parser.add_argument("--rounds", type=int, default=3, help="sequences that each side generates")
    parser.add_argument("--genai", metavar="PYTHON", help="a Python that has onnxruntime-genai")
    parser.add_argument(
        "--models", type=Path, metavar="FOLDER", help="a folder that keeps the models"
    )
    parser.add_argument("--ort", action="append", default=[], metavar="KEY=VALUE")
    add_results(parser)
    found = parser.parse_args(arguments)
    if found.quick:
        found.rounds, found.prompt, found.new, found.turn = 1, 5, 193, 32
    if min(found.rounds, found.turn, found.threads) < 1 or found.prompt < 2:
        parser.error("--rounds, --turn, --threads: expected at least 1; --prompt: at least 2")
    if (found.new - 1) % found.turn or found.new <= found.turn:
        parser.error(f"--new: expected a multiple of {found.turn}, and 1, got {found.new}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked for."""
    options = parse(arguments)
    threads, size = options.threads, (QUICK if options.quick else SIZES)["vocab_size"]
    if options.genai is None:
        print("onnxruntime-genai: skipped, since --genai names no Python that has it")
    print(
        f"{conditions()}; prompt {options.prompt}, {options.new} new tokens, "
        f"{options.rounds} rounds\n"
        f"bits {'side':16s}{'first ms':>8s} {'each ms':>8s} {'cpu ms':>8s} {'first':>7s} "
        f"{'each':>7s} {'early':>7s} {'late':>7s}  goal differs",
        flush=True,
    )
    every: list[Row] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="onnxpar-bench-") as name:
        scratch = Path(name)
        for bits in options.bits:
            folder = (
                options.models or scratch
            ) / f"llama{'-quick' if options.quick else ''}-{bits}"
            export(folder, bits, options.quick)
            job = Job("", options.prompt, options.new, int(size), options=tuple(options.ort))
            plain = (replace(job, files=str(folder)), sys.executable)
            sides = {Side("onnxruntime", "plain", 1, threads): plain}
            for side in (Side("onnxpar", "one", 1, threads), Side("onnxpar", "tp", threads, 1)):
                out = scratch / f"{bits}-{side.ranks}"
                if not out.exists():
                    strategy = "dp" if side.ranks == 1 else f"tp={side.ranks}"
                    shard_model(folder / "model.onnx", strategy, out, devices=side.ranks)
                sides[side] = (replace(job, files=str(out)), sys.executable)
            if options.genai is not None:
                sides[Side("genai", "own", 1, threads)] = (plain[0], options.genai)
            rows = measure(sides, bits, options.rounds, options.turn, scratch)
            missed += tell(rows)
            every += rows
    return report_results(options, [asdict(row) for row in every], missed)


if __name__ == "__main__":
    sys.exit(main())
