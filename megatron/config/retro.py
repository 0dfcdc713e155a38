"""Options for Retro's network and data, named as in Megatron-LM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.fields import CYCLIC, flag
from megatron.errors import ConfigError

ARGUMENTS = "args.json"  # the arguments of the command that created a working folder
_MAX_BYTES = 1 << 26
_RETRO = ("retro",)
# Every third layer attends to neighbors, from the first such layer on. Megatron-LM places the first
# one at layer 6 in models of up to 15 layers, and at layer 9 in others.
_FIRST_IN_SHALLOW, _FIRST_IN_DEEP, _MAX_SHALLOW, _STEP = 6, 9, 15, 3


@dataclass(frozen=True, kw_only=True)
class RetroOptions:
    """Retro's network.

    Attributes:
        retro_add_retriever: With --finetune, add a retriever with new weights to the GPT in --load.
            Retro's own checkpoints already have one.
        retro_freeze_gpt: Train only the retriever and the attention to neighbors, and leave the
            weights of the GPT as they are.
        retro_encoder_layers: Number of layers that encode the neighbors.
        retro_encoder_hidden_dropout: Dropout on block outputs of the neighbors' encoder.
        retro_encoder_attention_dropout: Dropout on attention probabilities of the neighbors'
            encoder.
        retro_num_neighbors: Number of neighbors that each chunk attends to.
        retro_num_retrieved_chunks: Number of chunks in a neighbor: the retrieved chunk and those
            that follow it.
        retro_chunk_length: Length of the chunks that have their own neighbors. Default: the length
            in --retro-workdir.
    """

    retro_add_retriever: bool = flag(False, only_for=_RETRO)
    retro_freeze_gpt: bool = flag(False, only_for=_RETRO)
    retro_encoder_layers: int = flag(2, unit="layers", at_least=1, only_for=_RETRO)
    retro_encoder_hidden_dropout: float = flag(
        0.1, unit="0 to 1", at_least=0, below=1, only_for=_RETRO
    )
    retro_encoder_attention_dropout: float = flag(
        0.1, unit="0 to 1", at_least=0, below=1, only_for=_RETRO
    )
    retro_num_neighbors: int = flag(2, at_least=1, only_for=_RETRO)
    retro_num_retrieved_chunks: int = flag(2, unit="chunks", at_least=1, only_for=_RETRO)
    retro_chunk_length: int | None = flag(None, unit="tokens", at_least=1, only_for=_RETRO)

    @property
    def chunk_length(self) -> int:
        """Number of tokens in a chunk."""
        assert self.retro_chunk_length is not None, "a rule requires it for Retro"
        return self.retro_chunk_length


@dataclass(frozen=True, kw_only=True)
class RetroDataOptions:
    """Retro's data.

    Attributes:
        retro_workdir: Working folder that tools/retro/main.py created. It determines the data, the
            split, the data seed and the chunk length.
        retro_cyclic_train_iters: Length of the run, if it is to repeat the samples of --train-iters
            with --dataloader-type cyclic. Default: --train-iters.
        retro_compatible: Read missing neighbors as Megatron-LM 23.08 does, which replaces each of
            them with the last chunk of the database, followed by the first. Otherwise they are
            empty.
        retro_eval_shuffled: Evaluate a second time with the neighbors of other chunks. The
            difference between the two losses shows how much the model gains from its neighbors.
        retro_return_doc_ids: Accepted for compatibility; no effect in training.
    """

    retro_workdir: str | None = flag(None, only_for=_RETRO)
    retro_cyclic_train_iters: int | None = flag(
        None, unit="iterations", at_least=1, only_for=_RETRO, requires=CYCLIC
    )
    retro_compatible: bool = flag(False, only_for=_RETRO)
    retro_eval_shuffled: bool = flag(False, only_for=_RETRO)
    retro_return_doc_ids: bool = flag(
        False, only_for=_RETRO, notice="training does not read the documents of neighbors"
    )


def is_retriever_parameter(name: str) -> bool:
    """Return whether the parameter with this name belongs to the retriever, which a GPT lacks."""
    return any(f".{part}." in name for part in ("cross_norm", "cross_attention", "retriever"))


def retro_layers(num_layers: int) -> range:
    """Return the indices, from 0, of the layers that attend to neighbors."""
    first = _FIRST_IN_SHALLOW if num_layers <= _MAX_SHALLOW else _FIRST_IN_DEEP
    return range(first - 1, num_layers, _STEP)


def read_arguments(workdir: str) -> dict[str, Any]:
    """Return the arguments of the command that created a working folder.

    Args:
        workdir: The value of --retro-workdir.

    Raises:
        ConfigError: There is no such folder, or its arguments cannot be read.
    """
    file = Path(workdir) / ARGUMENTS
    flag = f"--retro-workdir {workdir}"
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError("it is too large")
        arguments = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{flag}: {file} does not exist: make the folder with tools/retro/main.py"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{flag}: {file} cannot be read ({error}): restore it, or make the folder again with "
            "tools/retro/main.py"
        ) from None
    if not isinstance(arguments, dict):
        raise ConfigError(f"{flag}: {file} does not contain the arguments of tools/retro/main.py")
    return arguments
