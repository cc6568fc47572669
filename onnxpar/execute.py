"""The one seam from the transformer to the runtime: running and verifying what has been cut.

Importing this module loads onnxruntime and the collective library. So the commands import it when
they are called, and nothing else of `onnxpar` does.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from onnxpar.errors import SymbolError
from onnxpar_runtime import commands
from onnxpar_runtime import verify as checks
from onnxpar_runtime.data import read_npz
from onnxpar_runtime.options import parse_pairs
from onnxpar_runtime.verify import Case

__all__ = ["Case", "parse_case", "report_json", "run", "verify"]


def run(
    directory: Path,
    inputs: Path,
    outputs: Path,
    *,
    device: str = "auto",
    log_dir: Path | None = None,
    ort: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> int:
    """Runs this process's rank of an artifact directory once; returns the exit code.

    Args:
        directory: The artifact directory.
        inputs: `.npz` file of global arrays named as the inputs.
        outputs: `.npz` file to write.
        device: `auto`, `cpu` or `cuda`.
        log_dir: Folder for a log file of each rank, or None.
        ort: `key=value` options of onnxruntime.
        custom_ops: Further custom-op libraries.

    Raises:
        LaunchError: An option is malformed, or MPI cannot be used.
    """
    return commands.run(
        directory,
        inputs,
        outputs,
        device=device,
        log_dir=log_dir,
        ort_options=parse_pairs(ort),
        custom_ops=custom_ops,
    )


def verify(
    directory: Path,
    model: Path,
    *,
    cases: Sequence[str] = (),
    inputs: Path | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float = 0.0,
    ort: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> list[Case]:
    """Compares the divided program with the undivided one, all ranks in this process.

    Args:
        directory: The artifact directory.
        model: The undivided model, or artifacts of it for one device.
        cases: Texts `batch=16,seq=8`, one case each; none means three default cases.
        inputs: `.npz` file of global inputs instead of random ones.
        seed: Seed of the random inputs.
        rtol: Tolerance relative to an output's largest magnitude, by dtype if None.
        atol: Absolute tolerance, added.
        ort: `key=value` options of onnxruntime for the ranks.
        custom_ops: Further custom-op libraries.

    Raises:
        SymbolError: A case is malformed.
        OnnxparRuntimeError: As `onnxpar_runtime.verify.verify`.
    """
    settings = checks.Settings(
        seed=seed,
        rtol=rtol,
        atol=atol,
        custom_ops=tuple(str(path) for path in custom_ops),
        ort_options=parse_pairs(ort),
    )
    parsed = [parse_case(text) for text in cases]
    feeds = None if inputs is None else read_npz(inputs)
    return checks.verify(directory, model, parsed, feeds, settings)


def parse_case(text: str) -> Mapping[str, int]:
    """Returns the values of symbols in `batch=16,seq=8`.

    Raises:
        SymbolError: A part is not `name=integer`, or a name comes twice.
    """
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.rpartition("=")
        if not name.strip() or not number.strip().isdecimal():
            raise SymbolError(f"--symbol {text!r}: expected name=integer, got {part!r}")
        if name.strip() in values:
            raise SymbolError(f"--symbol {text!r}: {name.strip()!r} is given twice")
        values[name.strip()] = int(number)
    return values


def report_json(cases: Sequence[Case]) -> str:
    """Returns the comparison as JSON: `{"ok", "cases": [{"symbols", "max_abs", …}]}`."""
    report = {"ok": all(case.ok for case in cases), "cases": [asdict(case) for case in cases]}
    return json.dumps(report, indent=2)
