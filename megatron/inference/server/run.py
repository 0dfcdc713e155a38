"""The text generation server, every rank of it: from a command line to its end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.huggingface.files import COMPANION_FOLDER, GENERATION_CONFIG
from megatron.command import say
from megatron.config import RunConfig
from megatron.config.server import ServerConfig, problems_of
from megatron.environment import Launch
from megatron.errors import EXIT_OK
from megatron.inference.arguments import parse_generation
from megatron.inference.build import EngineOptions, engine_of
from megatron.inference.engine import BatchEngine
from megatron.inference.load import Loaded, load_gpt
from megatron.inference.panel import engine_rows
from megatron.inference.server.chat import ChatTemplate, find_template, special_tokens
from megatron.inference.server.launch import find_token, front, take_address, url_of
from megatron.inference.server.limits import Limits
from megatron.inference.server.settings import Defaults, FrontSettings
from megatron.inference.worker import serve
from megatron.training.panel import Row, format_panel
from megatron.training.process import processes, run_process, show_notices

PROGRAM = "run_text_generation_server.py"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """Run one process of the server until it is told to end; the exit code."""
    return run_process(arguments, lambda launch: _serve(arguments, launch))


def _serve(arguments: Sequence[str], launch: Launch) -> int:
    parsed = parse_generation(
        arguments,
        world_size=launch.world_size,
        program=PROGRAM,
        extra=(ServerConfig,),
        check_extra=problems_of,
    )
    (server,) = parsed.extra
    show_notices(parsed.notices, launch)
    # What can be wrong is found before the model is loaded.
    token = find_token(server)
    template = _find_template(server, parsed.config)
    listener = take_address(server) if launch.rank == 0 else None
    with processes(parsed.config, launch) as (device, layout):
        assert parsed.config.checkpoint.load is not None
        loaded = load_gpt(parsed.config.checkpoint.load, device, layout, config=parsed.config)
        options = EngineOptions(
            max_sequences=server.max_batch_size,
            max_step_tokens=max(EngineOptions.max_step_tokens, server.max_batch_size),
            cache_tokens=server.cache_tokens,
            seed=parsed.config.training.seed,
        )
        engine = engine_of(loaded, device, options)
        if listener is None:
            with _kept_handlers():
                # Rank 0 hears them, and ends the others; one that left first would strand them.
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                serve(engine, None, layout.world, device=device.torch_device)
            return EXIT_OK
        settings = _settings(server, loaded, engine, token, template)
        say(_panel(settings, url_of(listener), engine_rows(loaded, engine, device)))
        with _kept_handlers(), front(listener, settings, lambda: engine.stats) as inbox:
            # Also while the front ends: a second Ctrl-C does not leave it behind.
            for number in _SIGNALS:
                signal.signal(number, lambda *_: inbox.shut_down())
            serve(engine, inbox, layout.world, device=device.torch_device)
    return EXIT_OK


def _find_template(server: ServerConfig, config: RunConfig) -> str | None:
    """The chat template, tried."""
    folder = config.tokenizer.tokenizer_model
    template = find_template(server.chat_template, folder)
    if template is not None:
        ChatTemplate(template, special_tokens(folder))
    return template


@contextmanager
def _kept_handlers() -> Iterator[None]:
    """What the block does with Ctrl-C and SIGTERM is undone behind it. On rank 0 they end the
    server on all ranks, between two steps."""
    before = [signal.getsignal(number) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def _settings(
    server: ServerConfig,
    loaded: Loaded,
    engine: BatchEngine,
    token: str | None,
    template: str | None,
) -> FrontSettings:
    load = loaded.config.checkpoint.load
    assert load is not None
    longest = server.out_seq_length or engine.limits.max_length
    return FrontSettings(
        model=server.served_model_name or _name_of(Path(load)),
        tokenizer=loaded.config.tokenizer,
        engine=replace(engine.limits, max_length=min(longest, engine.limits.max_length)),
        limits=Limits(
            body_bytes=server.max_body_bytes,
            queued=server.max_queued_requests,
            tokens=server.max_tokens_to_oom,
            generate_seconds=server.request_timeout,
        ),
        defaults=Defaults(server.temperature, server.top_k, server.top_p),
        stop_tokens=_stop_tokens(Path(load), engine.limits.vocab_size),
        chat_template=template,
        token=token,
        legacy_status_codes=server.legacy_status_codes,
        created=int(time.time()),
    )


def _name_of(folder: Path) -> str:
    """`demo` of runs/demo/checkpoints."""
    folder = folder.resolve()
    return folder.parent.name if folder.name.startswith("checkpoint") else folder.name


def _stop_tokens(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """What an imported chat model's generation_config.json says that ends a turn."""
    path = folder / COMPANION_FOLDER / GENERATION_CONFIG
    if not path.is_file():
        return ()
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError):
        return ()  # the import has checked what matters of it
    tokens = value if isinstance(value, list) else [value]
    return tuple(token for token in tokens if type(token) is int and 0 <= token < vocab_size)


def _panel(settings: FrontSettings, url: str, engine: Sequence[Row]) -> str:
    address = url.removeprefix("http://")
    rows = [
        ("page", f"{url}/"),
        ("command line", f"python tools/text_generation_cli.py {address}"),
        ("OpenAI clients", f"base URL {url}/v1, model {settings.model}"),
        ("access", "with the token" if settings.token else "from this machine, without a token"),
        ("chat", "with a template" if settings.chat_template else "no chat template"),
        ("longest text", f"{settings.engine.max_length:,} tokens"),
        *engine,
    ]
    return format_panel(f"{PROGRAM}: serving {settings.model}", rows)
