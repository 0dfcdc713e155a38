"""The recorded Retro behind the server, in a process, with the passages in every answer."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from megatron.inference import samples
from tests.inference.server.processes import TOOL, server_process

PROMPT = "the quick brown fox jumps over " * 10  # more than a chunk
FIELDS = {"chunk", "corpus", "document", "text"}
NEW = 40  # enough to complete another chunk


@pytest.fixture(scope="module")
def folder(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the recorded relative paths lead to the recorded files."""
    folder = tmp_path_factory.mktemp("retro")
    for name in ("data", "retro_fp32"):
        (folder / name).symlink_to(golden / name)
    return folder


@pytest.fixture(scope="module")
def flags(golden: Path) -> list[str]:
    bert = str(golden / "bert_fp32/ckpt")
    load = ["--load", "retro_fp32/ckpt", "--retro-workdir", "retro_fp32/workdir"]
    return [*load, "--bert-embedder-load", bert]


@pytest.fixture(scope="module")
def url(folder: Path, flags: list[str]) -> Iterator[str]:
    with server_process([sys.executable, TOOL, *flags], folder, cwd=folder) as (process, url):
        yield url
        process.terminate()
        assert process.wait(timeout=120) == 0
    assert "Traceback" not in (folder / "log").read_text()


@pytest.fixture(scope="module")
def written(folder: Path, flags: list[str]) -> dict[str, Any]:
    """Return what `megatron generate` writes."""
    (folder / "prompts").write_text(PROMPT)
    words = ["--sample-input-file", "prompts", "--greedy", "--out-seq-length", str(NEW)]
    with contextlib.chdir(folder):
        assert samples.main("megatron generate", [*flags, *words]) == 0
    return dict(json.loads((folder / "prompts.out").read_text()))


def _complete(url: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_the_text_and_the_passages_are_those_of_the_command(
    url: str, written: dict[str, Any]
) -> None:
    (choice,) = _complete(url)["choices"]
    assert choice["text"] == written["text"]
    assert choice["passages"] == written["passages"]
    assert {passage["chunk"] for passage in choice["passages"]} == {0, 1}
    assert all(passage.keys() == FIELDS and passage["text"] for passage in choice["passages"])


def test_megatrons_api_has_a_list_of_passages_for_each_prompt(
    url: str, written: dict[str, Any]
) -> None:
    body = {"prompts": [PROMPT, "short"], "tokens_to_generate": NEW, "top_k": 1}
    answer = httpx.put(f"{url}/api", json=body, timeout=60).json()
    assert answer["text"][0] == PROMPT + written["text"]
    assert answer["passages"][0] == written["passages"]
    assert answer["passages"][1] == []
    search = {"prompts": [PROMPT], "tokens_to_generate": 2, "beam_width": 2}
    beams = httpx.put(f"{url}/api", json=search, timeout=60).json()
    assert len(beams["text"]) == 2
    assert beams["passages"] == [[each for each in written["passages"] if each["chunk"] == 0]]


def test_a_stream_has_passages_before_the_text_that_follows_them(
    url: str, written: dict[str, Any]
) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="ckpt", prompt=PROMPT, max_tokens=NEW, temperature=0, stream=True
    )
    text, passages, after = "", [], []
    for part in stream:
        (choice,) = part.choices
        found = getattr(choice, "passages", [])
        after += [len(text)] * len(found)
        passages += found
        text += choice.text
    assert text == written["text"]
    assert passages == written["passages"]
    assert after[0] == 0
    assert 0 < after[-1] < len(text)


def test_many_clients_at_once_get_what_each_gets_alone(url: str) -> None:
    prompts = [PROMPT, PROMPT[40:], "one", PROMPT * 2]

    def ask(prompt: str) -> Any:
        (choice,) = _complete(url, prompt=prompt, max_tokens=4, logprobs=2)["choices"]
        # On a CPU, the last bits depend on what else is in the batch.
        scores = choice["logprobs"].pop("token_logprobs")
        return {**choice, "logprobs": choice["logprobs"]["tokens"]}, scores

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for (choice, scores), (expected, wanted) in zip(pool.map(ask, prompts), alone, strict=True):
            assert choice == expected
            assert scores == pytest.approx(wanted, abs=1e-4)


def test_stop_sequences_scores_and_seeds_are_those_of_any_model(
    url: str, written: dict[str, Any]
) -> None:
    stop = written["text"][10:14]
    (choice,) = _complete(url, stop=stop)["choices"]
    assert choice["text"] == written["text"].partition(stop)[0]
    assert choice["finish_reason"] == "stop"
    (scored,) = _complete(url, echo=True, logprobs=1, max_tokens=2)["choices"]
    assert len(scored["logprobs"]["tokens"]) > 64 + 2
    assert None not in scored["logprobs"]["token_logprobs"][1:]
    drawn = [_complete(url, temperature=1, seed=5, n=2, max_tokens=6)["choices"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0][0]["text"] != drawn[0][1]["text"]


def _metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    (value,) = (line.split()[1] for line in lines if line.split()[0] == name)
    return float(value)


def test_a_client_that_leaves_frees_the_engine(url: str) -> None:
    before = _metric(url, "megatron_new_tokens_total")
    body = {"prompt": "x", "max_tokens": 250, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    end = time.monotonic() + 60
    while _metric(url, "megatron_sequences") and time.monotonic() < end:
        time.sleep(0.02)
    assert _metric(url, "megatron_sequences") == 0
    assert 0 < _metric(url, "megatron_new_tokens_total") - before < 250


def test_a_text_that_does_not_fit_is_refused_with_the_window(url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 422
    assert "the model's 256" in answer.json()["error"]["message"]
