"""Retrieval for any text: the neighbors of its chunks, as tokens and as passages.

In shapes, a text has l chunks of m tokens, each with k neighbors of r tokens.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron.config.retro import read_arguments as read_json
from megatron.config.run import RunConfig
from megatron.device import Device
from megatron.errors import ConfigError, DataError
from megatron.inference.request import NeighborPassage
from megatron.retro.database import ChunkDatabase
from megatron.retro.dataset import Ids, NeighborTexts
from megatron.retro.embedding import DecodedChunks, Embedder, EmbedderOptions, build_embedder
from megatron.retro.index import IndexOptions, check_width
from megatron.retro.neighbors import NO_NEIGHBOR, QueryOptions, Searcher, open_searcher
from megatron.retro.workdir import read_arguments, read_digest
from megatron.tokenizer import Tokenizer


class Retriever:
    """An index and an embedder, which together find the neighbors of a text's chunks.

    Args:
        searcher: The index.
        embedder: The network that embeds chunks. It must be the one that embedded the database.
        texts: The tokens of neighbors.
        tokenizer: The tokenizer of the model and the database.

    Attributes:
        texts: The tokens of neighbors.
    """

    def __init__(
        self, searcher: Searcher, embedder: Embedder, texts: NeighborTexts, tokenizer: Tokenizer
    ) -> None:
        """Store the components."""
        self._searcher, self._embedder = searcher, embedder
        self.texts, self._tokenizer = texts, tokenizer

    def find(self, chunks: Ids) -> Ids:
        """Find the neighbors of chunks.

        Args:
            chunks: The tokens of the chunks, padded with EOD, `[l, m]`.

        Returns:
            The neighbors of each chunk as database rows, nearest first, or -1, `[l, k]`.
        """
        vectors = self._embedder.embed(DecodedChunks(chunks, self._tokenizer))
        return self._searcher.search(vectors)

    def tokens(self, neighbors: Ids) -> Ids:
        """Return the tokens of neighbors `[l, k]`, padded with EOD, `[l, k, r]`."""
        return self.texts.tokens(neighbors)

    def passages(self, neighbors: Ids) -> list[NeighborPassage]:
        """Return the passages of neighbors `[l, k]` in order, skipping missing neighbors (-1)."""
        chunks = np.nonzero(neighbors != NO_NEIGHBOR)[0].tolist()
        rows = neighbors[neighbors != NO_NEIGHBOR]
        documents = self.texts.database.documents(rows).tolist()
        texts = DecodedChunks(self.texts.tokens(rows[:, None])[:, 0], self._tokenizer)
        return [
            NeighborPassage(chunk, corpus, document, text)
            for chunk, (corpus, document), text in zip(chunks, documents, texts, strict=True)
        ]


def open_retriever(
    config: RunConfig, tokenizer: Tokenizer, device: Device, embedder: str | None = None
) -> Retriever:
    """Open the index and the database of --retro-workdir, and load the embedding network.

    Texts are embedded unmasked, even if those of the database were masked (--retro-compatible).

    Args:
        config: The configuration of the Retro run.
        tokenizer: The tokenizer of the run.
        device: The device on which to embed texts.
        embedder: The folder or name of the embedding network. `None` uses the network with which
            the working folder was made.

    Raises:
        CheckpointError: The embedding network is missing.
        ConfigError: The working folder does not name the embedding network, or the network's width
            differs from the index's.
        DataError: A file of the working folder is missing or damaged, or the folder was made with
            a different tokenizer.
    """
    model, data = config.model, config.data
    assert data.retro_workdir is not None, "a rule requires it"
    workdir = Path(data.retro_workdir)
    preprocessing, arguments = read_arguments(workdir), read_json(data.retro_workdir)
    if read_digest(workdir, "gpt_tokenizer") not in (None, tokenizer.fingerprint()):
        raise DataError(
            f"--retro-workdir {workdir} was made with a different tokenizer than --load "
            f"{config.checkpoint.load}: give the folder with which this model was trained"
        )
    load = embedder or preprocessing.embedding.bert_embedder_load or arguments.get("load")
    if not load:
        raise ConfigError(
            f"--retro-workdir {workdir} does not name the network that embeds chunks: give "
            "--bert-embedder-load FOLDER"
        )
    index = IndexOptions.of(preprocessing)
    vocabulary = preprocessing.embedding.retro_bert_vocab_file
    has_vocabulary = vocabulary is not None and os.path.isfile(vocabulary)
    network = EmbedderOptions(
        kind=preprocessing.embedding.bert_embedder_type,
        load=str(load),
        tokenizer=preprocessing.embedding.tokenizer if has_vocabulary else None,
        max_length=preprocessing.embedding.retro_bert_max_chunk_length,
        allow_foreign=config.checkpoint.allow_foreign_checkpoints,
        flag="--bert-embedder-load",
    )
    database = ChunkDatabase(
        workdir, model.chunk_length, tokenizer.eod, vocab_size=tokenizer.vocab_size
    )
    query = replace(QueryOptions.of(preprocessing), queried=model.retro_num_neighbors)
    return Retriever(
        open_searcher(workdir, index, database, query, device),
        check_width(build_embedder(network, device), index),
        NeighborTexts(database, model.retro_num_retrieved_chunks, data.retro_compatible),
        tokenizer,
    )
