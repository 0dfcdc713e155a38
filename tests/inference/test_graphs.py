"""What a recording reads and writes, tested with a recorder that repeats the work instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from megatron.inference import build
from megatron.inference.build import EngineOptions
from megatron.inference.engine import BatchEngine
from megatron.inference.executor import batch_sizes_to_record, lengths_to_record
from megatron.inference.request import Request
from megatron.kernels.paged_attention import PART, PagedAttention
from tests.checkpoint.huggingface.models import VOCAB
from tests.inference.toy import OPTIONS, drain, greedy, prompts, tokens_of, toy_engine, write_model

Work = Callable[[], Tensor]


def engine_with(
    record: Callable[[Work], Work],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: EngineOptions = OPTIONS,
) -> BatchEngine:
    """Return an engine on the CPU whose recordings are made by `record`."""
    monkeypatch.setattr(PagedAttention, "can_capture", True)
    monkeypatch.setattr(build.Device, "recorder", lambda self: record)
    return toy_engine(folder, options, looks_ahead=True)


def test_steps_run_from_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model("llama", tmp_path)
    requests = [
        Request(str(i), prompt, greedy(1 + 3 * (i % 4)))
        for i, prompt in enumerate(prompts(20, longest=12, vocab=VOCAB))
    ]
    expected = drain(toy_engine(folder), requests)
    made: list[Work] = []
    calls = 0

    def record(work: Work) -> Work:
        made.append(work)

        def again() -> Tensor:
            nonlocal calls
            calls += 1
            return work()

        return again

    found = drain(engine_with(record, folder, monkeypatch), requests)
    assert {key: tokens_of(events) for key, events in found.items()} == {
        key: tokens_of(events) for key, events in expected.items()
    }
    assert 1 < len(made) <= len(batch_sizes_to_record(OPTIONS.max_sequences))
    assert calls > 2 * len(made), "a recording is used again"


def test_a_token_behind_many_scores_of_a_prompt_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with more scores than sequences precedes a recorded one that takes a token from it."""
    folder = write_model("llama", tmp_path)
    options = replace(OPTIONS, max_sequences=2, max_step_tokens=12)
    scored = tuple(range(5, 5 + 13))  # a chunk of 12 and one of a single token
    requests = [
        Request("scored", scored, greedy(5, prompt_logprobs=True)),
        Request("other", (3, 4), greedy(5)),
    ]
    expected = drain(toy_engine(folder, options), requests)
    found = drain(engine_with(lambda work: work, folder, monkeypatch, options), requests)
    assert {key: tokens_of(events) for key, events in found.items()} == {
        key: tokens_of(events) for key, events in expected.items()
    }


def test_where_recording_fails_everything_runs_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record(work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")

    folder = write_model("llama", tmp_path)
    requests = [Request("a", (1, 2, 3), greedy(5))]
    expected = tokens_of(drain(toy_engine(folder), requests)["a"])
    found = tokens_of(drain(engine_with(record, folder, monkeypatch), requests)["a"])
    assert found == expected
    assert caplog.text.count("CUDA graphs are off") == 1


def test_sizes_to_record_reach_the_largest_and_grow_slowly() -> None:
    for most in (1, 3, 8, 100, 256, 300):
        counts = batch_sizes_to_record(most)
        assert counts[0] == 1
        assert counts[-1] == most
        assert all(b <= 2 * a for a, b in zip(counts, counts[1:], strict=False))
    assert lengths_to_record(100) == [PART]
    assert lengths_to_record(5000) == [PART, 4 * PART, 16 * PART, 5120]
