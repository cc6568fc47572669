"""One rank of a training run: steps over micro-batches, evaluation, access to the states.

`onnxpar_runtime.training.loop` has a loop over epochs. A loop of one's own looks like this:

    rank = init()
    trainer = Trainer("out", rank=rank)  # a StepTrainer with further methods
    for batch in batches:
        loss = trainer.forward_backward(batch)
        norm = trainer.step({"lr": 0.1, "clip_norm": inf, ...})
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding
from onnxpar_format.dtypes import DTYPES, lossless
from onnxpar_format.entries import COUNTERS
from onnxpar_format.manifest import FROM_FILES, StateEntry, Training
from onnxpar_format.trace import EVALUATION as EVALUATION_SPAN
from onnxpar_format.trace import INPUT, STEP
from onnxpar_runtime.agree import agree, together
from onnxpar_runtime.devices import Device
from onnxpar_runtime.errors import InputError, LaunchError, OnnxparRuntimeError, TrainingError
from onnxpar_runtime.gather import gather_to_root, join_outputs
from onnxpar_runtime.inputs import Inputs
from onnxpar_runtime.memory import peak_bytes
from onnxpar_runtime.opened import Opened, Opening
from onnxpar_runtime.pipeline.work import Micro
from onnxpar_runtime.run_values import LOSS_WEIGHT
from onnxpar_runtime.session import common_symbols
from onnxpar_runtime.training.amounts import Amounts
from onnxpar_runtime.training.counts import Prepared, prepare
from onnxpar_runtime.training.loss_scale import LossScale
from onnxpar_runtime.training.loss_scale import loss_scale as chosen_scale
from onnxpar_runtime.training.programs import (
    CORRECT,
    EVALUATION,
    LOSS,
    OPTIMIZER,
    TRAINING,
    Programs,
    hyperparameters_read,
)
from onnxpar_runtime.training.results import Evaluation, StepResult
from onnxpar_runtime.training.runner import Runner, runner
from onnxpar_runtime.training.sources import Batch, data_rank
from onnxpar_runtime.training.state import States
from onnxpar_runtime.without_padding import Values

Array = NDArray[Any]
INVERSE_SCALE = "loss_scale_inverse"


@dataclass(frozen=True)
class _Open:
    """The resources of a trainer until it is closed."""

    programs: Programs
    runner: Runner
    inputs: Mapping[str, Inputs]


class StepTrainer(Opened):
    """One rank of a directory that was made for training.

    Args:
        directory: The directory.
        seed: Seed of the random numbers that the model draws.
        programs: The programs to load now; others are loaded when they are first needed.
        measured: As `Session`.
        loss_scale: `dynamic` or a number, if the directory computes in 16 bits; see
            `onnxpar_runtime.training.loss_scale`.
        overlap: Whether communication may run in the background of computation. The same on all
            ranks; it changes no result.
        opening: How to open the directory, see `Opening`.

    Attributes:
        training: What the manifest says about training.
        counters: The keys of random numbers: `seed`; `step`, the number of optimizer steps that are
            done; `micro_batch`, the number of the micro-batch in its step. They must be equal on
            all ranks.
        loss_scale: The factor of the loss in the graph. The gradients among the states are scaled
            by it; losses and norms that are returned are not.
        gradient_scale: The loss scale of the last step: the loss scale itself may have changed.

    Raises:
        DirectoryError: The directory is incomplete or not for training, or onnxruntime refuses a
            graph.
        LaunchError: The world does not have as many ranks as the directory has devices, or the
            device or an option cannot be used.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        seed: int = 0,
        programs: Sequence[str] = (TRAINING, OPTIMIZER, EVALUATION),
        measured: bool = False,
        loss_scale: str | None = None,
        overlap: bool = True,
        **opening: Unpack[Opening],
    ) -> None:
        """Loads the rank's graphs."""
        super().__init__(directory, measured, **opening)
        # What still runs in the background cannot be looked at.
        overlap = overlap and self._loader.watch is None
        self._overlap = overlap
        self.training: Training = self.manifest.trained()
        self._amounts = Amounts.of(self.manifest)
        self.gradient_scale = 1.0
        self.loss_scale: LossScale = chosen_scale(loss_scale, self.training.compute)
        self.rank.allow_background(overlap)
        loaded = Programs(self.manifest, self._loader)
        if self.training.compute == "bfloat16" and self.device is Device.CPU:
            raise LaunchError(
                f"{self.manifest.directory}: computes in bfloat16, but onnxruntime has no CPU "
                "kernels for it; run it on CUDA, or shard the model with --compute float16"
            )
        running = runner(self.manifest, self.rank, loaded)
        for name in programs:
            running.load(name)
        inputs = {
            name: Inputs(self.manifest, name, self.rank.index) for name in (TRAINING, EVALUATION)
        }
        self._open: _Open | None = _Open(loaded, running, inputs)
        self._common = common_symbols(self.manifest)
        self.counters = dict.fromkeys(COUNTERS, 0) | {"seed": seed}

    @property
    def _opened(self) -> "_Open":
        if self._open is None:
            raise LaunchError(f"the trainer of {self.manifest.directory} is closed")
        return self._open

    @property
    def states(self) -> States:
        """This rank's parts of the states."""
        return self._opened.programs.states

    @property
    def steps(self) -> int:
        """Number of optimizer steps that are done."""
        return self.counters["step"]

    @property
    def shard(self) -> tuple[int, int]:
        """The number of this rank's data rank, and the number of data ranks.

        Data ranks are the positions along the axes that shard dim 0 of the first input.
        """
        axes = self.manifest.program(TRAINING).inputs[0].dims[0][0][1]
        return data_rank(axes, self.manifest.atoms, self.rank.index)

    def peak_bytes(self, *, reset: bool = False) -> int:
        """Returns the most bytes that this rank held at a time: states, inputs, values, weights.

        Args:
            reset: Begin a new peak, at what is held now.

        Raises:
            LaunchError: The trainer was not made with `measured`.
        """
        programs = self._opened.programs
        return peak_bytes(programs.loader.memory, programs.bound_bytes, reset=reset)

    def expect(self, runs: Mapping[str, Sequence[Values]], micro_batches: int = 1) -> None:
        """Loads programs for the runs that will come, as `Programs.expect` says."""
        for name, values in runs.items():
            self._opened.programs.expect(name, values, micro_batches)
            self._opened.runner.load(name)

    # -- training --------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Prepared:
        """Returns a micro-batch sharded for this rank, which `train_step` takes like a batch.

        May be called ahead of time, from another thread: the batch is then copied to the GPU while
        the GPU computes. An error in the batch is raised when the result is used, on all ranks
        together.

        Raises:
            CudaError: The batch cannot be copied to the GPU.
        """
        opened = self._opened
        prepared = prepare(opened.inputs[TRAINING], self.training.loss, batch)
        if prepared.error is not None:
            return prepared
        return replace(prepared, feeds=opened.runner.stage(prepared.feeds))

    def train_step(
        self,
        micro_batches: Sequence[Batch | Prepared],
        hyper: Mapping[str, float],
        *,
        read: bool = True,
    ) -> StepResult:
        """Runs all micro-batches and then the optimizer. Every rank must call it.

        Loss and gradients are those of the mean over all micro-batches. Micro-batches in which
        nothing counts (every label is ignored) are left out.

        Args:
            micro_batches: Whole arrays of the inputs, a tuple of dicts (see `Batch`), or results
                of `prepare`. The same on all ranks.
            hyper: The scalars that the optimizer's program reads, by name; others are ignored.
            read: Read and check loss and norm. Otherwise a GPU is not waited for, and both are not
                a number in the result. The same on all ranks.

        Raises:
            InputError: An input is missing, unknown, of the wrong dtype or shape; a hyperparameter
                is missing; nothing in the step counts.
            SymbolValueError: A symbol's value violates its constraint, or ranks disagree.
            TrainingError: The loss is not finite, or 16-bit gradients are not finite at a fixed
                loss scale; parameters are unchanged.
            RankError: Another rank cannot go on; raised by all ranks.
        """
        with self.rank.timeline.span(STEP, f"step {self.steps + 1}"):
            return self._train_step(micro_batches, hyper, read)

    def _train_step(
        self, micro_batches: Sequence[Batch | Prepared], hyper: Mapping[str, float], read: bool
    ) -> StepResult:
        prepared = [b if isinstance(b, Prepared) else self.prepare(b) for b in micro_batches]
        total = sum(p.count for p in prepared)
        error = next((p.error for p in prepared if p.error is not None), None)
        error = error or self._missing(hyper)
        if error is None and not total:
            error = InputError("the step has no micro-batch with labels that count")
        self._agree(prepared, error)
        runs = [
            self._micro(p, float(p.divisor / total), number)
            for number, p in enumerate(prepared)
            if p.count
        ]
        loss = self._forward_backward(runs, accumulate=False, read=read, ahead=self._overlap)
        skipped = self.loss_scale.skipped
        norm = self._optimize(hyper, read=read)
        sizes = [run.feeds.values for run in runs]
        return StepResult(
            loss,
            norm,
            self.loss_scale.skipped > skipped,
            self._amounts.flops_of(sizes),
            self._amounts.tokens_of(sizes),
        )

    def forward_backward(
        self, batch: Batch | Prepared, *, weight: float = 1.0, accumulate: bool = False
    ) -> float:
        """Runs one micro-batch and leaves its gradients with the states. Every rank must call it.

        Args:
            batch: As for `train_step`.
            weight: The factor of the micro-batch's mean loss, and so of its gradients.
            accumulate: Add to the gradients that are there, instead of replacing them.

        Returns:
            The weighted loss.

        Raises:
            InputError: As `train_step`.
            SymbolValueError: As `train_step`.
            TrainingError: The loss is not finite.
            RankError: As `train_step`.
        """
        micro = batch if isinstance(batch, Prepared) else self.prepare(batch)
        error = micro.error
        if error is None and not micro.count:
            error = InputError("the micro-batch has no labels that count")
        self._agree([micro], error)
        self.counters["micro_batch"] = self.counters["micro_batch"] + 1 if accumulate else 0
        # It differs from `weight` if the sizes of data ranks differ.
        own = weight * float(micro.divisor / micro.count)
        run = self._micro(micro, own, self.counters["micro_batch"])
        return self._forward_backward([run], accumulate=accumulate)

    def step(self, hyper: Mapping[str, float]) -> float:
        """Reduces the gradients and updates the parameters with them. Every rank must call it.

        Args:
            hyper: As for `train_step`, the same on all ranks.

        Returns:
            The 2-norm of all gradients together, before clipping.

        Raises:
            InputError: A hyperparameter is missing.
            RankError: A rank failed.
        """
        error = self._missing(hyper)
        if error is not None:
            raise error.as_agreed()  # the same on all ranks
        return self._optimize(hyper)

    def _micro(self, prepared: Prepared, weight: float, number: int) -> Micro:
        return Micro(prepared.feeds, {LOSS_WEIGHT: weight * self.loss_scale.scale}, number)

    def _forward_backward(
        self, runs: Sequence[Micro], *, accumulate: bool, read: bool = True, ahead: bool = False
    ) -> float:
        loss = self._opened.runner.forward_backward(
            runs, self.counters, accumulate=accumulate, read=read, ahead=ahead
        )
        loss /= self.loss_scale.scale
        watch = self._loader.watch
        if watch is not None and self.loss_scale.dynamic and isfinite(loss):
            watch.forget()  # of gradients that overflow the scale is lowered
        self._check_values()
        if read:
            self._check(loss)
        return loss

    def _optimize(self, hyper: Mapping[str, float], *, read: bool = True) -> float:
        self.gradient_scale = self.loss_scale.scale
        numbers = {**hyper, INVERSE_SCALE: 1 / self.gradient_scale}
        # A dynamic loss scale follows the gradients of every step.
        read = read or self.loss_scale.dynamic
        norm = self._opened.runner.update(self.counters, numbers, read=read)
        if not self.loss_scale.dynamic or isfinite(norm):
            self._check_values()
        if self.training.compute is not None and read:
            self.loss_scale.after(isfinite(norm), self.steps + 1)
        self.counters["step"] += 1
        self.counters["micro_batch"] = 0
        return norm

    def _missing(self, hyper: Mapping[str, float]) -> OnnxparRuntimeError | None:
        names = hyperparameters_read(self.manifest)
        missing = [name for name in names if name not in hyper and name != INVERSE_SCALE]
        if missing:
            return InputError(
                f"hyperparameters: the optimizer {self.training.optimizer} reads {names}, missing "
                f"{missing}"
            )
        return None

    def _agree(self, prepared: Sequence[Prepared], error: OnnxparRuntimeError | None) -> None:
        """Lets all ranks go on, with equal sizes, or none: one small reduction."""
        values = prepared[0].feeds.values if prepared else {}
        sizes = [p.feeds.values.get(name, 0) for p in prepared for name in self._common]
        agree(self.rank, error, values, self._common, [len(prepared), *sizes])

    def _check(self, loss: float) -> None:
        """Raises TrainingError unless the loss is finite; it is the same on all ranks."""
        if not isfinite(loss):
            raise TrainingError(
                f"step {self.steps + 1}: the loss is {loss}; training stops; the parameters are "
                f"those after step {self.steps}"
            ).as_agreed()

    def even_bubble(self) -> float | None:
        """Returns the share of the last step in which stages would be idle, if equally fast.

        None without stages.
        """
        return self._opened.runner.even_bubble()

    # -- evaluation ------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, *, outputs: bool = False) -> Evaluation:
        """Returns loss and correct labels of a batch. Every rank must call it.

        Args:
            batch: As for `train_step`.
            outputs: Also gather the model's outputs to rank 0.

        Raises:
            InputError: As `train_step`; or data ranks have different sizes, and the program has no
                weights for them.
            SymbolValueError: As `train_step`.
            RankError: As `train_step`.
        """
        with self.rank.timeline.span(EVALUATION_SPAN, "evaluation of a batch"):
            return self._evaluate(batch, outputs)

    def _evaluate(self, batch: Batch, outputs: bool) -> Evaluation:
        running = self._opened.runner
        with self.rank.timeline.span(INPUT, "shard the batch"):
            prepared = prepare(self._opened.inputs[EVALUATION], self.training.loss, batch)
        error = prepared.error
        if not prepared.alike and not self._weighs():
            error = error or InputError(
                "evaluation: expected batches of equal size on all data ranks, since eval_model "
                "gives them equal weight, got different sizes"
            )
        self._agree([prepared], error)
        weight = float(prepared.divisor / prepared.count) if prepared.count else 1.0
        micro = Micro(prepared.feeds, {LOSS_WEIGHT: weight}, self.counters["micro_batch"])
        found = running.evaluate(micro, self.counters)
        self._check_values()
        joined: dict[str, Array] | None = None
        if outputs:
            made, values = running.outputs, prepared.feeds.values
            joined = together(
                self.rank, lambda: join_outputs(self.rank, self.manifest, made, found.parts, values)
            )
            for name in (LOSS, CORRECT):
                (joined or {}).pop(name, None)
        return Evaluation(
            loss=found.loss,
            count=int(prepared.count),
            correct=found.correct,
            outputs=joined,
        )

    def _weighs(self) -> bool:
        """Whether the evaluation takes a weight of the loss."""
        parts = [self.manifest.program(name) for name in self.manifest.parts(EVALUATION)]
        return any(s.kind == LOSS_WEIGHT for part in parts for s in part.system_inputs)

    # -- states ----------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Array]:
        """Returns copies of this rank's shards of the trained parameters, padding included.

        In a pipeline these are the parameters of the rank's stage.
        """
        return self._of_kind("parameter")

    def statistics(self) -> dict[str, Array]:
        """Returns copies of this rank's shards of the running statistics, padding included.

        Every micro-batch of training updates them, even in a step that fails. In a pipeline these
        are the statistics of the rank's stage.
        """
        return self._of_kind("statistic")

    def _of_kind(self, kind: str) -> dict[str, Array]:
        names = self.states.of_kind(kind)
        return {parameter: self.state(name) for parameter, name in names.items()}

    def state(self, name: str) -> Array:
        """Returns a copy of this rank's shard of a state, padding included.

        Raises:
            InputError: There is no such state, or not on this rank.
        """
        return self.states.get(name)

    def holds(self, name: str) -> bool:
        """Whether this rank has a shard of a state: in a pipeline each stage has its own states.

        Raises:
            InputError: There is no such state.
        """
        return self.states.holds(name)

    def sharding(self, name: str) -> SizedSharding:
        """Returns how a state is sharded over the ranks.

        Raises:
            InputError: There is no such state.
        """
        return self.states.sharding(name)

    def gather(self, name: str) -> Array | None:
        """Returns the whole array of a state on rank 0 and None elsewhere. All ranks must call it.

        Gradients that have not been reduced over some atoms are added up.

        Args:
            name: A state, or a tensor whose parts are states.

        Raises:
            InputError: There is no such state.
            RankError: A rank failed.
        """
        parts = self.training.by_tensor.get(name, ())
        if len(parts) < 2:
            return self._gather(name)
        arrays = [self._gather(state.name) for state in parts]
        whole = [array for array in arrays if array is not None]
        part = parts[0].part
        return np.concatenate(whole, part.axis) if part is not None and whole else None

    def _gather(self, name: str) -> Array | None:
        states = self.states
        state, part = states[name], self.summed(name) if states.holds(name) else None
        stage = min(state.stages)
        if self.manifest.stage_of(self.rank.index) != stage:
            part = None
        first, dtype = stage * self.manifest.stage_devices, DTYPES[state.dtype].dtype
        return gather_to_root(self.rank, states.sharding(name), part, first, dtype)

    def summed(self, name: str) -> Array:
        """Returns this rank's shard of a state, added up over the atoms that were not reduced yet.

        All ranks that hold parts of the sum must call it.

        Raises:
            InputError: There is no such state, or not on this rank.
            RankError: A rank failed.
        """
        states = self.states
        state, part = states[name], states.get(name)
        if state.partial or state.partial_stages:
            group = states.partial_group(name)
            if not self._opened.runner.reduced(name, group):
                part = self.rank.all_reduce(part, group)
        return part

    def load_parameters(self, arrays: Mapping[str, Array]) -> None:
        """Overwrites trained parameters and running statistics. Every rank must call it.

        Gradients and moments stay.

        Args:
            arrays: Whole arrays by their name in the model; other parameters do not change.

        Raises:
            InputError: An unknown parameter, a wrong shape, or a type whose conversion loses
                information; nothing is overwritten.
            RankError: Another rank cannot go on; raised by all ranks.
        """
        tensors = self.training.by_tensor.values()
        names = {s[0].tensor.parameter: s for s in tensors if s[0].kind in FROM_FILES}
        names |= {s.parameter: (s,) for many in tensors for s in many if s.kind in FROM_FILES}
        self._load(names, arrays, "trained parameters and statistics")

    def load_states(self, arrays: Mapping[str, Array]) -> None:
        """Overwrites states, as `load_parameters` does parameters. Every rank must call it.

        Args:
            arrays: Whole arrays by state; other states do not change.

        Raises:
            InputError: As `load_parameters`.
            RankError: As `load_parameters`.
        """
        names = {**self.training.by_tensor, **{n: (s,) for n, s in self.training.states.items()}}
        self._load(names, arrays, "states")

    def _load(
        self, names: Mapping[str, Sequence[StateEntry]], arrays: Mapping[str, Array], what: str
    ) -> None:
        """Overwrites the states that `names` has by the names in `arrays`, on all ranks or none."""

        def parts() -> dict[str, Array]:
            unknown = sorted(set(arrays) - set(names))
            if unknown:
                raise InputError(
                    f"no {what} {', '.join(unknown)}; there are {', '.join(sorted(names))}"
                )
            return {
                state.name: self._part(state.name, array)
                for name, whole in arrays.items()
                for state, array in _divided(names[name], np.asarray(whole))
            }

        for name, part in together(self.rank, parts).items():
            if self.holds(name):
                self.states.set(name, part)

    def reset(self) -> None:
        """Sets all states and the counters of steps to their initial values."""
        self.states.reset()
        self.counters |= {"step": 0, "micro_batch": 0}

    def _part(self, name: str, array: Array) -> Array:
        states = self.states
        sharding, dtype = states.sharding(name), DTYPES[states[name].dtype].dtype
        converted = lossless(array, dtype)
        if converted is None or array.shape != sharding.shape:
            raise InputError(
                f"{states[name].kind} {name!r}: expected {dtype} {sharding.shape}, got "
                f"{array.dtype} {array.shape}"
            )
        return sharding.take(converted, self.rank.index)

    def close(self) -> None:
        """Frees sessions and states, and the world of one rank if it made one.

        Methods that need them raise LaunchError afterwards.
        """
        if self._open is None:
            return
        self._open.runner.close()
        self._open = None
        super().close()


def _divided(states: Sequence[StateEntry], array: Array) -> list[tuple[StateEntry, Array]]:
    """Returns the states that hold a tensor, each with its range of the tensor's array."""
    part = states[0].part
    if len(states) == 1 or part is None:
        return [(states[0], array)]
    tensor = states[0].tensor
    if array.shape != tensor.shape:
        raise InputError(
            f"{tensor.kind} {tensor.name!r}: expected the shape {tensor.shape}, got {array.shape}"
        )
    bounds = [state.part.start for state in states[1:] if state.part is not None]
    return list(zip(states, np.split(array, bounds, part.axis), strict=True))
