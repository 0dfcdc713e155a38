"""OpenAI's own client: what it sends and what it expects."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai
import pytest

from megatron.config.generation import ServerConfig
from megatron.inference.request import NeighborPassage
from tests.inference.server.fake_engine import FakeEngine, logprob_of
from tests.inference.server.live import Live, make_settings, running

TEXT = "Hello, world!"


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_a_completion(client: openai.OpenAI) -> None:
    done = client.completions.create(model="test", prompt=TEXT, max_tokens=4)
    (choice,) = done.choices
    assert TEXT.startswith(choice.text)
    assert choice.finish_reason == "length"
    assert done.usage
    assert done.usage.completion_tokens == 4
    assert done.usage.total_tokens == done.usage.prompt_tokens + 4


def test_several_prompts_and_answers_are_in_order(client: openai.OpenAI) -> None:
    done = client.completions.create(model="test", prompt=["x", "y"], n=2, max_tokens=2)
    assert [choice.text for choice in done.choices] == ["xx", "xx", "yy", "yy"]
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (2, 8)


def test_equal_prompts_have_equal_seeds_and_the_answers_to_each_differ(
    client: openai.OpenAI, live: Live
) -> None:
    client.completions.create(model="test", prompt=["x", "x"], n=2, max_tokens=1, seed=3)
    assert [request.sampling.seed for request in live.engine.seen[-4:]] == [3, 4, 3, 4]


def test_token_ids_are_a_prompt(client: openai.OpenAI, live: Live) -> None:
    client.completions.create(model="test", prompt=[5, 6], max_tokens=1)
    assert live.engine.seen[-1].prompt == (5, 6)
    client.completions.create(model="test", prompt=[[5, 6], [7]], max_tokens=1)
    assert [request.prompt for request in live.engine.seen[-2:]] == [(5, 6), (7,)]


def test_a_stream_is_the_same_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "test", "prompt": "naïve 東京!", "max_tokens": 24, "n": 2}
    whole = client.completions.create(**options)
    texts, ends, usage = ["", ""], [], None
    stream = client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert ends == ["length", "length"]
    assert usage == whole.usage


@pytest.mark.parametrize("counts", [False, True])
def test_chunks_of_a_stream_have_a_place_for_the_usage_only_if_it_is_asked_for(
    live: Live, counts: bool
) -> None:
    body = {"prompt": TEXT, "max_tokens": 3, "stream": True}
    if counts:
        body["stream_options"] = {"include_usage": True}
    chunks = _chunks(live.post("/v1/completions", body).text)
    told = chunks.pop()["usage"]["completion_tokens"] if counts else None
    assert told == (3 if counts else None)
    assert all(chunk["choices"] for chunk in chunks)
    assert [chunk.get("usage", "none") for chunk in chunks] == [None if counts else "none"] * len(
        chunks
    )


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_an_answer_before_them(live: Live, stream: bool) -> None:
    body = {"prompt": TEXT, "max_tokens": 50, "stop": ["orl", "zzz"], "stream": stream}
    answer = live.post("/v1/completions", body)
    if not stream:
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Hello, w", "stop")
        return
    chunks = _chunks(answer.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, w"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def _chunks(text: str) -> list[dict[str, Any]]:
    *events, last = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def test_echo_and_logprobs(client: openai.OpenAI, live: Live) -> None:
    (choice,) = client.completions.create(
        model="test", prompt=TEXT, max_tokens=2, logprobs=2, echo=True
    ).choices
    prompt = live.engine.seen[-1].prompt
    assert choice.text.startswith(TEXT)
    told = choice.logprobs
    assert told
    assert told.tokens
    assert told.token_logprobs
    assert told.text_offset
    assert told.top_logprobs
    assert "".join(told.tokens) == choice.text
    assert told.token_logprobs == [
        None,
        *(logprob_of(token) for token in (*prompt[1:], *prompt[:2])),
    ]
    spelled = zip(told.tokens, told.text_offset, strict=True)
    assert all(choice.text[offset:].startswith(token) for token, offset in spelled)
    assert len(told.top_logprobs[-1]) == 2


def test_a_prompt_is_only_scored(client: openai.OpenAI) -> None:
    done = client.completions.create(model="test", prompt=TEXT, max_tokens=0, logprobs=1, echo=True)
    assert done.choices[0].text == TEXT


def test_a_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="test",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        ],
        max_completion_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = done.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == ""  # the fake engine repeats the first token, an end token
    assert choice.finish_reason == "stop"


def test_the_template_makes_the_prompt(live: Live, tokenizer_folder: Path) -> None:
    from tokenizers import Tokenizer

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}]
    assert live.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    known = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    text = known.decode(list(live.engine.seen[-1].prompt), skip_special_tokens=False)
    assert text == "<|endoftext|><|user|>Hi\n<|assistant|>x\n<|assistant|>"


def test_a_tokenizer_adds_nothing_to_a_rendered_chat(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    known = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    first = ("<|endoftext|>", known.token_to_id("<|endoftext|>"))
    known.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[first])
    known.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(tokenizer_folder / "tokenizer_config.json", tmp_path)
    engine = FakeEngine()
    with running(engine, make_settings(tmp_path, engine)) as live:
        live.post("/v1/chat/completions", {"messages": [HI], "max_tokens": 1})
        live.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})
    texts = [known.decode(list(one.prompt), skip_special_tokens=False) for one in engine.seen]
    assert texts == ["<|endoftext|><|user|>Hi\n<|assistant|>", "<|endoftext|>Hi"]


@pytest.fixture(scope="module")
def plain_chat(tokenizer_folder: Path) -> Any:
    """Return a chat whose first token is text, so that the fake engine has something to repeat."""
    engine = FakeEngine()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with running(engine, make_settings(tokenizer_folder, engine, chat_template=template)) as live:
        yield openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_a_chat_streams(plain_chat: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "test",
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 1,
    }
    whole = plain_chat.chat.completions.create(**options)
    content = whole.choices[0].message.content
    assert content
    chunks = list(plain_chat.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    tokens = [
        token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert whole.choices[0].logprobs
    assert tokens == whole.choices[0].logprobs.content
    assert bytes(byte for token in tokens for byte in token.bytes or []).decode() == content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_an_answer_is_sent_back_as_the_client_has_it(plain_chat: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": TEXT}]
    (first,) = plain_chat.chat.completions.create(model="test", messages=said, max_tokens=3).choices
    whole = {**dict.fromkeys(("audio", "refusal", "tool_calls")), **first.message.model_dump()}
    asked = [*said, whole, {"role": "user", "content": "x", "name": "Ada"}]
    done = plain_chat.chat.completions.create(model="test", messages=asked, max_tokens=3)
    assert done.usage
    assert done.usage.prompt_tokens > 3


def test_a_name_is_the_templates(tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    template = "{% for message in messages %}{{ message.name }}:{{ message.content }}{% endfor %}"
    with running(engine, make_settings(tokenizer_folder, engine, chat_template=template)) as live:
        message = {"role": "user", "content": "Hi", "name": "xyz"}
        done = live.post("/v1/chat/completions", {"messages": [message], "max_tokens": 3}).json()
        assert done["choices"][0]["message"]["content"] == "xyz"


@pytest.mark.parametrize(("top_p", "top_k"), [(0, 1), (0.5, 0), (1, 0)])
def test_top_p_of_nothing_is_the_likeliest_token(live: Live, top_p: float, top_k: int) -> None:
    live.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1, "top_p": top_p})
    sampling = live.engine.seen[-1].sampling
    assert (sampling.top_p, sampling.top_k) == (top_p, top_k)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["test"]
    assert client.models.retrieve("test").id == "test"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("of/another")


@pytest.fixture(scope="module")
def several(tokenizer_folder: Path) -> Iterator[Live]:
    """Return a server of a model with two adapters, which also retrieves passages."""
    engine = FakeEngine()
    names = ("sql", "of/rhymes")
    settings = make_settings(tokenizer_folder, engine, adapters=names, retrieves=True)
    with running(engine, settings) as live:
        yield live


def test_adapters_are_models(several: Live) -> None:
    client = openai.OpenAI(base_url=f"{several.url}/v1", api_key="none", max_retries=0)
    listed = [model.model_dump() for model in client.models.list()]
    names = {"test": None, "sql": "test", "of/rhymes": "test"}
    assert {model["id"]: model["parent"] for model in listed} == names
    for adapter, name in enumerate(names):
        assert client.models.retrieve(name).id == name
        done = client.completions.create(model=name, prompt=[[5], [6]], max_tokens=1)
        assert done.model == name
        assert [request.adapter for request in several.engine.seen[-2:]] == [adapter] * 2
        message: list[Any] = [{"role": "user", "content": "Hi"}]
        chunks = client.chat.completions.create(
            model=name, messages=message, max_tokens=1, stream=True
        )
        assert {chunk.model for chunk in chunks} == {name}
        assert several.engine.seen[-1].adapter == adapter
    several.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert several.engine.seen[-1].adapter == 0
    with pytest.raises(openai.NotFoundError, match="'rhymes'; available: test, sql, of/rhymes"):
        client.completions.create(model="rhymes", prompt="x")


def test_megatrons_api_chooses_an_adapter_too(several: Live) -> None:
    body = {"prompts": [TEXT], "tokens_to_generate": 1}
    for model, adapter in {"test": 0, "sql": 1, "of/rhymes": 2, None: 0}.items():
        assert several.put({**body, "model": model}).status_code == 200
        assert several.engine.seen[-1].adapter == adapter
    assert several.put({**body, "beam_width": 2, "model": "sql"}).status_code == 200
    assert several.engine.seen[-1].adapter == 1
    unknown = several.put({**body, "model": "x"})
    assert unknown.status_code == 404
    assert unknown.json() == "unknown model 'x'; available: test, sql, of/rhymes"
    assert several.put({**body, "model": 5}).json() == "model must be a string"


def test_the_passages_that_a_retro_reads_are_in_its_answers(
    live: Live, several: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A passage that is read again, as by another beam, is reported once."""
    passages = [NeighborPassage(i, 1, 10 + i, f"text {i}") for i in range(3)]
    monkeypatch.setattr(several.engine, "passages", (*passages, passages[0]))
    first, second = [[passages[0], passages[2]], [passages[1]]]
    told = [*map(asdict, [*first, *second])]
    body = {"prompt": TEXT, "max_tokens": 3}
    (choice,) = several.post("/v1/completions", body).json()["choices"]
    assert choice["passages"] == told
    chunks = _chunks(several.post("/v1/completions", {**body, "stream": True}).text)
    parts = [chunk["choices"][0].get("passages", []) for chunk in chunks]
    assert [passage for part in parts for passage in part] == told
    answer = several.put({"prompts": [TEXT, "x"], "tokens_to_generate": 3}).json()
    assert answer["passages"] == [told, told]
    answer = several.put({"prompts": [TEXT], "tokens_to_generate": 1}).json()
    assert answer["passages"] == [[*map(asdict, first)]]
    (choice,) = live.post("/v1/completions", body).json()["choices"]
    assert "passages" not in choice


def test_a_long_name_is_not_echoed(live: Live) -> None:
    answer = live.post("/v1/completions", {"prompt": "x", "y" * 100_000: 1})
    assert answer.status_code == 400
    assert len(answer.content) < 500
    assert len(live.post("/v1/completions", {"prompt": "x", "model": "z" * 9999}).content) < 500


HI = {"role": "user", "content": "Hi"}
REFUSED = [
    ("/v1/completions", {"prompt": TEXT, "suffix": "x"}, "suffix"),
    ("/v1/completions", {"prompt": TEXT, "best_of": 3}, "best_of"),
    ("/v1/completions", {"prompt": TEXT, "logit_bias": {"5": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": TEXT, "frequency_penalty": 0.5}, "frequency_penalty"),
    ("/v1/completions", {"prompt": TEXT, "tempreature": 1}, "tempreature"),
    ("/v1/completions", {"prompt": TEXT, "temperature": "1"}, "temperature"),
    ("/v1/completions", {"prompt": TEXT, "temperature": -1}, "temperature"),
    ("/v1/completions", {"prompt": TEXT, "temperature": True}, "temperature"),
    ("/v1/completions", {"prompt": TEXT, "top_p": 1.5}, "top_p"),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": TEXT, "n": 129}, "n"),
    ("/v1/completions", {"prompt": [TEXT] * 100, "n": 2}, "n"),
    ("/v1/completions", {"prompt": TEXT, "stop": [""]}, "stop"),
    ("/v1/completions", {"prompt": TEXT, "stop": 5}, "stop"),
    ("/v1/completions", {"prompt": TEXT, "stop": ["x"] * 17}, "stop"),
    ("/v1/completions", {"prompt": TEXT, "stream_options": {}}, "stream_options"),
    ("/v1/completions", {"prompt": TEXT, "logprobs": 21}, "logprobs"),
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [1.5]}, "prompt"),
    ("/v1/completions", {"prompt": [400]}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": "Hi"}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
    ),
    ("/v1/chat/completions", {"messages": [{**HI, "name": 5}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{**HI, "tool_calls": [{}]}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{**HI, "refusal": "No."}]}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "forbidden", "content": "Hi"}]},
        "messages",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [{}]},
        "tools",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "top_logprobs": 2},
        "top_logprobs",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), REFUSED, ids=str)
def test_what_is_refused_is_named(live: Live, path: str, body: dict[str, Any], field: str) -> None:
    answer = live.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_bound_is_reported_in_full(live: Live) -> None:
    answer = live.post("/v1/completions", {"prompt": TEXT, "seed": -1})
    assert answer.json()["error"]["message"] == f"seed -1: give 0 to {2**63 - 1}"


def test_harmless_values_of_refused_fields_pass(client: openai.OpenAI) -> None:
    client.completions.create(
        model="test",
        prompt="x",
        best_of=1,
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        suffix=None,
        user="me",
        max_tokens=1,
    )


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="available: test"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.UnprocessableEntityError, match="the model's 256"):
        client.completions.create(model="test", prompt="x", max_tokens=300)


def test_without_a_template_chat_says_what_to_do(tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    with running(engine, make_settings(tokenizer_folder, engine, chat_template=None)) as live:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        answer = live.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert "--chat-template" in answer.json()["error"]["message"]


def test_the_openapi_document_has_every_field_and_path(live: Live) -> None:
    from megatron.inference.server.megatron_api import MegatronRequest
    from megatron.inference.server.schema import ChatRequest, CompletionRequest

    document = live.client.get("/openapi.json").json()
    models: dict[str, Any] = {
        "/api": MegatronRequest,
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatRequest,
    }
    for path, model in models.items():
        body = document["paths"][path]["post"]["requestBody"]
        schema = body["content"]["application/json"]["schema"]
        assert set(schema["properties"]) == set(model.model_fields)
        answers = document["paths"][path]["post"]["responses"]
        assert {status for status in answers if status < "405"} == {
            "200",
            "400",
            "401",
            "403",
            "404",
        }
    assert {"/v1/models", "/health", "/metrics"} <= set(document["paths"])
    api = document["paths"]["/api"]["post"]
    content = api["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert content["stop_token"]["default"] is None  # the tokenizer's end of document
    answer = api["responses"]["200"]["content"]["application/json"]["schema"]["properties"]
    assert answer.keys() == {"text", "segments", "logprobs", "scores", "passages"}


def test_all_answers_of_a_request_are_limited_together(tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    server = ServerConfig(max_tokens_to_oom=20)
    with running(engine, make_settings(tokenizer_folder, engine, server=server)) as live:
        body = {"prompt": "x", "max_tokens": 4}
        assert live.post("/v1/completions", {**body, "n": 4}).status_code == 200
        refused = live.post("/v1/completions", {**body, "n": 5})
    assert refused.status_code == 422
    assert "25 is greater than 20" in refused.json()["error"]["message"]
