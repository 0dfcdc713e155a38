"""Checks of what belongs to one kind of network, and of what BERT and T5 need. See `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.data import DataOptions
from megatron.config.model import ModelOptions
from megatron.config.run import RunOptions
from megatron.config.stages import plan_model
from megatron.errors import ConfigError

_FEWEST_BUCKETS = 4
_SHOWN = {"gpt": "GPT", "bert": "BERT", "t5": "T5"}


def architecture(config: RunOptions, world_size: int) -> Iterator[str]:
    """Flags that another kind of network has."""
    kind = config.model.architecture
    data, parallel, model = config.data, config.parallel, config.model
    split_rank = parallel.pipeline_model_parallel_split_rank
    for owner, name, given in (
        ("gpt", "--reset-position-ids", data.reset_position_ids),
        ("gpt", "--reset-attention-mask", data.reset_attention_mask),
        ("gpt", "--eod-mask-loss", data.eod_mask_loss),
        ("bert", "--bert-no-binary-head", not model.bert_binary_head),
        ("t5", f"--decoder-num-layers {model.decoder_num_layers}", model.decoder_num_layers),
        ("t5", f"--decoder-seq-length {data.decoder_seq_length}", data.decoder_seq_length),
        ("t5", f"--pipeline-model-parallel-split-rank {split_rank}", split_rank is not None),
        ("t5", "--position-embedding-type relative", model.position_embedding_type == "relative"),
        ("t5", "--scale-decoder-outputs", model.scale_decoder_outputs),
        ("t5", "--disable-output-bias", not model.add_output_bias),
        ("t5", f"--softmax-scale {model.softmax_scale}", model.softmax_scale is not None),
    ):
        if given and kind != owner:
            yield f"{name} belongs to a {_SHOWN[owner]}, and this is a {_SHOWN[kind]}: drop it"
    if kind == "gpt":
        yield from _of_sentences(data)
        return
    if parallel.context_parallel_size > 1:
        yield (
            f"--context-parallel-size {parallel.context_parallel_size}: padding masks do not go "
            f"with it, and a {_SHOWN[kind]} has them: use 1"
        )


def _of_sentences(data: DataOptions) -> Iterator[str]:
    """Flags that change the samples of BERT and T5 only."""
    for name in ("mask_prob", "short_seq_prob"):
        value = getattr(data, name)
        if value != getattr(DataOptions(), name):
            flag = f"--{name.replace('_', '-')} {value}"
            yield f"{flag} belongs to a BERT or T5, and this is a GPT: drop it"


def relative_positions(config: RunOptions, world_size: int) -> Iterator[str]:
    """The buckets of --position-embedding-type relative, and what it does not go with."""
    model, parallel = config.model, config.parallel
    buckets, longest = model.relative_attention_num_buckets, model.relative_attention_max_distance
    if model.position_embedding_type != "relative":
        for field in ("relative_attention_num_buckets", "relative_attention_max_distance"):
            value = getattr(model, field)
            if value != getattr(ModelOptions(), field):
                yield (
                    f"--{field.replace('_', '-')} {value} belongs to --position-embedding-type "
                    "relative: add it, or drop this flag"
                )
        return
    if buckets < _FEWEST_BUCKETS or buckets % 2:
        yield (
            f"--relative-attention-num-buckets {buckets}: an encoder has half of them for each "
            f"direction: use an even number from {_FEWEST_BUCKETS} on"
        )
    elif longest <= buckets // 2:
        yield (
            f"--relative-attention-max-distance {longest}: the first {buckets // 2} distances of "
            f"--relative-attention-num-buckets {buckets} have a bucket each: use at least "
            f"{buckets // 2 + 1}"
        )
    if parallel.zero_stage == 3 and _has_virtual_stages(config):
        yield (
            "--zero-stage 3 with --position-embedding-type relative and virtual stages: the parts "
            "on one stage share a table, which would be given back while another part needs it: "
            "use --zero-stage 1, or one virtual stage"
        )


def _has_virtual_stages(config: RunOptions) -> bool:
    try:
        parts = plan_model(config.model, config.parallel)
    except (ConfigError, AssertionError):  # other rules say so
        return False
    return len(parts) > config.parallel.pipeline_model_parallel_size


def t5(config: RunOptions, world_size: int) -> Iterator[str]:
    """What an encoder and a decoder need."""
    if config.model.architecture != "t5":
        return
    length, parallel = config.data.decoder_seq_length, config.parallel
    if length is None:
        yield "--decoder-seq-length is required: give it a value, as --encoder-seq-length"
    if config.model.group_query_attention:
        yield (
            "--group-query-attention: a T5's attention between decoder and encoder has a key and "
            "a value for every head: drop it"
        )
    tensor = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and length and tensor > 0 and length % tensor:
        yield (
            f"--decoder-seq-length {length} is not divisible by --tensor-model-parallel-size "
            f"{tensor}, as --sequence-parallel needs: use a multiple of {tensor}"
        )
