"""Comparing what has been divided with the undivided program, as `onnxpar verify` does."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import ModelError, SymbolError
from onnxpar.core.symbols import Symbol
from onnxpar_runtime import verify as checks
from onnxpar_runtime.manifest import FILE_NAME, Manifest
from onnxpar_runtime.npz import read_npz
from onnxpar_runtime.options import parse_pairs
from onnxpar_runtime.training.verify_training import TrainingCase, TrainingSettings, verify_training
from onnxpar_runtime.verify import Case


def verify(
    directory: Path,
    model: Path,
    *,
    cases: Sequence[str] = (),
    inputs: Path | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float = 0.0,
    steps: int | None = None,
    lr: float | None = None,
    ort: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> list[Case] | list[TrainingCase]:
    """Compares the divided program with the undivided one, all ranks in this process.

    Artifacts for training are compared by training: losses, gradients and parameters.

    Args:
        directory: The artifact directory.
        model: The undivided model, or artifacts of it for one device.
        cases: Texts `batch=16,seq=8`, one case each; none means three default cases.
        inputs: `.npz` file of global inputs instead of random ones.
        seed: Seed of the random inputs.
        rtol: Tolerance relative to an output's largest magnitude, by dtype if None.
        atol: Absolute tolerance, added.
        steps: Steps of training, for artifacts for training; one if None.
        lr: Learning rate of these; None for one that suits the optimizer.
        ort: `key=value` options of onnxruntime for the ranks.
        custom_ops: Further custom-op libraries.

    Raises:
        SymbolError: A case is malformed.
        ModelError: Steps or a learning rate for artifacts that do not train.
        OnnxparError: The model cannot be cut for one device as the artifacts say.
        OnnxparRuntimeError: As `onnxpar_runtime.verify.verify` and
            `onnxpar_runtime.training.verify_training.verify_training`.
    """
    libraries = tuple(str(path) for path in custom_ops)
    parsed = [parse_case(text) for text in cases]
    feeds = None if inputs is None else read_npz(inputs)
    manifest = Manifest.load(directory)
    if manifest.training is not None:
        how = TrainingSettings(
            steps=1 if steps is None else steps,
            lr=lr,
            seed=seed,
            rtol=rtol,
            atol=atol,
            custom_ops=libraries,
            ort_options=parse_pairs(ort),
        )
        with _undivided(manifest, model) as whole:
            return verify_training(directory, whole, parsed, feeds, how)
    for option, number in (("--steps", steps), ("--lr", lr)):
        if number is not None:
            raise ModelError(f"{option}: expected artifacts for training, got {directory}")
    settings = checks.Settings(
        seed=seed, rtol=rtol, atol=atol, custom_ops=libraries, ort_options=parse_pairs(ort)
    )
    return checks.verify(directory, model, parsed, feeds, settings)


@contextmanager
def _undivided(manifest: Manifest, model: Path) -> Iterator[Path]:
    """Gives a directory with the same training for one device: the one given, or one made of it."""
    if (model / FILE_NAME).is_file():
        yield model
        return
    spec = TrainingSpec.of(manifest.trained().spec)
    with TemporaryDirectory(prefix="onnxpar-verify-") as folder:
        whole = Path(folder, "whole")
        shard_model(model, "replicate", whole, devices=1, symbols=_symbols(manifest), training=spec)
        yield whole


def _symbols(manifest: Manifest) -> dict[str, Symbol]:
    """The constraints of the artifacts; names that are one size share their symbol."""
    found: dict[str, Symbol] = {}
    for name, symbol in manifest.symbols.items():
        found[name] = (
            found[symbol.same_as]
            if symbol.same_as in found
            else Symbol(
                max=symbol.max,
                min=symbol.min,
                divisor=symbol.divisor,
                remainder=symbol.remainder,
                unique=symbol.unique,
                per_rank=symbol.per_rank,
            )
        )
    return found


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


def report_json(cases: Sequence[Case] | Sequence[TrainingCase]) -> str:
    """Returns the comparison as JSON: `{"ok", "cases": [{"symbols", "max_abs", …}]}`.

    Cases of training have `steps` as well, a list of what was found in each.
    """
    report = {"ok": all(case.ok for case in cases), "cases": [asdict(case) for case in cases]}
    return json.dumps(report, indent=2)
