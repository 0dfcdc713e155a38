"""What the text generation server is to do."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import flag

MOST_SEQUENCES = 1 << 16  # computed at a time: a step is planned and recorded by their number


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Text generation server."""

    host: str = flag(
        "127.0.0.1",
        "Address to listen on. Any but this machine's own 127.0.0.1 needs --auth-token-file.",
    )
    port: int = flag(5000, "Port to listen on. 0: any free one, which is printed.")
    auth_token_file: str | None = flag(
        None,
        "File with a token that clients must send. By default only this machine is served.",
    )
    served_model_name: str | None = flag(
        None,
        "The model's name for clients of OpenAI's API. Default: the name of the --load folder.",
    )
    chat_template: str | None = flag(
        None, "File with a Jinja chat template. Default: the one beside the tokenizer."
    )
    legacy_status_codes: bool = flag(
        False, "PUT /api answers most mistakes as Megatron-LM does: with status 200 and a string."
    )
    temperature: float = flag(1.0, "Temperature of requests that name none.")
    top_k: int = flag(
        0, "top_k of requests that name neither top_k nor top_p.", names=("--top_k", "--top-k")
    )
    top_p: float = flag(
        0.0, "top_p of requests that name neither top_k nor top_p.", names=("--top_p", "--top-p")
    )
    out_seq_length: int | None = flag(
        None,
        "Longest text, prompt and answer together. Default: as long as the model's positions go.",
        unit="tokens",
    )
    max_tokens_to_oom: int = flag(
        12000,
        "A request's prompts times (longest prompt + tokens to generate) may not be more.",
        unit="tokens",
    )
    max_batch_size: int = flag(
        256, "Sequences that are computed at once; others wait.", unit="sequences"
    )
    max_queued_requests: int = flag(
        1024, "Sequences that run or wait; more are refused with status 429.", unit="sequences"
    )
    cache_tokens: int | None = flag(
        None,
        "Size of the key-value cache. Default: what fits in memory and is useful.",
        unit="tokens",
    )
    max_body_bytes: int = flag(1 << 20, "Larger requests are refused.", unit="bytes")
    request_timeout: float = flag(600.0, "Longest time for one answer.", unit="seconds")


def problems_of(server: ServerConfig) -> list[str]:
    """One line for each mistake."""
    checks = (
        (not 0 <= server.port < 1 << 16, f"--port {server.port}: give 0 to 65535"),
        (
            not 0 < server.temperature <= 100,
            f"--temperature {server.temperature:g}: give more than 0, at most 100",
        ),
        (not 0 <= server.top_k <= 1000, f"--top_k {server.top_k}: give 0 (all) to 1000"),
        (not 0 <= server.top_p <= 1, f"--top_p {server.top_p:g}: give 0 (all) to 1"),
        (
            server.top_k > 0 and server.top_p > 0,
            f"--top_k {server.top_k} and --top_p {server.top_p:g} exclude each other: keep one",
        ),
        (
            server.request_timeout <= 0,
            f"--request-timeout {server.request_timeout:g}: give more than 0 seconds",
        ),
        *(
            (value is not None and value < 1, f"{name} {value}: give 1 or more")
            for name, value in (
                ("--out-seq-length", server.out_seq_length),
                ("--max-tokens-to-oom", server.max_tokens_to_oom),
                ("--max-batch-size", server.max_batch_size),
                ("--max-queued-requests", server.max_queued_requests),
                ("--cache-tokens", server.cache_tokens),
                ("--max-body-bytes", server.max_body_bytes),
            )
        ),
        (
            server.max_batch_size > MOST_SEQUENCES,
            f"--max-batch-size {server.max_batch_size}: give at most {MOST_SEQUENCES}",
        ),
    )
    return [message for wrong, message in checks if wrong]
