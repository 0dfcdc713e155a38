"""Flags of programs that generate text: what fits together, and values of JSON flags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.config.fields import closest_match, divisors, fields_of, from_text, near_multiples
from megatron.config.generation import (
    SamplesConfig,
    ServerConfig,
    Speculation,
    adapter_problems,
    find_sample_notices,
    named_adapters,
    read_speculation,
    sample_problems,
    server_problems,
)
from megatron.config.model import ModelOptions
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, RunOptions, field_at, narrow, with_values
from megatron.errors import ConfigError
from tests.config.command import parse


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "a"},
        {"prompt": "a", "num_samples": 3, "serve_adapter": ("sql=x",)},
        {"num_samples": 1},
        {"num_samples": 1, "genfile": "x", "greedy": True},
        {"sample_input_file": "x"},
        {"sample_input_file": "x", "sample_output_file": "y", "samples_per_prompt": 2},
        {"prompt": "a", "temperature": 0.0, "top_p": 1.0, "max_batch_size": 1},
    ],
)
def test_samples_that_can_be_written(given: dict[str, Any]) -> None:
    samples = SamplesConfig(**given)
    assert sample_problems(samples) == find_sample_notices(samples) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nothing to write: give --prompt TEXT"),
        ({"prompt": "a", "sample_input_file": "x"}, "--prompt and --sample-input-file cannot be"),
        ({"prompt": "a", "samples_per_prompt": 2}, "--samples-per-prompt 2 is for"),
        ({"prompt": "a", "sample_output_file": "x"}, "--sample-output-file requires"),
        ({"prompt": "a", "genfile": "x"}, "--genfile is for texts without a prompt"),
        ({"sample_input_file": "a", "genfile": "x"}, "--genfile is for texts without a prompt"),
        ({"prompt": "a\udcff"}, "--prompt is not valid UTF-8"),
        ({"prompt": "\ud800"}, "--prompt is not valid UTF-8"),
        ({"prompt": ""}, "--prompt is empty"),
        ({"prompt": "a", "serve_adapter": ("a=x", "b=y")}, "--serve-adapter names several"),
        ({"prompt": "a", "temperature": 100.5}, "--temperature 100.5: must be at most 100"),
        ({"prompt": "a", "top_p": 1.01}, "--top_p 1.01: must be at most 1"),
        ({"prompt": "a", "max_batch_size": 0}, "--max-batch-size 0: must be at least 1"),
        ({"prompt": "a", "speculative_config": "[]"}, "--speculative-config []: give a JSON"),
    ],
)
def test_samples_that_cannot_be_written(given: dict[str, Any], said: str) -> None:
    (line,) = sample_problems(SamplesConfig(**given))
    assert line.startswith(said)


def test_a_flag_of_samples_without_effect_is_reported() -> None:
    (line,) = find_sample_notices(SamplesConfig(prompt="a", recompute=True))
    assert line.startswith("--recompute has no effect")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, []),
        ({"top_k": 5}, []),
        ({"top_p": 0.5}, []),
        ({"port": 0, "cache_tokens": 1, "temperature": 100.0, "top_p": 1.0}, []),
        ({"out_seq_length": 1, "max_tokens_to_oom": 1, "request_timeout": 0.5}, []),
        ({"max_batch_size": 1, "max_queued_requests": 1, "max_body_bytes": 1}, []),
        ({"top_p": 1.5}, ["--top_p 1.5: must be at most 1"]),
        ({"temperature": 100.5}, ["--temperature 100.5: must be at most 100"]),
        ({"request_timeout": 0.0}, ["--request-timeout 0: must be above 0"]),
        ({"speculative_config": "[]"}, ["--speculative-config []: give a JSON object"]),
        ({"top_k": 1, "top_p": 0.5}, ["--top_k 1 and --top_p 0.5 cannot be combined: use one"]),
        ({"temperature": 0.0}, ["--temperature 0: must be above 0"]),
        ({"port": 65536}, ["--port 65536: must be at most 65535"]),
        ({"serve_adapter": ("a",)}, ["--serve-adapter a: give NAME=FOLDER"]),
    ],
)
def test_flags_of_a_server(given: dict[str, Any], said: list[str]) -> None:
    lines = server_problems(ServerConfig(**given))
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))


@pytest.mark.parametrize("word", ["a", "=x", "a=", " a=x", "a =x", "a\n=x", "\u200b=x"])
def test_an_adapter_needs_a_name_that_can_be_typed_and_a_folder(word: str) -> None:
    assert adapter_problems(["b=y", word]) == [
        f"--serve-adapter {word}: give NAME=FOLDER, for example sql=runs/sql/checkpoints"
    ]


def test_the_folder_of_an_adapter_may_contain_an_equals_sign() -> None:
    assert adapter_problems(["a b=x=1", "c=y"]) == []
    assert named_adapters(["a b=x=1", "c=y"]) == {"a b": "x=1", "c": "y"}
    assert named_adapters(None) == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "mtp", "num_speculative_tokens": 64}, ("mtp", 64, 4, 2)),
        ({"method": "ngram", "num_speculative_tokens": 1}, ("ngram", 1, 4, 2)),
        ({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 1},
         ("ngram", 1, 1, 1)),
        ({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 9},
         ("ngram", 1, 9, 2)),
        ({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 4},
         ("ngram", 1, 4, 4)),
    ],
)  # fmt: skip
def test_settings_of_speculative_decoding(given: dict[str, Any], expected: tuple) -> None:
    found = read_speculation(json.dumps(given))
    names = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
    assert found == Speculation(**dict(zip(names, expected, strict=True)))
    assert read_speculation(None) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"num_speculative_tokens": 1}, "method is missing"),
        ({"method": "eagle"}, 'method is "eagle": use ngram or mtp'),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0: must be at least 1"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens is 65: must be at most 64"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is true: give a JSON object"),
        ({"num_speculative_tokens": 1.0}, "num_speculative_tokens is 1.0: give a JSON object"),
        ({"model": "x"}, "unknown key 'model': use method, num_speculative_tokens"),
        ({"method": "mtp", "prompt_lookup_max": 2}, "prompt_lookup_max is for the method ngram"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min 5 is more than prompt_lookup_max 4"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "is more than prompt_lookup_max 2"),
    ],
)
def test_mistakes_in_settings_of_speculative_decoding(given: dict[str, Any], said: str) -> None:
    rest = {} if "is missing" in said else {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError) as refusal:
        read_speculation(json.dumps(rest | given))
    (line,) = refusal.value.problems
    assert said in line


@pytest.mark.parametrize(
    ("number", "step", "said"), [(48, 32, "32 or 64"), (8, 32, "32"), (33, 32, "32 or 64")]
)
def test_multiples_that_a_message_names(number: int, step: int, said: str) -> None:
    assert near_multiples(number, step) == said


def test_divisors_that_a_message_names() -> None:
    assert [divisors(number) for number in (1, 2, 7, 12)] == [
        "1",
        "1 or 2",
        "1 or 7",
        "1, 2, 3, 4, 6 or 12",
    ]


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("--num-layer", ["--num-layers", "--num-experts"], "--num-layers"),
        ("--tensor-parallel", ["--tensor-model-parallel-size", "--tensorboard-dir"],
         "--tensor-model-parallel-size"),
        ("--parallel", ["--tensor-model-parallel-size", "--sequence-parallel"],
         "--sequence-parallel"),
        ("--train-epochs", ["--train-iters", "--train-samples"], None),
        ("--lr_warmup_iters", ["--lr-warmup-iters"], "--lr-warmup-iters"),
        ("--xyz", ["--lr", "--seed"], None),
        ("--num-attnetion-epochs", ["--num-attention-heads"], None),
        ("--parallel-sequence", ["--sequence-parallel"], "--sequence-parallel"),
    ],
)  # fmt: skip
def test_the_flag_that_a_misspelled_one_means(
    word: str, known: list[str], meant: str | None
) -> None:
    assert closest_match(word, known) == meant


def test_other_flags_are_suggested_only_if_no_flag_is_as_near() -> None:
    assert closest_match("--num-layer", ["--num-layers"], ["--num-layer-s"]) == "--num-layers"
    assert closest_match("--num-layer", ["--seed"], ["--num-layers"]) == "--num-layers"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775807", 1 - 2**63),
        ("9223372036854775808", None),
        (" 7 ", 7),
        ("1e3", None),
    ],
)
def test_whole_numbers_have_64_bits(text: str, value: int | None) -> None:
    field = next(one for one in fields_of(ModelOptions) if one.name == "num_layers")
    if value is None:
        with pytest.raises(ValueError, match="expected a whole number"):
            from_text(field, text)
    else:
        assert from_text(field, text) == value
    assert from_text(field, "none") is None


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("checkpoint.save", None, '--save ""'),
        ("checkpoint.save", "a b", "--save a b"),
        ("model.num_layers", None, "--num-layers none"),
        ("optimizer.adam_eps", 1e-8, "--adam-eps 1e-08"),
        ("model.rotary_base", 10000.0, "--rotary-base 10000"),
        ("model.swiglu", True, "--swiglu"),
        ("model.swiglu", False, "--no-swiglu"),
        ("model.onnx_safe", True, "--onnx-safe true"),
        ("model.onnx_safe", False, "--onnx-safe false"),
        ("training.rampup_batch_size", (8, 8, 100), "--rampup-batch-size 8 8 100"),
    ],
)
def test_a_value_as_it_is_typed(path: str, value: object, text: str) -> None:
    assert field_at(path).spell(value) == text


@pytest.mark.parametrize(
    ("words", "scale"),
    [
        ("--lora-rank 16", 1.0),
        ("--lora-rank 16 --lora-alpha 32", 2.0),
        ("--lora-rank 16 --lora-alpha 32 --use-rslora", 8.0),
        ("--lora-rank 16 --use-rslora", 4.0),
    ],
)
def test_the_scale_of_an_adapter(words: str, scale: float) -> None:
    assert parse(words).config.model.lora_scale == scale


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ("", 128),
        ("--position-embedding-type rope --rope-type dynamic --rotary-scaling-factor 2.5", 320),
        (
            "--position-embedding-type rope --rope-type yarn --rotary-scaling-factor 2.5 "
            "--yarn-original-max-position-embeddings 64",
            128,
        ),
    ],
)
def test_the_longest_context_of_a_network(words: str, length: int) -> None:
    assert parse(words).config.model.longest_context == length


def test_layers_of_both_halves_of_a_t5_are_counted() -> None:
    values = {"model.architecture": "t5", "model.num_layers": 4, "model.decoder_num_layers": 6}
    values |= {"model.hidden_size": 8, "model.num_attention_heads": 2, "data.seq_length": 8}
    model = narrow(resolve(with_values(RunOptions(), values), 1), ModelRun).model
    assert (model.decoder_layers, model.num_layers) == (6, 4)
