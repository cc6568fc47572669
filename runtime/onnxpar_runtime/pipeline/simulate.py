"""The time of a program, and the share in which ranks are idle, for given times of its steps."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.schedule import Action, Kind, PlayedSchedule
from onnxpar_runtime.pipeline.timeline import require_end, timeline
from onnxpar_runtime.pipeline.transfers import rendezvous


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one micro-batch in each virtual stage, in any unit.

    Attributes:
        forward: Times of the forward.
        backward: Times of an unsplit backward.
        backward_input: Times of the inputs' part of a split backward.
        backward_weight: Times of its weights' part.
        transfer: Times of a transfer that the virtual stage sends, after both ranks have posted it.
            Transfers do not slow each other down.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    transfer: Sequence[float]

    @staticmethod
    def equal(
        virtual_stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        transfer: float = 0.0,
    ) -> "Times":
        """Returns the same times for all virtual stages; an unsplit backward takes both parts."""
        return Times(
            (forward,) * virtual_stages,
            (backward_input + backward_weight,) * virtual_stages,
            (backward_input,) * virtual_stages,
            (backward_weight,) * virtual_stages,
            (transfer,) * virtual_stages,
        )

    def of(self, kind: Kind, virtual_stage: int) -> float:
        """Returns the time of one computation."""
        times = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]
        return times[virtual_stage]


@dataclass(frozen=True, slots=True)
class Simulation:
    """The times of a program.

    Attributes:
        makespan: Time from the beginning to the end of the last computation of all ranks.
        busy: For each rank the time in which it computes.
        starts: For each rank the times at which its computations begin, as in the schedule.
        ends: The times at which they end.
    """

    makespan: float
    busy: tuple[float, ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank the share of the makespan in which it is idle, from 0 to 1.

        With equal times it is (p - 1)/(m + p - 1) for GPipe and 1F1B.
        """
        return tuple(1 - busy / self.makespan for busy in self.busy)


def simulate(program: PlayedSchedule, times: Times) -> Simulation:
    """Returns when a program's computations run, each as early as possible.

    Raises:
        ScheduleError: There are not as many times as virtual stages, or the program deadlocks.
    """
    schedule = program.schedule
    for field in fields(times):
        count = len(getattr(times, field.name))
        if count != schedule.virtual_stages:
            raise ScheduleError(
                f"times of {field.name}: expected {schedule.virtual_stages}, one for each virtual"
                f" stage, got {count}"
            )
    durations = [
        [
            times.of(step.kind, schedule.virtual_stage(rank, step.chunk))
            if isinstance(step, Action)
            else 0.0
            for step in steps
        ]
        for rank, steps in enumerate(program.ranks)
    ]
    needs = rendezvous(program, lambda message: times.transfer[message.source])
    result = timeline(durations, needs)
    require_end(schedule.name, program.ranks, needs, result)
    starts, ends = (
        tuple(
            tuple(time for time, step in zip(row, steps, strict=True) if isinstance(step, Action))
            for row, steps in zip(rows, program.ranks, strict=True)
        )
        for rows in (result.starts, result.ends)
    )
    return Simulation(
        max(row[-1] for row in ends), tuple(sum(row) for row in durations), starts, ends
    )


def even_bubble(program: PlayedSchedule) -> float:
    """Returns the bubble if all stages take the same time, and transfers take none.

    A backward takes twice as long as a forward, half of it for the parameters' gradients.
    """
    simulation = simulate(program, Times.equal(program.schedule.virtual_stages))
    return float(np.mean(simulation.bubbles))
