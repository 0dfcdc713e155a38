"""Initialization of a bi-encoder from a pretrained BERT (--bert-load)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron.checkpoint.compatibility import check_network
from megatron.checkpoint.entries import Box
from megatron.checkpoint.loading import open_root
from megatron.checkpoint.merged import without_adapters
from megatron.checkpoint.reader import PaddedReader, Reader, WrappedReader
from megatron.command import print_line
from megatron.config.model import with_article
from megatron.config.retriever import CONTEXT, QUERY, TOWERS
from megatron.errors import CheckpointError
from megatron.models.adapters import adapted_layers
from megatron.training.pretrain import Extras
from megatron.training.restoring import load_shared_weights, stored_entries
from megatron.training.run import Run

_FLAG = "--bert-load"


class StartFromBert(Extras):
    """An extra step that initializes both towers of a bi-encoder from the model in --bert-load."""

    def begin(self, run: Run) -> None:
        """Load the BERT model if --bert-load names one. Collective.

        Nothing is loaded if the run continues from its own checkpoint or with --finetune.

        Raises:
            CheckpointError: There is no checkpoint, or it is not for a BERT of this size.
        """
        folder = run.config.retriever.bert_load
        if folder is None or run.progress.iteration or run.config.checkpoint.finetune:
            return
        allow_foreign = run.config.checkpoint.allow_foreign_checkpoints
        reader = open_root(Path(folder), layout=run.layout, allow_foreign=allow_foreign)
        if reader is None:
            raise CheckpointError(
                f"{_FLAG} {folder}: there is no checkpoint: give a BERT model's folder"
            )
        reader = without_adapters(reader, adapted_layers)
        saved = reader.meta["config"].get("model", {})
        kind = saved.get("architecture", "gpt")
        if kind != "bert":
            architecture_text = with_article(kind)
            raise CheckpointError(
                f"{_FLAG} {folder}: holds {architecture_text}, but a bert is needed"
            )
        model = replace(
            run.config.model,
            architecture="bert",
            bert_binary_head=saved.get("bert_binary_head", True),
            biencoder_projection_dim=0,
            biencoder_shared_query_context_model=False,
        )
        check_network(replace(run.config, model=model), reader, _FLAG)
        entries = stored_entries(reader, run.tokenizer.vocab_size)
        padded = PaddedReader(reader, rows=run.plan.embedding.vocabulary, entries=entries)
        parts = ["projection"]
        if "model.embedding.token_type.weight" not in reader.tensors:  # without the binary head
            parts.append("embedding.token_type")
        # As in Megatron, both towers start from the initial projection of the query tower.
        parameters = dict(run.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                if name.startswith(f"{CONTEXT}.projection."):
                    parameter.copy_(parameters[name.replace(CONTEXT, QUERY)])
        load_shared_weights(
            run, _InTowers(padded), new=[f"{tower}.{part}" for tower in TOWERS for part in parts]
        )
        run.pretrained = str(reader.path)
        if run.layout.world.rank == 0:
            print_line(f"  the towers start from {reader.path}")


class _InTowers(WrappedReader):
    """A reader that presents a BERT checkpoint as a bi-encoder whose towers have equal weights."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self._sources = {
            f"model.{tower}.{name.removeprefix('model.')}": name
            for tower in TOWERS
            for name in reader.tensors
            if name.startswith("model.")
        }
        self.tensors = {name: reader.tensors[source] for name, source in self._sources.items()}

    def chunks(self, name: str) -> list[Box]:
        """Return the boxes in which the reader of the BERT checkpoint reads a tensor.

        Args:
            name: The tensor's name in a tower.
        """
        return self._reader.chunks(self._sources[name])

    def _read(self, name: str, box: Box) -> torch.Tensor:
        return self._reader.read(self._sources[name], box)
