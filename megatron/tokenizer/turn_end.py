"""Detection of the token that ends the assistant's turn in a chat template."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import cast

from megatron.errors import UserError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.chat_template import TRAINING_DATE, Chat, ChatTemplate, trained_text

_CPU_SECONDS = 5  # the processor time for a template to render two messages
_TIMEOUT = 60.0  # seconds, of which a busy machine may use the most for other processes
_ANSWER = "Yes"
_MESSAGES = [{"role": "user", "content": "No?"}, {"role": "assistant", "content": _ANSWER}]


def find_turn_end(source: str, special: Mapping[str, str], tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ends the assistant's turn, or `None` if no single token does.

    The result is also `None` if rendering fails or takes too long.

    Generation stops at this token. The template is not trusted, so it is rendered in a separate
    process with a limit on processor time.

    Args:
        source: The text of the template.
        special: The texts of special tokens such as eos_token, by name.
        tokenizer: The tokenizer that encodes the end of the turn.
    """
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(
        target=_send_turn_end, args=(sender, source, special, tokenizer), daemon=True
    )
    process.start()
    sender.close()
    try:
        return cast("int | None", receiver.recv()) if receiver.poll(_TIMEOUT) else None
    except EOFError:  # the process died
        return None
    finally:
        process.kill()
        process.join()


def _send_turn_end(
    sender: Connection, source: str, special: Mapping[str, str], tokenizer: Tokenizer
) -> None:
    end = None
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    try:
        template = ChatTemplate(source, special, TRAINING_DATE)
        text, spans = trained_text(template, Chat(_MESSAGES))
        start, stop = spans[-1]
        ending = text[text.index(_ANSWER, start) + len(_ANSWER) : stop].strip()
        ids = tokenizer.tokenize_with_special(ending) if ending else ()
        end = int(ids[0]) if len(ids) == 1 else None
    except (UserError, ValueError, IndexError, MemoryError):
        pass  # reported when the template renders a conversation
    sender.send(end)
