"""Use a text generation server from a terminal or a script.

python tools/text_generation_cli.py localhost:5000                        # one prompt at a time
python tools/text_generation_cli.py localhost:5000 --prompt "def main("   # a single answer
head -c 500 story.txt | python tools/text_generation_cli.py localhost:5000
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from megatron.command import print_line, run_command
from megatron.config.arguments import ToolParser
from megatron.environment import module_command, private_cache
from megatron.errors import CheckpointError, ConfigError, UserError

_HELP = """\
Enter a text, and the model continues it. In a chat, enter a message, and it replies.
  /tokens N        max new tokens                 /seed N    repeat the same answers
  /temperature X   0: the most likely token       /clear     forget the conversation
  /top_k N, /top_p X                              /model M   another of the server's models
  /help, /quit (or Ctrl-D)
Ctrl-C stops an answer."""
_NUMBERS = {"tokens": int, "seed": int, "top_k": int, "temperature": float, "top_p": float}
_HISTORY_LINES = 1000
_POLL_SECONDS = 0.2  # seconds between two checks of a server that is starting
_LOG_LINES = 20  # last lines to show of a server that failed
_MAX_TIMEOUT = 1e6  # seconds
# Models also emit control characters, which could change the terminal's settings.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROL_PICTURES |= {127: 0x2421, **dict.fromkeys(range(128, 160), 0xFFFD)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    options = build_parser().read(argv)
    return run_command(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Print one answer if a prompt is given or piped in. Otherwise, start a session.

    Raises:
        UserError: A flag is invalid, or the server cannot be reached or refuses the request.
    """
    if options.system is not None and not options.chat:
        raise UserError("--system requires --chat: give both, or neither")
    session = ChatSession(Server(options.server, options.auth_token_file, options.timeout), options)
    if options.prompt is not None:
        session.answer(options.prompt)
    elif not sys.stdin.isatty():
        # An incomplete character that `head -c` may leave at the end is dropped. Other bytes that
        # are not UTF-8 become surrogates, which are refused before they are sent.
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        session.answer(decoder.decode(sys.stdin.buffer.read()))
    else:
        _read_commands(session)


class Server:
    """A client of a text generation server."""

    def __init__(self, address: str, token_file: str | None, timeout: float) -> None:
        """Check the address.

        Args:
            address: HOST:PORT, with or without http:// or https:// before it.
            token_file: File with the server's access token, or `None` if it requires none.
            timeout: Seconds to wait for the next chunk of an answer.

        Raises:
            UserError: The address or the timeout is invalid, or the file cannot be read.
        """
        url = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
        try:
            port = url.port
        except ValueError:
            port = None
        is_http = url.scheme in ("", "http", "https")
        if not is_http or not url.hostname or port is None or url.path.strip("/"):
            raise UserError(f"{address}: give HOST:PORT, for example localhost:5000")
        if not 0 < timeout <= _MAX_TIMEOUT:
            raise UserError(f"--timeout {timeout:g}: give seconds, more than 0")
        self._is_encrypted = url.scheme == "https"
        self._host, self._port, self._timeout = url.hostname, port, timeout
        self._headers = {"Content-Type": "application/json"}
        if token_file is not None:
            try:
                token = Path(token_file).read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"--auth-token-file {token_file} cannot be read: {error}"
                ) from error
            if not token or not token.isprintable():
                raise UserError(
                    f"--auth-token-file {token_file}: give a file whose only line is the token"
                )
            self._headers["Authorization"] = f"Bearer {token}"

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of a streamed answer.

        Args:
            path: Path of the request.
            body: Body of the request.

        Raises:
            UserError: A text in the body is not UTF-8 or a number is not finite, or the server
                cannot be reached or refuses the request. The message of a refusal is the server's.
        """
        with self._response("POST", path, _encode(body)) as response:
            yield from _objects(response)

    def has_chat_template(self) -> bool:
        """Return whether the server has a model with a chat template.

        Raises:
            UserError: The server cannot be reached, or refuses the request. The message of a
                refusal is the server's.
        """
        with self._response("GET", "/v1/models") as response:
            try:
                models = json.loads(response.read())["data"]
                return any(model.get("chat") is True for model in models)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                return False  # not one of our servers

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, data: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request, and yield the response to read."""
        kind = http.client.HTTPSConnection if self._is_encrypted else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        where = f"{self._host}:{self._port}"
        with contextlib.closing(connection):
            try:
                connection.request(method, path, data, self._headers)
                # A response without a length leaves the connection open, so close the connection
                # too.
                with connection.getresponse() as response:
                    if response.status != http.HTTPStatus.OK:
                        raise UserError(f"{where}: {_message(response)}")
                    yield response
            except TimeoutError as error:
                raise UserError(
                    f"{where} sent nothing for {self._timeout:g} seconds: give a larger --timeout"
                ) from error
            except http.client.HTTPException as error:
                raise UserError(
                    f"{where}: {str(error) or 'no answer'}: is a text generation server running "
                    "there?"
                ) from error
            except (OSError, UnicodeError) as error:
                raise UserError(
                    f"cannot connect to {where} ({error}): is the server running there?"
                ) from error


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise UserError("the text is not UTF-8: convert it, for example with iconv") from None
    except ValueError:
        raise UserError("one of the numbers is not finite: give a finite one") from None


def _message(response: http.client.HTTPResponse) -> str:
    text = response.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"status {response.status}, {text[:200]!r}: is this a text generation server?"


def _objects(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if not data:
            continue
        value = _object(data)
        if "error" in value:
            error = value["error"]
            raise UserError(str(error.get("message", error) if isinstance(error, dict) else error))
        yield value
    raise http.client.HTTPException("the answer is incomplete")


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not value.keys() & {"choices", "error"}:
        raise http.client.HTTPException(
            f"{data[:60]!r} is not an answer from a text generation server"
        )
    return value


class ChatSession:
    """A conversation and its sampling settings."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        """Start a conversation.

        Args:
            server: The server that answers.
            options: The command line.
        """
        self._server = server
        self._chat: bool = options.chat
        self._model: str | None = options.model
        self._settings = {name: getattr(options, name) for name in _NUMBERS}
        self._stop: list[str] = options.stop
        self._start = [{"role": "system", "content": options.system}] if options.system else []
        self._messages = list(self._start)

    def answer(self, text: str) -> None:
        """Send a text, and print the answer as it arrives.

        In a chat, add both to the conversation once the answer is complete.

        Raises:
            UserError: The text cannot be sent, or the server cannot be reached or refuses it.
        """
        message = {"role": "user", "content": text}
        path, body = "/v1/completions", {"prompt": text, **self._sampling()}
        if self._chat:
            path = "/v1/chat/completions"
            body = {"messages": [*self._messages, message], **self._sampling()}
        answer = ""
        try:
            for value in self._server.stream(path, {**body, "stream": True}):
                for choice in value["choices"]:
                    piece = choice.get("delta", {}).get("content") or choice.get("text") or ""
                    answer += piece
                    if sys.stdout.isatty():
                        piece = piece.translate(_CONTROL_PICTURES)
                    print(piece, end="", flush=True)
        finally:
            if answer:
                print(flush=True)
        if self._chat:
            self._messages += [message, {"role": "assistant", "content": answer}]

    def set(self, name: str, text: str) -> None:
        """Change a numeric setting.

        Args:
            name: Name of the setting.
            text: New value of the setting.

        Raises:
            UserError: The text is not a number.
        """
        try:
            self._settings[name] = _NUMBERS[name](text)
        except ValueError:
            raise UserError(f"/{name} {text}: give a number") from None

    def select_model(self, model: str) -> None:
        """Switch to a different model for all later answers.

        Args:
            model: Name of a model or an adapter of the server. Empty selects the default.
        """
        self._model = model or None

    def clear(self) -> None:
        """Forget the conversation."""
        self._messages = list(self._start)

    def _sampling(self) -> dict[str, Any]:
        values = {
            **self._settings,
            "max_tokens": self._settings["tokens"],
            "stop": self._stop,
            "model": self._model,
        }
        del values["tokens"]
        return {name: value for name, value in values.items() if value not in (None, [])}


def _read_commands(session: ChatSession) -> None:
    with _history():
        print("/help lists the commands; Ctrl-D quits.")
        while True:
            try:
                line = input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                continue
            if line.strip() == "/quit":
                return
            try:
                _run_command(session, line)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                print("(stopped)")


def _run_command(session: ChatSession, line: str) -> None:
    name, _, value = line.strip().removeprefix("/").partition(" ")
    if not line.strip():
        return
    if not line.startswith("/"):
        session.answer(line)
    elif name == "help":
        print(_HELP)
    elif name == "clear":
        session.clear()
    elif name == "model":
        session.select_model(value.strip())
    elif name in _NUMBERS:
        session.set(name, value)
    else:
        raise UserError(f"/{name}: no such command; /help lists the commands")


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Enable line editing and a history of lines, which is saved between sessions."""
    try:
        import readline
    except ImportError:  # not on every platform
        yield
        return
    try:
        path = private_cache("text_generation") / "history"
    except (OSError, RuntimeError):  # a user without a home folder, or whose disk is full
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser(
        "text_generation_cli.py", "Use a text generation server from a terminal or a script."
    )
    parser.add_argument(
        "server",
        metavar="HOST:PORT",
        help="for example localhost:5000, or https://HOST:PORT if a proxy provides HTTPS",
    )
    parser.add_argument("--prompt", help="answer this prompt and quit; piped text does the same")
    parser.add_argument(
        "--chat", action="store_true", help="chat with the model instead of continuing texts"
    )
    parser.add_argument("--system", help="with --chat: the system message")
    parser.add_argument(
        "--model", help="a model or an adapter of the server, by the name in its /v1/models"
    )
    parser.add_argument("--tokens", type=int, default=64, help="maximum new tokens (%(default)s)")
    parser.add_argument("--temperature", type=float, help="0 always takes the most likely token")
    parser.add_argument(
        "--top_k",
        "--top-k",
        type=int,
        help="sample from the k most likely tokens; 0 disables the limit",
    )
    parser.add_argument(
        "--top_p",
        "--top-p",
        type=float,
        help="sample from the most likely tokens with this total probability; 1 disables the limit",
    )
    parser.add_argument("--seed", type=int, help="the same seed gives the same answers")
    parser.add_argument(
        "--stop", action="append", default=[], help="stop sequence; may be given several times"
    )
    parser.add_argument("--auth-token-file", metavar="FILE", help="file with the server's token")
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds to wait for the next chunk of an answer (%(default)s)",
    )
    return parser


def chat(args: Sequence[str]) -> int:
    """Chat with the server or checkpoint named by the first argument, and return the exit code."""
    parser = build_parser()
    parser.prog = "megatron chat"
    parser.description = (
        "Chat with a model. Instead of HOST:PORT, you can name a folder of checkpoints: a server "
        "for it then runs on this machine until you leave. A model with a chat template answers "
        "messages; any other model continues texts."
    )
    parser.set_defaults(chat=None)  # depends on the model
    parser.add_argument(
        "--no-chat",
        dest="chat",
        action="store_false",
        help="continue texts; the default for a model without a chat template",
    )
    parser.add_argument(
        "--serve-adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="with a folder of checkpoints: an adapter of its model, chosen by --model NAME; "
        "may be given several times",
    )
    options = parser.read(args)

    def start_session() -> None:
        if options.chat is None:
            server = Server(options.server, options.auth_token_file, options.timeout)
            options.chat = server.has_chat_template()
        run(options)

    def work() -> None:
        folder = Path(options.server)
        if not folder.is_dir():
            if "/" in options.server and "//" not in options.server:
                raise ConfigError(
                    f"{folder}: there is no such folder: name a folder of checkpoints, or a server "
                    "as HOST:PORT"
                )
            if options.serve_adapter:
                raise ConfigError(
                    f"--serve-adapter is for a folder of checkpoints, and {options.server} is a "
                    "server: choose one of its adapters with --model"
                )
            start_session()
            return
        with serving(folder, options.serve_adapter) as options.server:
            start_session()

    return run_command(work)


@contextlib.contextmanager
def serving(checkpoints: Path, adapters: Sequence[str] = ()) -> Iterator[str]:
    """Serve a checkpoint to this machine only, and yield the address of the server.

    The server ends with the context.

    Args:
        checkpoints: The folder of checkpoints.
        adapters: Adapters of the model, each NAME=FOLDER.

    Raises:
        CheckpointError: The server exited before it was ready. The message is the end of its log.
    """
    print_line(f"loading {checkpoints} ...")
    with tempfile.TemporaryFile("w+b") as log:
        args = ["serve", "--load", str(checkpoints), "--port", "0"]
        args += [arg for adapter in adapters for arg in ("--serve-adapter", adapter)]
        command = [*module_command("megatron.cli.main"), *args]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield _address(server, log)
        finally:
            server.terminate()
            server.wait()


def _address(server: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """Wait until a server has loaded its model and printed its address, and return the address."""
    while True:
        has_ended = server.poll() is not None
        log.seek(0)
        text = log.read().decode(errors="replace")
        if match := re.search(r"http://\S+:\d+", text):
            return match.group()
        if has_ended:
            raise CheckpointError(
                "\n".join(text.splitlines()[-_LOG_LINES:]).removeprefix("error: ")
            )
        time.sleep(_POLL_SECONDS)
