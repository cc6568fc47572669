"""Folders as Optimum exports them: tokens equal those of its own loop over the undivided files."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.core.errors import ModelError
from onnxpar_format.options import BeamSearch, VerifyOptions
from onnxpar_runtime.errors import OnnxparRuntimeError
from onnxpar_runtime.generation.encoder import token_feeds
from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.manifest import Manifest

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
made = pytest.importorskip("encoder_decoder", reason="needs transformers: the extra zoo")

import transformers  # noqa: E402
from decoder import configuration, network  # noqa: E402

from tests.models.beam_reference import compare  # noqa: E402
from tests.models.optimum_form import merge, write_folder  # noqa: E402
from tests.tiers import FULL  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch's tracer

RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(3, 256, size).tolist() for size in (13, 5, 9)]
START, NEW = [3, 17, 40], 24
CASES = [("bart", "tp=2"), ("t5 merged", "dp=2,tp=2")] if FULL else [("t5 merged", "tp=2")]

# As in test_encoder_decoder: forty sums of at most 128 terms, one after the other.
RTOL = 3e-5


@cache
def module(family: str) -> Any:
    config = configuration(family, {}, made.FAMILIES, made._SIZES)
    found = network(config, seed=0, folder=None, auto=transformers.AutoModelForSeq2SeqLM)
    with torch.no_grad():
        for name, weight in found.get_decoder().named_parameters():
            # So that what was read and what was written decide, not the last token alone.
            if weight.ndim == 2 and "emb" not in name and "relative" not in name:
                weight *= 4
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a family, or the one with merged decoders."""

    @cache
    def folder(name: str) -> Path:
        family, _, merged = name.partition(" ")
        path: Path = tmp_path_factory.mktemp(family) / "files"
        if merged:
            return merge(folder(family), path)
        return write_folder(module(family), path)

    return folder


@pytest.fixture(scope="module")
def sharded(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a folder and a strategy."""

    @cache
    def out(name: str, strategy: str) -> Path:
        path: Path = tmp_path_factory.mktemp("out") / "out"
        devices = 1 if strategy == "replicate" else None
        return shard_model(folders(name), strategy, path, devices=devices).out

    return out


def chained(folder: Path) -> list[list[int]]:
    """The tokens of a loop over the three files, as Optimum's own."""
    encoder, first, following = (
        onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
        for name in ("encoder_model", "decoder_model", "decoder_with_past_model")
    )

    def run(session: Any, feeds: dict[str, Any]) -> dict[str, Any]:
        taken = [value.name for value in session.get_inputs()]
        names = [value.name for value in session.get_outputs()]
        results = session.run(None, {name: feeds[name] for name in taken})
        return dict(zip(names, results, strict=True))

    found = []
    for text in TEXTS:
        read = {"input_ids": np.array([text]), "attention_mask": np.ones((1, len(text)), np.int64)}
        hidden = run(encoder, read)["last_hidden_state"]
        feeds = {"encoder_attention_mask": read["attention_mask"], "encoder_hidden_states": hidden}
        results = run(first, {**feeds, "input_ids": np.array([START])})
        new: list[int] = []
        for _ in range(NEW):
            new.append(int(results["logits"][0, -1].argmax()))
            feeds |= {n.replace("present", "past_key_values"): a for n, a in results.items()}
            results = run(following, {**feeds, "input_ids": np.array([[new[-1]]])})
        found.append(new)
    return found


@pytest.mark.full
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_tokens_are_those_of_the_three_files(
    name: str, strategy: str, folders: Any, sharded: Any
) -> None:
    out = sharded(name, strategy)
    want = chained(folders(name.split()[0]))
    assert len({tuple(tokens) for tokens in want}) > 1
    with Ranks(out, Generator) as ranks:
        feeds = token_feeds(ranks.manifest.program("encoder"), TEXTS)
        got = ranks.on_each(
            lambda m: m.generate([START] * len(TEXTS), max_new_tokens=NEW, encoder=feeds)
        )
    assert got == [want] * ranks.manifest.devices
    options = VerifyOptions(generate=4, prompt_tokens=5)
    (case,) = runtime.verify(out, folders(name), options=options)
    assert case.ok, case
    assert case.bytes_counted == case.bytes_expected > 0


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_beam_search_finds_what_transformers_does(name: str, strategy: str, sharded: Any) -> None:
    """A run takes one token of each row: first of the prompts, in three runs, then of the beams."""
    how, new, longest = BeamSearch(3, 0.7, "false"), 12, max(map(len, TEXTS))
    rows = {
        "input_ids": [text + [1] * (longest - len(text)) for text in TEXTS],
        "attention_mask": [[1] * len(text) + [0] * (longest - len(text)) for text in TEXTS],
        "decoder_input_ids": [START] * len(TEXTS),
    }
    with Ranks(sharded(name, strategy), Generator) as ranks:
        given = {"encoder": token_feeds(ranks.manifest.program("encoder"), TEXTS)}
        prompts = rows["decoder_input_ids"]

        def search(m: Generator, eos: Sequence[int] = ()) -> Any:
            return m.beam_search(prompts, how, max_new_tokens=new, eos=eos, **given)

        free = ranks.on_each(search)[0]
        eos = sorted({free[0][0].tokens[4], free[1][1].tokens[7]})
        found = ranks.on_each(lambda m: search(m, eos))
    assert all(one == found[0] for one in found)
    assert len({one.tokens[0] for row in found[0] for one in row}) > 1
    inputs = {key: np.array(value) for key, value in rows.items()}
    family = module(name.split()[0])
    compare(found[0], family, inputs, how, eos, new, prompt=len(START), rtol=RTOL)


@pytest.mark.parametrize(
    ("name", "strategy"), [("t5", "replicate"), ("bart", "tp=2")][: 2 if FULL else 1]
)
def test_the_encoder_has_the_projections_of_its_result_and_nothing_else_of_the_decoder(
    name: str, strategy: str, sharded: Any
) -> None:
    """Shapes in the decoder follow from its tokens, yet no layer of it runs in the encoder."""
    out = sharded(name, strategy)
    encoder = Manifest.load(out).program("encoder")
    assert [spec.name for spec in encoder.inputs] == ["input_ids", "attention_mask"]
    assert len(encoder.outputs) == 8 // 2
    graph = onnx.load(out / "rank0000.encoder.onnx", load_external_data=False).graph
    # Of a layer of the encoder: 4 projections, 2 of attention, 2 of the feed-forward part.
    assert sum(node.op_type == "MatMul" for node in graph.node) == 2 * 8 + 2 * 2


def test_weights_that_the_files_name_differently_are_stored_once(
    sharded: Any,
) -> None:
    """The table has another name in each file; the head is stored as its transpose besides."""
    out = sharded("t5", "replicate")
    stored = sum(path.stat().st_size for path in out.glob("weights.*"))
    held = sum(p.nbytes for p in module("t5").parameters())
    # Headers of the file and constants of the graphs are less than half of another table.
    table = module("t5").get_input_embeddings().weight.nbytes
    assert held + table <= stored < held + 1.5 * table


def test_prompts_of_several_lengths_are_refused_without_a_mask(
    sharded: Any,
) -> None:
    with Generator(sharded("t5", "replicate")) as generator:
        feeds = token_feeds(generator.manifest.program("encoder"), TEXTS[:2])
        with pytest.raises(OnnxparRuntimeError, match="expected equal lengths"):
            generator.generate([[3], [3, 4]], encoder=feeds)


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (["decoder_with_past_model"], "expected decoder_model.onnx and decoder_with_past_model"),
        (["decoder_model"], "for a task that ends in -with-past"),
        (["encoder_model", "decoder_with_past_model"], "without genai_config.json, model.onnx, or"),
    ],
)
def test_a_folder_that_is_not_complete_is_refused(
    removed: list[str], message: str, folders: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in folders("t5").glob("*.onnx"):
        if path.stem not in removed:
            (folder / path.name).symlink_to(path)
    with pytest.raises(ModelError, match=message):
        shard_model(folder, "tp=2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_keys_that_do_not_follow_from_the_encoder_are_refused(folders: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in folders("t5").glob("*.onnx"):
        (folder / path.name).symlink_to(path)
    model = onnx.load(folder / "decoder_model.onnx")
    given = onnx.helper.make_tensor_value_info("scale", onnx.TensorProto.FLOAT, [])
    model.graph.input.append(given)
    (node,) = (n for n in model.graph.node if "present.0.encoder.key" in n.output)
    node.output[:] = ["unscaled"]
    scaled = onnx.helper.make_node("Mul", ["unscaled", "scale"], ["present.0.encoder.key"])
    model.graph.node.append(scaled)
    (folder / "decoder_model.onnx").unlink()
    onnx.save(model, folder / "decoder_model.onnx")
    with pytest.raises(ModelError, match=r"follow from encoder_hidden_states, got .*'scale'"):
        shard_model(folder, "tp=2", tmp_path / "out")


def test_a_decoder_alone_is_the_file_of_its_folder(folders: Any, tmp_path: Path) -> None:
    """Also where the branches of its file are merged."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "decoder_model_merged.onnx").symlink_to(
        folders("t5 merged") / "decoder_model_merged.onnx"
    )
    out = shard_model(folder, "replicate", tmp_path / "out", devices=1).out
    names = [spec.name for spec in Manifest.load(out).program("model").inputs]
    assert "use_cache_branch" not in names and "past_key_values.0.decoder.key" in names
