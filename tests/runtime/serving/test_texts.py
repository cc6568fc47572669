"""A server with a tokenizer: texts, texts that stop answers, chats, and what is refused."""

import json
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")

from onnxpar.api.shard_model import shard_model
from tests.decoders import growing
from tests.runtime.generation.plain import greedy
from tests.runtime.serving.folders import WORDS, words
from tests.runtime.serving.servers import served

HELLO = [{"role": "user", "content": "w5 w9"}]
RENDERED = ["<s>", "<user>", "w5", "w9", "<assistant>"]


def test_texts_and_chats(tmp_path: Path) -> None:
    model, folder = growing(tmp_path / "model.onnx"), words(tmp_path / "tokenizer")
    out = shard_model(model, "replicate", tmp_path / "one", devices=1).out

    def text(prompt: list[str], count: int) -> str:
        (tokens,) = greedy(model, [[WORDS.index(word) for word in prompt]], count)
        return " ".join(WORDS[t] for t in tokens if t >= 5)

    options = ["--tokenizer", str(folder), "--max-length", "64", "--name", "small"]
    with served(1, out, *options) as server:
        post, common = server.client.post, {"model": "small", "temperature": 0}
        asked = {**common, "prompt": ["w1 w2", "w3"], "max_tokens": 12}
        found = post("/v1/completions", json=asked).json()
        wanted = [text(["w1", "w2"], 12), text(["w3"], 12)]
        assert [choice["text"] for choice in found["choices"]] == wanted
        assert [choice["index"] for choice in found["choices"]] == [0, 1]
        assert found["usage"] == {
            "prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27
        }  # fmt: skip

        end = wanted[0].split()[4]
        asked = {**common, "prompt": "w1 w2", "max_tokens": 12, "stop": end, "stream": True}
        options_of_stream = {"stream_options": {"include_usage": True}}
        streamed = post("/v1/completions", json={**asked, **options_of_stream}).text
        parts = [line[6:] for line in streamed.splitlines() if line]
        assert parts[-1] == "[DONE]"
        *chunks, counted = map(json.loads, parts[:-1])
        assert "".join(c["choices"][0]["text"] for c in chunks) == wanted[0].partition(end)[0]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert counted["choices"] == [] and counted["usage"]["prompt_tokens"] == 2

        chat = {**common, "messages": HELLO, "max_completion_tokens": 10}
        found = post("/v1/chat/completions", json=chat).json()
        message = found["choices"][0]["message"]
        assert message["role"] == "assistant" and message["content"] == text(RENDERED, 10)
        assert found["object"] == "chat.completion" and found["usage"]["prompt_tokens"] == 5
        parted = [{"role": "user", "content": [{"type": "text", "text": "w5 w9"}]}]
        streamed = post(
            "/v1/chat/completions", json={**chat, "messages": parted, "stream": True}
        ).text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines()[:-2] if line]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        rest = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[1:]]
        assert "".join(rest) == message["content"]
        # Log-probabilities, of words and of numbers of bytes.
        asked = {**common, "prompt": "w1 w2", "max_tokens": 4, "logprobs": 2}
        (choice,) = post("/v1/completions", json=asked).json()["choices"]
        found, tokens = choice["logprobs"], choice["token_ids"]
        assert found["tokens"] == [WORDS[t] for t in tokens]
        lengths = [len(word) for word in found["tokens"]]
        assert found["text_offset"] == [sum(lengths[:n]) for n in range(4)]
        for word, logprob, best in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert len(best) == 2 and best[word] == logprob == max(best.values()) < 0
        streamed = post("/v1/completions", json={**asked, "stream": True}).text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines()[:-2] if line]
        for key, values in found.items():
            parts = [x for c in chunks for x in c["choices"][0]["logprobs"][key]]
            assert parts == values
        wanted_too = {"max_completion_tokens": 4, "logprobs": True, "top_logprobs": 3}
        chat |= wanted_too
        (choice,) = post("/v1/chat/completions", json=chat).json()["choices"]
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [WORDS[t] for t in choice["token_ids"]]
        for one in content:
            assert one["bytes"] == list(one["token"].encode())
            first = {k: one[k] for k in ("token", "logprob", "bytes")}
            assert one["top_logprobs"][0] == first and len(one["top_logprobs"]) == 3
        del chat["logprobs"]
        answer = post("/v1/chat/completions", json=chat)
        assert answer.status_code == 400 and "top_logprobs" in answer.text
        del chat["top_logprobs"]
        # As many tokens as a slot has room for.
        del chat["max_completion_tokens"]
        assert post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 60

        for messages, problem in (
            ([{"role": "tool", "content": ""}], "messages: no tools here"),
            ([], "messages: expected a non-empty list of messages, got []"),
            ([{"role": "user", "content": 1}], "messages[0].content: expected a string, or a list"),
        ):
            answer = post("/v1/chat/completions", json={**common, "messages": messages})
            assert answer.status_code == 400 and problem in answer.json()["error"]["message"]
        assert server.end(server.ranks[0], 10) == 0
