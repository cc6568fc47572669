"""Compares a training, step by step, with the undivided one.

Both train on the same random batches for some steps, and their losses are compared. Optimizers such
as Adam amplify noise: an element of a parameter whose gradient is rounding noise may move in either
direction, and afterwards gradients differ by more than rounding. So the undivided program repeats
every step from the states of the ranks. Loss, gradients, moments and parameters of this step must
be equal except for rounding. So an error in a step is found in that step, and errors that add up
over steps are found in the losses.

If a gradient differs by more than sums in another order usually do, the undivided program runs with
parameters that are moved by rounding; the gradients may differ by twice as much more as its own
gradients then move (`onnxpar_runtime.training.limits.of_gradient`). They move if layers amplify
rounding, such as those that normalise over few elements, and if a gradient jumps (that of ReLU at
0) whose operand is rounding noise. The same holds for running statistics.

Both sides evaluate before the first step. Steps have one micro-batch, or the number for which a
pipeline was made. Even steps have one more, and clip the gradients to half of the last step's norm.
The bytes that the ranks count are compared with the formulas of the manifest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES
from onnxpar_format.manifest import TRANSIENT, StateEntry
from onnxpar_format.options import Settings, VerifyOptions
from onnxpar_runtime.errors import DirectoryError, TrainingError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.options import parse_pairs
from onnxpar_runtime.training import limits
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.training.hyper import Hyperparameters, hyperparameters
from onnxpar_runtime.training.programs import EVALUATION, OPTIMIZER, PAIRED, TRAINING
from onnxpar_runtime.training.results import StepResult
from onnxpar_runtime.verify.findings import (
    Findings,
    StepCase,
    TrainingCase,
    difference_of,
    greatest,
)
from onnxpar_runtime.verify.random_feeds import Draws
from onnxpar_runtime.verify.references import undivided_directory, undivided_fails

Array = NDArray[Any]
_SHAKES = 8
_SHAKE_ULPS = 8
LATER = 10
"""The factor by which the losses of two runs may differ more after the first step than in it.

After the first step the parameters differ, and so do all later values.
"""
RATES: Mapping[str, float] = {"sgd": 1e-2, "momentum": 1e-2, "adam": 1e-3, "adamw": 1e-3,
                              "lamb": 1e-3}  # fmt: skip
"""The default learning rate of each optimizer, as in practice."""
_DECAY = 1e-2


def undivided_training(manifest: Manifest, directory: str | Path) -> Manifest:
    """Returns the manifest of the undivided training; raises DirectoryError if it differs."""
    undivided = undivided_directory(directory)
    mine, its = manifest.trained(), undivided.trained()
    expected = {
        "optimizer": mine.optimizer,
        "loss": mine.loss.kind,
        **_parameters(mine.states),
    }
    got = {"optimizer": its.optimizer, "loss": its.loss.kind, **_parameters(its.states)}
    wrong = [what for what in {**expected, **got} if expected.get(what) != got.get(what)]
    if wrong:
        first = wrong[0]
        more = f" ({len(wrong) - 1} more differ)" if wrong[1:] else ""
        raise DirectoryError(
            f"undivided model: {first}: expected {expected.get(first, 'none')}, "
            f"got {got.get(first, 'none')}{more}"
        )
    return undivided


def _parameters(states: Mapping[str, StateEntry]) -> dict[str, str]:
    """Returns the parameters among the states, with type and shape as a text."""
    return {
        f"trained parameter {s.parameter!r}": f"{s.dtype}{list(s.shape)}"
        for s in states.values()
        if s.kind == "parameter"
    }


def compare_steps(
    manifest: Manifest,
    undivided: Manifest,
    draw: Draws,
    cases: Sequence[Mapping[str, int]],
    options: VerifyOptions,
) -> list[TrainingCase]:
    """Returns the comparison of an evaluation and of training steps at each case.

    Args:
        manifest: The training to compare.
        undivided: The same training, for one device.
        draw: Inputs and labels of each micro-batch.
        cases: Values of the symbols.
        options: What to compare and how strictly.

    Raises:
        OnnxparRuntimeError: Graphs cannot be loaded, or a rank fails.
    """
    kind = manifest.trained().optimizer
    # With these settings, all parts of the optimizer have an effect.
    settings = Settings(weight_decay=_DECAY, dampening=0.1 if kind == "momentum" else None)
    rate = RATES[kind] if options.lr is None else options.lr
    hyper = hyperparameters(kind, settings)
    # The limits are computed for unscaled gradients.
    scale = None if manifest.trained().compute is None else "1"
    start = partial(
        TrainerGroup, custom_ops=options.custom_ops, seed=options.seed, loss_scale=scale
    )
    with (
        start(manifest.directory, ort_options=parse_pairs(options.ort)) as ranks,
        start(undivided.directory) as one,
    ):
        return [Comparison(ranks, one, hyper, rate, options, values).run(draw) for values in cases]


@dataclass(frozen=True)
class _Work:
    """A step, and its loss in a run of the undivided program alone."""

    step: int
    batches: Sequence[Mapping[str, Array]]
    hyper: Mapping[str, float]
    loss: float


class Comparison:
    """The comparison of one case.

    Args:
        ranks: The partitioned program.
        one: The undivided program.
        hyper: The optimizer's scalars.
        rate: The learning rate.
        options: What to compare and how strictly.
        values: Values of the symbols.
    """

    def __init__(
        self,
        ranks: TrainerGroup,
        one: TrainerGroup,
        hyper: Hyperparameters,
        rate: float,
        options: VerifyOptions,
        values: Mapping[str, int],
    ) -> None:
        """Has found nothing yet."""
        self.ranks, self.one, self.hyper, self.rate = ranks, one, hyper, rate
        self.values = values
        self.states = ranks.manifest.trained().states
        self.found = Findings(options, ranks.manifest.trained().compute)

    def run(self, draw: Draws) -> TrainingCase:
        """Evaluates and trains on both sides, from the beginning."""
        for group in (self.ranks, self.one):
            group.reset()
        self._evaluate(draw.batch(self.values))
        count = self.found.options.steps or 1
        plan = self._alone([self._batches(draw, n) for n in range(1, count + 1)])
        steps: list[StepCase] = []
        for work in plan:
            found = self._step(work)
            if found is None:
                break
            steps.append(found)
        return TrainingCase(**vars(self.found.case(self.values)), steps=tuple(steps))

    # -- evaluation

    def _evaluate(self, batch: Mapping[str, Array]) -> None:
        expected = self.one.evaluate(batch, outputs=True)
        self.ranks.reset_counters()
        found = self.ranks.on_each(lambda trainer: trainer.evaluate(batch, outputs=True))
        self._sent({EVALUATION: 1})
        fit = {expected["correct"], *self._correct(batch, found[0]["outputs"] or {})}
        for rank, got in enumerate(found):
            if got["correct"] not in fit or got["count"] != expected["count"]:
                self.found.problems.append(
                    f"evaluation on rank {rank}: expected {expected['correct']} correct of "
                    f"{expected['count']}, got {got['correct']} of {got['count']}"
                )
                break
        losses = [got["loss"] for got in found]
        self._loss("evaluation", losses, expected["loss"], 1)
        wanted, have = expected["outputs"] or {}, found[0]["outputs"] or {}
        outputs = self.ranks.manifest.program(EVALUATION).outputs
        specs = [spec for spec in outputs if spec.name in wanted]
        self.found.outputs(specs, wanted, have, "evaluation: ")

    def _correct(self, batch: Mapping[str, Array], outputs: Mapping[str, Array]) -> set[int]:
        """Returns how many labels are the class of the greatest logit in the ranks' own outputs.

        If two logits of a sample are almost equal, rounding decides which of them is the greatest.
        The outputs themselves are compared within their tolerance.
        """
        loss = self.ranks.manifest.trained().loss
        if loss.labels is None:
            return set()
        labels = batch[loss.labels]
        counted = labels != loss.ignore_index
        return {
            int(((greatest(a) == labels) & counted).sum())
            for a in outputs.values()
            if a.ndim > 1 and a.shape[:-1] == labels.shape and a.shape[-1] > 0
        }

    def _sent(self, runs: Mapping[str, int]) -> None:
        each = {program: [self.values] * count for program, count in runs.items()}
        self.found.sent(each, self.ranks, f"{', '.join(runs)}: ")

    def _loss(
        self, where: str, losses: Sequence[float], expected: float, more: int
    ) -> tuple[float, float]:
        """Compares every rank's loss; returns the loss that differs most, and by how much."""
        dtype = next(s.dtype for s in self.ranks.manifest.program(TRAINING).outputs if not s.shape)
        got = max(losses, key=lambda loss: _apart(loss, expected))
        relative = _apart(got, expected) / abs(expected) if expected else _apart(got, expected)
        limit = self.found.rtol(dtype) * more * abs(expected) + self.found.options.atol
        # A loss near zero is the rest of terms of size one.
        limit += limits.NOISE_ULPS * float(np.finfo(DTYPES[dtype].dtype).eps)
        self.found.note("loss", _apart(got, expected), relative)
        if not _apart(got, expected) <= limit:
            self.found.problems.append(f"{where}: expected loss {expected:.9g}, got {got:.9g}")
        return got, relative

    # -- steps

    def _batches(self, draw: Draws, step: int) -> list[dict[str, Array]]:
        names = {s.name for s in self.ranks.manifest.program(TRAINING).inputs}
        pipeline = self.ranks.manifest.pipeline
        paired = PAIRED in self.ranks.manifest.programs
        count = 1 + paired if pipeline is None else pipeline.micro_batches
        batches = [draw.batch(self.values) for _ in range(count if step % 2 else count + 1)]
        return [{n: a for n, a in batch.items() if n in names} for batch in batches]

    def _alone(self, steps: Sequence[Sequence[Mapping[str, Array]]]) -> list["_Work"]:
        """Trains the undivided program from its initial states; returns the steps to compare."""
        plan: list[_Work] = []
        norm = inf
        for number, batches in enumerate(steps, 1):
            clip = {"clip_norm": inf if number % 2 else norm / 2}
            hyper = self.hyper.at(number, self.rate) | clip
            result = self._one_step(batches, hyper)
            norm = result.grad_norm
            plan.append(_Work(number, batches, hyper, result.loss))
        self.one.reset()
        return plan

    def _one_step(
        self, batches: Sequence[Mapping[str, Array]], hyper: Mapping[str, float]
    ) -> StepResult:
        try:
            return self.one.train_step(batches, hyper)
        except TrainingError as error:
            raise undivided_fails(self.values, error) from None

    def _step(self, work: "_Work") -> StepCase | None:
        """Runs a step on both sides from the ranks' states; returns None if the ranks cannot."""
        where, batches = f"step {work.step}", work.batches
        if work.step > 1:
            kept = [n for n, s in self.states.items() if s.kind not in TRANSIENT]
            self.one.load_states({name: self.ranks.gather(name) for name in kept})
        before = {name: self._of_one(name) for name in self._kind("parameter").values()}
        old = {name: self._of_one(name) for name in self._kind("statistic").values()}
        expected = self._one_step(batches, work.hyper)
        tensors = {p: self._tensor(p, before[name]) for p, name in self._kind("parameter").items()}
        running = {name: self._of_one(name) for name in self._kind("statistic").values()}
        self.ranks.reset_counters()
        try:
            results = self.ranks.on_each(lambda trainer: trainer.train_step(batches, work.hyper))
        except TrainingError as error:
            self.found.problems.append(f"{where}: expected loss {expected.loss:.9g}, got: {error}")
            return None
        pairs = len(batches) // 2 if PAIRED in self.ranks.manifest.programs else 0
        paired = {PAIRED: pairs} if pairs else {}
        self._sent({TRAINING: len(batches) - 2 * pairs, **paired, OPTIMIZER: 1})
        losses = [result.loss for result in results]
        self._loss(where, losses, expected.loss, 1)
        further = 1 if work.step == 1 else LATER
        loss, loss_rel = self._loss(f"{where} of a run", losses, work.loss, further)
        wanted = self._expected_gradients()
        noise, moved = self._noise(wanted), 0.0
        found = self._gradients(wanted)
        bounds = self._statistic_bounds(running)
        off = any(not difference <= noise[p] for p, (difference, _) in found.items())
        jumps: list[str] = []
        if off or not self._statistics_hold(running, bounds):
            moves = self._moves(work, before, old, wanted | running)
            bounds = {n: bound + 2 * moves[n][0] for n, bound in bounds.items()}
            if off:
                moved = sqrt(sum(moves[p][1] ** 2 for p in wanted))
                jumps = [p for p in wanted if moves[p][0] > noise[p]]
                noise = {p: bound + 2 * moves[p][0] for p, bound in noise.items()}
        self._norm(where, results, expected, 2 * moved)
        gradient_rel, gradient_worst = self._judge(where, wanted, noise, found)
        parameter_abs, share, worst = 0.0, 0.0, ""
        tiny = float(np.finfo(np.float64).tiny)
        for parameter, name in self._kind("parameter").items():
            allowed = noise[parameter]
            if isfinite(work.hyper["clip_norm"]):
                # The relative difference of the clipping factor is that of the norm: that of the
                # largest gradient, plus the movement of gradients that jump.
                size = float(np.abs(wanted[parameter]).max(initial=0.0))
                allowed = 2 * allowed + size * 2 * moved / max(expected.grad_norm, tiny)
            tensor, unit = tensors[parameter], _unit(self.states[name].dtype)
            kind = self.hyper.kind
            limit = limits.after_step(kind, allowed, tensor, work.hyper, work.step, unit)
            for state, difference, part in self._apart(where, parameter, tensor, limit):
                if state == name:
                    parameter_abs = max(parameter_abs, difference)
                if part > share:
                    share, worst = part, state
        for name, statistic in running.items():
            _, part = self._on_ranks(where, name, statistic, bounds[name])
            if part > share:
                share, worst = part, name
        self.found.max_abs = max(self.found.max_abs, parameter_abs)
        return StepCase(
            step=work.step,
            micro_batches=len(batches),
            loss=loss,
            loss_expected=work.loss,
            loss_rel=loss_rel,
            gradient_rel=gradient_rel,
            gradient_worst=gradient_worst,
            parameter_abs=parameter_abs,
            state_share=share,
            state_worst=worst,
            jumps=tuple(jumps),
        )

    def _kind(self, kind: str) -> dict[str, str]:
        return {s.parameter: n for n, s in self.states.items() if s.kind == kind}

    def _unit(self, state: StateEntry) -> float:
        """Returns the unit of rounding of the type in which a state is computed."""
        compute = self.ranks.manifest.trained().compute
        return max(_unit(state.dtype), _unit(compute or state.dtype))

    def _of_one(self, name: str) -> Array:
        return self.one.members[0].state(name).astype(np.float64)

    def _tensor(self, parameter: str, before: Array) -> limits.Tensor:
        names = {s.kind: n for n, s in self.states.items() if s.parameter == parameter}
        moments = [self._of_one(names[k]) if k in names else None for k in ("moment1", "moment2")]
        return limits.Tensor(before, self._of_one(names["parameter"]), *moments)

    def _norm(
        self, where: str, results: Sequence[StepResult], expected: StepResult, more: float
    ) -> None:
        manifest = self.ranks.manifest
        dtype = manifest.program(manifest.parts(OPTIMIZER)[0]).outputs[0].dtype
        limit = self.found.rtol(dtype) * expected.grad_norm + self.found.options.atol + more
        got = max((r.grad_norm for r in results), key=lambda n: _apart(n, expected.grad_norm))
        if not _apart(got, expected.grad_norm) <= limit:
            self.found.problems.append(
                f"{where}: expected a gradient norm of {expected.grad_norm:.9g}, got {got:.9g}"
            )

    def _expected_gradients(self) -> dict[str, Array]:
        return {p: self._of_one(n) for p, n in self._kind("gradient").items()}

    def _noise(self, wanted: Mapping[str, Array]) -> dict[str, float]:
        """Returns how much the elements of each parameter's gradient usually differ by rounding."""
        largest = max(float(np.abs(a).max(initial=0.0)) for a in wanted.values())
        noise = {}
        for parameter, name in self._kind("gradient").items():
            state = self.states[name]
            scale = float(np.abs(wanted[parameter]).max(initial=0.0))
            bound = limits.of_gradient(
                self.found.rtol(state.dtype), scale, largest, self._unit(state)
            )
            noise[parameter] = bound + self.found.options.atol
        return noise

    def _statistic_bounds(self, running: Mapping[str, Array]) -> dict[str, float]:
        """Returns how much running statistics may differ, without `atol`."""
        largest = max((float(np.abs(a).max(initial=0.0)) for a in running.values()), default=0.0)
        bounds = {}
        for name, array in running.items():
            state = self.states[name]
            scale = float(np.abs(array).max(initial=0.0))
            rtol = self.found.rtol(state.dtype)
            bounds[name] = limits.of_statistic(rtol, scale, largest, self._unit(state))
        return bounds

    def _statistics_hold(self, running: Mapping[str, Array], bounds: Mapping[str, float]) -> bool:
        """Whether all statistics are within their bounds, at least on the first replicas."""
        for name, expected in running.items():
            difference, _, same = difference_of(expected, self.ranks.gather(name))
            if not same or difference > bounds[name] + self.found.options.atol:
                return False
        return True

    def _gradients(self, wanted: Mapping[str, Array]) -> dict[str, tuple[float, bool]]:
        """Returns how much each parameter's gradient differs, and whether it is equally finite."""
        found = {}
        for parameter, name in self._kind("gradient").items():
            difference, _, same = difference_of(wanted[parameter], self.ranks.gather(name))
            found[parameter] = (difference, same)
        return found

    def _judge(
        self,
        where: str,
        wanted: Mapping[str, Array],
        noise: Mapping[str, float],
        found: Mapping[str, tuple[float, bool]],
    ) -> tuple[float, str]:
        """Compares differences with limits; returns the largest relative one and its parameter.

        A difference is relative to the magnitude at which the tolerance equals its limit.
        """
        top, worst = 0.0, ""
        for parameter, (difference, same) in found.items():
            name = self._kind("gradient")[parameter]
            rtol = self.found.rtol(self.states[name].dtype)
            scale = noise[parameter] / rtol if rtol else np.abs(wanted[parameter]).max(initial=0.0)
            relative = float(difference / scale) if scale else difference
            self.found.note(name, difference, relative)
            if relative > top:
                top, worst = relative, parameter
            if not same or difference > noise[parameter]:
                self.found.problems.append(
                    f"{where}: gradient of {parameter!r}: expected a difference of at most "
                    f"{noise[parameter]:.3g}, got {difference:.3g}"
                )
        return top, worst

    def _moves(
        self,
        work: "_Work",
        before: Mapping[str, Array],
        old: Mapping[str, Array],
        wanted: Mapping[str, Array],
    ) -> dict[str, tuple[float, float]]:
        """Returns how much gradients and statistics of the undivided program move with rounding.

        The parameters are moved by some units of rounding, several times. For the gradient of each
        parameter, and for each running statistic, the result has the largest movement of an element
        and the 2-norm of the movement.

        Args:
            work: The step.
            before: The parameters before it.
            old: The running statistics before it.
            wanted: Gradients by parameter, and running statistics, after it.
        """
        rng = np.random.default_rng(0)
        trainer = self.one.members[0]
        counters = dict(trainer.counters)
        moves = dict.fromkeys(wanted, (0.0, 0.0))
        for _ in range(_SHAKES):
            shaken = {}
            for name, array in before.items():
                size = _SHAKE_ULPS * self._unit(self.states[name])
                factor = 1 + size * rng.standard_normal(array.shape)
                shaken[name] = (array * factor).astype(trainer.state(name).dtype)
            same = {name: array.astype(trainer.state(name).dtype) for name, array in old.items()}
            self.one.load_states(shaken | same)
            trainer.counters["step"] = work.step - 1
            self._one_step(work.batches, work.hyper)
            reached = self._expected_gradients() | {name: self._of_one(name) for name in old}
            for key, array in reached.items():
                difference = array - wanted[key]
                largest = float(np.abs(difference).max(initial=0.0))
                length = float(np.linalg.norm(difference))
                moves[key] = (max(moves[key][0], largest), max(moves[key][1], length))
        trainer.counters |= counters
        return moves

    def _apart(
        self, where: str, parameter: str, tensor: limits.Tensor, limit: limits.Limits
    ) -> list[tuple[str, float, float]]:
        """Compares parameter and moments on every rank.

        Returns:
            Each state, its difference, and the difference divided by the limit.
        """
        wanted: dict[str, tuple[Array | None, Array | float]] = {
            "parameter": (tensor.after, limit.parameter),
            "moment1": (tensor.moment1, limit.moment1),
            "moment2": (tensor.moment2, limit.moment2),
        }
        found = []
        for name, state in self.states.items():
            if state.parameter != parameter or state.kind not in wanted:
                continue
            expected, bound = wanted[state.kind]
            assert expected is not None
            found.append((name, *self._on_ranks(where, name, expected, bound)))
        return found

    def _on_ranks(
        self, where: str, name: str, expected: Array, bound: Array | float
    ) -> tuple[float, float]:
        """Compares a state on every rank: returns the difference, and divided by its limit.

        A rank's elements are written to a copy of the reference, so that all replicas are compared.
        """
        allowed = np.broadcast_to(bound, expected.shape) + self.found.options.atol
        most, share = 0.0, 0.0
        for rank, member in enumerate(self.ranks.members):
            if not member.holds(name):
                continue
            got = expected.copy()
            member.sharding(name).put(got, member.state(name), rank)
            difference = np.abs(got - expected)
            # A limit of zero admits no difference.
            parts = difference / np.maximum(allowed, np.finfo(np.float64).tiny)
            most = max(most, float(difference.max(initial=0.0)))
            share = max(share, float(np.nan_to_num(parts, nan=inf).max(initial=0.0)))
            if not (difference <= allowed).all():
                at = np.unravel_index(int(np.nan_to_num(parts, nan=inf).argmax()), parts.shape)
                self.found.problems.append(
                    f"{where}: {self.states[name].kind} {name!r} on rank {rank}: element "
                    f"{[int(i) for i in at]}: expected {expected[at]:.9g} within "
                    f"{allowed[at]:.3g}, got {got[at]:.9g}"
                )
                break
        return most, share


def _apart(got: float, expected: float) -> float:
    """Returns the distance of two numbers; infinite if one is not finite."""
    difference = abs(got - expected)
    return difference if isfinite(difference) else inf


def _unit(dtype: str) -> float:
    """Returns the unit of rounding of a type."""
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[
        dtype
    ]
