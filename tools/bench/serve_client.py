"""The client of tools/bench/serve.py: the package `openai`, in an environment of its own."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from started_script import expect_driver

if __name__ == "__main__":
    # Before the import of openai, which may not be installed.
    expect_driver("tools/bench/serve.py")

import openai


def ask(client: Any, sent: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokens of an answer, or the status with which it was refused."""
    body = dict(sent["body"])
    tokens: list[int] = []
    try:
        made = client.completions.create(**body, stream=sent["stream"])
        if not sent["stream"]:
            (choice,) = made.choices
            tokens = choice.model_extra["token_ids"]
        else:
            for part in made:
                tokens += part.choices[0].model_extra["token_ids"]
                if sent["leave"] is not None and len(tokens) >= sent["leave"]:
                    made.close()
                    break
    except openai.APIStatusError as error:
        return {"status": error.status_code, "tokens": None}
    return {"status": None, "tokens": tokens}


def main() -> None:
    """Sends the requests of a job, several at a time."""
    job = json.load(sys.stdin)
    client = openai.OpenAI(base_url=f"{job['place']}/v1", api_key="none", max_retries=0)
    with ThreadPoolExecutor(job["at_once"]) as pool:
        found = list(pool.map(lambda sent: ask(client, sent), job["requests"]))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
