"""Write a checkpoint in Megatron Core's older format, `torch`.

Such a folder uses Megatron-LM's file layout, with a file for each tensor-parallel rank and stage,
so `LegacySaver` writes it. Within the files, names, order, arguments and the optimizer's settings
are those of Megatron Core.

The optimizer's step count is in its parameter groups, where the optimizers of Transformer Engine
and Apex keep it. PyTorch's AdamW, which Megatron Core uses if neither is installed, keeps a count
for each parameter instead. Transformer Engine's optimizer refuses such a count as an unknown state,
so it is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.checkpoint.core.arguments import core_arguments
from megatron.checkpoint.core.states import core_group_settings, core_random_states, extra_states
from megatron.checkpoint.entries import WORD_EMBEDDING
from megatron.checkpoint.legacy.file_plan import FileParameter, FilePlan, plan_core_files
from megatron.checkpoint.legacy.writer import LegacyWriter
from megatron.config.model import ModelConfig
from megatron.config.rules_legacy import unsupported_by_core
from megatron.config.stages import plan_model


class CoreTorchWriter(LegacyWriter):
    """A writer of Megatron Core's `torch` files from an opened checkpoint of a GPT or BERT."""

    program = "Megatron Core"

    @property
    def _is_engine(self) -> bool:
        # Megatron Core's pretrain_bert.py does not use the flag.
        is_bert = self.config.model.architecture == "bert"
        return is_bert or self.config.checkpoint.transformer_impl != "local"

    def _unsupported(self, model: ModelConfig) -> Iterator[str]:
        return unsupported_by_core(model)

    def _plan(self, shapes: Mapping[str, tuple[int, ...]]) -> list[FilePlan]:
        model, parallel = self.config.model, self.config.parallel
        return plan_core_files(
            shapes,
            plan_model(model, parallel),
            parallel,
            self._arrangement,
            model,
            is_engine=self._is_engine,
        )

    def _arguments(self) -> argparse.Namespace:
        return core_arguments(
            self.config,
            self.reader.meta,
            rows=self.reader.global_shape(WORD_EMBEDDING)[0],
            dtype=self.reader.dtype(WORD_EMBEDDING),
            data_parallel=self.data_parallel,
            kind="torch",
        )

    def _model(self, parameters: tuple[FileParameter, ...]) -> dict[str, Any]:
        tree = super()._model(parameters)
        for name in list(tree):
            for module in extra_states(name, is_engine=self._is_engine):
                tree[f"{module}._extra_state"] = None
        if any(name.endswith(".final_layernorm.weight") for name in tree):  # the last stage
            tree["output_layer._extra_state"] = None
        return tree

    def _settings(self, *, decays: bool) -> dict[str, Any]:
        return core_group_settings(self.config, self.reader.meta, decays=decays, is_expert=False)

    def _state(self, parameter: FileParameter) -> dict[str, Any]:
        return dict(self._moments(parameter))

    def _random_states(self, seed: int, plan: FilePlan) -> dict[str, Any]:
        return core_random_states(
            seed,
            self.reader.iteration,
            plan.stage,
            plan.tensor_rank,
            expert=0,
            width=plan.tensor_rank,
        )
