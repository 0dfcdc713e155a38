"""Small engines over models of the Hugging Face families, and their expected results."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megatron.checkpoint.entries import model_state
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.reader import PaddedReader, restore
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, narrow
from megatron.config.stages import parts_of_stage, plan_parts
from megatron.config.yaml_file import from_dict
from megatron.device import Device
from megatron.inference import build
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.engine import BatchEngine
from megatron.inference.load import Loaded
from megatron.inference.request import Event, Finished, Prompt, Request, Sampling, Token
from megatron.models.build import build_model, run_context
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from tests.checkpoint.huggingface.models import CASES, logits, tensors_of, write_folder

OPTIONS = EngineOptions(max_sequences=8, max_step_tokens=32, cache_tokens=512, block_size=4)


def write_model(name: str, folder: Path) -> Path:
    """Write a random model of `CASES`."""
    return write_folder(folder, CASES[name].config, tensors_of(CASES[name]))


def toy_engine(
    folder: Path,
    options: EngineOptions = OPTIONS,
    layout: Layout | None = None,
    *,
    looks_ahead: bool = False,
) -> BatchEngine:
    """Return an engine over the model in a Hugging Face folder; `looks_ahead` as on a GPU."""
    layout = layout or Layout.single()
    reader = HFReader(folder)
    config = narrow(resolve(from_dict(reader.meta["config"], str(folder)), 1), ModelRun)
    parallel = replace(config.parallel, pipeline_model_parallel_size=layout.pipeline.size)
    plan = plan_parts(config.model.num_layers, parallel)
    (part,) = parts_of_stage(plan, layout.pipeline.rank, layout.pipeline.size)
    rows = -(-reader.vocab // layout.tensor.size) * layout.tensor.size
    model = build_model(GPTModel, config, run_context(config, layout, Device.cpu()), rows, part)
    restore(PaddedReader(reader, rows=rows, entries=reader.vocab), model_state([model]))
    tokenizer: Any = SimpleNamespace(vocab_size=reader.vocab)
    loaded = Loaded(model, tokenizer, config, 0, layout)  # type: ignore[arg-type]
    with patch.object(build, "is_asynchronous", lambda device: looks_ahead):
        return build_engine(loaded, Device.cpu(), options)


def drain(engine: BatchEngine, requests: Sequence[Request] = ()) -> dict[str, list[Event]]:
    """Run to the end; return each request's events. All blocks must be free afterwards."""
    events: dict[str, list[Event]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request, []).append(event)
    assert engine.stats.blocks_used == 0, "blocks leak"
    return events


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, Token)]


def end_of(events: Sequence[Event]) -> Finished:
    (end,) = (event for event in events if isinstance(event, Finished))
    assert end is events[-1]
    return end


def prompt_of(events: Sequence[Event]) -> Prompt:
    (prompt,) = (event for event in events if isinstance(event, Prompt))
    return prompt


def prompts(count: int, *, longest: int, vocab: int, seed: int = 0) -> list[tuple[int, ...]]:
    chance = random.Random(seed)
    return [
        tuple(chance.randrange(vocab) for _ in range(chance.randint(1, longest)))
        for _ in range(count)
    ]


def greedy(new: int, **changes: object) -> Sampling:
    return replace(Sampling(max_new_tokens=new, temperature=0), **changes)  # type: ignore[arg-type]


def expected_logits(name: str, tokens: Sequence[int]) -> torch.Tensor:
    """Return [s, v] from the reference model, in float64."""
    return logits(CASES[name], tensors_of(CASES[name]), torch.tensor([tokens]))[0]


def expected_greedy(name: str, prompt: Sequence[int], new: int) -> list[int]:
    """Return greedy tokens of the reference model, which recomputes everything for each token."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(expected_logits(name, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
