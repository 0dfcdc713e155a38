"""Chat templates and tokenization of clients' texts, in processes separate from the web server.

The time and memory that a text takes depend on the text, and on the template and tokenizer that
came with the model. Both hold the interpreter's lock while they run, so running them in a thread
would stop the whole web server. Each process reads a `Setup` and then jobs from stdin, and writes a
`Result` for each job to stdout. The kernel ends a process when a job takes too long, even if the
web server has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.config.data import TokenizerConfig
from megatron.environment import module_command
from megatron.errors import ConfigError, DataError
from megatron.inference.messages import Record, Unpacker, pack
from megatron.inference.server.endpoint import ApiError, client_address
from megatron.inference.server.settings import FrontSettings, ServerLimits
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.chat_template import ChatTemplate, special_tokens

logger = logging.getLogger(__name__)
_CHUNK = 1 << 16
_START_SECONDS = 60.0  # time in which a process must read its tokenizer
_LONG_TEXT = 4096  # characters
_MAX_DECODED_BYTES = 1 << 16  # bytes of a single token's text
_NICENESS = 10  # of the process for long texts, which must not slow down short ones or the engine


@dataclass(frozen=True)
class Setup:
    """The settings that a process needs before its first job.

    Attributes:
        limits: Limits on the time and memory of a job.
        niceness: Amount by which to lower the priority of the process, from 0 to 19.
        max_bytes: Largest size of a text that can fit in the model's context, in bytes. A longer
            text from a template is truncated, since it is rejected anyway.
        tokenizer: Files of the tokenizer, or `None` in a process that renders a template.
        template: Text of the chat template.
        special: Texts of special tokens, for the template.
    """

    limits: ServerLimits
    niceness: int
    max_bytes: int = 0
    tokenizer: TokenizerConfig | None = None
    template: str = ""
    special: dict[str, str] | None = None

    @property
    def error_prefix(self) -> str:
        """Beginning of the error message for a job that fails."""
        if self.tokenizer is None:
            return "the model's chat template refuses the messages"
        return "the tokenizer refuses the text"

    @property
    def source_name(self) -> str:
        """Source of the tokenizer or the template, for the server's log."""
        if self.tokenizer is None:
            return "the chat template"
        return str(self.tokenizer.tokenizer_model or self.tokenizer.vocab_file)


@dataclass(frozen=True)
class Job:
    """The work for one request.

    Attributes:
        texts: Texts to tokenize.
        parses_special: Whether a special token that is written out in a text is read as that token.
        messages: Conversation to render, in a process that has a chat template.
    """

    texts: tuple[str, ...] = ()
    parses_special: bool = False
    messages: tuple[dict[str, str], ...] = ()

    @property
    def is_long(self) -> bool:
        """Whether the texts take long enough for other clients to notice."""
        values = (value for message in self.messages for value in message.values())
        return sum(map(len, (*self.texts, *values))) >= _LONG_TEXT


@dataclass(frozen=True)
class Result:
    """The result of a job.

    Attributes:
        ids: Token ids of each text.
        text: Text of a conversation.
        error: Why the job failed, or `None` if it succeeded. Clients see it.
        exception_name: Name of the exception behind the error, for the server's log.
    """

    ids: tuple[tuple[int, ...], ...] = ()
    text: str = ""
    error: str | None = None
    exception_name: str | None = None


def main() -> int:
    """Run jobs until stdin closes, and return the exit code."""
    signal.setitimer(signal.ITIMER_REAL, _START_SECONDS)  # SIGALRM ends the process
    setup = next(_read_messages(Setup))
    try:
        run_job = _prepare(setup)
    except Exception as error:
        _write_result(Result(error=str(error) or type(error).__name__))
        return 1
    _write_result(Result())
    signal.setitimer(signal.ITIMER_REAL, 0)
    for job in _read_messages(Job):
        signal.setitimer(signal.ITIMER_REAL, setup.limits.text_seconds)
        with _report_errors(setup.error_prefix):
            _write_result(run_job(job))
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def _read_messages(kind: type[Record]) -> Iterator[Record]:
    unpacker = Unpacker[Record](kind)
    while data := os.read(sys.stdin.fileno(), _CHUNK):
        yield from unpacker.feed(data)


@contextlib.contextmanager
def _report_errors(error_prefix: str) -> Iterator[None]:
    """Write any error in the block as a `Result`. A crash of the process writes nothing."""
    try:
        yield
    except ApiError as error:
        _write_result(Result(error=error.message))
    except MemoryError:
        _write_result(Result(error=f"{error_prefix}: it needs too much memory"))
    except Exception as error:
        # The error's own text may name files, which clients must not see, and quote the client's
        # text, which must not be logged.
        exception_name = type(error.__cause__ or error).__name__
        _write_result(
            Result(
                error=f"{error_prefix}: the server's log has the reason",
                exception_name=exception_name,
            )
        )


def _write_result(result: Result) -> None:
    data = memoryview(pack(Result, result))
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def _prepare(setup: Setup) -> Callable[[Job], Result]:
    """Return the function that runs the jobs, and limit this process's resources."""
    os.nice(setup.niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the web server ends this process
    run_job: Callable[[Job], Result]
    if setup.tokenizer is None:
        template = ChatTemplate(setup.template, setup.special or {})

        def run_job(job: Job) -> Result:
            try:
                return Result(text=template.render(job.messages)[: setup.max_bytes + 1])
            except DataError as error:
                raise ApiError(400, str(error), field="messages") from None
    else:
        tokenizer = build_tokenizer(setup.tokenizer)

        def run_job(job: Job) -> Result:
            tokenize = (
                tokenizer.tokenize_with_special
                if job.parses_special
                else tokenizer.tokenize_unterminated
            )
            return Result(ids=tuple(tuple(tokenize(text)) for text in job.texts))

    with contextlib.suppress(OSError):  # systems without /proc do not limit address spaces
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + setup.limits.text_memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return run_job


class TextProcess:
    """A child process of the web server that runs one job at a time."""

    def __init__(self, setup: Setup) -> None:
        """Store the settings. The process does not run until `start` is called.

        Args:
            setup: Settings of the process.
        """
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._results = Unpacker[Result](Result)
        self._lock = asyncio.Lock()
        self._long_jobs: Counter[str] = Counter()  # by client, including jobs that wait

    async def start(self) -> None:
        """Start the process.

        Raises:
            ConfigError: The tokenizer or the template cannot be used.
        """
        self._results = Unpacker[Result](Result)
        self._process = await asyncio.create_subprocess_exec(
            *module_command("megatron.inference.server.texts"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # a panic's stack could fill the log
        )
        result = await self._exchange(pack(Setup, self._setup))
        if result.error is not None:
            await self.close()
            raise ConfigError(f"the server cannot start: {result.error}")

    async def run(self, job: Job) -> Result:
        """Return the result of a job, once the jobs before it are done.

        Raises:
            ApiError: Too many long jobs are waiting (429), or the job failed or exceeded a limit
                (400).
            ConfigError: An earlier job ended the process, and it cannot be started again.
        """
        if not job.is_long:
            return await self._run_next(job)
        client, limits, jobs = client_address.get(), self._setup.limits, self._long_jobs
        if jobs[client] >= limits.long_texts_per_client or jobs.total() >= limits.long_texts:
            raise ApiError(429, "too many long texts are being processed: try again in a moment")
        jobs[client] += 1
        try:
            return await self._run_next(job)
        finally:
            jobs[client] -= 1
            if not jobs[client]:
                del jobs[client]

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _run_next(self, job: Job) -> Result:
        setup = self._setup
        await self._lock.acquire()
        # Even if the client has left, this job's result must be read from the pipe.
        exchange = asyncio.ensure_future(self._exchange(pack(Job, job)))
        exchange.add_done_callback(lambda _: self._lock.release())
        result = await asyncio.shield(exchange)
        if result.exception_name is not None:
            logger.warning(
                "%s: %s in %s", setup.error_prefix, result.exception_name, setup.source_name
            )
        if result.error is not None:
            raise ApiError(400, result.error)
        return result

    async def _exchange(self, message: bytes) -> Result:
        """Send a message and return the result, which is an error if the process has ended."""
        if self._process is None:  # the last text ended the process
            await self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # the process has ended, which is handled below
            process.stdin.write(message)
            await process.stdin.drain()
        while data := await process.stdout.read(_CHUNK):
            for result in self._results.feed(data):
                return result
        code, self._process = await process.wait(), None
        reason = "it takes too long" if code == -signal.SIGALRM else "it crashes"
        return Result(error=f"{self._setup.error_prefix}: {reason}")


class Texts:
    """Tokenization and chat templates for all clients, in other processes.

    Long texts have their own process, so that short ones do not wait for them.
    """

    def __init__(self, settings: FrontSettings, tokenizer: Tokenizer, max_length: int) -> None:
        """Store the settings. The processes do not run until `start` is called.

        Args:
            settings: Settings of the server.
            tokenizer: Tokenizer of the model.
            max_length: Maximum number of tokens in a prompt and its answer together.

        Raises:
            ConfigError: The text of a single token could exceed `_MAX_DECODED_BYTES`.
            DataError: The tokenizer's decoder could take an unbounded time to decode a token.
        """
        self._max_length = max_length
        longest = max(len(entry.encode("utf-8", "surrogatepass")) for entry in tokenizer.vocab)
        # The web server decodes texts in its own process, so every call must be short.
        if longest * tokenizer.text_growth() > _MAX_DECODED_BYTES:
            raise ConfigError(
                f"a token of this tokenizer may become a text of more than {_MAX_DECODED_BYTES:,} "
                f"bytes (its longest entry has {longest:,}): give another --tokenizer-model"
            )
        # Add one byte per token for a separator. Only two kinds of longer text could still have few
        # enough tokens: runs of spaces, and long words that become a single (unknown) token.
        self._max_bytes = max_length * (longest + 1)

        def process(niceness: int) -> TextProcess:
            return TextProcess(Setup(settings.limits, niceness, tokenizer=settings.tokenizer))

        self._short, self._long = process(0), process(_NICENESS)
        self._template: TextProcess | None = None
        if settings.chat_template is not None:
            special = special_tokens(settings.tokenizer.tokenizer_model)
            setup = Setup(
                settings.limits, 0, self._max_bytes, None, settings.chat_template, special
            )
            self._template = TextProcess(setup)

    async def start(self) -> None:
        """Start the processes.

        Raises:
            ConfigError: The tokenizer or the template cannot be used.
        """
        await asyncio.gather(*(process.start() for process in self._processes()))

    async def close(self) -> None:
        """Stop the processes."""
        await asyncio.gather(*(process.close() for process in self._processes()))

    def _processes(self) -> list[TextProcess]:
        return [
            process for process in (self._short, self._long, self._template) if process is not None
        ]

    async def tokenize(
        self, texts: Sequence[str], *, parses_special: bool = False, too_long: str | None = None
    ) -> list[tuple[int, ...]]:
        """Return the token ids of each text.

        Args:
            texts: Any texts.
            parses_special: Whether a special token that is written out in a text is read as that
                token.
            too_long: Error message for a text that cannot fit in the model's context. `None` uses a
                message that states the limits.

        Raises:
            ApiError: A text cannot fit (422), the tokenizer rejects one (400), or too many long
                texts are being processed (429).
        """
        if max(len(text.encode()) for text in texts) > self._max_bytes:
            default = (
                f"a text of more than {self._max_bytes:,} bytes does not fit in the model's "
                f"{self._max_length} tokens: shorten the prompt"
            )
            raise ApiError(422, too_long or default, keeps_status=False)
        job = Job(texts=tuple(texts), parses_special=parses_special)
        return list((await (self._long if job.is_long else self._short).run(job)).ids)

    async def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the text of a conversation, up to the beginning of the model's answer.

        Args:
            messages: Messages, each with a role, content and optionally a name.

        Raises:
            ApiError: The model has no template, or the template rejects the messages (400), or too
                many long conversations are being processed (429).
        """
        if self._template is None:
            raise ApiError(
                400,
                "this model's tokenizer has no chat template: use /v1/completions, or start the "
                "server with --chat-template",
                field="messages",
            )
        try:
            return (await self._template.run(Job(messages=tuple(messages)))).text
        except ApiError as error:
            raise replace(error, field="messages") from None
