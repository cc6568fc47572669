"""Compares a partitioned program with the undivided one, as `onnxpar verify` does."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.api.encoder_decoder import ENCODER
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import DirectoryError, SymbolError
from onnxpar.core.symbols import Symbol
from onnxpar.frontend.model_folder import given_model
from onnxpar.report.read_directory import read_report
from onnxpar_format.manifest import FILE_NAME
from onnxpar_format.new_file import check_file, new_file
from onnxpar_format.options import VerifyOptions
from onnxpar_format.texts import whole
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.npz import read_npz
from onnxpar_runtime.temporary import temporary_folder
from onnxpar_runtime.verify import bisect, compare
from onnxpar_runtime.verify.bisect import Bisection
from onnxpar_runtime.verify.findings import Case


def verify(
    directory: Path,
    model: Path,
    cases: Sequence[str] = (),
    inputs: Path | None = None,
    options: VerifyOptions | None = None,
    encoder: Path | None = None,
) -> list[Case]:
    """Compares the partitioned program with the undivided one, all ranks in this process.

    For a training directory, it compares losses, gradients and parameters.

    Args:
        directory: The directory.
        model: The undivided model (a file, or a model folder of onnxruntime-genai or Optimum),
            or its directory for one device.
        cases: Texts such as `batch=16,seq=8`, one for each case; by default three cases.
        inputs: `.npz` file of global inputs instead of random ones.
        options: What to compare and how strictly.
        encoder: The undivided encoder, if the model is the file of its decoder.

    Raises:
        SymbolError: A case is malformed.
        OnnxparError: The model cannot be partitioned for one device as the directory says.
        OnnxparRuntimeError: As `onnxpar_runtime.verify.compare.verify`.
    """
    parsed = [parse_case(text) for text in cases]
    feeds = _feeds(inputs)
    with _undivided(Manifest.load(directory), model, encoder) as undivided:
        return compare.verify(directory, undivided, parsed, feeds, options)


def first_difference(
    directory: Path,
    model: Path,
    case: str | Mapping[str, int] | None = None,
    inputs: Path | None = None,
    options: VerifyOptions | None = None,
) -> Bisection:
    """Finds the first node whose own result is wrong, in the order of the undivided graph.

    Args:
        directory: The directory.
        model: As for `verify`.
        case: Values of the symbols, or a text such as `batch=16,seq=8`; defaults where missing.
        inputs: As for `verify`; then there is no `case`.
        options: As for `verify`.

    Raises:
        OnnxparError: As `verify`, or the directory has no report of how it was sharded.
        OnnxparRuntimeError: As `verify`.
    """
    with _sides(directory, model, case, inputs, options) as sides:
        return bisect.bisect(sides)


def dump_values(
    directory: Path,
    model: Path,
    out: Path,
    nodes: Sequence[str] = (),
    case: str | Mapping[str, int] | None = None,
    inputs: Path | None = None,
    options: VerifyOptions | None = None,
) -> int:
    """Writes values of both programs as whole arrays to an `.npz` file; returns their number.

    Args:
        directory: The directory.
        model: As for `verify`.
        out: The file. It has `ranks/NAME` and `undivided/NAME` for each value NAME.
        nodes: Patterns of the nodes whose results are written; none for all nodes.
        case: As for `first_difference`.
        inputs: As for `first_difference`.
        options: As for `verify`.

    Raises:
        OnnxparError: As `first_difference`, or the file cannot be written.
        OnnxparRuntimeError: As `first_difference`, or a pattern matches no node.
    """
    check_file(out, DirectoryError)
    with _sides(directory, model, case, inputs, options) as sides:
        found = bisect.dump(sides, nodes)
    with new_file(out, DirectoryError) as file, file.open("wb") as stream:
        # numpy stores bfloat16 as raw bytes; every reader knows float32.
        arrays: dict[str, Any] = {
            name: array.astype(np.float32) if array.dtype.name == "bfloat16" else array
            for name, array in found.items()
        }
        np.savez(stream, **arrays)
    return len(found)


@contextmanager
def _sides(
    directory: Path,
    model: Path,
    case: str | Mapping[str, int] | None,
    inputs: Path | None,
    options: VerifyOptions | None,
) -> Iterator[bisect.Sides]:
    values = parse_case(case) if isinstance(case, str) else case or {}
    report, feeds = read_report(directory), _feeds(inputs)
    with one_device(Manifest.load(directory), model) as undivided:
        yield bisect.Sides(directory, undivided, report, values, feeds, options or VerifyOptions())


def _feeds(inputs: Path | None) -> dict[str, Any] | None:
    return None if inputs is None else read_npz(inputs)


@contextmanager
def _undivided(
    manifest: Manifest, model: Path, encoder: Path | None
) -> Iterator[Path | Mapping[str, Path]]:
    """Yields the model, or for training a directory for one device, which is made if needed."""
    if manifest.training is None and not (model / FILE_NAME).is_file():
        with temporary_folder("onnxpar-verify-") as folder:
            path, reader = given_model(model, encoder).files(folder)
            yield {"model": path} | ({ENCODER: reader} if reader else {})
        return
    with one_device(manifest, model) as made:
        yield made


@contextmanager
def one_device(manifest: Manifest, model: Path) -> Iterator[Path]:
    """Yields the same program's directory for one device, which is made if needed."""
    if (model / FILE_NAME).is_file():
        yield model
        return
    spec = None if manifest.training is None else TrainingSpec.of(manifest.training.spec)
    with temporary_folder("onnxpar-verify-") as folder:
        made = folder / "undivided"
        symbols = _symbols(manifest)
        # With the nodes of the model, so that a fault of what replaces them is seen.
        shard_model(
            model, "replicate", made, devices=1, symbols=symbols, training=spec, fuses=False
        )
        yield made


def _symbols(manifest: Manifest) -> dict[str, Symbol]:
    """Returns the directory's constraints; names that must have one size share their symbol."""
    found: dict[str, Symbol] = {}
    for name, symbol in manifest.symbols.items():
        found[name] = (
            found[symbol.same_as]
            if symbol.same_as in found
            else Symbol(**{f.name: getattr(symbol, f.name) for f in fields(Symbol)})
        )
    return found


def parse_case(text: str) -> Mapping[str, int]:
    """Returns the values of symbols in `batch=16,seq=8`.

    Raises:
        SymbolError: A part is not `name=integer`, or a name is given twice.
    """
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.rpartition("=")
        value = whole(number.strip())
        if not name.strip() or value is None:
            raise SymbolError(f"--symbol {text!r}: expected name=integer, got {part!r}")
        if name.strip() in values:
            raise SymbolError(f"--symbol {text!r}: {name.strip()!r} is given twice")
        values[name.strip()] = value
    return values


def report_json(cases: Sequence[Case], found: Bisection | None = None) -> str:
    """Returns the comparison as JSON: `{"ok", "cases": [{"symbols", "max_abs", …}]}`.

    Training cases also have `steps`, a list with the findings in each step.

    Args:
        cases: The comparison.
        found: Where the difference begins, which is the entry `bisect`, if it was asked for.
    """
    report = {"ok": all(case.ok for case in cases), "cases": [asdict(case) for case in cases]}
    if found is not None:
        report["bisect"] = asdict(found)
    return json.dumps(report, indent=2)
