"""Outputs that are inputs of the next run: found by name, named by the user, sharded alike."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import llama_4bit
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse, shard_model
from onnxpar.core.errors import ModelError
from onnxpar.core.symbols import Symbol
from onnxpar.facts.carried_states import CarriedState, carried_states
from onnxpar.graph.state_names import state_pairs
from onnxpar.propagation.propagate import propagate
from onnxpar.propagation.state_layouts import propagate_with_states
from onnxpar.strategy import resolve, strategy_for
from tests.decoders import growing

EYE, ZERO = np.eye(8, dtype=np.float32), np.array([0])


def graph(inputs: str, outputs: str, shape: str = "batch,n") -> ir.Graph:
    names = [*inputs.split(), *outputs.split()]
    taken = ", ".join(f"float[{shape}] {name}" for name in inputs.split())
    made = ", ".join(f"float[batch,m] {name}" for name in outputs.split())
    first = names[0]
    nodes = "\n".join(f"{name} = Identity({first})" for name in outputs.split())
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({taken}) => ({made}) {{ {nodes} }}'
    return ir.from_proto(onnx.parser.parse_model(text)).graph


@pytest.mark.parametrize(
    ("taken", "made"),
    [
        ("past_0", "present_0"),
        ("past_key_values_3_key", "present_3_key"),
        ("past_key_values_3_key", "present_key_values_3_key"),
        ("past_key_self_2", "present_key_self_2"),
        ("past_conv_1", "present_conv_1"),
        ("cache_k_0", "new_cache_k_0"),
        ("cache_k_0", "cache_k_0_out"),
        ("ssm_state", "ssm_state_next"),
        ("x", None),
        ("past_1", None),
        ("past_key_values_3_value", None),
    ],
)
def test_states_are_found_by_the_names_of_exporters(taken: str, made: str | None) -> None:
    outputs = [made] if made else ["x_out", "present_0", "present_3_key", "y"]
    found = state_pairs(graph(taken, " ".join(outputs)))
    assert found == ({taken: made} if made else {})


def test_a_state_of_another_rank_is_not_found_by_name() -> None:
    assert state_pairs(graph("past_0", "present_0", "batch,n,4")) == {}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"z": "y"}, "state z=y: the model has no input 'z'"),
        ({"x": "z"}, "state x=z: the model has no output 'z'"),
        ({"w": "y", "x": "y"}, "state x=y: expected an output of its own, but 'y' is the state of"),
    ],
)
def test_a_declared_state_that_is_none_is_refused(declared: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        state_pairs(graph("w x", "y"), declared)


def test_a_declared_state_of_another_rank_is_refused() -> None:
    with pytest.raises(ModelError, match="expected the type FLOAT with 3 dims of the input, got"):
        state_pairs(graph("x", "y", "batch,n,4"), {"x": "y"})


def test_a_growing_cache_may_be_empty_and_is_not_sharded_along_its_growth(tmp_path: Path) -> None:
    model = onnx.load(growing(tmp_path / "model.onnx"))
    program = analyse(ir.from_proto(model), {})
    assert program.env.table["past_sequence_length"] == Symbol(min=0)
    assert program.env.table["total_sequence_length"] == Symbol()
    first = carried_states(program)[0]
    assert first == CarriedState("past_key_values_0_key", "present_0_key", 2)
    constrained = analyse(ir.from_proto(model), {"past_sequence_length": Symbol(min=4)})
    assert constrained.env.table["past_sequence_length"].min == 4


def test_the_cache_of_group_query_attention_is_written_in_place() -> None:
    found = carried_states(analyse(llama_4bit.build(layers=1), {}))
    assert [(s.input, s.output, s.grows, s.appends) for s in found] == [
        (f"past_key_values.0.{part}", f"present.0.{part}", 2, True) for part in ("key", "value")
    ]


def test_a_state_has_one_layout_even_if_its_readers_want_others(tmp_path: Path) -> None:
    """Alone, `y` would be left in the layout of the product; `past_y` is read in every layout."""
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[batch,8] x, float[batch,8] past_y) => (float[batch,8] present_y, float[8] z)
        { y = MatMul(x, w)  present_y = Add(y, past_y)  z = ReduceSum<keepdims=0>(past_y, zero) }
    """
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(EYE, "w"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(ZERO, "zero"))
    onnx.save(model, tmp_path / "model.onnx")
    plan = shard_model(tmp_path / "model.onnx", "tp=2", tmp_path / "out").partitioned.plan
    taken, left = plan.inputs["past_y"], plan.outputs["present_y"]
    assert [taken.dim_atoms(d) for d in (0, 1)] == [left.dim_atoms(d) for d in (0, 1)]
    assert taken.split_atoms, "the product shards its columns"


@pytest.mark.parametrize("fixed", [False, True])
def test_a_layout_that_a_search_held_gives_way_and_one_of_the_user_stays(
    fixed: bool, tmp_path: Path
) -> None:
    """A cache replicated as an input would be gathered, as an output, by every run."""
    program = analyse(ir.from_proto(onnx.load(growing(tmp_path / "model.onnx"))), {})
    seeds = resolve(strategy_for("tp=2", None, program.model, "the model"), program)
    states = carried_states(program)
    held = frozenset(state.input for state in states)
    seeds = replace(seeds, held=held)
    plan = propagate_with_states(partial(propagate, program), seeds, states, held if fixed else ())
    (tp,) = plan.mesh.axis_atoms("tp")
    for state in states:
        for sharding in (plan.inputs[state.input], plan.outputs[state.output]):
            assert sharding.split_atoms == (() if fixed else (tp,))
