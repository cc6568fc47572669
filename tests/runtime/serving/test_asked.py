"""What clients ask for, read from JSON, and how it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from onnxpar_format.options import Sampling
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.chats import template_of
from onnxpar_runtime.serving.asked import completion_of
from onnxpar_runtime.serving.fields import Fields, Refusal
from onnxpar_runtime.serving.metrics import Metrics


def asked(**fields: Any) -> Any:
    return completion_of(
        Fields(json.dumps({"model": "m", "prompt": [1], **fields}).encode()), "m", None
    )


def test_defaults_are_those_of_openai() -> None:
    found = asked(user="someone", logprobs=None, best_of=1, frequency_penalty=0.0)
    assert (found.prompts, found.choices, found.new, found.stops) == ([[1]], 1, 16, [])
    assert not found.streams and not found.usage and not found.chat
    assert found.sampling == Sampling(temperature=1, seed=found.sampling.seed)
    assert asked().sampling.seed != found.sampling.seed


def test_fields_are_read() -> None:
    found = asked(
        prompt=[[1, 2], [3]], n=3, max_tokens=7, logprobs=5, temperature=0, top_p=0.5, top_k=4,
        seed=9, repetition_penalty=1.5, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    assert found.prompts == [[1, 2], [3]] and found.choices == 3 and found.new == 7
    assert found.logprobs == 5 and asked().logprobs is None
    assert found.streams and found.usage
    assert found.sampling == Sampling(0, 4, 0.5, 1.5, 9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt": []},
            "prompt: expected a string, tokens, or a non-empty list of either, got []",
        ),
        ({"prompt": [[1], []]}, "prompt: expected a string, tokens"),
        ({"prompt": [1, -1]}, "prompt: expected a string, tokens"),
        ({"prompt": [True]}, "prompt: expected a string, tokens"),
        ({"prompt": None}, "prompt: expected a string, tokens"),
        ({"model": 3}, "model: expected a string, got 3"),
        ({"model": None}, "model: expected a string, got none"),
        ({"n": 0}, "n: expected an integer from 1 to 128, got 0"),
        ({"n": 1.5}, "n: expected an integer from 1 to 128, got 1.5"),
        ({"max_tokens": True}, "max_tokens: expected an integer from 1"),
        ({"temperature": -1}, "temperature: expected a number from 0 to 100, got -1"),
        ({"temperature": float("nan")}, "temperature: expected a number from 0 to 100, got NaN"),
        ({"top_p": 1.1}, "top_p: expected a number from 0 to 1, got 1.1"),
        ({"seed": -1}, "seed: expected an integer from 0"),
        ({"stop": "x"}, "stop: expected a tokenizer"),
        ({"stop": [""]}, "stop: expected a string or a list of at most 4 strings, none empty"),
        ({"stop": ["a"] * 5}, "stop: expected a string or a list of at most 4 strings, none empty"),
        ({"stream": 1}, "stream: expected true or false, got 1"),
        ({"stream_options": {}}, "stream_options: expected an object, and stream: true, got {}"),
        ({"logprobs": 21}, "logprobs: expected an integer from 0 to 20, got 21"),
        ({"logprobs": True}, "logprobs: expected an integer from 0 to 20, got true"),
        ({"logit_bias": {"1": 1}}, 'logit_bias: not supported, got {"1": 1}'),
        ({"x" * 9: 1}, "xxxxxxxxx: no such field"),
    ],
)
def test_what_is_wrong_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as caught:
        asked(**fields)
    assert str(caught.value).startswith(message) and caught.value.status == 400
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == next(iter(fields))


def test_a_model_of_any_length_gives_a_short_answer() -> None:
    with pytest.raises(Refusal, match="model: expected 'm', got 'xxx") as caught:
        asked(model="x" * 200_000)
    assert caught.value.status == 404 and len(json.dumps(caught.value.body)) < 500


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_objects_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal, match="body: expected a JSON object"):
        Fields(body)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ " + "-" * 3000 + "1 }}", "chat template: nested too deeply"),
        ("{% if a %}" * 200 + "{% endif %}" * 200, "chat template: too many levels"),
        ("{% break %}", "chat template: 'break' outside loop"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "messages: nested too deeply"),
        ("{{ cycler('a').next.x.y }}", "messages: "),
        ("{{ [].pop() }}", "messages: "),
        ("{{ 'a'.encode('no') }}", "messages: unknown encoding"),
    ],
    ids=("minuses", "blocks", "break", "recursion", "attribute", "pop", "encoding"),
)
def test_what_a_template_raises_is_one_error(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(text)
    with pytest.raises(InputError, match=expected):
        template_of(tmp_path).render([])  # type: ignore[union-attr]


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    assert template_of(tmp_path) is None
    text = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "chat_template.jinja").write_text(text)
    template = template_of(tmp_path)
    assert template is not None
    with pytest.raises(InputError, match="unsafe"):
        template.render([])


def test_metrics_are_in_the_format_of_prometheus() -> None:
    metrics = Metrics()
    metrics.token(10.0, 9.97, None)
    metrics.token(10.5, 9.97, 10.0)
    metrics.finished("stop", 7)
    metrics.reused_tokens = 64
    lines = metrics.text().splitlines()
    assert "# TYPE onnxpar_first_token_seconds histogram" in lines
    for line in (
        'onnxpar_first_token_seconds_bucket{le="0.025"} 0',
        'onnxpar_first_token_seconds_bucket{le="0.05"} 1',
        'onnxpar_first_token_seconds_bucket{le="+Inf"} 1',
        "onnxpar_first_token_seconds_count 1",
        "onnxpar_token_seconds_sum 0.500000",
        "onnxpar_new_tokens_total 2",
        "onnxpar_prompt_tokens_total 7",
        "onnxpar_reused_prompt_tokens_total 64",
        'onnxpar_requests_total{finished="stop"} 1',
    ):
        assert line in lines
