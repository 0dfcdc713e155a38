"""An executor for a Retro, and construction of an engine for a GPT or a Retro.

A Retro has no KV cache. Each step computes every text in the batch from its first token. This is
correct but slow: the time per token grows with the length of the text and the size of the batch.
The rest of the engine is the same as for a GPT, with a "cache" of one empty block per text.

Shapes: l chunks of m tokens, each with k neighbors of r tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.engine import BatchEngine
from megatron.inference.executor import WantedLogits
from megatron.inference.load import Loaded
from megatron.inference.request import EngineLimits, NeighborPassage, Retrieved
from megatron.inference.sampling import Chosen, choose, unpack
from megatron.inference.scheduler import Row, SchedulerSettings, StepPlan
from megatron.models.retro import RetroModel
from megatron.parallel.layout import Axis
from megatron.retro.dataset import Ids
from megatron.retro.neighbors import NOBODY
from megatron.retro.retriever import Retriever, open_retriever

KINDS = ("gpt", "retro")  # architectures that `build_any_engine` accepts
_KEPT = 4096  # number of chunks whose neighbors are remembered


@dataclass
class RetroExecutor:
    """An executor of steps for a Retro in a single process.

    Attributes:
        model: The Retro, in evaluation mode.
        retriever: The retriever that finds the neighbors of a chunk.
        device: Device of the model.
        copy: This process.
        chunk_length: Length of a chunk, m.
        num_neighbors: Number of neighbors of a chunk, k.
        filler: Token that fills up the last chunk of a text.
        vocab_size: Number of vocabulary entries that can be chosen.
    """

    model: RetroModel
    retriever: Retriever
    device: Device
    copy: Axis
    chunk_length: int
    num_neighbors: int
    filler: int
    vocab_size: int

    def __post_init__(self) -> None:
        """Start with no chunks remembered."""
        self._nobody = self.retriever.tokens(np.full((1, self.num_neighbors), NOBODY))

        # Chunks are looked up one by one, so a chunk's neighbors depend on nothing else in a step.
        @lru_cache(_KEPT)
        def read(chunk: tuple[int, ...]) -> tuple[Ids, list[NeighborPassage]]:
            neighbors = self.retriever.find(np.array([chunk]))
            return self.retriever.tokens(neighbors), self.retriever.passages(neighbors)

        self._read = read

    @torch.no_grad()
    def begin(self, plan: StepPlan, wanted: Sequence[WantedLogits]) -> Callable[[], list[Chosen]]:
        """Compute a plan.

        Args:
            plan: The step to compute, in which every token is known.
            wanted: The tokens whose logits are needed, row by row.

        Returns:
            A function that waits for the device, and returns what was chosen for each of `wanted`.
        """
        if not wanted:
            return list
        logits = [
            self._logits(plan[index], [each.place for each in group])
            for index, group in groupby(wanted, key=lambda each: each.row)
        ]
        choices = [each.choice for each in wanted]
        result = choose(torch.cat(logits), choices)
        return lambda: unpack(result.flatten().tolist(), choices)

    def retrieved(self, plan: StepPlan) -> list[Retrieved]:
        """Return the passages of the chunks that a plan completes."""
        m, found = self.chunk_length, []
        for row in plan:
            first = row.start // m
            chunks = self._chunks(row)[first:]
            passages = tuple(
                replace(passage, chunk=index)
                for index, chunk in enumerate(chunks, first)
                for passage in self._read(chunk)[1]
            )
            if passages:
                found.append(Retrieved(row.sequence.request, passages))
        return found

    def _logits(self, row: Row, places: Sequence[int]) -> Tensor:
        """Return the logits [u, v] of u tokens of a row."""
        text = row.sequence.tokens[: row.start + row.size]
        # The model reads whole chunks. Earlier tokens see neither the filler nor the passages that
        # are retrieved for the filled chunk.
        neighbors = [self._read(chunk)[0] for chunk in self._chunks(row)]
        short = -len(text) % self.chunk_length
        if short:
            neighbors.append(self._nobody)
        tokens = np.array([[*text, *[self.filler] * short]], dtype=np.int64)
        send = self.device.send
        logits = self.model(send(tokens), send(np.concatenate(neighbors)[None]))
        rows: Tensor = logits[0, [row.start + place for place in places], : self.vocab_size]
        return rows

    def _chunks(self, row: Row) -> list[tuple[int, ...]]:
        """Return the complete chunks of a text, up to the end of a row."""
        m, text = self.chunk_length, row.sequence.tokens
        return [tuple(text[i * m : (i + 1) * m]) for i in range((row.start + row.size) // m)]


def check_retrieval(config: RunConfig, embedder: str | None, cache_tokens: int | None) -> None:
    """Check the flags on which a GPT and a Retro differ, before the model is loaded.

    Args:
        config: The run.
        embedder: The value of --bert-embedder-load.
        cache_tokens: The value of --cache-tokens.

    Raises:
        ConfigError: A flag does not fit the kind of model.
    """
    parallel = config.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if config.model.architecture == "gpt":
        if embedder is not None:
            raise ConfigError(
                f"--bert-embedder-load {embedder} is for a Retro, and --load holds a GPT: drop it"
            )
    elif ranks > 1:
        raise ConfigError(
            f"a Retro generates text on a single process, not on {ranks}: drop "
            "--tensor-model-parallel-size and --pipeline-model-parallel-size"
        )
    elif cache_tokens is not None:
        raise ConfigError(f"--cache-tokens {cache_tokens}: a Retro has no KV cache: drop it")


def build_any_engine(
    loaded: Loaded,
    device: Device,
    options: EngineOptions,
    *,
    embedder: str | None = None,
    copy: Axis | None = None,
) -> BatchEngine:
    """Return an engine for a GPT or a Retro in memory. Collective over its layout.

    Args:
        loaded: The model. A GPT was built in a `serving_context`.
        device: Device that the model is on.
        options: Options of the engine. A Retro has no cache and no graphs.
        embedder: For a Retro, the network that embeds chunks (`open_retriever`).
        copy: Ranks of this copy of the model, as for `build_engine`.

    Raises:
        CheckpointError: There is no embedding network.
        ConfigError: A flag must be changed.
        DataError: The working folder of a Retro is damaged or belongs to another model.
    """
    model, config = loaded.model, loaded.config
    if not isinstance(model, RetroModel):
        return build_engine(loaded, device, options, copy=copy)
    retriever = open_retriever(config, loaded.tokenizer, device, embedder)
    window, most = config.data.seq_length, options.max_sequences
    vocab_size = loaded.tokenizer.vocab_size
    return BatchEngine(
        RetroExecutor(
            model.eval(),
            retriever,
            device,
            copy or loaded.layout.world,
            chunk_length=config.model.chunk_length,
            num_neighbors=config.model.retro_num_neighbors,
            filler=loaded.tokenizer.eod,
            vocab_size=vocab_size,
        ),
        # Every text has one block, as long as the window, so that texts share nothing.
        SchedulerSettings(
            blocks=most, block_size=window, max_sequences=most, max_tokens=most * window
        ),
        EngineLimits(
            vocab_size=vocab_size,
            max_length=window,
            cache_tokens=most * window,
            max_beams=most,
        ),
        seed=options.seed,
        looks_ahead=False,  # the last chunk's neighbors depend on the token that is being chosen
        choices=[
            ("passages", f"{config.data.retro_workdir}, for each complete chunk of a text"),
            ("cache", "off (each new token takes a pass over the whole text)"),
            ("batch", f"up to {most:,} sequences, one after the other"),
        ],
    )
