"""One call of a sharded module: the programs that it uses, and their place in PyTorch's graph."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onnxpar.api import runtime
from onnxpar.api.block_programs import BlockPrograms, BlockSignature
from onnxpar.api.pytorch.export_module import Results
from onnxpar.core.errors import CallError
from onnxpar.core.symbols import Symbol


class Programs:
    """The two programs for some calls. They are closed when no call needs them any more.

    Every rank must make them at the same time.

    Args:
        devices: Number of ranks.
        symbols: Constraints on the sizes of the calls.
        plan: Returns the programs before they are written, and how the module packs its results; it
            is called on rank 0 only.

    Attributes:
        symbols: As above.
        signature: What the programs take and return.
        results: How the module packs its results.
        reports: What `onnxpar inspect --json` shows of each program, by `forward` and `backward`.

    Raises:
        OnnxparError: Of `plan`; all ranks raise it.
    """

    def __init__(
        self,
        devices: int,
        symbols: Mapping[str, Symbol],
        plan: Callable[[], tuple[BlockPrograms, Results]],
    ) -> None:
        """Makes the forward program."""
        self.symbols = symbols
        self._devices = devices
        self._planned: BlockPrograms | None = None

        def make(folder: Path) -> Mapping[str, Any]:
            self._planned, results = plan()
            report = self._planned.write_forward(folder)
            return {"report": report, "signature": self._planned.signature, "results": results}

        self._forward, found = runtime.open_program(devices, make)
        self._backward: Any = None
        self.signature: BlockSignature = found["signature"]
        self.results: Results = found["results"]
        self.reports: dict[str, Any] = {"forward": found["report"]}
        # Not `close` itself, which would keep this object.
        self._loaded = [self._forward]
        weakref.finalize(self, _close, self._loaded).atexit = False

    def forward(self, arrays: Mapping[str, Any], counters: Mapping[str, int]) -> list[Any]:
        """Runs the forward program on complete arrays; every rank must call it."""
        return self._run(self._forward, arrays, counters)

    def backward(self, arrays: Mapping[str, Any], counters: Mapping[str, int]) -> list[Any]:
        """Runs the backward program, which is made when it is first needed, likewise."""
        if self._backward is None:

            def make(folder: Path) -> Mapping[str, Any]:
                assert self._planned is not None
                return self._planned.write_backward(folder)

            self._backward, self.reports["backward"] = runtime.open_program(self._devices, make)
            self._loaded.append(self._backward)
            self._planned = None
        return self._run(self._backward, arrays, counters)

    def _run(
        self, program: Any, arrays: Mapping[str, Any], counters: Mapping[str, int]
    ) -> list[Any]:
        own = 1 if runtime.started() else self._devices
        call = runtime.Call(self._devices, {n: [array] * own for n, array in arrays.items()})
        found: list[Any] = program.run(call, sliced=False, counters=counters)
        return found

    def close(self) -> None:
        """Frees the ranks' sessions. Backward passes of earlier calls cannot run any more."""
        _close(self._loaded)


def _close(loaded: list[Any]) -> None:
    while loaded:
        loaded.pop().close()


@dataclass(frozen=True)
class CallNames:
    """What messages call a call, and the keys of its random numbers.

    Attributes:
        title: Names the module.
        number: Number of the call.
        counters: As `onnxpar_runtime.Session.counters`.
    """

    title: str
    number: int
    counters: Mapping[str, int]


class BlockCall(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is not required
    """One call of the programs."""

    @staticmethod
    def forward(ctx: Any, programs: Programs, names: CallNames, *tensors: Tensor) -> Any:
        """Returns the outputs of the module, and the new running statistics."""
        signature = programs.signature
        taken = [*signature.inputs, *(held.name for held in signature.held)]
        arrays = {n: as_array(n, t) for n, t in zip(taken, tensors, strict=True)}
        found = programs.forward(arrays, names.counters)
        device = tensors[0].device if tensors else torch.device("cpu")
        results = tuple(torch.from_numpy(array).to(device) for array in found)
        ctx.programs, ctx.names, ctx.taken = programs, names, taken
        ctx.kept = [*signature.inputs, *signature.kept]
        values = dict(zip(taken, tensors, strict=True))
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
        """Returns the gradients of inputs and held tensors."""
        programs, signature, names = ctx.programs, ctx.programs.signature, ctx.names
        saved = ctx.saved_tensors  # PyTorch's checkpointing lets them be read only once
        runtime.same_call(
            f"backward of {names.title}", lambda: ({"number of the call": str(names.number)}, None)
        )
        arrays = {n: as_array(n, t) for n, t in zip(ctx.kept, saved, strict=True)}
        given = dict(zip(signature.outputs, cotangents, strict=False))
        for name, taker in signature.cotangents.items():
            arrays[taker] = as_array(name, given[name].contiguous())
        made: dict[str, Tensor] = {}
        if signature.gradients:
            found = programs.backward(arrays, names.counters)
            device = saved[0].device if saved else torch.device("cpu")
            made = {
                name: torch.from_numpy(array).to(device)
                for name, array in zip(signature.gradients, found, strict=True)
            }
        return (None, None, *(made.get(name) for name in ctx.taken))


def as_array(name: str, tensor: Tensor) -> Any:
    """Returns a tensor's memory as an array, without a copy if it is on the CPU."""
    try:
        return tensor.detach().cpu().numpy()
    except TypeError:
        raise CallError(
            f"{name!r}: expected an element type that NumPy has, got {tensor.dtype}; use float32 "
            "or float16 in a sharded module"
        ) from None


def check_alike(given: Mapping[str, Tensor], samples: int = 64, alike: float = 1e-3) -> None:
    """Raises CallError on all ranks if they were clearly given other numbers.

    Args:
        given: The tensors by name, of equal shapes on all ranks.
        samples: Number of elements to compare of each.
        alike: How far they may differ, relative to the largest: rounding differs by 1e-6 or less;
            other random numbers by about 1.
    """
    for name, tensor in given.items():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // samples)].cpu().double().numpy()
        first = runtime.from_first_rank(sample)
        scale = float(abs(first).max(initial=0.0))
        same = bool((abs(first - sample) <= alike * scale).all())
        if not runtime.on_all_ranks(same):
            raise CallError(
                f"input {name!r}: expected the same numbers on all ranks, got others than rank "
                "0 on at least one; use the same seed and the same batches on all ranks"
            )


def described(tensors: Mapping[str, Tensor], kind: str) -> Mapping[str, str]:
    """Returns element type and shape of each tensor, for comparisons of calls."""
    return {f"{kind} {name!r}": runtime.described(tensor) for name, tensor in tensors.items()}


def listed(names: Sequence[str]) -> str:
    """Returns names as a fact that ranks compare."""
    return "\n".join(sorted(names))
