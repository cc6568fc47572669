"""`onnxpar.shard_module`: a PyTorch module that all ranks compute together, with its gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import gcd
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from onnxpar.api import runtime
from onnxpar.api.block_programs import Asked, BlockPrograms
from onnxpar.api.pytorch.block_call import (
    BlockCall,
    CallNames,
    Programs,
    as_array,
    check_alike,
    described,
    listed,
)
from onnxpar.api.pytorch.export_module import (
    OPSET,
    Example,
    Results,
    export_packing,
    first_names,
)
from onnxpar.api.pytorch.from_torch import (
    HOOKS,
    OpenDims,
    check_inputs,
    check_module,
    named_inputs,
    open_dims,
    without_cache,
    without_hooks,
)
from onnxpar.core.errors import CallError, ModelError, StrategyError
from onnxpar.core.symbols import Symbol
from onnxpar.strategy import Strategy, load_strategy

_MADE = count()
"""Numbers the sharded modules of a process."""
_KEPT = 16
"""Programs of a module: for two modes and a few combinations of divisors of its sizes."""
_SHARED = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("training", "_is_full_backward_hook"),
)
"""Attributes of a module that are those of the sharded one; the names of hooks come besides."""

_Traced = tuple[tuple[bool, ...], tuple[tuple[str, int, int], ...], int]
"""Modes of parts; names, identities and versions of buffers; how often attributes were set."""


def shard_module(
    module: torch.nn.Module,
    args: Sequence[Tensor] | Tensor = (),
    kwargs: Mapping[str, Tensor] | None = None,
    *,
    strategy: str | Path | Strategy,
    dynamic_shapes: Mapping[str, OpenDims] | Sequence[OpenDims] | None = None,
    devices: int | None = None,
    opset: int = OPSET,
) -> "ShardedModule":
    """Returns a module that computes another one on all ranks, forward and backward.

    It takes the place of `module` in a program of PyTorch, of which every rank runs a copy:

        net.block = onnxpar.shard_module(net.block, x, strategy="tp=2")

    The ranks are the processes that mpirun started; outside of mpirun they are threads of this
    process. Every rank must make the same calls with the same tensors, and gets the same complete
    results. Parameters are those of `module`, under the same names: every rank holds all of them
    complete, so an optimizer, the clipping of gradients and `state_dict` work as without sharding.
    Rank 0's values are given to all ranks here.

    Args:
        module: The module. It returns tensors, alone or in tuples, lists and dicts, also nested.
        args: Tensors to trace it with, as for `onnxpar.from_torch`.
        kwargs: Further tensors by the names of arguments.
        strategy: A strategy without pipeline stages, the path of a strategy file, or a preset such
            as `dp=2,tp=2`.
        dynamic_shapes: The open dims, as for `onnxpar.from_torch`; other dims keep their size.
        devices: Number of ranks, if the strategy does not give it.
        opset: Version of ONNX's operators, as for `onnxpar.from_torch`.

    Raises:
        ModelError: As `onnxpar.from_torch`; or `module` is already sharded.
        StrategyError: There is no such strategy, it has pipeline stages, or mpirun started another
            number of ranks.
        CallError: Ranks gave different modules or arguments. All ranks raise it.
    """

    def prepare() -> tuple[dict[str, str], tuple[Example, Strategy]]:
        example = _example(module, args, kwargs, dynamic_shapes)
        chosen = _for_these_ranks(strategy, devices)
        facts = {"module": type(module).__name__, "strategy": chosen.source}
        facts |= {**described(example.inputs, "input"), **described(module.state_dict(), "tensor")}
        return facts, (example, chosen)

    return ShardedModule(*runtime.same_call("shard_module", prepare), opset)


def _example(
    module: torch.nn.Module,
    args: Sequence[Tensor] | Tensor,
    kwargs: Mapping[str, Tensor] | None,
    dynamic_shapes: Mapping[str, OpenDims] | Sequence[OpenDims] | None,
) -> Example:
    """Returns the module and how it is to be traced."""
    check_module(module)
    if any(isinstance(part, ShardedModule) for part in module.modules()):
        raise ModelError(
            f"{type(module).__name__} is sharded already or has a sharded part; shard_module "
            "cannot be nested"
        )
    inputs = named_inputs(module, args, kwargs or {})
    dims, ranges = open_dims(dynamic_shapes, inputs)
    return Example(module, {n: t.detach() for n, t in inputs.items()}, dims, (), ranges)


def _for_these_ranks(strategy: str | Path | Strategy, devices: int | None) -> Strategy:
    """Returns a strategy for as many ranks as there are."""
    started = runtime.started()
    if not isinstance(strategy, Strategy):
        try:
            strategy = load_strategy(str(strategy), started if devices is None else devices)
        except StrategyError as error:
            if started is None or devices is not None:
                raise
            raise StrategyError(f"{error}; mpirun started {started} ranks") from None
    if started not in (None, strategy.world):
        raise StrategyError(
            f"{strategy.source}: expected mpirun to start {strategy.world} ranks, got {started}"
        )
    if strategy.pipeline is not None:
        raise StrategyError(
            f"{strategy.source}: expected a strategy without pipeline stages, got "
            f"{strategy.stages}; a module cannot wait for further micro-batches"
        )
    return strategy


class ShardedModule(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not required
    """What `shard_module` returns.

    Its parameters, buffers, submodules and hooks are those of the module that was given. Other
    attributes are read from that module, and methods of it that are called compute without
    sharding. What the forward pass reads of them is part of the program: setting one here makes new
    programs, but a change in a part of the module is not seen. Hooks of the module itself run in
    every call; hooks of its parts run only when they are traced.

    The programs are made by the first call. A call in other modes (`train()`, `eval()`, also of a
    part), with buffers that have changed and are not floating-point entries of `state_dict()`, with
    other tensors that require a gradient, or with sizes that need other constraints makes further
    ones. The 16 that were used last are kept, until `close`; others are freed when no backward
    pass needs them any more. A copy (`deepcopy`, pickle) has none, and makes its own.
    """

    def __init__(self, example: Example, strategy: Strategy, opset: int) -> None:
        """Use `shard_module`."""
        super().__init__()
        module = example.module
        # The same dicts: what is set here is set there. An attribute would be a submodule, and
        # would change the names of all parameters.
        own = vars(module)
        self.__dict__ |= {n: own[n] for n in (*_SHARED, *HOOKS)}
        self.__dict__ |= {
            "_example": example,
            "_strategy": strategy,
            "_opset": opset,
            "_exported": {},
            "_programs": [],
            "_changes": 0,
            "_calls": 0,
            "_steps": 0,
            "_number": next(_MADE),
            "_seed": runtime.from_first_rank(torch.initial_seed() % 2**31),
            "_dtypes": {name: tensor.dtype for name, tensor in self._state().items()},
        }
        with torch.no_grad():
            for name, tensor in self._state().items():
                whole = tensor.detach().cpu().contiguous()
                runtime.share_array(as_array(name, whole))
                tensor.copy_(whole)

    def __getattr__(self, name: str) -> Any:
        """Returns a parameter, buffer, submodule or other attribute of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # What Python looks for in special methods is not the module's.
            if name.startswith("__") or "_example" not in self.__dict__:
                raise
            return getattr(self._example.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; one of the module is set there, and the next call exports again."""
        own = self.__dict__
        module = own["_example"].module if "_example" in own else None
        if module is not None and name not in own and name in vars(module):
            setattr(module, name, value)
            own["_changes"] += 1
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: everything but the programs."""
        return {**self.__dict__, "_programs": [], "_exported": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes this a copy, which draws other random numbers."""
        super().__setstate__(state)
        self.__dict__["_number"] = next(_MADE)

    @property
    def devices(self) -> int:
        """Number of ranks."""
        world: int = self._strategy.world
        return world

    @property
    def reports(self) -> list[dict[str, Any]]:
        """What `onnxpar inspect --json` shows of each `forward` and `backward` that is kept."""
        return [made.programs.reports for made in self._programs]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the module; every rank must call it with the same tensors.

        Args:
            args: As for the module itself; tensors.
            kwargs: Further tensors by name.

        Returns:
            What the module returns, complete.

        Raises:
            CallError: A tensor is missing, or of another type or size than declared; or ranks make
                different calls: in another mode, with other sizes, or a backward pass on one of
                them. All ranks raise it. When programs are made, tensors are compared as well.
            OnnxparError: The strategy does not fit the module, or it has no gradient.
            OnnxparRuntimeError: A rank failed.
        """
        self._calls += 1
        title = f"{type(self._example.module).__name__} (sharded module {self._number})"
        call = runtime.same_call(f"forward of {title}", lambda: self._call(args, kwargs))
        made = self._made_for(call)
        self._steps += self.training
        signature, state = made.programs.signature, call.state
        tensors = [call.given[name] for name in signature.inputs]
        for held in signature.held:
            whole = state[held.tensor]
            tensors.append(
                whole if held.size is None else whole.narrow(held.axis, held.start, held.size)
            )
        # So that the sharded modules of a program draw different random numbers.
        seed = (self._seed + 1_000_003 * self._number) % 2**31
        names = CallNames(title, self._calls, {"seed": seed, "step": self._steps})
        results = BlockCall.apply(made.programs, names, *tensors)
        own = len(signature.outputs)
        self._keep(dict(zip(signature.statistics, results[own:], strict=True)), state)
        return made.programs.results.packed(results[:own])

    def close(self) -> None:
        """Frees the ranks' sessions; the next call makes the programs again."""
        for made in self._programs:
            made.programs.close()
        self._programs.clear()
        self._exported.clear()

    def _state(self) -> dict[str, Tensor]:
        """The floating-point tensors of `state_dict()`, each under its first name."""
        names = first_names(self)
        found = self.state_dict(keep_vars=True)
        return {
            first: found[name]
            for name, first in names.items()
            if name == first and found[name].is_floating_point()
        }

    def _call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, str], "_Given"]:
        """Returns what ranks compare of a call, and the checked call."""
        example: Example = self._example
        given = named_inputs(example.module, args, kwargs)
        check_inputs(given, example)
        state = self._state()
        self._check_types(state)
        wanted = frozenset(
            name
            for name, tensor in (*given.items(), *state.items())
            if tensor.requires_grad and torch.is_grad_enabled()
        )
        sizes = {
            symbol: int(given[name].shape[axis])
            for name, dims in example.dims.items()
            for axis, symbol in dims.items()
        }
        call = _Given(given, state, self._traced(state), wanted, sizes)
        known = self._known(call)
        facts = {
            "number of the call": str(self._calls),
            "mode": "training" if self.training else "evaluation",
            "parts in the other mode": listed(
                [n for n, part in self.named_modules() if part.training != self.training]
            ),
            "tensors that require a gradient": listed(list(wanted)),
            **described(given, "input"),
            "programs": "new ones" if known is None else f"those at place {known}",
        }
        return facts, call

    def _check_types(self, state: Mapping[str, Tensor]) -> None:
        """Raises CallError unless parameters have the types with which they were sharded."""
        for name, tensor in state.items():
            if tensor.dtype != self._dtypes.get(name):
                raise CallError(
                    f"{type(self._example.module).__name__}, tensor {name!r}: expected "
                    f"{self._dtypes.get(name)}, as when the module was sharded, got "
                    f"{tensor.dtype}; convert a module before shard_module"
                )

    def _traced(self, state: Mapping[str, Tensor]) -> _Traced:
        """What an export fixes: modes of all parts, attributes, buffers that are not its inputs."""
        return (
            tuple(part.training for part in self.modules()),
            tuple(
                (name, id(buffer), buffer._version)
                for name, buffer in self.named_buffers()
                if name not in state and not name.endswith("num_batches_tracked")
            ),
            self._changes,
        )

    def _known(self, call: "_Given") -> int | None:
        """Returns the place of existing programs that a call can use."""
        for place, made in enumerate(self._programs):
            if made.fits(call):
                return place
        return None

    def _made_for(self, call: "_Given") -> "_Made":
        """Returns the programs of a call, which are the last of those that are kept."""
        place = self._known(call)
        if place is None:
            check_alike(call.given)
            # A divisor that the size shares with the number of devices saves padding.
            symbols = {
                name: Symbol(divisor=divisor)
                for name, size in call.sizes.items()
                if (divisor := gcd(size, self.devices)) > 1
            }
            programs = Programs(self.devices, symbols, lambda: self._planned(symbols, call))
            made = _Made(call.traced, call.wanted, programs)
        else:
            made = self._programs.pop(place)
        self._programs.append(made)
        del self._programs[:-_KEPT]
        for traced in self._exported.keys() - {each.traced for each in self._programs}:
            del self._exported[traced]
        return made

    def _planned(
        self, symbols: Mapping[str, Symbol], call: "_Given"
    ) -> tuple[BlockPrograms, Results]:
        if call.traced not in self._exported:
            self._exported[call.traced] = self._export()
        model, results = self._exported[call.traced]
        fixed = frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, part in self.named_modules()
            if part is not self and not part.training
            for name, _ in part.named_buffers(recurse=False)
        )
        asked = Asked(frozenset(call.state), call.wanted, self.training, fixed)
        return BlockPrograms(model.clone(), asked, self._strategy, symbols), results

    def _export(self) -> tuple[ir.Model, Results]:
        example: Example = self._example
        example.module.training = self.training
        # PyTorch's checkpointing counts the tensors that a call saves; these are not the call's.
        uncounted = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        try:
            with without_cache(example.module), without_hooks(example.module), uncounted:
                return export_packing(example, self._opset)
        except ValueError as error:
            raise ModelError(f"{type(example.module).__name__}: {error}") from None

    def _keep(self, statistics: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Stores new running statistics, and counts the batches."""
        with torch.no_grad():
            for name, value in statistics.items():
                state[name].copy_(value)
            for name, counted in self.named_buffers():
                norm = name.removesuffix("num_batches_tracked")
                if norm != name and f"{norm}running_mean" in statistics:
                    counted += 1


@dataclass(frozen=True)
class _Given:
    """A checked call.

    Attributes:
        given: The tensors by input.
        state: The floating-point tensors of the module.
        traced: What an export for it fixes.
        wanted: Names of the tensors that require a gradient.
        sizes: Sizes of the symbols.
    """

    given: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    traced: _Traced
    wanted: frozenset[str]
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class _Made:
    """Programs, and the calls for which they were made."""

    traced: _Traced
    wanted: frozenset[str]
    programs: Programs

    def fits(self, call: _Given) -> bool:
        """Whether a call can use them."""
        return (
            (self.traced, self.wanted) == (call.traced, call.wanted)
            and all(
                call.sizes[name] % symbol.divisor == 0
                for name, symbol in self.programs.symbols.items()
            )
        )  # fmt: skip
