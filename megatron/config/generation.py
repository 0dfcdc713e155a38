"""Flags of programs that generate text: the text generation server and the sample writer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.fields import fields_of, flag
from megatron.errors import ConfigError

MAX_SEQUENCES = 1 << 16  # per step; CUDA graphs are recorded for sizes up to this

_MAX_DRAFT_TOKENS, _LONGEST_RUN = 64, 64  # tokens
_MAX_SAMPLES = 10_000_000  # per file, because a file that is continued is read whole


def bounds_problems(config: Any) -> list[str]:
    """Return a line for each single value of a dataclass that is outside its field's bounds."""
    kind: type = type(config)
    pairs = ((field, getattr(config, field.name)) for field in fields_of(kind))
    return [
        f"{field.spell(value)}: {field.out_of_bounds(value)}"
        for field, value in pairs
        if not field.many and field.out_of_bounds(value)
    ]


def named_adapters(values: Sequence[str] | None) -> dict[str, str]:
    """Return the folders of adapters by name.

    Args:
        values: Values of --serve-adapter, each NAME=FOLDER.
    """
    return {name: folder for name, _, folder in (value.partition("=") for value in values or ())}


def adapter_problems(values: Sequence[str] | None) -> list[str]:
    """Return a line for each mistake in the values of --serve-adapter."""
    problems, names = [], set()
    for value in values or ():
        name, equals, folder = value.partition("=")
        if not (name and equals and folder) or not name.isprintable() or name != name.strip():
            problems.append(
                f"--serve-adapter {value}: give NAME=FOLDER, for example sql=runs/sql/checkpoints"
            )
        elif name in names:
            problems.append(f"--serve-adapter {value}: {name} is given twice: choose another name")
        names.add(name)
    if values == ():
        problems.append("--serve-adapter has no value: give NAME=FOLDER, or drop it")
    return problems


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The settings in --speculative-config, under vLLM's names.

    Attributes:
        method: "ngram" finds an earlier occurrence of the latest tokens in the text and drafts the
            tokens that followed it; "mtp" drafts tokens with the model's multi-token prediction
            layers (--mtp-num-layers).
        num_speculative_tokens: Maximum number of draft tokens for each step.
        prompt_lookup_max: For ngram: length of the longest sequence of latest tokens to look for.
        prompt_lookup_min: For ngram: length of the shortest one.
    """

    method: str = flag("ngram", choices=("ngram", "mtp"))
    num_speculative_tokens: int = flag(1, unit="tokens", at_least=1, at_most=_MAX_DRAFT_TOKENS)
    prompt_lookup_max: int = flag(4, unit="tokens", at_least=1, at_most=_LONGEST_RUN)
    prompt_lookup_min: int = flag(2, unit="tokens", at_least=1, at_most=_LONGEST_RUN)


def read_speculation(text: str | None) -> Speculation | None:
    """Return the settings in a value of --speculative-config, or `None` if there is no value.

    Raises:
        ConfigError: The value has a mistake.
    """
    if text is None:
        return None
    problems = speculation_problems(text)
    if problems:
        raise ConfigError(problems)
    values = json.loads(text)
    if "prompt_lookup_max" in values:
        values.setdefault("prompt_lookup_min", min(2, values["prompt_lookup_max"]))
    return Speculation(**values)


def speculation_problems(text: str | None) -> list[str]:
    """Return a line for each mistake in the value of --speculative-config."""
    if text is None:
        return []
    flag = f"--speculative-config {text}"
    example = 'give a JSON object such as \'{"method": "ngram", "num_speculative_tokens": 4}\''
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        return [f"{flag}: {example}"]
    known = {entry.name: entry for entry in fields_of(Speculation)}
    problems = [
        f"{flag}: {name} is missing: {example}"
        for name in ("method", "num_speculative_tokens")
        if name not in given
    ]
    for name, value in given.items():
        entry = known.get(name)
        choices = None if entry is None else entry.info.choices
        if entry is None:
            problems.append(f"{flag}: unknown key {name!r}: use {', '.join(known)}")
        elif type(value) is not entry.kind or (choices and value not in choices):
            expected = f"use {' or '.join(choices)}" if choices else example
            problems.append(f"{flag}: {name} is {json.dumps(value)}: {expected}")
        elif invalid := entry.out_of_bounds(value):
            problems.append(f"{flag}: {name} is {value}: {invalid}")
        elif name.startswith("prompt_lookup_") and given.get("method") == "mtp":
            problems.append(f"{flag}: {name} is for the method ngram: drop it")
    if not problems:
        shortest = given.get("prompt_lookup_min", 1)
        longest = given.get("prompt_lookup_max", Speculation.prompt_lookup_max)
        if shortest > longest:
            problems.append(
                f"{flag}: prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}: "
                "swap them"
            )
    return problems


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Speculative decoding.

    Attributes:
        speculative_config: Draft several tokens and verify them in one pass, which does not change
            the text. A JSON object with vLLM's keys, such as '{"method": "ngram",
            "num_speculative_tokens": 4}' or '{"method": "mtp", "num_speculative_tokens": 1}'.
            Default: one token at a time.
    """

    speculative_config: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServerConfig(SpeculationOptions):
    """Text generation server.

    Attributes:
        host: Address to listen on. Any address other than the loopback 127.0.0.1 requires
            --auth-token-file.
        port: Port to listen on. 0 picks a free port and prints it.
        auth_token_file: File with a token that clients must send. By default only clients on this
            machine are served.
        served_model_name: Model name for clients of the OpenAI-compatible API. Default: the name of
            the --load folder or, if that begins with "checkpoint", of its parent folder.
        serve_adapter: Adapters of the model, as NAME=FOLDER. Requests choose one by NAME as their
            model. A folder contains PEFT's files, or checkpoints of a run with --lora-rank.
        legacy_status_codes: Answer most invalid PUT /api requests as Megatron-LM does, with status
            200 and a string.
        temperature: Default temperature for requests that do not set one.
        top_k: Default top_k for requests that set neither top_k nor top_p.
        top_p: Default top_p for requests that set neither top_k nor top_p.
        out_seq_length: Maximum length of prompt and answer together. Default: the model's context
            length.
        max_tokens_to_oom: Limit on a request's number of prompts x (longest prompt + tokens to
            generate).
        max_batch_size: Maximum number of sequences computed at once. Others wait.
        max_queued_requests: Maximum number of running and waiting sequences. Further requests get
            status 429.
        cache_tokens: Size of the KV cache. Default: as much as fits in memory and can be used.
        max_body_bytes: Maximum size of a request body. Larger requests are refused.
        request_timeout: Time limit for a single answer.
        log_requests: Write the body of every PUT /api request, with its prompts, to the log, up to
            2000 characters, unless the request has no_log.
        bert_embedder_load: For Retro: folder or name of the network that embeds chunks. Default:
            the one that --retro-workdir was created with.
    """

    host: str = "127.0.0.1"
    port: int = flag(5000, at_least=0, at_most=65535)
    auth_token_file: str | None = None
    served_model_name: str | None = None
    serve_adapter: tuple[str, ...] | None = flag(
        None, names="--serve-adapter --lora-modules", adds=True
    )
    legacy_status_codes: bool = False
    temperature: float = flag(1.0, above=0, at_most=100)
    top_k: int = flag(0, names="--top_k --top-k", at_least=0, at_most=1000)
    top_p: float = flag(0.0, names="--top_p --top-p", at_least=0, at_most=1)
    out_seq_length: int | None = flag(None, unit="tokens", at_least=1)
    max_tokens_to_oom: int = flag(12000, unit="tokens", at_least=1)
    max_batch_size: int = flag(256, unit="sequences", at_least=1, at_most=MAX_SEQUENCES)
    max_queued_requests: int = flag(1024, unit="sequences", at_least=1)
    cache_tokens: int | None = flag(None, unit="tokens", at_least=1)
    max_body_bytes: int = flag(1 << 20, unit="bytes", at_least=1)
    request_timeout: float = flag(600.0, unit="seconds", above=0)
    log_requests: bool = False
    bert_embedder_load: str | None = None


def server_problems(server: ServerConfig) -> list[str]:
    """Return one line for each mistake in the server's flags."""
    problems = [*bounds_problems(server), *adapter_problems(server.serve_adapter)]
    problems += speculation_problems(server.speculative_config)
    if server.top_k > 0 and server.top_p > 0:
        problems.append(
            f"--top_k {server.top_k} and --top_p {server.top_p:g} cannot be combined: use one of "
            "them"
        )
    return problems


@dataclass(frozen=True, kw_only=True)
class SamplesConfig(SpeculationOptions):
    """Samples.

    Attributes:
        prompt: Prompt to continue; the result is printed.
        sample_input_file: File with one prompt per line. In a *.jsonl file, the prompt is the
            "prompt" of each object, or its "text" if it has no "prompt". A prompt may be an object
            with a "text", as in RealToxicityPrompts.
        sample_output_file: JSON Lines file for the generated texts. An existing file is continued.
            Default: the input file's name with .out appended.
        num_samples: Number of texts to generate without a prompt, or for --prompt (where 0 means
            1). With --sample-input-file, stop after this many texts (0: never).
        samples_per_prompt: Number of texts to generate for each prompt of --sample-input-file. They
            follow one another in the output.
        genfile: JSON Lines file for texts generated without a prompt, in the format of
            --sample-output-file. By default they are printed.
        out_seq_length: Maximum length of an answer. Prompt and answer together are also limited by
            the model's context length.
        greedy: Always choose the most likely token.
        temperature: Sampling temperature: logits are divided by it. 0 selects greedy decoding.
        top_k: Sample from the k most likely tokens. 0 disables the limit.
        top_p: Sample from the most likely tokens that together have this probability. 0 disables
            the limit.
        recompute: Accepted for compatibility; no effect. The KV cache is always used, and gives
            the same results.
        max_batch_size: Maximum number of texts computed at once.
        serve_adapter: Adapter to use for all texts, as NAME=FOLDER. The folder contains PEFT's
            files, or checkpoints of a run with --lora-rank.
        bert_embedder_load: For Retro: folder or name of the network that embeds chunks. Default:
            the one that --retro-workdir was created with.
    """

    prompt: str | None = None
    sample_input_file: str | None = None
    sample_output_file: str | None = None
    num_samples: int = flag(0, unit="texts", at_least=0, at_most=_MAX_SAMPLES)
    samples_per_prompt: int = flag(1, unit="texts", at_least=1, at_most=_MAX_SAMPLES)
    genfile: str | None = None
    out_seq_length: int = flag(1024, unit="tokens", at_least=1)
    greedy: bool = False
    temperature: float = flag(1.0, at_least=0, at_most=100)
    top_k: int = flag(0, names="--top_k --top-k", at_least=0)
    top_p: float = flag(0.0, names="--top_p --top-p", at_least=0, at_most=1)
    recompute: bool = False
    max_batch_size: int = flag(64, unit="texts", at_least=1, at_most=MAX_SEQUENCES)
    serve_adapter: tuple[str, ...] | None = flag(
        None, names="--serve-adapter --lora-modules", adds=True
    )
    bert_embedder_load: str | None = None


def sample_problems(samples: SamplesConfig) -> list[str]:
    """Return one line for each mistake in the flags of samples."""
    checks = (
        (
            samples.prompt is None
            and samples.sample_input_file is None
            and samples.num_samples < 1,
            "nothing to write: give --prompt TEXT, --sample-input-file FILE, or --num-samples N "
            "for texts without a prompt",
        ),
        (
            samples.prompt is not None and samples.sample_input_file is not None,
            "--prompt and --sample-input-file cannot be combined: use one of them",
        ),
        (
            samples.sample_input_file is None and samples.samples_per_prompt > 1,
            f"--samples-per-prompt {samples.samples_per_prompt} is for --sample-input-file: use "
            "--num-samples",
        ),
        (
            samples.sample_input_file is None and samples.sample_output_file is not None,
            "--sample-output-file requires --sample-input-file: add it, or use --genfile",
        ),
        (
            samples.genfile is not None
            and (samples.prompt is not None or samples.sample_input_file is not None),
            "--genfile is for texts without a prompt: drop it, or drop --prompt and "
            "--sample-input-file",
        ),
        (
            any("\ud800" <= letter <= "\udfff" for letter in samples.prompt or ""),
            "--prompt is not valid UTF-8: convert the text, for example with iconv",
        ),
        (samples.prompt == "", "--prompt is empty: give some text, or --num-samples alone"),
        (
            len(samples.serve_adapter or ()) > 1,
            "--serve-adapter names several adapters, but a single adapter is used for all texts: "
            "give one, or start a server, where each request chooses its adapter",
        ),
    )
    return [
        *(message for is_mistake, message in checks if is_mistake),
        *adapter_problems(samples.serve_adapter),
        *speculation_problems(samples.speculative_config),
        *bounds_problems(samples),
    ]


def find_sample_notices(samples: SamplesConfig) -> list[str]:
    """Return one line for each flag that is accepted but has no effect, with the reason."""
    if not samples.recompute:
        return []
    return ["--recompute has no effect: the KV cache is always used, with the same results"]
