"""Pipeline schedules as data: made, joined with their transfers, checked and simulated."""

from onnxpar_runtime.pipeline.check import check
from onnxpar_runtime.pipeline.peaks import activation_peaks
from onnxpar_runtime.pipeline.render import render
from onnxpar_runtime.pipeline.schedule import (
    Action,
    Edge,
    Kind,
    Message,
    Payload,
    PlayedSchedule,
    Point,
    Schedule,
    Step,
    Transfer,
)
from onnxpar_runtime.pipeline.schedule_kinds import SCHEDULES, make
from onnxpar_runtime.pipeline.simulate import Simulation, Times, simulate
from onnxpar_runtime.pipeline.transfers import chain, with_transfers

__all__ = [
    "SCHEDULES",
    "Action",
    "Edge",
    "Kind",
    "Message",
    "Payload",
    "PlayedSchedule",
    "Point",
    "Schedule",
    "Simulation",
    "Step",
    "Times",
    "Transfer",
    "activation_peaks",
    "chain",
    "check",
    "make",
    "render",
    "simulate",
    "with_transfers",
]
