"""Encoder-decoders of Hugging Face: as transformers computes, and sharded as undivided.

Their export takes half a minute. The quick tier asks requests of a small one made by hand, and
`test_optimum_form.py` has a T5 that is exported in another way.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar_format.options import BeamSearch, Sampling, VerifyOptions
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.encoder import token_feeds
from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.manifest import Manifest
from tests.decoders import HEAD, VOCAB, encoder_decoder
from tests.models.cached import cached_logits
from tests.runtime.serving.servers import served

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")
made = pytest.importorskip("encoder_decoder", reason="needs transformers: the extra zoo")
pytest.importorskip("uvicorn", reason="serves by HTTP: the extra serve")

from decoder import configuration  # noqa: E402

from tests.models.beam_reference import compare  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers about its defaults

Drawn = list[tuple[int, float]]
"""The tokens of a request, and the logarithms of their probabilities."""
ROWS, PROMPT, LENGTH, SOURCE = 2, 5, 9, 13

# Sums have at most 128 terms, the two halves together some forty sums one after the other, and
# norms divide what was added at their scale: 40 sqrt(128) 2^-24 = 2.7e-5 of the largest output.
RTOL = 3e-5


@cache
def built(family: str) -> Any:
    """A network, its encoder and its decoder."""
    return made.build(configuration(family, {}, made.FAMILIES, made._SIZES))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family, written once."""

    @cache
    def written(family: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(family) / "model"
        if family == "small":
            return encoder_decoder(folder, tokens=True)
        module, encoder, decoder = built(family)
        made.save_folder(module.config, encoder, decoder, folder)
        return folder

    return written


@pytest.fixture(scope="module")
def sharded(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """The directory of a family by a strategy, made once."""

    @cache
    def out(family: str, strategy: str) -> Path:
        return shard_model(folder_of(family), strategy, tmp_path_factory.mktemp("out") / "out").out

    return out


Sharded = Callable[[str, str], Path]


def source(family: str) -> dict[str, Any]:
    """Inputs of the encoder; the second text is shorter, and padded."""
    rng = np.random.default_rng(0)
    if family == "whisper":
        return {"input_features": rng.normal(0, 1, (ROWS, 16, 48)).astype(np.float32)}
    mask = np.ones((ROWS, SOURCE), np.int64)
    mask[1, -4:] = 0
    return {"input_ids": rng.integers(3, 256, (ROWS, SOURCE)) * mask, "attention_mask": mask}


def logits(folder: Path, read: dict[str, Any], ids: Any) -> Any:
    """The logits of a sequence: of a prompt from an empty cache, then of single tokens."""
    encoder, session = (
        onnxruntime.InferenceSession(folder / f"{part}.onnx", providers=["CPUExecutionProvider"])
        for part in ("encoder", "decoder")
    )
    names = [value.name for value in session.get_inputs()]
    own, crossed = (
        [name for name in names if name.startswith("past") and f".{kind}." in name]
        for kind in ("decoder", "encoder")
    )
    fixed = dict(zip(crossed, encoder.run(None, read), strict=True))
    fixed |= {f"encoder_{name}": array for name, array in read.items()}
    return cached_logits(session, ids, range(PROMPT, LENGTH + 1), own, fixed=fixed)


@pytest.mark.full
@pytest.mark.parametrize("family", made.FAMILIES)
def test_it_computes_what_transformers_does(folder_of: Callable[[str], Path], family: str) -> None:
    read = source(family)
    ids = np.random.default_rng(1).integers(0, 256, (ROWS, LENGTH))
    tensors = {name: torch.from_numpy(array) for name, array in read.items()}
    with torch.no_grad():
        module = built(family)[0]
        want = module(**tensors, decoder_input_ids=torch.from_numpy(ids)).logits.numpy()
    got = logits(folder_of(family), read, ids)
    assert np.abs(got - want).max() <= RTOL * np.abs(want).max()


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "strategy", "steps"),
    [("whisper", "tp=2", 128), ("t5", "dp=2,tp=2", 12), ("bart", "tp=2", 12)],
)
def test_sharded_it_generates_the_same(
    folder_of: Callable[[str], Path], sharded: Sharded, family: str, strategy: str, steps: int
) -> None:
    out = sharded(family, strategy)
    (case,) = runtime.verify(out, folder_of(family), options=VerifyOptions(generate=steps))
    assert case.ok, case
    assert case.bytes_counted == case.bytes_expected > 0
    assert case.symbols["prompts"] == 3
    # A device has half of the heads, in both caches.
    inputs = {spec.name: spec for spec in Manifest.load(out).program("model").inputs}
    for kind in ("encoder", "decoder"):
        assert inputs[f"past_key_values.0.{kind}.key"].dims[1][0].atoms


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("small", "tp=2"),
        *(pytest.param("t5", strategy, marks=pytest.mark.full) for strategy in ("tp=2", "dp=2")),
    ],
)
def test_requests_that_come_and_go_get_the_tokens_of_each_alone(
    sharded: Sharded, family: str, strategy: str
) -> None:
    """Texts of 1 to 15 tokens, in 4 slots; then with memory for few of them, and by HTTP."""
    out = sharded(family, strategy)
    rng = np.random.default_rng(7)
    words, width = (VOCAB, HEAD) if family == "small" else (256, 16)
    texts = [rng.integers(3, words, 1 + 2 * n).tolist() for n in range(8)]
    news = [int(n) for n in rng.integers(1, 12, 8)]

    def alone(m: Generator) -> list[Drawn]:
        found = []
        for number, (text, new) in enumerate(zip(texts, news, strict=True)):
            steps = m.steps(
                [[3]],
                max_new_tokens=new,
                sampling=Sampling(temperature=4, seed=number),
                encoder=token_feeds(m.manifest.program("encoder"), [text]),
                logprobs=0,
            )
            found.append([(s.tokens[0], (s.likelihoods or {})[0].logprob) for s in steps])
        return found

    def turns(m: Generator, **options: Any) -> tuple[list[Drawn], int]:
        requests = m.requests(start=[3], length=32, **options)
        if m.rank.index == 0:
            for number, (text, new) in enumerate(zip(texts, news, strict=True)):
                how = Sampling(temperature=4, seed=number)
                requests.submit(text, max_new_tokens=new, sampling=how, logprobs=0)
            with pytest.raises(InputError, match="expected at most 32 tokens, got 33"):
                requests.submit([5] * 33, max_new_tokens=1)
            with pytest.raises(InputError, match="expected elements from"):
                requests.submit([256], max_new_tokens=1)
        found: list[Drawn] = [[] for _ in texts]
        most = 0
        while True:
            for event in requests.step():
                assert event.token is not None and event.likelihood is not None
                found[event.request].append((event.token, event.likelihood.logprob))
            most = max(most, requests.running)
            if not requests.running and not requests.waiting:
                return found, most

    def check(made: list[tuple[list[Drawn], int]], most: range) -> None:
        for found, together in made:
            assert together in most
            for got, expected in zip(found, want, strict=True):
                assert [token for token, _ in got] == [token for token, _ in expected]
                # Logits are below 16: twice RTOL of that.
                values = [[value for _, value in one] for one in (got, expected)]
                np.testing.assert_allclose(*values, rtol=0, atol=2 * 16 * RTOL)

    with Ranks(out, Generator) as ranks:
        want = ranks.on_each(alone)[0]
        # What was read decides, by much more than the tolerance.
        first = sorted(one[0][1] for one in want)
        assert np.diff(first).min() > 0 and np.median(np.diff(first)) > 0.01
        check(ranks.on_each(lambda m: turns(m, slots=4)), range(4, 5))
        # Two layers, keys and values of 4 heads; tp=2 halves them. The least cache has
        # 64 columns, and 32 tokens may be read: 5 of that for one request, 3 and 2 for another.
        row = 2 * 2 * 4 * width * 4 * (64 + 32) // (2 if strategy == "tp=2" else 1)
        check(ranks.on_each(lambda m: turns(m, cache_memory=8 * row)), range(2, 8))
    if strategy == "tp=2":
        with served(2, out, "--start", "3", "--slots", "4", "--max-length", "32") as server:

            def answer(number: int) -> Any:
                body = {"prompt": texts[number], "max_tokens": news[number], "seed": number}
                asked = {"model": out.name, "temperature": 4, **body}
                return server.client.post("/v1/completions", json=asked).json()

            with ThreadPoolExecutor(len(texts)) as pool:
                answers = list(pool.map(answer, range(len(texts))))
            got = [one["choices"][0]["token_ids"] for one in answers]
            assert got == [[token for token, _ in one] for one in want]
            assert answers[3]["usage"]["prompt_tokens"] == len(texts[3])
            long = server.client.post(
                "/v1/completions", json={"model": out.name, "prompt": [5] * 33}
            )
            assert long.status_code == 400 and "at most 32 tokens, got 33" in long.text
            # Longer than it takes: mpirun once took over 10 s on a busy machine.
            server.end(server.process.pid, 30)


SEARCHES = [
    BeamSearch(3, 1.0, "false"),
    BeamSearch(4, 0.3, "true"),
    BeamSearch(2, 2.0, "never"),
    BeamSearch(5, -0.5, "never"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "strategy"), [("t5", "tp=2"), *((f, "dp=2,tp=2") for f in made.FAMILIES)]
)
def test_beam_search_finds_what_transformers_does(
    sharded: Sharded, family: str, strategy: str
) -> None:
    """With several tokens that complete a sequence, and ways to stop."""
    module, _, _ = built(family)
    read, new = source(family), 12
    out = sharded(family, strategy)
    with Ranks(out, Generator) as ranks:
        # Tokens that occur early complete sequences, so that there are some to compare.
        given = {"encoder": read, "max_new_tokens": new}
        prompts = [[3]] * ROWS
        free = ranks.on_each(lambda m: m.beam_search(prompts, SEARCHES[0], **given))[0]
        eos = {free[0][0].tokens[4], free[1][0].tokens[7], free[0][1].tokens[2]}
        for how in SEARCHES:

            def search(m: Generator, how: BeamSearch = how) -> Any:
                return m.beam_search(prompts, how, eos=eos, **given)

            first, *others = ranks.on_each(search)
            assert all(found == first for found in others)
            compare(first, module, read, how, sorted(eos), new, rtol=RTOL)


@pytest.mark.full
def test_a_table_of_both_is_stored_once(sharded: Sharded) -> None:
    out = sharded("t5", "tp=2")
    names = [name for name in Manifest.load(out).parameters if name.endswith("shared.weight")]
    assert names == ["shared.weight"]


@pytest.mark.full
def test_a_folder_is_described_as_genai_does(tmp_path: Path) -> None:
    configuration("bart", {}, made.FAMILIES, made._SIZES).save_pretrained(tmp_path / "hf")
    out = tmp_path / "out"
    made.main([str(tmp_path / "hf"), "-o", str(out), "--set", "decoder_layers=1"])
    written = json.loads((out / "genai_config.json").read_text())["model"]
    assert written["decoder_start_token_id"] == 3
    models = {part: onnx.load(out / written[part]["filename"]) for part in ("encoder", "decoder")}
    for part, model in models.items():
        for kind, values in (("inputs", model.graph.input), ("outputs", model.graph.output)):
            names = written[part][kind].values()
            assert {value.name for value in values} == {n % 0 if "%d" in n else n for n in names}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing: expected whisper, t5, bart"),
        (["bart", "--set", "layers=8"], "layers: BartConfig has no such entry"),
        (["{llama}"], "Unrecognized configuration class"),
    ],
)
def test_what_cannot_be_exported_is_said(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration("llama").save_pretrained(tmp_path / "llama")
    given = [text.format(llama=tmp_path / "llama") for text in arguments]
    with pytest.raises(SystemExit):
        made.main([*given, "-o", str(tmp_path / "out")])
    assert message in capsys.readouterr().err
