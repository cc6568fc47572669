"""Compares programs: chooses values of the symbols, draws inputs, runs both programs, reports.

Forward programs are compared by their outputs, training as `training_steps` describes. The bytes
that the ranks count in their collectives are compared with the formulas of the manifest.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from onnxpar_format.manifest import FILE_NAME
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.group import ThreadsGroup
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.options import parse_pairs
from onnxpar_runtime.training.programs import EVALUATION
from onnxpar_runtime.verify.cases import Array, chosen_cases, symbols_of
from onnxpar_runtime.verify.findings import Case, Findings
from onnxpar_runtime.verify.generation import verify_generation
from onnxpar_runtime.verify.random_feeds import Draws, GivenFeeds, RandomFeeds
from onnxpar_runtime.verify.references import (
    Reference,
    Undivided,
    open_reference,
    reference_run,
    undivided_path,
)
from onnxpar_runtime.verify.training_batches import RandomBatches
from onnxpar_runtime.verify.training_steps import compare_steps, undivided_training

FORWARD = "model"


def verify(
    directory: str | Path,
    model: str | Undivided,
    cases: Sequence[Mapping[str, int]] = (),
    feeds: Mapping[str, Array] | None = None,
    options: VerifyOptions | None = None,
) -> list[Case]:
    """Returns the comparison at each case; for training each is a `TrainingCase`.

    Args:
        directory: The directory.
        model: The undivided ONNX model, that of each program, or a directory for one device; for
            training, such a directory.
        cases: Values of symbols; missing symbols get a default. Without cases there are three: an
            even one, an uneven one and the smallest, if the constraints allow them.
        feeds: The inputs of every batch (in training also labels), instead of random ones. Then
            there is one case, and `cases` must be empty.
        options: What to compare and how strictly.

    Raises:
        OnnxparRuntimeError: Directory or model cannot be loaded, were changed or do not belong
            together; a case names an unknown symbol or violates a constraint; steps or a learning
            rate are given for a forward program; or a rank fails.
    """
    options = options or VerifyOptions()
    models: Undivided = model if isinstance(model, Mapping) else {FORWARD: Path(model)}
    if not isinstance(model, Mapping) and (Path(model) / FILE_NAME).is_file():
        models = Path(model)
    manifest = Manifest.load(directory)
    manifest.verify_files()
    trains = manifest.training is not None
    program = manifest.program(EVALUATION if trains else FORWARD)
    draw: Draws
    if trains:
        if options.generate is not None:
            raise InputError(
                f"--generate: expected a forward program, got {directory}, made for training"
            )
        values, given = chosen_cases(manifest, program, cases, feeds)
        undivided = undivided_training(manifest, undivided_path(models, FORWARD))
        draw = (
            RandomBatches(undivided, values, options.seed, options.custom_ops)
            if given is None
            else GivenFeeds(given)
        )
        return list(compare_steps(manifest, undivided, draw, values, options))
    if options.generate is not None:
        if cases or feeds is not None:
            raise InputError(
                "--generate draws its own prompts: expected neither --symbol nor --inputs"
            )
        return verify_generation(directory, models, options.generate, options)
    values, given = chosen_cases(manifest, program, cases, feeds)
    for option, number in (("--steps", options.steps), ("--lr", options.lr)):
        if number is not None:
            raise InputError(f"{option}: expected a training directory, got {directory}")
    found = _compared(manifest, FORWARD, models, values, given, options)
    if feeds is None:
        for name in {pair.source: None for pair in program.supplied}:
            source = manifest.program(name)
            known = symbols_of(manifest, source)
            own = [{n: size for n, size in case.items() if n in known} for case in cases]
            values, _ = chosen_cases(manifest, source, own, None)
            found += _compared(manifest, name, models, values, None, options)
    return found


def _compared(
    manifest: Manifest,
    name: str,
    models: Undivided,
    values: Sequence[Mapping[str, int]],
    given: Mapping[str, Array] | None,
    options: VerifyOptions,
) -> list[Case]:
    """Returns the comparison of a forward program at each case."""
    program = manifest.program(name)
    draw: Draws
    with closing(open_reference(models, manifest, name, options.custom_ops)) as reference:
        draw = (
            RandomFeeds(reference, program, values, options.seed)
            if given is None
            else GivenFeeds(given)
        )
        with ThreadsGroup(
            manifest.directory,
            program=name,
            ort_options=parse_pairs(options.ort),
            custom_ops=options.custom_ops,
        ) as ranks:
            return [_compare(name, ranks, reference, draw, case, options) for case in values]


def _compare(
    name: str,
    ranks: ThreadsGroup,
    reference: Reference,
    draw: Draws,
    values: Mapping[str, int],
    options: VerifyOptions,
) -> Case:
    feeds = draw.batch(values)
    expected = reference_run(reference, feeds, values)
    ranks.reset_counters()
    found, where = Findings(options), "" if name == FORWARD else f"program {name!r}: "
    found.outputs(ranks.manifest.program(name).outputs, expected, ranks.run_global(feeds), where)
    found.sent({name: [values]}, ranks, where)
    return found.case(values)
