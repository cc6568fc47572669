"""Runs the micro-batches of a step: one after another on all ranks, or through stages."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.entries import SECOND, TensorEntry
from onnxpar_format.trace import OPTIMIZER as OPTIMIZER_SPAN
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.devices import Device
from onnxpar_runtime.errors import DirectoryError
from onnxpar_runtime.inputs import Feeds
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.pipeline.inbox import Inbox
from onnxpar_runtime.pipeline.work import FORWARD, Micro, VirtualStages
from onnxpar_runtime.run_values import (
    ACCUMULATE,
    ADDED,
    ALONE,
    FINISH_LATER,
    FIRST,
    START_AHEAD,
)
from onnxpar_runtime.training.programs import (
    CORRECT,
    EVALUATION,
    GRAD_NORM,
    LOSS,
    OPTIMIZER,
    PAIRED,
    TRAINING,
    Programs,
)

Array = NDArray[Any]
Counters = Mapping[str, int]
Run = tuple[Micro, ...]
"""A micro-batch, or two that take turns."""
_NOTHING = Feeds({}, {})


@dataclass(frozen=True)
class Found:
    """The results of an evaluation on a rank.

    Attributes:
        loss: Weighted loss, equal on all ranks.
        correct: Number of correct labels, equal on all ranks; None without classes.
        parts: Local arrays of the outputs that this rank has.
    """

    loss: float
    correct: int | None
    parts: Mapping[str, Array]


class Runner(ABC):
    """Runs the programs of a training directory on one rank. Every rank makes the same calls.

    Args:
        manifest: The manifest.
        rank: The rank.
        programs: The rank's programs, which are closed with the runner.
    """

    def __init__(self, manifest: Manifest, rank: Rank, programs: Programs) -> None:
        """Runs nothing yet."""
        self._manifest, self._rank, self._programs = manifest, rank, programs
        self._gradients = _Gradients(manifest, programs)
        # Whether no micro-batch has run since the last update.
        self._updated = False

    def stage(self, feeds: Feeds) -> Feeds:
        """Returns inputs of the training on their way to the device. Any thread may call it."""
        return feeds

    @property
    @abstractmethod
    def outputs(self) -> Mapping[TensorEntry, int]:
        """The outputs of the evaluation, and the stage that makes each."""

    @abstractmethod
    def load(self, program: str) -> None:
        """Loads a program unless it is loaded."""

    def forward_backward(
        self,
        micro_batches: Sequence[Micro],
        counters: Counters,
        *,
        accumulate: bool,
        read: bool,
        ahead: bool,
    ) -> float:
        """Runs micro-batches and leaves their gradients with the states.

        Args:
            micro_batches: At least one.
            counters: The counters of random numbers, except the number of the micro-batch.
            accumulate: Add to the gradients that are there, instead of replacing them.
            read: Whether the losses are wanted; otherwise a GPU is not waited for.
            ahead: Whether `update` comes next, so that reductions of gradients may start before.

        Returns:
            The sum of the weighted losses, on all ranks; not a number unless `read`.
        """
        if accumulate:
            self._make_partial()
        runs = self._runs(micro_batches)
        self._gradients.begin(len(runs), accumulate=accumulate, ahead=ahead)
        loss = self._loss(runs, counters, read=read)
        self._updated = False
        return loss

    def _runs(self, micro_batches: Sequence[Micro]) -> Sequence[Run]:
        """Divides the micro-batches of a step into runs of the training program."""
        return [(micro,) for micro in micro_batches]

    @abstractmethod
    def _loss(self, runs: Sequence[Run], counters: Counters, *, read: bool) -> float:
        """Runs micro-batches as `forward_backward`, after the step has begun."""

    def reduced(self, gradient: str, group: Sequence[int]) -> bool:
        """Whether the last step has replaced a gradient by its sum over a group."""
        if not self._gradients.ahead:
            return False
        collectives = self._manifest.program(self.optimizer()).collectives
        if not any(
            c.value == gradient and c.started_in and c.op == "AllReduce" for c in collectives
        ):
            return False
        # Between GPUs everything travels while they compute.
        return self._programs.loader.device is not Device.CPU or self._rank.overlaps(group)

    def _make_partial(self) -> None:
        """Makes partial values again of the gradients that the last step replaced by their sums.

        The first rank of each group keeps the sum, and the others have zero.
        """
        self._rank.settle()
        states = self._programs.states
        for name in states.of_kind("gradient").values():
            group = states.partial_group(name)
            if self.reduced(name, group) and self._rank.index != group[0]:
                states.clear(name)
        self._gradients.ahead = False

    @abstractmethod
    def optimizer(self) -> str:
        """Returns the name of this rank's optimizer program."""

    def update(self, counters: Counters, hyper: Mapping[str, float], *, read: bool) -> float:
        """Updates the parameters.

        Returns:
            The 2-norm of all gradients together; not a number unless `read`.
        """
        program = self._programs.load(self.optimizer())
        if self._updated:
            # No training program has finished what the last update left running.
            self._make_partial()
        numbers = {**hyper, FINISH_LATER: self._gradients.ahead}
        self._updated = True
        with self._rank.timeline.span(OPTIMIZER_SPAN, self.optimizer()):
            outputs = program.run(_NOTHING, counters, numbers, read=read)
        return float(outputs[GRAD_NORM].item()) if read else nan

    def evaluate(self, micro_batch: Micro, counters: Counters) -> Found:
        """Runs the evaluation."""
        # Only the training program waits itself for gathers that the last update left running.
        self._rank.settle()
        return self._evaluate(micro_batch, counters)

    @abstractmethod
    def _evaluate(self, micro_batch: Micro, counters: Counters) -> Found:
        """Runs the evaluation; nothing runs in the background."""

    def even_bubble(self) -> float | None:
        """Returns the share of the last step in which stages would be idle, if equally fast.

        None without stages.
        """
        return None

    def close(self) -> None:
        """Frees the programs, and ends threads of the runner."""
        self._programs.close()


def runner(manifest: Manifest, rank: Rank, programs: Programs) -> Runner:
    """Returns the runner of a directory's programs.

    Args:
        manifest: The manifest.
        rank: The rank.
        programs: The rank's programs.
    """
    if manifest.pipeline is None:
        return OneStage(manifest, rank, programs)
    return Pipelined(manifest, rank, programs)


class OneStage(Runner):
    """Micro-batches one after another, each through the complete program."""

    @property
    def outputs(self) -> Mapping[TensorEntry, int]:
        """As `Runner`."""
        return dict.fromkeys(self._manifest.program(EVALUATION).outputs, 0)

    def stage(self, feeds: Feeds) -> Feeds:
        """As `Runner`."""
        program = self._programs.loaded(TRAINING)
        return feeds if program is None else program.stage(feeds)

    def load(self, program: str) -> None:
        """As `Runner`."""
        self._programs.load(program)

    def _runs(self, micro_batches: Sequence[Micro]) -> Sequence[Run]:
        """As `Runner`; two micro-batches of one size take turns if there is a program for it."""
        runs: list[Run] = []
        paired = PAIRED in self._manifest.programs
        for micro in micro_batches:
            last = runs[-1] if runs else ()
            if paired and len(last) == 1 and last[0].feeds.values == micro.feeds.values:
                runs[-1] = (*last, micro)
            else:
                runs.append((micro,))
        return runs

    def _loss(self, runs: Sequence[Run], counters: Counters, *, read: bool) -> float:
        """As `Runner`."""
        loss = 0.0
        for index, (micro, *others) in enumerate(runs):
            name = PAIRED if others else TRAINING
            feeds, now = micro.feeds, {**counters, "micro_batch": micro.number}
            numbers = {**micro.numbers, **self._gradients.numbers(name, index)}
            for other in others:
                second = {f"{SECOND}{n}": array for n, array in other.feeds.local.items()}
                feeds = Feeds(feeds.values, {**feeds.local, **second})
                now[f"{SECOND}micro_batch"] = other.number
                numbers |= {f"{SECOND}{n}": number for n, number in other.numbers.items()}
            outputs = self._programs.load(name).run(feeds, now, numbers, read=read)
            loss += float(outputs[LOSS].item()) if read else nan
        return loss

    def optimizer(self) -> str:
        """As `Runner`."""
        return OPTIMIZER

    def _evaluate(self, micro_batch: Micro, counters: Counters) -> Found:
        """As `Runner`."""
        program = self._programs.load(EVALUATION)
        parts = program.run(micro_batch.feeds, counters, micro_batch.numbers)
        correct = int(parts[CORRECT].item()) if CORRECT in parts else None
        return Found(float(parts[LOSS].item()), correct, parts)


class Pipelined(Runner):
    """Micro-batches through the stages of a pipeline, in the order of its schedule."""

    def __init__(self, manifest: Manifest, rank: Rank, programs: Programs) -> None:
        """Runs nothing yet."""
        super().__init__(manifest, rank, programs)
        assert manifest.pipeline is not None
        self._pipeline = manifest.pipeline
        self._stage = manifest.stage_of(rank.index)
        self._inbox = Inbox(rank)
        self._stages: dict[str, VirtualStages] = {}

    def load(self, program: str) -> None:
        """As `Runner`."""
        if program in self._pipeline.updates:
            for name in self._updates(program):
                self._programs.load(name)
        else:
            self._through(program)

    def _updates(self, program: str) -> tuple[str, ...]:
        """Returns this stage's parts of a program that works on states alone."""
        return self._pipeline.updates[program][self._stage :: self._pipeline.stages]

    def _through(self, program: str) -> VirtualStages:
        """Returns this stage's parts of a program that runs through the stages."""
        if program not in self._stages:
            self._stages[program] = VirtualStages(
                self._manifest, program, self._rank, self._programs.load, self._inbox
            )
        return self._stages[program]

    @property
    def outputs(self) -> Mapping[TensorEntry, int]:
        """As `Runner`."""
        return self._through(EVALUATION).made

    def _loss(self, runs: Sequence[Run], counters: Counters, *, read: bool) -> float:
        """As `Runner`."""
        micro_batches = [micro for run in runs for micro in run]
        found = self._through(TRAINING).run(
            self._pipeline.schedule, micro_batches, counters, self._gradients
        )
        if not read:
            return nan
        loss = sum(float(outputs[LOSS].item()) for outputs in found if LOSS in outputs)
        return self._on_all_ranks(TRAINING, {LOSS: loss})[LOSS]

    def _on_all_ranks(self, program: str, numbers: Mapping[str, float]) -> dict[str, float]:
        """Returns numbers from the stages that make them, on all ranks.

        Args:
            program: The program whose outputs they are.
            numbers: This rank's numbers, by output; those that its stage does not make are ignored.
        """
        # The first rank of the stage that makes a number sends it, and all others add zero.
        stages = {spec.name: stage for spec, stage in self._through(program).made.items()}
        first = self._manifest.stage_devices
        own = [n if self._rank.index == stages[k] * first else 0.0 for k, n in numbers.items()]
        found = self._rank.all_reduce(np.array(own, np.float64))
        return {name: float(number) for name, number in zip(numbers, found, strict=True)}

    def optimizer(self) -> str:
        """As `Runner`."""
        (name,) = self._updates(OPTIMIZER)
        return name

    def _evaluate(self, micro_batch: Micro, counters: Counters) -> Found:
        """As `Runner`."""
        micro = micro_batch._replace(number=counters["micro_batch"])
        (parts,) = self._through(EVALUATION).run(FORWARD, [micro], counters)
        names = [spec.name for spec in self.outputs if spec.name in (LOSS, CORRECT)]
        numbers = {n: float(parts[n].item()) if n in parts else 0.0 for n in names}
        found = self._on_all_ranks(EVALUATION, numbers)
        return Found(found[LOSS], int(found[CORRECT]) if CORRECT in found else None, parts)

    def even_bubble(self) -> float | None:
        """As `Runner`."""
        return self._through(TRAINING).even_bubble(self._pipeline.schedule, self._gradients.count)

    def close(self) -> None:
        """As `Runner`."""
        self._inbox.close()
        super().close()


class _Gradients:
    """Where a step's gradients are, and what programs do with them; as `pipeline.work.Numbers`.

    The program of a step's only micro-batch writes its gradients to their states. Those of several
    add them up there. Schedules differentiate the micro-batches of a virtual stage in ascending
    order, as one device does.

    Attributes:
        count: Number of runs in the last step, of one micro-batch or of two.
        ahead: Whether reductions could start ahead in the last step, so that sums have replaced
            gradients.
    """

    def __init__(self, manifest: Manifest, programs: Programs) -> None:
        self._manifest, self._programs = manifest, programs
        self._sums = set(manifest.trained().sums.values())
        # The gradients that each program makes.
        self._own: dict[str, tuple[str, ...]] = {}
        self.count = 0
        self._begun: set[str] = set()
        self.ahead = False

    def begin(self, count: int, *, accumulate: bool, ahead: bool) -> None:
        """Begins a step of some runs; the other arguments are those of `forward_backward`."""
        self.count = count
        # The gradients that earlier runs have made.
        self._begun = set(self._sums) if accumulate else set()
        # A captured step cannot leave work behind on another stream.
        self.ahead = ahead and not accumulate and not self._programs.loader.graphs

    def numbers(self, program: str, index: int) -> Mapping[str, float]:
        """As `Numbers`."""
        states, last = self._programs.states, index == self.count - 1
        if program not in self._own:
            made = [o.state for o in self._manifest.program(program).state_outputs]
            self._own[program] = tuple(s for s in made if states[s].kind == "gradient")
        own = self._own[program]
        if not own:
            return {}
        added = not self._begun.isdisjoint(own)
        if added or not last:
            self._require_sums(program, own)
        for name in own if added else ():
            # Only where virtual stages of this rank share a parameter.
            if name not in self._begun:
                states.clear(name)
        self._begun.update(own)
        mode = ADDED if added else ALONE if last else FIRST
        return {ACCUMULATE: mode, START_AHEAD: last and self.ahead}

    def _require_sums(self, program: str, gradients: Sequence[str]) -> None:
        """Raises DirectoryError unless a program adds up these gradients."""
        manifest = self._manifest
        states = self._programs.states
        absent = sorted(states[name].parameter for name in gradients if name not in self._sums)
        if absent:
            raise DirectoryError(
                f"{manifest.directory}: no micro_gradient state for the parameters {absent}"
            )
        if not any(s.kind == ACCUMULATE for s in manifest.program(program).system_inputs):
            raise DirectoryError(
                f"{manifest.directory}: {program} does not add up the gradients of micro-batches; "
                "another version of onnxpar wrote it: shard the model again"
            )
