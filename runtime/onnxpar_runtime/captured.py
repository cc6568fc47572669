"""Which runs of a program can be captured as CUDA graphs: the host repeats its work in them."""

from collections.abc import Collection

from onnxpar_format.entries import ProgramEntry
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.run_values import ACCUMULATE, FINISH_LATER, START_AHEAD

FIXED = (START_AHEAD, FINISH_LATER, ACCUMULATE)
"""Kinds of numbers of a run that are the same whenever a captured run is repeated."""


def obstacle(manifest: Manifest, program: ProgramEntry) -> str | None:
    """Returns why runs with the same shapes cannot be captured; None if they may be.

    A CUDA graph does not replay the host's work, which differs if the program has counters, as for
    random numbers. All ranks must capture in the same step, so sizes must be equal on all ranks.
    During a capture no other thread may allocate GPU memory, but a stage of a pipeline may receive
    values at any time.
    """
    if any(not state.appends for state in program.carried):
        return "each run writes its states anew"
    if any(symbol.per_rank for symbol in manifest.symbols.values()):
        return "the ranks may have different sizes"
    if manifest.pipeline is not None:
        return "stages of a pipeline receive values at any time"
    if any(entry.counter is not None for entry in program.system_inputs):
        return "its random numbers are different in each run"
    return None


def read_anew(program: ProgramEntry, on_host: Collection[str]) -> bool:
    """Whether kernels read, in host memory, values that may differ between runs.

    Args:
        program: The program.
        on_host: The inputs that they read in host memory.
    """
    changing = {
        entry.name
        for entry in program.system_inputs
        if entry.symbol is None and entry.atom is None and entry.kind not in FIXED
    }
    changing |= {spec.name for spec in program.inputs}
    return not changing.isdisjoint(on_host)
