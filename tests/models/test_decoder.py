"""Decoders of Hugging Face with their cache: as transformers computes, and sharded as undivided."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar_format.options import BeamSearch, VerifyOptions
from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.group import Ranks
from tests.models.cached import cached_logits

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")
decoder = pytest.importorskip("decoder", reason="needs transformers: the extra zoo")

from _exporter import save  # noqa: E402
from llama_4bit import quantise  # noqa: E402

from tests.models.beam_reference import compare  # noqa: E402
from tests.tiers import FULL  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers about its defaults

EVERY = [(family, cache) for family in decoder.FAMILIES for cache in ("growing", "shared")]
QUICK = [("qwen3", "shared")]
LAYERS = 2 if FULL else 1
BATCH, PROMPT, LENGTH = 2, 11, 13
"""Of the prompt and of the whole sequence; longer than the window of Gemma 3's local layers."""

# Sums have at most 128 terms, a network some thirty sums one after the other, and norms divide what
# was added at their scale: 30 sqrt(128) 2^-24 = 2e-5 of the largest output.
RTOL = 2e-5


def built(folder: Path, family: str, cache: str, bits: int = 32) -> Path:
    path = folder / "model.onnx"
    config = decoder.configuration(family, {"num_hidden_layers": LAYERS})
    save(decoder.build(config, shared=cache == "shared", bits=bits, block=16)[1], path)
    return path


def logits(path: Path, ids: Any) -> Any:
    """The logits of a sequence: of a prompt from an empty cache, then of single tokens."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    caches = [name for name in names if name.startswith("past")]
    # A shared buffer has its full length from the beginning.
    length = 0 if "position_ids" in names else LENGTH
    return cached_logits(session, ids, range(PROMPT, LENGTH + 1), caches, length)


def expected(family: str, ids: Any, bits: int = 32) -> Any:
    """What transformers computes of the whole sequence at once."""
    config = decoder.configuration(family, {"num_hidden_layers": LAYERS})
    module = decoder.network(config)
    with torch.no_grad():
        for part in module.modules():
            if bits != 32 and isinstance(part, torch.nn.Linear):
                part.weight.copy_(torch.from_numpy(rounded(part.weight.numpy(), bits)))
        return module(input_ids=torch.from_numpy(ids)).logits.numpy()


def rounded(weight: Any, bits: int, block: int = 16) -> Any:
    """A weight as the numbers and scales of few bits give it."""
    packed, scales = quantise(weight, block, bits)
    places = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (packed[..., None] >> places & (2**bits - 1)).reshape(*scales.shape, block)
    values = (numbers.astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]
    return values.reshape(weight.shape)


def tokens() -> Any:
    return np.random.default_rng(0).integers(0, 256, (BATCH, LENGTH))


@pytest.mark.parametrize(("family", "cache"), EVERY if FULL else QUICK)
def test_it_computes_what_transformers_does(family: str, cache: str, tmp_path: Path) -> None:
    ids = tokens()
    want = expected(family, ids)
    got = logits(built(tmp_path, family, cache), ids)
    assert np.abs(got - want).max() <= RTOL * np.abs(want).max()


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.full)])
def test_few_bits_are_those_of_the_weights(bits: int, tmp_path: Path) -> None:
    ids = tokens()
    want = expected("llama", ids, bits)
    got = logits(built(tmp_path, "llama", "shared", bits), ids)
    assert np.abs(got - want).max() <= RTOL * np.abs(want).max()
    assert np.abs(want - expected("llama", ids)).max() > RTOL * np.abs(want).max()


@pytest.mark.full
def test_angles_have_the_type_of_the_weights(tmp_path: Path) -> None:
    """Attention on a shared cache takes queries, keys and angles of one type."""
    changes = {"dtype": "float16", "num_hidden_layers": 1}
    _, model = decoder.build(decoder.configuration("llama", changes), shared=True)
    path, ids = tmp_path / "model.onnx", tokens()
    save(model, path)
    with torch.no_grad():
        same = decoder.network(decoder.configuration("llama", changes)).float()
        want = same(input_ids=torch.from_numpy(ids)).logits.numpy()
    got = logits(path, ids)
    assert got.dtype == np.float16
    # Each of some thirty results, one after the other, is rounded to 11 bits.
    assert np.abs(got - want).max() <= 30 * 2**-11 * np.abs(want).max()


CASES = [("mixtral", "shared", 4, "tp=2")]
EVERY_CASE = [
    (family, cache, bits, strategy)
    for family, cache in EVERY
    for bits in (32, 4)
    for strategy in ("tp=2", "dp=2,tp=2", "pp=2", "pp=2,tp=2")
]

ROWS = {
    **{
        ("llama", cache, bits): 1 + 2 * LAYERS
        for cache in ("growing", "shared")
        for bits in (32, 4)
    },
    ("mixtral", "shared", 4): 0.5 + LAYERS,
    ("mixtral", "growing", 4): 0.5 + LAYERS * 1.5,
}
"""Rows of activations that each of two devices sends for a token. Llama: an all-reduce for the
table and two for each layer. Mixtral: all-gathers and reduce-scatters, half a row each; if
the cache grows, the results of the heads are gathered as well."""


@pytest.mark.parametrize(("family", "cache", "bits", "strategy"), EVERY_CASE if FULL else CASES)
def test_sharded_it_generates_the_same(
    family: str, cache: str, bits: int, strategy: str, tmp_path: Path
) -> None:
    path = built(tmp_path, family, cache, bits)
    out = shard_model(path, strategy, tmp_path / "out").out
    (case,) = runtime.verify(out, path, options=VerifyOptions(generate=12))
    assert case.ok, case
    assert case.bytes_counted == case.bytes_expected > 0
    if strategy == "tp=2" and (family, cache, bits) in ROWS:
        # Three sequences, 64 columns of prompts and 11 steps, rows of 64 floats.
        assert case.bytes_counted == ROWS[family, cache, bits] * 3 * (64 + 11) * 64 * 4


@pytest.mark.full
def test_beam_search_finds_what_transformers_does(tmp_path: Path) -> None:
    """Prompts of two lengths, in a cache that attention updates, which is permuted in place."""
    path, new = built(tmp_path, "llama", "shared"), 10
    out = shard_model(path, "tp=2", tmp_path / "out").out
    ids = tokens()
    mask = np.ones_like(ids)
    mask[1, :5] = 0
    prompts = [ids[0].tolist(), ids[1, 5:].tolist()]
    module = decoder.network(decoder.configuration("llama"))
    with Ranks(out, Generator) as ranks:
        how = BeamSearch(4, 0.7, "false")
        free = ranks.on_each(lambda m: m.beam_search(prompts, how, max_new_tokens=new))[0]
        eos = [free[0][0].tokens[3], free[1][1].tokens[6]]
        found = ranks.on_each(lambda m: m.beam_search(prompts, how, max_new_tokens=new, eos=eos))[0]
    inputs = {"input_ids": ids, "attention_mask": mask}
    compare(found, module, inputs, how, eos, new, prompt=LENGTH, rtol=RTOL)
    assert {len(one.tokens) for row in found for one in row} > {new}


@pytest.mark.full
def test_a_folder_is_described_as_genai_does(tmp_path: Path) -> None:
    decoder.configuration("gemma3").save_pretrained(tmp_path / "hf")
    out = tmp_path / "out"
    decoder.main(
        [str(tmp_path / "hf"), "-o", str(out), "--cache", "shared", "--set", "vocab_size=300"]
    )
    written = json.loads((out / "genai_config.json").read_text())["model"]
    model = onnx.load(out / written["decoder"]["filename"])
    described = written["decoder"]["inputs"], written["decoder"]["outputs"]
    for values, names in zip((model.graph.input, model.graph.output), described, strict=True):
        layers = range(written["decoder"]["num_hidden_layers"])
        expected = {n % i if "%d" in n else n for n in names.values() for i in layers}
        assert {value.name for value in values} == expected
    key = next(v for v in model.graph.input if v.name == "past_key_values.0.key")
    dims = key.type.tensor_type.shape.dim
    assert dims[1].dim_value == written["decoder"]["num_key_value_heads"] == 2
    assert dims[3].dim_value == written["decoder"]["head_size"] == 32
    (scores,) = [v for v in model.graph.output if v.name == "logits"]
    assert scores.type.tensor_type.shape.dim[2].dim_value == written["vocab_size"] == 300


def test_layers_repeat_their_kinds() -> None:
    kinds = decoder.configuration("gemma3", {"num_hidden_layers": 3}).layer_types
    assert kinds == ["sliding_attention", "full_attention", "sliding_attention"]


def test_what_follows_from_a_change_changes_too() -> None:
    config = decoder.configuration("llama", {"hidden_size": 128})
    assert (config.hidden_size, config.head_dim) == (128, 32)
    assert decoder.configuration("qwen3", {"hidden_size": 512}).head_dim == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing: expected llama, "),
        (["llama", "--set", "hiden_size=8"], "hiden_size: LlamaConfig has no such entry"),
        (["llama", "--set", "hidden_size"], "--set hidden_size: expected NAME=VALUE"),
        (["llama", "--bits", "4", "--block", "48"], "expected a multiple of 48 columns, got 64"),
        (["{gpt2}", "--cache", "shared"], "GPT2LMHeadModel: a shared cache needs rotary positions"),
        (["{mamba}"], "MambaForCausalLM: expected a cache of keys and values, got none"),
    ],
)
def test_what_cannot_be_exported_is_said(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, MambaConfig

    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64).save_pretrained(tmp_path / "gpt2")
    MambaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=64).save_pretrained(
        tmp_path / "mamba"
    )
    folders = {name: str(tmp_path / name) for name in ("gpt2", "mamba")}
    given = [text.format(**folders) for text in arguments]
    with pytest.raises(SystemExit):
        decoder.main([*given, "-o", str(tmp_path / "out.onnx")])
    assert message in capsys.readouterr().err
