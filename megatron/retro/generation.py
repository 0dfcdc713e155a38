"""Text generation with retrieval: every chunk of the text gets its neighbors when it is complete.

The whole text runs through the model for every token, because a Retro has no KV cache. That is
correct but slow: the time of a token grows with the length of the text.

Shapes: l chunks of m tokens, each with k neighbors of r tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megatron.config.retro import read_arguments as read_json
from megatron.config.run import RunConfig
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.inference.load import Loaded
from megatron.inference.request import RequestError, Sampling
from megatron.inference.sampling import Choice, choose, uniform, unpack
from megatron.retro.database import ChunkDatabase
from megatron.retro.dataset import Ids, NeighborTexts
from megatron.retro.embedding import DecodedChunks, Embedder, EmbedderOptions, build_embedder
from megatron.retro.index import IndexOptions, checked
from megatron.retro.neighbors import NOBODY, QueryOptions, Searcher, open_searcher
from megatron.retro.workdir import read_arguments
from megatron.tokenizer import Tokenizer


class NeighborPassage(NamedTuple):
    """A passage that the model has read.

    Attributes:
        chunk: The number of the chunk of the text that it was found for, from 0.
        corpus: The number of its corpus in the working folder.
        document: The number of its document in the corpus.
        text: The chunk that was found and those after it.
    """

    chunk: int
    corpus: int
    document: int
    text: str


class Retriever:
    """What finds the neighbors of any text's chunks.

    Args:
        searcher: The index.
        embedder: What embeds chunks, the network that embedded the database.
        texts: The tokens of neighbors.
        tokenizer: The tokenizer of the model and the database.
    """

    def __init__(
        self, searcher: Searcher, embedder: Embedder, texts: NeighborTexts, tokenizer: Tokenizer
    ) -> None:
        """Store the parts."""
        self._searcher, self._embedder = searcher, embedder
        self._texts, self._tokenizer = texts, tokenizer

    def find(self, chunks: Ids) -> Ids:
        """Return the neighbors of chunks [l, m], nearest first: database rows [l, k], or -1."""
        vectors = self._embedder.embed(DecodedChunks(chunks, self._tokenizer))
        return self._searcher.search(vectors)

    def tokens(self, neighbors: Ids) -> Ids:
        """Return the tokens [l, k, r] of neighbors [l, k]."""
        return self._texts.tokens(neighbors)

    def passages(self, neighbors: Ids) -> list[NeighborPassage]:
        """Return the passages of neighbors [l, k], without those that were not found."""
        chunks = np.nonzero(neighbors != NOBODY)[0].tolist()
        rows = neighbors[neighbors != NOBODY]
        documents = self._texts.database.documents(rows).tolist()
        texts = DecodedChunks(self._texts.tokens(rows[:, None])[:, 0], self._tokenizer)
        return [
            NeighborPassage(chunk, corpus, document, text)
            for chunk, (corpus, document), text in zip(chunks, documents, texts, strict=True)
        ]


def open_retriever(
    config: RunConfig, tokenizer: Tokenizer, device: Device, embedder: str | None = None
) -> Retriever:
    """Open the index and the database of --retro-workdir, and load the network that embeds.

    Texts are embedded as they are, also where the database's were masked (--retro-compatible).

    Args:
        config: The run of the Retro.
        tokenizer: Its tokenizer.
        device: The device of the embedding.
        embedder: Folder or name of the embedding network; `None` takes the one that the working
            folder was made with.

    Raises:
        CheckpointError: There is no embedding network.
        ConfigError: The working folder does not name it, or it has another width than the index.
        DataError: A file of the working folder is missing or damaged.
    """
    model, data = config.model, config.data
    assert data.retro_workdir is not None, "a rule requires it"
    workdir = Path(data.retro_workdir)
    made, told = read_arguments(workdir), read_json(data.retro_workdir)
    load = embedder or made.embedding.bert_embedder_load or told.get("load")
    if not load:
        raise ConfigError(
            f"--retro-workdir {workdir} does not name the network that embeds chunks: give "
            "--bert-embedder-load FOLDER"
        )
    index = IndexOptions.of(made)
    vocabulary = made.embedding.retro_bert_vocab_file
    has_vocabulary = vocabulary is not None and Path(vocabulary).is_file()
    network = EmbedderOptions(
        kind=made.embedding.bert_embedder_type,
        load=str(load),
        tokenizer=made.embedding.tokenizer if has_vocabulary else None,
        max_length=made.embedding.retro_bert_max_chunk_length,
        allow_foreign=config.checkpoint.allow_foreign_checkpoints,
    )
    database = ChunkDatabase(
        workdir, model.chunk_length, tokenizer.eod, vocab_size=tokenizer.vocab_size
    )
    query = replace(QueryOptions.of(made), queried=model.retro_num_neighbors)
    return Retriever(
        open_searcher(workdir, index, database, query, device),
        checked(build_embedder(network, device), index),
        NeighborTexts(database, model.retro_num_retrieved_chunks, data.retro_compatible),
        tokenizer,
    )


class Written(NamedTuple):
    """A token that was written.

    Attributes:
        token: The token's id.
        neighbors: The neighbors [l, k] of the chunks that were complete before it.
    """

    token: int
    neighbors: Ids


@torch.no_grad()
def write(
    loaded: Loaded,
    retriever: Retriever,
    prompt: Sequence[int],
    sampling: Sampling,
    device: Device,
    seed: int,
) -> Iterator[Written]:
    """Yield the tokens that continue a prompt.

    Args:
        loaded: A Retro on a single process.
        retriever: What finds neighbors.
        prompt: Token ids.
        sampling: The length, the temperature, top_k, top_p and the stop tokens.
        device: The model's device.
        seed: Seed of the draws.

    Raises:
        RequestError: The prompt is empty or fills the model's window.
    """
    config = loaded.config
    m, window = config.model.chunk_length, config.data.seq_length
    tokens, neighbors = list(prompt), np.empty((0, config.model.retro_num_neighbors), np.int64)
    if not 0 < len(tokens) < window:
        raise RequestError(f"the prompt has {len(tokens)} tokens: give 1 to {window - 1}")
    for _ in range(min(sampling.max_new_tokens, window - len(tokens))):
        complete = len(tokens) // m
        if complete > len(neighbors):
            new = np.array(tokens[len(neighbors) * m : complete * m]).reshape(-1, m)
            neighbors = np.concatenate((neighbors, retriever.find(new)))
        # The model reads whole chunks. Earlier tokens see neither padding nor what it retrieves.
        length = -(-len(tokens) // m)
        text = np.full((1, length * m), loaded.tokenizer.eod)
        text[0, : len(tokens)] = tokens
        read = np.full((length, neighbors.shape[1]), NOBODY)
        read[:complete] = neighbors
        logits = loaded.model(device.send(text), device.send(retriever.tokens(read)[None]))
        choice = Choice(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            uniform=uniform(seed, len(tokens)),
        )
        last = logits[:, len(tokens) - 1, : loaded.tokenizer.vocab_size]
        (chosen,) = unpack(choose(last, [choice]).flatten().tolist(), [choice])
        if chosen.token is None:
            raise RequestError("the model's scores are not finite: the checkpoint is damaged")
        tokens.append(chosen.token)
        yield Written(chosen.token, neighbors)
        if chosen.token in sampling.stop_tokens:
            return
