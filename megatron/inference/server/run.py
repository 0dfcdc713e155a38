"""The text generation server on each rank, from the command line to shutdown."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.huggingface.files import COMPANION_FOLDER, GENERATION_CONFIG
from megatron.command import PanelRow, format_panel, print_line
from megatron.config.generation import (
    ServerConfig,
    named_adapters,
    read_speculation,
    server_problems,
)
from megatron.config.parser import Program
from megatron.environment import module_command
from megatron.errors import EXIT_OK, ConfigError, UserError
from megatron.inference.adapters import add_to, open_adapters
from megatron.inference.build import EngineOptions, check_speculation
from megatron.inference.load import engine_rows, load_gpt, parse_generation
from megatron.inference.messages import Command, MessageError, Report, Shutdown, Unpacker, pack
from megatron.inference.request import Event, RequestError, Stats
from megatron.inference.retrieval import ARCHITECTURES, build_any_engine, check_retrieval
from megatron.inference.server.address import open_listener, url_of
from megatron.inference.server.settings import CHUNK, LOOPBACK, FrontSettings
from megatron.inference.worker import serve
from megatron.processes.launch import Launch
from megatron.processes.process import print_notices, processes, run_process
from megatron.tokenizer.chat_template import ChatTemplate, find_template, special_tokens
from megatron.tokenizer.turn_end import find_turn_end

PROGRAM = "run_text_generation_server.py"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MIN_TOKEN = 16  # characters
_SHUTDOWN_SECONDS = 15.0  # seconds in which the web server may finish its last answers


def main(arguments: Sequence[str]) -> int:
    """Run one process of the server until it is shut down, and return the exit code."""
    return run_process(arguments, lambda launch: _serve(arguments, launch))


def _serve(arguments: Sequence[str], launch: Launch) -> int:
    program = Program(name=PROGRAM, extra=(ServerConfig,), check_extra=server_problems)
    parsed = parse_generation(arguments, launch.world_size, program, kinds=ARCHITECTURES)
    (server,) = parsed.extra
    print_notices(parsed.notices, launch)
    # Find mistakes before loading the model, which may take minutes.
    embedder = server.bert_embedder_load
    check_retrieval(parsed.config, embedder)
    speculation = read_speculation(server.speculative_config)
    check_speculation(parsed.config.model, speculation)
    name = _model_name(parsed.config.checkpoint.load, server)
    adapters = open_adapters(server.serve_adapter, parsed.config)
    token = find_token(server)
    tokenizer_model = parsed.config.tokenizer.tokenizer_model
    template = find_template(parsed.config.tokenizer.chat_template, tokenizer_model)
    if template is not None:
        ChatTemplate(template, special_tokens(tokenizer_model))
    listener = open_listener(server) if launch.rank == 0 else None
    url = url_of(listener) if listener else ""
    options = EngineOptions(
        max_sequences=server.max_batch_size,
        cache_tokens=server.cache_tokens,
        seed=parsed.config.training.seed,
        speculation=speculation,
    )
    with (
        processes(parsed.config, launch) as (device, layout),
        ExitStack() as handlers,
        web_server(listener) if listener else nullcontext() as connection,
    ):
        folder = parsed.config.checkpoint.load
        assert folder is not None
        loaded = load_gpt(folder, device, layout, config=parsed.config, kinds=ARCHITECTURES)
        loaded = add_to(loaded, adapters, device)
        engine = build_any_engine(loaded, device, options, embedder=embedder)
        if connection is None:
            # Rank 0 handles the signals and ends the other ranks. If one of these ended first, all
            # others would wait for it forever.
            handlers.enter_context(_handle_signals(signal.SIG_IGN))
            serve(engine, None)
            return EXIT_OK
        limits = engine.limits
        max_length = min(server.out_seq_length or limits.max_length, limits.max_length)
        stop_tokens = _stop_tokens(Path(folder), limits.vocab_size)
        if template is not None:
            turn_end = find_turn_end(template, special_tokens(tokenizer_model), loaded.tokenizer)
            stop_tokens += () if turn_end is None else (turn_end,)
        settings = FrontSettings(
            model=name,
            tokenizer=parsed.config.tokenizer,
            engine=replace(limits, max_length=max_length),
            server=server,
            stop_tokens=stop_tokens,
            chat_template=template,
            token=token,
            created=int(time.time()),
            retrieves=parsed.config.model.architecture == "retro",
            adapters=tuple(adapter.name for adapter in adapters),
        )
        print_line(_panel(settings, url, engine_rows(loaded, engine, device)))
        with suppress(BrokenPipeError):  # the web server has died, which the inbox will notice
            connection.sendall(pack(FrontSettings, settings))
        with closing(SocketInbox(connection, lambda: engine.stats)) as inbox:
            # The signals end the server on all ranks, between two steps. The handlers stay in
            # place while the web server ends, so that a second Ctrl-C does not leave it behind.
            # After that, a late SIGTERM must not change the exit code.
            handlers.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)
            handlers.enter_context(_handle_signals(lambda *_: inbox.shut_down()))
            serve(engine, inbox)
    return EXIT_OK


def _model_name(folder: str | None, server: ServerConfig) -> str:
    """Return the model's name for clients.

    It is --served-model-name or, by default, the name of the folder, or of the parent of a folder
    whose name begins with "checkpoint".

    Raises:
        ConfigError: An adapter has the same name.
    """
    resolved = Path(folder or "").resolve()
    # The model of runs/demo/checkpoints is called `demo`.
    folder_name = resolved.parent.name if resolved.name.startswith("checkpoint") else resolved.name
    name = server.served_model_name or folder_name
    if name in named_adapters(server.serve_adapter):
        raise ConfigError(
            f"--serve-adapter {name}=...: the model itself has this name: choose another, or give "
            "--served-model-name"
        )
    return name


@contextmanager
def _handle_signals(handler: Any) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM during the block, and restore their handlers after it."""
    previous = {signum: signal.signal(signum, handler) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, previous_handler in previous.items():
            signal.signal(signum, previous_handler)


def _stop_tokens(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of tokens that end a turn, from an imported model's generation_config.json."""
    path = folder / COMPANION_FOLDER / GENERATION_CONFIG
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, RecursionError, AttributeError):
        return ()  # the import has already checked the parts that matter
    tokens = value if isinstance(value, list) else [value]
    return tuple(token for token in tokens if type(token) is int and 0 <= token < vocab_size)


def _panel(settings: FrontSettings, url: str, engine: Sequence[PanelRow]) -> str:
    address = url.removeprefix("http://")
    rows = [
        ("page", f"{url}/"),
        ("command line", f"python tools/text_generation_cli.py {address}"),
        ("OpenAI clients", f"base URL {url}/v1, model {' or '.join(settings.models)}"),
        ("access", "token required" if settings.token else "this machine only, no token required"),
        ("chat", "available" if settings.chat_template else "not available (no chat template)"),
        ("longest text", f"{settings.engine.max_length:,} tokens"),
        *engine,
    ]
    return format_panel(f"{PROGRAM}: serving {settings.model}", rows)


def find_token(server: ServerConfig) -> str | None:
    """Return the access token that clients must send, or `None` if they need none.

    They need none if --auth-token-file is not given and only this machine can connect.

    Args:
        server: Flags of the server.

    Raises:
        ConfigError: The token is missing, cannot be read, or is not a single word of at least 16
            ASCII characters.
    """
    path = server.auth_token_file
    if path is None:
        if server.host in LOOPBACK:
            return None
        raise ConfigError(
            f"--host {server.host} can be reached from other machines: give --auth-token-file FILE "
            "with a token that clients must send, or --host 127.0.0.1"
        )
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--auth-token-file {path} cannot be read: {error}") from error
    if len(token) < _MIN_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--auth-token-file {path}: give one word of at least {_MIN_TOKEN} ASCII characters, "
            "for example from: openssl rand -hex 32"
        )
    return token


@contextmanager
def web_server(listener: socket.socket) -> Iterator[socket.socket]:
    """Run the web server's process during the block.

    The process starts while the model is loading, and waits for its settings, which are the first
    message.

    Args:
        listener: Bound socket that clients connect to. The process takes it over.

    Yields:
        The socket to the process. Closing it ends the process.

    Raises:
        UserError: The process failed. It has printed the error.
    """
    connection, child_socket = socket.socketpair()
    with listener, child_socket:
        descriptors = (child_socket.fileno(), listener.fileno())
        process = subprocess.Popen(
            [*module_command("megatron.inference.server.front"), *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # only rank 0 gets Ctrl-C; the web server ends with rank 0
        )
    try:
        yield connection
    finally:
        connection.close()
        try:
            code = process.wait(_SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    if code:
        raise UserError(f"the web server failed with exit code {code}: its message is above")


class SocketInbox:
    """The server's `worker.Inbox`. Its threads wait for the socket so that the engine never does.

    If the web server ends for any reason, the inbox returns a command to shut down.
    """

    def __init__(self, connection: socket.socket, stats: Callable[[], Stats]) -> None:
        """Start the threads that read from the socket and write to it.

        Args:
            connection: Socket to the web server. `close` closes it.
            stats: Function that returns the engine's statistics, to send with the events.
        """
        self._connection = connection
        self._stats = stats
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"front-{work.__name__}", daemon=True)
            for work in (self._receive, self._transmit)
        ]
        for thread in self._threads:
            thread.start()

    def poll(self, wait: float) -> list[Command]:
        """Return the commands that have arrived, in order.

        Args:
            wait: Maximum time to wait for the first command, in seconds.
        """
        commands: list[Command] = []
        try:
            commands.append(self._commands.get(block=wait > 0, timeout=wait or None))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def send(self, events: Sequence[Event]) -> None:
        """Send events to the web server, with the engine's current statistics."""
        self._reports.put(Report.of(events, self._stats()))

    def shut_down(self) -> None:
        """Queue the command to shut down."""
        self._commands.put(Shutdown())

    def close(self) -> None:
        """Send the remaining events, and close the socket."""
        self._reports.put(None)
        self._threads[1].join(timeout=5.0)
        self._connection.close()

    def _receive(self) -> None:
        try:
            unpacker = Unpacker[Command](Command)
            while data := self._connection.recv(CHUNK):
                for command in unpacker.feed(data):
                    self._commands.put(command)
        except (OSError, MessageError, RequestError):
            pass  # the web server is gone, or broken if it sent a bad message
        self._commands.put(Shutdown())

    def _transmit(self) -> None:
        try:
            while (report := self._reports.get()) is not None:
                self._connection.sendall(pack(Report, report))
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the web server is gone; `_receive` shuts down
