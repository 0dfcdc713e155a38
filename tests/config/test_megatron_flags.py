"""Every flag of Megatron-LM 23.08 and of the Llama-2 fork, as defined by their parsers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.fields import Field, fields_of
from megatron.config.other_flags import other_flags
from megatron.config.run import flatten, sections
from tests.config.command import parse, problems

REFUSED, ACCEPTED = other_flags().refused, other_flags().accepted
OLD_FLAGS, GONE_FLAGS = other_flags().translated, other_flags().removed
_FILE = Path(__file__).with_name("megatron_flags.json")
_FLAGS: list[dict[str, Any]] = [
    flag for flags in json.loads(_FILE.read_text()).values() for flag in flags
]
_FIELDS: dict[str, tuple[str, Field]] = {
    name: (f"{section}.{field.name}", field)
    for section, config_type in sections().items()
    for field in fields_of(config_type)
    for name in (*field.names, *field.off_names)
}
_KNOWN = {flag.name: flag for flag in (*REFUSED, *ACCEPTED)}
_OLD = {flag.name: flag for flag in OLD_FLAGS}

# Defaults that differ from Megatron's on purpose, with the reason.
_DEVIATIONS = {
    "--transformer-impl": "as in Megatron Core: it matters only to files for Megatron Core",
    "--exit-signal-handler": "SIGTERM and SIGINT save and leave unless told not to",
    "--no-save-optim": "off instead of unset: the same meaning",
    "--no-save-rng": "off instead of unset: the same meaning",
    "--no-load-optim": "off instead of unset: the same meaning",
    "--no-load-rng": "off instead of unset: the same meaning",
    "--use-cpu-initialization": "off instead of unset: the same meaning",
}
# Types that differ: numbers instead of text, and fractions of a minute.
_KINDS = {
    "--rampup-batch-size": "int",
    "--distributed-timeout-minutes": "float",
    "--rotary-seq-len-interpolation-factor": "float",
}
_RETRO_WORKDIR = Path(__file__).parent / "retro_workdir"
_OF_RETRO = (
    *("--retro-workdir", "--retro-add-retriever", "--retro-cyclic-train-iters"),
    *("--retro-encoder-layers", "--retro-encoder-hidden-dropout"),
    *("--retro-encoder-attention-dropout", "--retro-num-neighbors"),
    *("--retro-num-retrieved-chunks", "--retro-return-doc-ids"),
)
# A value that our rules accept, for flags where `_other_value` would return one that they refuse.
_VALUES = {
    "--retro-workdir": str(_RETRO_WORKDIR),
    "--tensor-model-parallel-size": "2",
    "--pipeline-model-parallel-size": "2",
    "--num-layers-per-virtual-pipeline-stage": "1",
    "--ffn-hidden-size": "300",
    "--hidden-size": "128",
    "--encoder-num-layers": "3",
    "--encoder-seq-length": "64",
    "--kv-channels": "8",
    "--num-attention-heads": "8",
    "--max-position-embeddings": "256",
    "--seq-length": "64",
    "--num-channels": "4",
    "--loss-scale-window": "500",
    "--make-vocab-size-divisible-by": "64",
    "--num-query-groups": "2",
    "--global-batch-size": "16",
    "--micro-batch-size": "2",
    "--rampup-batch-size": "4 4 100",
    "--profile-ranks": "0",
    "--weight-decay": "0.5",
    "--start-weight-decay": "0.1",
    "--end-weight-decay": "0.1",
    "--lr": "0.5",
    "--min-lr": "1e-4",
    "--lr-warmup-init": "1e-4",
    "--train-iters": "80",
    "--train-samples": "1000",
    "--split": "98,1,1",
    "--vocab-size": "200",
    "--data-path": "corpus",
    "--train-data-path": "0.3 one 0.7 two",
    "--valid-data-path": "one",
    "--test-data-path": "one",
    "--tokenizer-type": "GPT2BPETokenizer",
}
# What else a run must have, or must not have, for a flag to be accepted: (further words, without).
_DELAYED = ("--bf16 --fp8-format hybrid --fp8-recipe delayed", "")
_SAMPLES = ("--train-samples 1000", "--train-iters")
_COMPANIONS = {
    **dict.fromkeys(
        _OF_RETRO,
        (f"--retro-workdir {_RETRO_WORKDIR} --num-layers 6", "--mock-data --seq-length"),
    ),
    "--retro-cyclic-train-iters": (
        f"--retro-workdir {_RETRO_WORKDIR} --num-layers 6 --dataloader-type cyclic",
        "--mock-data --seq-length",
    ),
    "--num-layers-per-virtual-pipeline-stage": ("--pipeline-model-parallel-size 2", ""),
    "--encoder-num-layers": ("", "--num-layers"),
    "--encoder-seq-length": ("", "--seq-length"),
    "--train-samples": ("", "--train-iters"),
    "--rampup-batch-size": ("--global-batch-size 16 " + _SAMPLES[0], _SAMPLES[1]),
    "--lr-decay-samples": _SAMPLES,
    "--lr-warmup-samples": _SAMPLES,
    "--start-weight-decay": ("--weight-decay-incr-style linear --end-weight-decay 0.2", ""),
    "--end-weight-decay": ("--weight-decay-incr-style linear --start-weight-decay 0.1", ""),
    "--weight-decay-incr-style": ("--start-weight-decay 0.1 --end-weight-decay 0.2", ""),
    "--num-query-groups": ("--group-query-attention", ""),
    "--recompute-granularity": ("--recompute-method block", ""),
    "--recompute-method": ("--recompute-granularity full", ""),
    "--recompute-num-layers": ("--recompute-granularity full --recompute-method uniform", ""),
    "--distribute-saved-activations": (
        "--recompute-granularity full --recompute-method uniform",
        "",
    ),
    "--standalone-embedding-stage": ("--pipeline-model-parallel-size 2", ""),
    "--no-initialization": ("--load folder", ""),
    "--decoder-num-layers": ("--decoder-seq-length 64", ""),
    "--pipeline-model-parallel-split-rank": (
        "--pipeline-model-parallel-size 4 --decoder-seq-length 64 --num-layers 3 "
        "--decoder-num-layers 1",
        "--num-layers",
    ),
    "--use-flash-attn": ("--bf16", ""),
    "--fp32-residual-connection": ("--bf16", ""),
    "--fp16-lm-cross-entropy": ("--fp16", ""),
    "--fp8-format": ("--bf16", ""),
    "--no-fp8-wgrad": ("--bf16 --fp8-format hybrid", ""),
    "--fp8-margin": _DELAYED,
    "--fp8-interval": _DELAYED,
    "--fp8-amax-history-len": _DELAYED,
    "--fp8-amax-compute-algo": _DELAYED,
    "--save": ("--save-interval 5", ""),
    "--exit-on-missing-checkpoint": ("--load folder", ""),
    "--profile-step-start": ("--profile-step-end 20", ""),
    "--data-path": ("", "--mock-data"),
    "--train-data-path": ("", "--mock-data"),
    "--valid-data-path": ("--train-data-path one", "--mock-data"),
    "--test-data-path": ("--train-data-path one", "--mock-data"),
    "--tokenizer-type": ("--vocab-file v --merge-file m", ""),
    "--vocab-extra-ids": ("--tokenizer-type BertWordPieceCase --vocab-file v", ""),
    "--wandb-entity": ("--wandb-project p", ""),
    "--wandb-name": ("--wandb-project p", ""),
    "--wandb-id": ("--wandb-project p", ""),
}
_WORLD = {
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--num-layers-per-virtual-pipeline-stage": 2,
    "--standalone-embedding-stage": 2,
    "--pipeline-model-parallel-split-rank": 4,
}
# Flags for network kinds other than GPT.
_ARCHITECTURE = {
    "--bert-no-binary-head": "bert",
    "--mask-prob": "bert",
    "--short-seq-prob": "bert",
    "--bert-load": "ict",
    "--biencoder-projection-dim": "ict",
    "--biencoder-shared-query-context-model": "ict",
    "--titles-data-path": "ict",
    "--query-in-block-prob": "ict",
    "--use-one-sent-docs": "ict",
    "--retriever-score-scaling": "ict",
    "--retriever-report-topk-accuracies": "ict",
    "--decoder-num-layers": "t5",
    "--decoder-seq-length": "t5",
    "--pipeline-model-parallel-split-rank": "t5",
    **dict.fromkeys(_OF_RETRO, "retro"),
}
_NEEDS_PROGRAM = ("--use-checkpoint-args",)


def _name(flag: dict[str, Any]) -> str:
    return flag["flags"][0]


def _other_value(flag: dict[str, Any]) -> str | None:
    """Return words for a value that is not the default, or None for a switch."""
    if flag["nargs"] == 0:
        return None
    if _name(flag) in _VALUES:
        return _VALUES[_name(flag)]
    if flag["choices"]:
        return str(next(choice for choice in flag["choices"] if choice != flag["default"]))
    word = {"bool": "true", "float": "0.5", "int": "3"}.get(flag["type"], "text")
    return " ".join([word] * flag["nargs"]) if isinstance(flag["nargs"], int) else word


def _expected(flag: dict[str, Any], words: str | None) -> Any:
    """Return the value that Megatron's parser would store."""
    if words is None:
        return flag["action"] == "StoreTrue"
    if flag["type"] == "bool":
        return True
    kinds = {"int": int, "float": float}
    if _name(flag) == "--rampup-batch-size":
        return tuple(int(word) for word in words.split())
    kind = kinds.get(flag["type"], str)
    if flag["nargs"] in ("*", "+") or _name(flag) == "--num-experts":
        return tuple(kind(word) for word in words.split())
    return kind(words)


def _words(flag: dict[str, Any]) -> list[str]:
    value = _other_value(flag)
    return [_name(flag), *([] if value is None else value.split())]


def test_the_list_is_whole() -> None:
    assert len(_FLAGS) == 232 + 11


@pytest.mark.parametrize("flag", _FLAGS, ids=_name)
def test_every_flag_is_known_with_its_type_and_default(flag: dict[str, Any]) -> None:
    name = _name(flag)
    if name in _OLD:
        return
    default = tuple(flag["default"]) if isinstance(flag["default"], list) else flag["default"]
    choices = set(flag["choices"] or ())
    if name in _FIELDS:
        _, field = _FIELDS[name]
        assert field.is_switch == (flag["nargs"] == 0)
        assert field.many == (flag["nargs"] in ("*", "+") or name == "--num-experts")
        assert choices <= set(field.info.choices or ())
        kind = _KINDS.get(name, flag["type"])
        assert field.is_switch or field.kind.__name__ == (kind or "str")
        assert (field.default == default) != (name in _DEVIATIONS)
        return
    known = _KNOWN[name]
    assert known.is_switch == (flag["nargs"] == 0)
    assert known.many == (flag["nargs"] not in (None, 0))
    assert choices <= set(known.info.choices or ())
    if not known.is_switch:
        assert known.kind.__name__ == (flag["type"] or "str")
        unset = {(False, None), ((), None)}
        assert known.default == default or (known.default, default) in unset


@pytest.mark.parametrize("flag", _FLAGS, ids=_name)
def test_a_value_lands_in_its_field_or_is_reported_by_name(flag: dict[str, Any]) -> None:
    name, words = _name(flag), _words(flag)
    more, without = _COMPANIONS.get(name, ("", ""))
    refused = {entry.name for entry in REFUSED} | {*_NEEDS_PROGRAM}
    if name in refused:
        load = ["--load", "x"] if name in _NEEDS_PROGRAM else []
        lines = problems(*words, *load, world_size=2)
        assert len(lines) == 1
        assert lines[0].startswith(" ".join(words) + ": ") or lines[0].startswith(name)
        return
    if name in _OLD:
        _check_old(flag)
        return
    run = parse(
        *words,
        more,
        without=without.split(),
        world_size=_WORLD.get(name, 1),
        architecture=_ARCHITECTURE.get(name, "gpt"),
    )
    if name in _KNOWN:
        assert [line for line in run.notices if line.startswith(name)]
        return
    path, field = _FIELDS[name]
    assert flatten(run.config)[path] == _expected(flag, _other_value(flag))
    if field.info.notice:
        assert [line for line in run.notices if line.startswith(name)]


def _check_old(flag: dict[str, Any]) -> None:
    """Check 23.08's own dead flags: one notice instead of an assertion or a silent exit."""
    name = _name(flag)
    value = {"--warmup": "0.01", "--batch-size": "4"}.get(name, "1")
    words = [name] if flag["nargs"] == 0 else [name, value]
    words.append(_COMPANIONS.get(name, ("", ""))[0])
    run = parse(
        *words,
        world_size=_WORLD.get(name, 1),
        without=["--micro-batch-size"] if name == "--batch-size" else [],
    )
    assert len([line for line in run.notices if name in line]) == 1


def test_no_flag_is_read_twice() -> None:
    assert set(_KNOWN).isdisjoint(_FIELDS)
    assert len(_KNOWN) == len(REFUSED) + len(ACCEPTED)
    gone = {flag.name for flag in GONE_FLAGS if flag.value is None}
    assert set(_KNOWN).isdisjoint({*_OLD, *gone})
    fields = [field.name for config_type in sections().values() for field in fields_of(config_type)]
    assert len(fields) == len(set(fields))
