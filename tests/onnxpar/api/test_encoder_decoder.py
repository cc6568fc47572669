"""An encoder and a decoder in one directory: layouts that fit, weights, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxpar.api import encoder_decoder as api
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import ModelError, StrategyError
from onnxpar.core.symbols import Symbol
from onnxpar_format.entries import SymbolEntry
from onnxpar_runtime.errors import DirectoryError as ReadError
from onnxpar_runtime.manifest import Manifest
from tests.decoders import KV_HEADS, LAYERS, encoder_decoder, growing

CROSSED = [f"{part}_cross_{n}" for n in range(LAYERS) for part in ("key", "value")]


def sharded(tmp_path: Path, strategy: str = "tp=2", **more: Any) -> Manifest:
    folder = encoder_decoder(tmp_path / "model")
    return Manifest.load(shard_model(folder, strategy, tmp_path / "out", **more).out)


@pytest.mark.parametrize("strategy", ["tp=2", "tp=4", "dp=2", "dp=2,tp=2"])
def test_what_the_encoder_leaves_has_the_layout_that_the_decoder_takes(
    strategy: str, tmp_path: Path
) -> None:
    manifest = sharded(tmp_path, strategy)
    decoder, encoder = manifest.program("model"), manifest.program("encoder")
    assert [(p.input, p.source, p.value, p.given) for p in decoder.supplied] == [
        (f"past_{name}", "encoder", f"present_{name}", False) for name in CROSSED
    ]
    assert {state.input for state in decoder.carried}.isdisjoint(p.input for p in decoder.supplied)
    taken = {spec.name: spec for spec in decoder.inputs}
    made = {spec.name: spec for spec in encoder.outputs}
    for pair in decoder.supplied:
        assert taken[pair.input].dims == made[pair.value].dims
        # Each device has its part of them, and nothing more.
        assert len(taken[pair.input].split_atoms) == len(manifest.atoms)
    heads = taken["past_key_cross_0"].dims[1][0]
    assert heads.size == KV_HEADS and bool(heads.atoms) == ("tp" in strategy)


def test_layouts_agree_if_a_preset_holds_all_inputs_of_the_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `tp=2` does for Whisper with one layer, whose decoder it lets read replicated tensors."""
    half = api._half

    def held(*arguments: Any) -> Any:
        found = half(*arguments)
        return replace(found, seeds=replace(found.seeds, held=frozenset(found.seeds.inputs)))

    monkeypatch.setattr(api, "_half", held)
    manifest = sharded(tmp_path)
    decoder, encoder = manifest.program("model"), manifest.program("encoder")
    taken = {spec.name: spec for spec in decoder.inputs}
    made = {spec.name: spec for spec in encoder.outputs}
    for pair in decoder.supplied:
        assert taken[pair.input].dims == made[pair.value].dims
        assert taken[pair.input].split_atoms


def test_a_weight_of_both_is_stored_once_unless_its_content_or_layout_differs(
    tmp_path: Path,
) -> None:
    names = sharded(tmp_path).parameters
    assert "g" in names and "encoder.g" not in names
    # Other content.
    assert "wu0" in names and names["encoder.wu0"].shape == (12, 32)
    # The decoder divides its columns, the encoder its rows.
    layouts = [[bool(d[0].atoms) for d in names[n].dims] for n in ("wq0", "encoder.wq0")]
    assert layouts == [[False, True], [True, False]]
    one = Manifest.load(
        shard_model(tmp_path / "model", "replicate", tmp_path / "one", devices=1).out
    )
    assert "encoder.wq0" not in one.parameters and "wq0" in one.parameters


def test_a_new_name_is_one_that_nobody_has(tmp_path: Path) -> None:
    folder = encoder_decoder(tmp_path / "model")
    model = onnx.load(folder / "encoder.onnx")
    (bias,) = (w for w in model.graph.initializer if w.name == "g")
    bias.name = "encoder.wu0"
    for node in model.graph.node:
        node.input[:] = ["encoder.wu0" if name == "g" else name for name in node.input]
    onnx.save(model, folder / "encoder.onnx")
    manifest = Manifest.load(shard_model(folder, "tp=2", tmp_path / "out").out)
    assert {"encoder.wu0", "encoder.encoder.wu0"} <= set(manifest.parameters)


def test_two_files_are_taken_as_a_folder_is(tmp_path: Path) -> None:
    folder = encoder_decoder(tmp_path / "model")
    found = [
        Manifest.load(shard_model(model, "tp=2", tmp_path / name, encoder=encoder).out)
        for name, model, encoder in (
            ("one", folder, None),
            ("two", folder / "decoder.onnx", folder / "encoder.onnx"),
        )
    ]
    assert found[0].programs == found[1].programs
    with pytest.raises(ModelError, match="expected the file of a decoder, got folder"):
        shard_model(folder, "tp=2", tmp_path / "out", encoder=folder / "encoder.onnx")


def test_constraints_of_both_hold(tmp_path: Path) -> None:
    symbols = {
        "batch": Symbol(divisor=2),
        "frames": Symbol(max=40),
        "past_sequence_length": Symbol(min=0),
    }
    found = sharded(tmp_path, symbols=symbols).symbols
    assert found["batch"].divisor == 2 and found["frames"].max == 40
    with pytest.raises(ModelError, match="symbol 'rows': expected a symbol of the inputs of the"):
        shard_model(tmp_path / "model", "tp=2", tmp_path / "two", symbols={"rows": Symbol()})


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Symbol(), Symbol(min=3, max=9), Symbol(min=3, max=9)),
        (Symbol(max=12), Symbol(max=9), Symbol(max=9)),
        (Symbol(divisor=4), Symbol(divisor=6), Symbol(divisor=12)),
        (
            Symbol(divisor=4, remainder=3),
            Symbol(divisor=6, remainder=1),
            Symbol(divisor=12, remainder=7),
        ),
        (Symbol(min=0), Symbol(min=0, per_rank=True), Symbol(min=0, per_rank=True)),
    ],
)
def test_two_constraints_admit_what_both_admit(one: Symbol, other: Symbol, both: Symbol) -> None:
    assert one.both(other) == other.both(one) == both
    for size in range(1, 40):
        made, *each = (SymbolEntry(**vars(symbol)).admits(size) for symbol in (both, one, other))
        # A constraint with a remainder admits no size below its divisor.
        assert made == (all(each) and (not both.remainder or size >= both.divisor))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Symbol(divisor=4), Symbol(divisor=2, remainder=1)),
        (Symbol(max=4), Symbol(min=5)),
    ],
)
def test_constraints_that_contradict_are_refused(one: Symbol, other: Symbol) -> None:
    with pytest.raises(ValueError, match="no size satisfies"):
        one.both(other)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("auto", "expected one that leaves nothing to a search"),
        ("pp=2", "expected one stage, got a pipeline"),
        ("mesh: {tp: 2}\nnodes: {'*': {in: [[~]]}}", "got 'nodes'"),
        ("mesh: {tp: 2}\nparameters: {wq0: [~, tp]}", "got 'parameters'"),
        ("mesh: {tp: 2}\ndataset: {features: [~, ~, ~]}", "got 'dataset'"),
    ],
)
def test_a_strategy_for_one_program_is_refused(strategy: str, message: str, tmp_path: Path) -> None:
    if ":" in strategy:
        (tmp_path / "s.yaml").write_text(strategy)
        strategy = str(tmp_path / "s.yaml")
    with pytest.raises(StrategyError, match=message):
        sharded(tmp_path, strategy, devices=2)
    assert not (tmp_path / "out").exists()


def test_the_written_strategy_gives_the_same_directory(tmp_path: Path) -> None:
    one = sharded(tmp_path, "dp=2,tp=2", symbols={"frames": Symbol(max=40)})
    file = one.directory / "strategy.yaml"
    two = Manifest.load(shard_model(tmp_path / "model", file, tmp_path / "two").out)
    assert (one.programs, one.parameters, one.symbols) == (
        two.programs,
        two.parameters,
        two.symbols,
    )


def test_training_is_refused(tmp_path: Path) -> None:
    spec = TrainingSpec(parse_loss("mse"), parse_optimizer("sgd"))
    with pytest.raises(ModelError, match="an encoder-decoder of two files cannot be trained"):
        sharded(tmp_path, training=spec)


def without_outputs(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.output[:] = [n.replace("present_", "read_") for n in node.output]
    for value in model.graph.output:
        value.name = value.name.replace("present_", "read_")


def in_double(model: onnx.ModelProto) -> None:
    for weight in model.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT:
            array = numpy_helper.to_array(weight).astype(np.float64)
            weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_outputs, "input 'past_key_cross_0' of the decoder: expected the output 'present_"),
        (in_double, r"expected the type FLOAT with 4 dims of the input, got DOUBLE with 4 dims"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    folder = encoder_decoder(tmp_path / "model")
    model = onnx.load(folder / "encoder.onnx")
    change(model)
    onnx.save(model, folder / "encoder.onnx")
    with pytest.raises(ModelError, match=message):
        shard_model(folder, "tp=2", tmp_path / "out")


def test_an_encoder_of_which_nothing_is_taken_is_refused(tmp_path: Path) -> None:
    folder = encoder_decoder(tmp_path / "model")
    alone = growing(tmp_path / "alone.onnx")
    with pytest.raises(ModelError, match="expected an output of the encoder that is an input of"):
        shard_model(alone, "tp=2", tmp_path / "out", encoder=folder / "encoder.onnx")


def test_a_broken_entry_of_the_manifest_is_refused(tmp_path: Path) -> None:
    directory = sharded(tmp_path).directory
    text = (directory / "manifest.json").read_text()
    for old, new, message in (
        (
            '"from": "encoder"',
            '"from": "reader"',
            r"supplied 'past_key_cross_0'.from: expected one",
        ),
        ('"value": "present_key_cross_0"', '"value": "x"', r"value: expected one of the outputs"),
        (
            '"input": "past_key_cross_0"',
            '"input": "x"',
            r"supplied 'x': expected one of the inputs",
        ),
    ):
        assert old in text
        (directory / "manifest.json").write_text(text.replace(old, new))
        with pytest.raises(ReadError, match=message):
            Manifest.load(directory)
    raw = json.loads(text)
    spec = raw["programs"]["encoder"]["outputs"][0]
    spec["dims"][1][0]["atoms"] = []
    (directory / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(
        ReadError, match="expected the type and the layout of 'present_key_cross_0'"
    ):
        Manifest.load(directory)
