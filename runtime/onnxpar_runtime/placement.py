"""Tells an mpirun on which machine each rank runs, so that the fewest bytes leave a machine."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from onnxpar_format.manifest import ManifestContents
from onnxpar_format.texts import bytes_text
from onnxpar_runtime.hosts import hosts_of, slots_of
from onnxpar_runtime.launch import is_open_mpi, mpirun_environment
from onnxpar_runtime.machine_layout import Layout, lay_out

_MAPPING = (
    "map-by", "rank-by", "rankfile", "rf", "npernode", "pernode", "N", "bynode", "byslot",
    "nolocal", "rankmap", "ppn", "rr",
)  # fmt: skip
"""Options of Open MPI, and of MPICH, with which a user places ranks."""


def placed(
    mpirun: str, options: Sequence[str], manifest: ManifestContents, folder: Path
) -> tuple[list[str], str]:
    """Returns options of mpirun that place the ranks of a directory, and a notice of it.

    The options are returned as they are, with an empty notice, if they do not say how many ranks
    each machine takes, if they already place ranks, or if no other placement sends less.

    Args:
        mpirun: The program.
        options: Options that name machines.
        manifest: The manifest of the directory.
        folder: Where Open MPI's file of the machines of ranks is written.
    """
    open_mpi = is_open_mpi(mpirun)
    slots = slots_of(options, open_mpi)
    names = {option.lstrip("-").partition("=")[0] for option in options if option[:1] == "-"}
    layout = None if names.intersection(_MAPPING) else lay_out(manifest, list(slots.values()))
    if layout is None or not (open_mpi or _maps_ranks(mpirun)):
        return list(options), ""
    if not open_mpi:
        # A file with a line for each rank would make a machine of each line.
        return [*options, "-rankmap", ",".join(map(str, layout.machines))], _notice(layout)
    machines = list(slots)
    lines = [f"{machines[number]}\n" for number in layout.machines]
    file = folder / "ranks"
    file.write_text("".join(lines), encoding="utf-8")
    others = hosts_of(options).others
    return [*others, "--hostfile", str(file), "--map-by", "seq"], _notice(layout)


def _maps_ranks(mpirun: str) -> bool:
    """Whether an mpirun of MPICH's family can place each rank; those before MPICH 4.1 cannot."""
    done = subprocess.run(
        [mpirun, "--help"], env=mpirun_environment(), capture_output=True, check=False
    )
    return b"-rankmap" in done.stdout


def _notice(layout: Layout) -> str:
    order = ",".join(f"{name}={size}" for name, size in layout.axes)
    assumed = "" if layout.assumed is None else f", with {layout.assumed} for each symbol"
    total, leaving = bytes_text(layout.total), bytes_text(layout.leaving)
    return (
        f"the mesh axes are laid onto machines in the order {order}: of the {total} that a rank "
        f"sends in collectives, {leaving} leave its machine, and with consecutive ranks "
        f"{bytes_text(layout.consecutive)} would{assumed} (--keep-placement)"
    )
