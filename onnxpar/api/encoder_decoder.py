"""Partitions an encoder and its decoder on one mesh, with one layout for each shared tensor."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxpar.core.errors import ModelError, StrategyError
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Symbol
from onnxpar.emit.weight_sources import tensor_bytes
from onnxpar.facts.carried_states import CarriedState, carried_states
from onnxpar.facts.program import Program
from onnxpar.facts.supplied_inputs import SuppliedInput, supplied_inputs
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.partition.partition import partition
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.propagation.state_layouts import propagate_with_states
from onnxpar.search.decide import settled
from onnxpar.search.workload import Workload
from onnxpar.strategy import Strategy, resolve
from onnxpar.strategy.schema import SEARCH

ENCODER = "encoder"
"""Name of the encoder's program."""
_LEAST = 1024
"""Elements of a weight that is looked for under other names in the decoder."""

Symbols = Mapping[str, Symbol]
Analyse = Callable[[ir.Model, Symbols, Mapping[str, str] | None], Program]


@dataclass(frozen=True)
class _Half:
    """One of the two programs, with the part of its plan that is fixed."""

    workload: Workload
    seeds: Seeds


def check_strategy(strategy: Strategy) -> None:
    """Checks that a strategy can be carried out for two programs.

    Raises:
        StrategyError: The strategy searches, has a pipeline, or names nodes or tensors of one
            program.
    """
    what = "an encoder and a decoder are sharded by one strategy"
    if strategy.pipeline is not None:
        raise StrategyError(f"{strategy.source}: {what}: expected one stage, got a pipeline")
    if strategy.rest == SEARCH or strategy.dataset == SEARCH:
        raise StrategyError(
            f"{strategy.source}: {what}: expected one that leaves nothing to a search, such as "
            "tp=2 or dp=2,tp=2"
        )
    for entry in ("dataset", "parameters", "nodes"):
        if isinstance(found := getattr(strategy, entry), Mapping) and found:
            raise StrategyError(
                f"{strategy.source}: {what}: expected no names of one model's tensors or nodes, "
                f"got {entry!r}"
            )


def partition_encoder_decoder(
    read: Callable[[], ir.Model],
    decoder: ir.Model,
    strategy: Strategy,
    symbols: Symbols,
    analyse: Analyse,
    states: Mapping[str, str] | None,
    declared: Mapping[str, str] | None,
) -> tuple[PartitionedModel, PartitionedModel]:
    """Returns the decoder and the encoder, partitioned for one mesh.

    A weight of both that has the same elements and is sharded alike is stored once, under the name
    that the decoder gives it. If both have a name for different weights, the encoder's gets
    `encoder.` before it.

    Args:
        read: Reads the encoder.
        decoder: The decoder, which is used up.
        strategy: The strategy, for both.
        symbols: Constraints on symbols of either.
        analyse: Makes a program of a model, with constraints and declared states.
        states: The decoder's states that are known, output by input.
        declared: Outputs of the encoder that are known, by input of the decoder.

    Raises:
        OnnxparError: The models do not belong together, or the strategy does not fit one of them.
    """
    check_strategy(strategy)
    encoder = read()
    own = {side: _own(symbols, model) for side, model in (("d", decoder), ("e", encoder))}
    unknown = symbols.keys() - own["d"].keys() - own["e"].keys()
    if unknown:
        raise ModelError(
            f"symbol {min(unknown)!r}: expected a symbol of the inputs of the encoder or of the "
            "decoder"
        )
    taken = set(decoder.graph.initializers)
    shared = _shared(encoder, decoder)
    _rename(encoder, shared, taken)
    whole = analyse(decoder, own["d"], states)
    carried = carried_states(whole, states)
    supplied = supplied_inputs(
        whole.graph, encoder.graph, ENCODER, [state.input for state in carried], declared
    )
    first = _half(whole, replace(strategy, symbols=own["d"]), own["d"])
    second = _half(analyse(encoder, own["e"], None), replace(strategy, symbols=own["e"]), own["e"])
    plans = _plans(first, second, carried, supplied)
    clash = {
        name
        for name in shared.values()
        if name in plans[0].parameters
        and plans[1].parameters.get(name, plans[0].parameters[name]) != plans[0].parameters[name]
    }
    if clash:
        # The layouts are right, but a file holds one layout of a name.
        encoder = read()
        _rename(encoder, {k: v for k, v in shared.items() if v not in clash}, taken)
        program = analyse(encoder, own["e"], None)
        second = _half(program, replace(strategy, symbols=own["e"]), own["e"])
        plans = _plans(first, second, carried, supplied)
    parted = partition(first.workload.program, plans[0])
    return (
        replace(parted, carried=carried, supplied=supplied),
        partition(second.workload.program, plans[1], name=ENCODER),
    )


def _own(symbols: Symbols, model: ir.Model) -> dict[str, Symbol]:
    """Returns the constraints on symbols of a model's inputs."""
    dims = [dim for value in model.graph.inputs for dim in value.shape or ()]
    names = {name for d in dims if isinstance(d, ir.SymbolicDim) for name in _names(d)}
    return {name: symbol for name, symbol in symbols.items() if name in names}


def _names(dim: ir.SymbolicDim) -> Collection[str]:
    return {str(dim.value), *(str(name) for name in dim.free_symbols())}


def _half(program: Program, strategy: Strategy, symbols: Symbols) -> _Half:
    workload = Workload.inference(program)
    strategy = settled(strategy, workload, symbols)
    return _Half(workload, resolve(strategy, program))


def _plans(
    decoder: _Half,
    encoder: _Half,
    carried: Sequence[CarriedState],
    supplied: Sequence[SuppliedInput],
) -> tuple[Plan, Plan]:
    """Returns plans of both, with one layout of each result of the encoder that the decoder reads.

    Of two layouts, it is the one that shards the tensor more, so neither program holds more than it
    needs.
    """
    taking = propagate_with_states(decoder.workload.plan, decoder.seeds, carried)
    making = encoder.workload.plan(encoder.seeds)
    inputs, outputs = dict(decoder.seeds.inputs), dict(encoder.seeds.outputs)
    held = set(decoder.seeds.held)
    for pair in supplied:
        if pair.given:
            continue
        taken, made = taking.inputs[pair.input], making.outputs[pair.value]
        if _pieces(taken) == _pieces(made):
            continue
        better = made if len(made.split_atoms) > len(taken.split_atoms) else taken
        atoms = [better.dim_atoms(dim) for dim in range(better.rank)]
        inputs[pair.input] = Sharding.of(taken.shape, atoms)
        outputs[pair.value] = Sharding.of(made.shape, atoms)
        held.add(pair.input)
    # A preset may hold all inputs as they come, so `held` does not show what has changed.
    if inputs != decoder.seeds.inputs or outputs != encoder.seeds.outputs:
        seeds = replace(decoder.seeds, inputs=inputs, held=frozenset(held))
        taking = propagate_with_states(decoder.workload.plan, seeds, carried)
        making = encoder.workload.plan(replace(encoder.seeds, outputs=outputs))
    return taking, making


def _pieces(layout: Sharding) -> tuple[tuple[tuple[int | None, tuple[int, ...]], ...], ...]:
    """Returns the atoms of each component, and the sizes of several in one dim."""
    return tuple(
        tuple(
            (c.size if len(dim) > 1 and isinstance(c.size, int) else None, tuple(c.atoms))
            for c in dim
        )
        for dim in layout.dims
    )


def _shared(encoder: ir.Model, decoder: ir.Model) -> dict[str, str]:
    """Returns, by name in the encoder, the decoder's name of each weight that both have."""
    own, others = encoder.graph.initializers, decoder.graph.initializers
    found = {
        name: name
        for name, value in own.items()
        if name in others and _equal(value.const_value, others[name].const_value)
    }
    for name, value in own.items():
        tensor = value.const_value
        if name in found or tensor is None or tensor.size < _LEAST:
            continue
        same = [n for n, other in others.items() if _equal(tensor, other.const_value)]
        if same:
            found[name] = same[0]
    return found


def _equal(one: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return np.array_equal(tensor_bytes(one), tensor_bytes(other))


def _rename(model: ir.Model, shared: Mapping[str, str], others: Collection[str]) -> None:
    """Gives shared weights their common name, and others a name that `others` does not have."""
    weights = model.graph.initializers
    taken = {*others, *(value.name for value in (*model.graph.inputs, *weights.values()))}
    taken |= {value.name for node in model.graph for value in node.outputs}
    for name in [name for name in weights if name in others and name not in shared]:
        new = f"{ENCODER}.{name}"
        while new in taken:
            new = f"{ENCODER}.{new}"
        taken.add(new)
        weights[name].name = new
    for name in [name for name in weights if shared.get(name, name) != name]:
        if shared[name] in weights:
            weights[name].replace_all_uses_with(weights[shared[name]])
            weights.pop(name)
        else:
            weights[name].name = shared[name]
