"""`onnxpar.shard_module`: a PyTorch module that all ranks compute together, with its gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from onnxpar.api import runtime
from onnxpar.api.block_programs import Asked, BlockPrograms, BlockSignature
from onnxpar.api.pytorch.export_module import OPSET, Example, export, first_names
from onnxpar.api.pytorch.from_torch import OpenDims, named_inputs, open_dims, without_cache
from onnxpar.core.errors import CallError, ModelError, StrategyError
from onnxpar.core.symbols import Symbol
from onnxpar.strategy import Strategy, load_strategy

_SAMPLES = 64
_MADE = count()
"""Numbers the sharded modules of a process, so that they draw different random numbers."""
_ALIKE = 1e-3
"""How far inputs of ranks may differ, relative to the largest: rounding differs by 1e-6 or less;
other random numbers by about 1."""

_Traced = tuple[tuple[bool, ...], tuple[tuple[str, int, int], ...]]
"""Modes of parts; names, identities and versions of buffers."""


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
        module: The module. It returns a tensor or several in a tuple.
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
    """
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    if any(isinstance(part, ShardedModule) for part in module.modules()):
        raise ModelError(
            f"{type(module).__name__} is sharded already or has a sharded part; shard_module "
            "cannot be nested"
        )
    inputs = named_inputs(module, (args,) if isinstance(args, Tensor) else args, kwargs or {})
    dims, ranges = open_dims(dynamic_shapes, list(inputs))
    strategy = _for_these_ranks(strategy, devices)
    if strategy.pipeline is not None:
        raise StrategyError(
            f"{strategy.source}: expected a strategy without pipeline stages, got "
            f"{strategy.stages}; a module cannot wait for further micro-batches"
        )
    example = Example(module, {n: t.detach() for n, t in inputs.items()}, dims, (), ranges)
    return ShardedModule(example, strategy, opset)


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
    return strategy


@dataclass
class _Programs:
    """The two programs for some calls.

    Attributes:
        symbols: Constraints on the sizes of the calls.
        devices: Number of ranks.
        signature: What the programs take and return.
        forward: The ranks with the forward program loaded.
        planned: The programs before they are written; on rank 0 only.
        loaded: The ranks with the backward program loaded, when it is needed.
        reports: What `onnxpar inspect --json` shows of each program, by `forward` and `backward`.
    """

    symbols: Mapping[str, Symbol]
    devices: int
    signature: BlockSignature
    forward: Any
    planned: BlockPrograms | None
    loaded: Any = None
    reports: dict[str, Any] = field(default_factory=dict)

    @property
    def backward(self) -> Any:
        """The ranks with the backward program loaded; every rank must ask for it."""
        if self.loaded is None:

            def make(folder: Path) -> Mapping[str, Any]:
                assert self.planned is not None
                return self.planned.write_backward(folder)

            self.loaded, self.reports["backward"] = runtime.open_program(self.devices, make)
            self.planned = None
        return self.loaded

    def call(self, arrays: Mapping[str, Any]) -> Any:
        """Returns complete arrays as those of all ranks."""
        return runtime.Call(self.devices, arrays, dict.fromkeys(arrays, False))

    def close(self) -> None:
        """Frees the ranks' sessions."""
        self.forward.close()
        if self.loaded is not None:
            self.loaded.close()


class ShardedModule(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not required
    """What `shard_module` returns.

    Its parameters, buffers and submodules are those of the module that was given. The programs are
    made by the first call; a call in other modes (`train()`, `eval()`, also of a part), with
    buffers that have changed and are not floating-point entries of `state_dict()`, with other
    tensors that require a gradient, or with sizes that need other constraints makes further ones.
    All of them are kept until `close`.
    """

    def __init__(self, example: Example, strategy: Strategy, opset: int) -> None:
        """Use `shard_module`."""
        super().__init__()
        module = example.module
        # The same dicts: what is set here is set there. An attribute would be a submodule, and
        # would change the names of all parameters.
        self._parameters, self._buffers = module._parameters, module._buffers
        self._modules, self.training = module._modules, module.training
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.__dict__["_example"] = example
        self._strategy = strategy
        self._opset = opset
        self._exported: dict[_Traced, ir.Model] = {}
        self._programs: dict[tuple[_Traced, frozenset[str]], list[_Programs]] = {}
        seed = torch.initial_seed() + 1_000_003 * next(_MADE)
        self._seed = runtime.from_first_rank(seed % 2**31)
        self._calls = 0
        with torch.no_grad():
            for tensor in self._state().values():
                whole = tensor.detach().cpu().contiguous()
                runtime.share_array(_array("a parameter", whole))
                tensor.copy_(whole)

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self._strategy.world

    @property
    def reports(self) -> list[dict[str, Any]]:
        """What `onnxpar inspect --json` shows of each `forward` and `backward` made so far."""
        return [each.reports for made in self._programs.values() for each in made]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the module; every rank must call it with the same tensors.

        Args:
            args: As for the module itself; tensors.
            kwargs: Further tensors by name.

        Returns:
            The complete result, or a tuple of several.

        Raises:
            CallError: A tensor is missing, or of another type or size than declared, on this rank;
                ranks that were given other tensors wait for it. Or, when programs are made, other
                ranks gave other tensors; then all ranks raise it.
            OnnxparError: The strategy does not fit the module, or it has no gradient.
            OnnxparRuntimeError: A rank failed.
        """
        example: Example = self.__dict__["_example"]
        example.module.training = self.training
        given = named_inputs(example.module, args, kwargs)
        self._check(given, example)
        state = self._state()
        wanted = frozenset(
            name
            for name, tensor in (*given.items(), *state.items())
            if tensor.requires_grad and torch.is_grad_enabled()
        )
        programs = self._programs_for(given, state, wanted)
        self._calls += self.training
        signature = programs.signature
        tensors = [given[name] for name in signature.inputs]
        for held in signature.held:
            whole = state[held.tensor]
            tensors.append(
                whole if held.size is None else whole.narrow(held.axis, held.start, held.size)
            )
        counters = {"seed": self._seed, "step": self._calls}
        results = _Block.apply(programs, counters, *tensors)
        own = len(signature.outputs)
        self._keep(dict(zip(signature.statistics, results[own:], strict=True)), state)
        return results[0] if own == 1 else tuple(results[:own])

    def close(self) -> None:
        """Frees the ranks' sessions; the next call makes the programs again."""
        for made in self._programs.values():
            for each in made:
                each.close()
        self._programs.clear()

    def _state(self) -> dict[str, Tensor]:
        """The floating-point tensors of `state_dict()`, each under its first name."""
        names = first_names(self)
        found = self.state_dict(keep_vars=True)
        return {
            first: found[name]
            for name, first in names.items()
            if name == first and found[name].is_floating_point()
        }

    def _traced(self, state: Mapping[str, Tensor]) -> _Traced:
        """What an export fixes: the modes of all parts, and the buffers that are not its inputs."""
        return (
            tuple(part.training for part in self.modules()),
            tuple(
                (name, id(buffer), buffer._version)
                for name, buffer in self.named_buffers()
                if name not in state and not name.endswith("num_batches_tracked")
            ),
        )

    def _check(self, given: Mapping[str, Tensor], example: Example) -> None:
        """Raises CallError unless the tensors are of the kinds that were traced."""
        title = type(example.module).__name__
        if given.keys() != example.inputs.keys():
            raise CallError(
                f"{title}: expected the inputs with which it was traced, "
                f"{', '.join(example.inputs)}; got {', '.join(given) or 'none'}"
            )
        sizes: dict[str, tuple[int, str]] = {}
        for name, traced in example.inputs.items():
            tensor, dims = given[name], example.dims.get(name, {})
            if tensor.dtype != traced.dtype:
                raise CallError(
                    f"{title}, input {name!r}: expected {traced.dtype}, as it was traced, got "
                    f"{tensor.dtype}"
                )
            wanted = [dims.get(axis, size) for axis, size in enumerate(traced.shape)]
            if len(wanted) != tensor.ndim or any(
                isinstance(want, int) and want != size
                for want, size in zip(wanted, tensor.shape, strict=True)
            ):
                raise CallError(
                    f"{title}, input {name!r}: expected the shape ({', '.join(map(str, wanted))}), "
                    f"got {tuple(tensor.shape)}; open further dims with dynamic_shapes"
                )
            for axis, symbol in dims.items():
                size = int(tensor.shape[axis])
                known, where = sizes.setdefault(symbol, (size, name))
                if known != size:
                    raise CallError(
                        f"{title}, input {name!r}, dim {axis}: expected {symbol} = {known}, as in "
                        f"input {where!r}, got {size}"
                    )

    def _programs_for(
        self, given: Mapping[str, Tensor], state: Mapping[str, Tensor], wanted: frozenset[str]
    ) -> _Programs:
        example: Example = self.__dict__["_example"]
        sizes = {
            symbol: int(given[name].shape[axis])
            for name, dims in example.dims.items()
            for axis, symbol in dims.items()
        }
        traced = self._traced(state)
        made = self._programs.setdefault((traced, wanted), [])
        for each in made:
            if all(sizes[name] % symbol.divisor == 0 for name, symbol in each.symbols.items()):
                return each
        self._check_alike(given)
        # A divisor that the size shares with the number of devices saves padding.
        symbols = {
            name: Symbol(divisor=divisor)
            for name, size in sizes.items()
            if (divisor := gcd(size, self.devices)) > 1
        }
        planned: list[BlockPrograms] = []

        def make(folder: Path) -> Mapping[str, Any]:
            planned.append(self._planned(symbols, traced, frozenset(state), wanted))
            report = planned[0].write_forward(folder)
            return {"report": report, "signature": planned[0].signature}

        forward, found = runtime.open_program(self.devices, make)
        programs = _Programs(
            symbols,
            self.devices,
            found["signature"],
            forward,
            planned[0] if planned else None,
            reports={"forward": found["report"]},
        )
        made.append(programs)
        return programs

    def _planned(
        self,
        symbols: Mapping[str, Symbol],
        traced: _Traced,
        held: frozenset[str],
        wanted: frozenset[str],
    ) -> BlockPrograms:
        if traced not in self._exported:
            self._exported[traced] = self._export()
        model = self._exported[traced].clone()
        fixed = frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, part in self.named_modules()
            if part is not self and not part.training
            for name, _ in part.named_buffers(recurse=False)
        )
        asked = Asked(held, wanted, self.training, fixed)
        return BlockPrograms(model, asked, self._strategy, symbols)

    def _export(self) -> ir.Model:
        example: Example = self.__dict__["_example"]
        # PyTorch's checkpointing counts the tensors that a call saves; these are not the call's.
        uncounted = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        try:
            with without_cache(example.module), uncounted:
                return export(example, self._opset)
        except ValueError as error:
            raise ModelError(f"{type(example.module).__name__}: {error}") from None

    def _check_alike(self, given: Mapping[str, Tensor]) -> None:
        """Raises CallError on all ranks if they were clearly given other numbers."""
        for name, tensor in given.items():
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // _SAMPLES)].cpu().double().numpy()
            first = runtime.from_first_rank(sample)
            scale = float(np.abs(first).max(initial=0.0))
            same = first.shape == sample.shape and np.allclose(first, sample, 0, _ALIKE * scale)
            if not runtime.on_all_ranks(bool(same)):
                raise CallError(
                    f"input {name!r}: expected the same numbers on all ranks, got others than rank "
                    "0 on at least one; use the same seed and the same batches on all ranks"
                )

    def _keep(self, statistics: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Stores new running statistics, and counts the batches."""
        with torch.no_grad():
            for name, value in statistics.items():
                state[name].copy_(value)
            for name, counted in self.named_buffers():
                norm = name.removesuffix("num_batches_tracked")
                if norm != name and f"{norm}running_mean" in statistics:
                    counted += 1


class _Block(torch.autograd.Function):  # type: ignore[misc]  # as above
    """One call of the programs."""

    @staticmethod
    def forward(ctx: Any, programs: _Programs, counters: Any, *tensors: Tensor) -> Any:
        signature = programs.signature
        names = [*signature.inputs, *(held.name for held in signature.held)]
        arrays = {n: _array(n, t) for n, t in zip(names, tensors, strict=True)}
        found = programs.forward.run(programs.call(arrays), sliced=False, counters=counters)
        device = tensors[0].device if tensors else torch.device("cpu")
        results = tuple(torch.from_numpy(array).to(device) for array in found)
        ctx.programs, ctx.counters, ctx.names = programs, counters, names
        ctx.kept = [*signature.inputs, *signature.kept]
        values = dict(zip(names, tensors, strict=True))
        # They change when this returns, and PyTorch would refuse the backward pass.
        values |= {name: values[name].clone() for name in signature.statistics}
        ctx.save_for_backward(*(values[name] for name in ctx.kept))
        known = dict(zip(signature.outputs, results, strict=False))
        fixed = [t for n, t in known.items() if n not in signature.cotangents]
        ctx.mark_non_differentiable(*fixed, *results[len(signature.outputs) :])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        programs, signature = ctx.programs, ctx.programs.signature
        saved = ctx.saved_tensors  # PyTorch's checkpointing lets them be read only once
        arrays = {n: _array(n, t) for n, t in zip(ctx.kept, saved, strict=True)}
        given = dict(zip(signature.outputs, cotangents, strict=False))
        for name, taker in signature.cotangents.items():
            arrays[taker] = _array(name, given[name].contiguous())
        made: dict[str, Tensor] = {}
        if signature.gradients:
            found = programs.backward.run(
                programs.call(arrays), sliced=False, counters=ctx.counters
            )
            device = saved[0].device if saved else torch.device("cpu")
            made = {
                name: torch.from_numpy(array).to(device)
                for name, array in zip(signature.gradients, found, strict=True)
            }
        return (None, None, *(made.get(name) for name in ctx.names))


def _array(name: str, tensor: Tensor) -> Any:
    """Returns a tensor's memory as an array, without a copy if it is on the CPU."""
    try:
        return tensor.detach().cpu().numpy()
    except TypeError:
        raise CallError(
            f"{name!r}: expected an element type that NumPy has, got {tensor.dtype}; use float32 "
            "or float16 in a sharded module"
        ) from None
