"""Every flag of Megatron Core 0.17.1 to 0.19.2, and every flag removed earlier, is known.

`megatron_core_flags.json` has its parsers' entry for each spelling that 23.08 does not have.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.config.fields import Field, fields_of
from megatron.config.generation import ServerConfig
from megatron.config.other_flags import other_flags, read_entry
from megatron.config.run import sections
from tests.config.command import parse, problems
from tests.repository import ROOT

REFUSED, ACCEPTED = other_flags().refused, other_flags().accepted
OTHER_NAMES = other_flags().other_programs
_FILE = Path(__file__).with_name("megatron_core_flags.json")
_FLAGS: dict[str, dict[str, Any]] = {
    flag["flag"]: flag for flags in json.loads(_FILE.read_text()).values() for flag in flags
}
_FIELDS: dict[str, Field] = {
    name: field
    for config_type in (*sections().values(), ServerConfig)
    for field in fields_of(config_type)
    for name in (*field.names, *field.off_names)
}
_KNOWN = {flag.name: flag for flag in (*REFUSED, *ACCEPTED)}
_OLD = {flag.name for flag in (*other_flags().translated, *other_flags().removed)}

# Intentional differences, with the reason.
_DEVIATIONS = {
    "many": {"--cp-comm-type": "all layers have the same"},
    "type": {
        "--distributed-timeout-minutes": "fractions count",
        "--rotary-base": "not always whole",
        "--rotary-seq-len-interpolation-factor": "not always whole",
    },
    "default": {
        "--pipeline-model-parallel-comm-backend": "unset means nccl there, too",
        "--moe-layer-freq": "as it is written",
        "--moe-token-dispatcher-type": "has no effect",
        "--fp4-recipe": "refused in any case",
        "--inference-grouped-gemm-backend": "refused in any case",
        "--one-logger-project": "refused in any case",
        "--fim-eod-token": "refused in any case",
    },
}


def _differences(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of a flag that differ in Megatron's parser, as (ours, theirs)."""
    there = {"type": row.get("type"), "many": row.get("many", False)}
    here: dict[str, Any]
    if name in _KNOWN:
        known = _KNOWN[name]
        here = {"type": None if known.is_switch else known.kind.__name__, "many": known.many}
        default = row.get("default")
        there["default"] = default if not known.many else () if default is None else (default,)
        here["default"] = known.default or (None if known.is_switch else known.default)
    elif name in _FIELDS:
        field = _FIELDS[name]
        here = {"type": None if field.is_switch else field.kind.__name__, "many": field.many}
    else:
        return {} if name in _OLD else {"known": (False, True)}
    return {
        what: (here[what], there[what])
        for what in here
        if here[what] != there[what] and name not in _DEVIATIONS[what]
    }


def test_every_flag_of_core_is_known_with_what_it_takes() -> None:
    assert len(_FLAGS) == 643 + 37 + 24
    found = {name: _differences(name, row) for name, row in _FLAGS.items()}
    assert {name: what for name, what in found.items() if what} == {}


def _given(flag: Field, value: Any) -> list[str]:
    if flag.is_switch:
        return [flag.name]
    values = value if isinstance(value, tuple) else (value,)
    return [flag.name, *map(str, values)]


def _other_value(flag: Field) -> Any:
    """Return a value that changes something."""
    if flag.info.choices:
        return next(choice for choice in flag.info.choices if choice != flag.default)
    if flag.kind is bool:
        return True
    return {int: 98765, float: 0.98765, str: "other"}.get(flag.kind)


def _asking(flags: tuple[Field, ...]) -> list[Field]:
    """Return the flags that change something when given: not `--no-x` if x is off anyway."""
    return [flag for flag in flags if flag.default is not True]


def test_all_refused_flags_at_once_are_reported_by_name_in_one_message() -> None:
    flags = _asking(REFUSED)
    lines = problems(*(word for flag in flags for word in _given(flag, _other_value(flag))))
    assert len(lines) == len(flags) > 580
    for flag, line in zip(flags, lines, strict=True):
        assert line.startswith(f"{' '.join(_given(flag, _other_value(flag)))}: {flag.help}")


def test_all_accepted_flags_at_once_get_a_note_each() -> None:
    words = [word for flag in ACCEPTED for word in _given(flag, _other_value(flag))]
    notices = parse(*words).notices
    assert len(notices) == len(ACCEPTED)
    for flag, line in zip(ACCEPTED, notices, strict=True):
        assert line.startswith(flag.name)
        assert line.endswith(f": {flag.help}")


def test_known_flags_at_their_defaults_ask_for_nothing() -> None:
    flags = [flag for flag in _KNOWN.values() if flag.default not in (None, (), False)]
    assert len(flags) > 150
    assert parse(*(word for flag in flags for word in _given(flag, flag.default))).notices == ()


def test_what_a_remedy_names_is_there() -> None:
    reasons = {flag.help for flag in _KNOWN.values()} | set(OTHER_NAMES.values())
    named = {name for reason in reasons for name in re.findall(r"--[\w-]+", reason)}
    of_others = {"--help", "--config", "--deepspeed_config", "--max-restarts", "--nproc-per-node"}
    of_others |= other_flags().of_commands.keys()
    assert named - set(_FIELDS) - of_others == set()
    files = {name for reason in reasons for name in re.findall(r"[a-z_]+/[\w./]+\.\w+", reason)}
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("--persistent-save-interval 7 --save c", "checkpoint.save_interval", 7),
        ("--wandb-exp-name n --wandb-project p", "logging.wandb_name", "n"),
        ("--wandb-save-dir d --wandb-project p", "logging.wandb_save_dir", "d"),
        ("--override-opt-param-scheduler --load c", "schedule.override_opt_param_scheduler", True),
        (
            "--use-checkpoint-opt-param-scheduler --load c",
            "schedule.use_checkpoint_opt_param_scheduler",
            True,
        ),
        ("--disable-fp8-wgrad --bf16 --fp8-format hybrid", "precision.fp8_wgrad", False),
        (
            "--disable-log-loss-scale-to-tensorboard --tensorboard-dir t",
            "logging.log_loss_scale_to_tensorboard",
            False,
        ),
    ],
)
def test_a_later_name_of_what_is_here_is_taken(words: str, path: str, value: Any) -> None:
    section, name = path.split(".")
    assert getattr(getattr(parse(words).config, section), name) == value


def test_torch_dist_is_written() -> None:
    words = "--ckpt-format torch_dist --save here --save-interval 5"
    assert parse(words).config.checkpoint.transformer_impl == "transformer_engine"
    assert parse(f"{words} --transformer-impl local").config.checkpoint.transformer_impl == "local"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--relu", "--ckpt-format torch_dist with --relu: Megatron Core does not support it"),
        (
            "--num-experts 4 --mlp-type residual",
            "--ckpt-format torch_dist with --mlp-type residual: Megatron Core does not support it",
        ),
        ("--decoupled-lr 0.5", "--ckpt-format torch_dist with --decoupled-lr 0.5: such optimizer"),
        (
            "--optimizer sgd --use-distributed-optimizer",
            (
                "--ckpt-format torch_dist with --use-distributed-optimizer: Megatron Core's "
                "distributed optimizer stores"
            ),
        ),
    ],
)
def test_what_torch_dist_cannot_hold_is_refused(words: str, line: str) -> None:
    words += " --ckpt-format torch_dist --save here --save-interval 5"
    (found,) = problems(words)
    assert found.startswith(line)


_LLAMA = "--group-query-attention --num-query-groups 2 --num-attention-heads 4"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--use-distributed-optimizer",
            "--ckpt-format torch with --use-distributed-optimizer: the optimizer's",
        ),
        ("--decoupled-lr 0.1", "--ckpt-format torch with --decoupled-lr 0.1: the optimizer's"),
        ("--freeze embedding", "--ckpt-format torch with --freeze embedding: the optimizer's"),
        (
            "--qk-layernorm --apply-wd-to-qk-layernorm",
            "--ckpt-format torch with --apply-wd-to-qk-layernorm: the optimizer's",
        ),
        ("--optimizer muon", "--ckpt-format torch with --optimizer muon: its states cannot be"),
        ("--softmax-type learnable", "--ckpt-format torch with --softmax-type learnable: it"),
        ("--mtp-num-layers 1", "--ckpt-format torch with --mtp-num-layers 1: it cannot"),
        ("--fp8-format hybrid --bf16", "--ckpt-format torch with --fp8-format hybrid: it cannot"),
        ("--geglu", "--ckpt-format torch with --geglu: Megatron Core does not support it"),
        (
            "--num-layers 4 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
            "--ckpt-format torch: every stage must have the same number of layers, but here they "
            "have 1, 3: use",
        ),
        (
            f"{_LLAMA} --tensor-model-parallel-size 4",
            "--ckpt-format torch: Megatron Core gives every tensor-parallel rank whole heads",
        ),
        (
            "--num-experts 4 --moe-router-topk 2",
            "--num-experts 4 cannot be combined with --ckpt-format torch: such experts",
        ),
        (
            "--multi-latent-attention",
            "--multi-latent-attention cannot be combined with --ckpt-format torch: latent",
        ),
        (
            "--hybrid-layer-pattern M*-M",
            "--hybrid-layer-pattern M*-M cannot be combined with --ckpt-format torch: hybrid",
        ),
    ],
)
def test_what_the_torch_format_cannot_hold_is_refused(words: str, line: str) -> None:
    found = problems(f"{words} --ckpt-format torch --save here --save-interval 5", world_size=8)
    assert any(one.startswith(line) for one in found), found


@pytest.mark.parametrize(
    ("architecture", "words", "line"),
    [
        ("t5", "--decoder-seq-length 64", "--ckpt-format torch: only GPTs and BERTs are written"),
        (
            "bert",
            "--transformer-impl local",
            "--ckpt-format torch with --transformer-impl local: Megatron Core's pretrain_bert.py",
        ),
    ],
)
def test_networks_other_than_gpts_in_the_torch_format(
    architecture: str, words: str, line: str
) -> None:
    words += " --ckpt-format torch --save here --save-interval 5"
    (found,) = problems(words, architecture=architecture)
    assert found.startswith(line)


@pytest.mark.parametrize("words", ["--use-distributed-optimizer", "--decoupled-lr 0.1"])
def test_without_optimizer_states_the_torch_format_holds_the_weights(words: str) -> None:
    words = f"{words} --ckpt-format torch --save here --save-interval 5 --no-save-optim"
    assert parse(words).config.checkpoint.ckpt_format == "torch"


@pytest.mark.parametrize("value", ["torch_dcp", "zarr", "fsdp_dtensor"])
def test_a_format_of_cores_checkpoints_is_refused_with_the_remedy(value: str) -> None:
    (line,) = problems(f"--ckpt-format {value}")
    assert line.startswith(f"--ckpt-format {value}: this is a Megatron Core format")
    assert "drop the flag" in line


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--context-parallel", "--context-parallel-size"),  # not --hybrid-context-parallel
        ("--tensor-parallel", "--tensor-model-parallel-size"),
        ("--num_layers", "--num-layers"),
        ("--heads", "--num-attention-heads"),
        ("--micro-batchsize", "--micro-batch-size"),
        ("--wandb-nam", "--wandb-name"),
        ("--flash-attn", "--use-flash-attn"),
    ],
)
def test_a_misspelled_flag_is_one_of_ours_rather_than_one_that_is_refused(
    given: str, meant: str
) -> None:
    (line,) = problems(f"{given} 2")
    assert line == f"unknown flag {given}: did you mean {meant}?"


def test_a_misspelled_flag_that_is_refused_anyway_says_so_at_once() -> None:
    (line,) = problems("--mtp-standalon")
    assert line == (
        "unknown flag --mtp-standalon: did you mean --mtp-standalone? "
        "(layers of multi-token prediction are on the last pipeline stage, with the output layer: "
        "drop the flag)"
    )


def test_names_of_other_programs_are_translated() -> None:
    assert set(OTHER_NAMES).isdisjoint({*_FIELDS, *_KNOWN, *_OLD})
    assert problems("--learning-rate 1e-3", without=["--lr"]) == [
        "unknown flag --learning-rate: use --lr"  # and --lr is not reported as missing
    ]
    lines = problems(*(f"{name} 3" for name in OTHER_NAMES))
    assert lines == [f"unknown flag {name}: {said}" for name, said in OTHER_NAMES.items()]


def test_a_family_is_read_as_its_entries_say() -> None:
    table = "--a --[no-]b --c:int --d=0.5 --e=x|y --f:str=1 --g:int... --h=2... --i=-1"
    read = [
        (
            flag.name,
            None if flag.is_switch else flag.kind,
            flag.default,
            flag.info.choices,
            flag.many,
        )
        for entry in table.split()
        for flag in read_entry(entry, "why")
    ]
    assert read == [
        ("--a", None, False, None, False),
        ("--b", None, False, None, False),
        ("--no-b", None, True, None, False),
        ("--c", int, None, None, False),
        ("--d", float, 0.5, None, False),
        ("--e", str, "x", ("x", "y"), False),
        ("--f", str, "1", None, False),
        ("--g", int, (), None, True),
        ("--h", int, (2,), None, True),
        ("--i", int, -1, None, False),
    ]


# Performance flags of Megatron Core's later versions, as scripts write them, and words of the
# error.
_LATER_REFUSED = {
    "--no-overlap-p2p-communication": "drop the flag",
    "--disable-tp-comm-split-ag": "--tp-comm-overlap",
    "--use-nccl-ub": "environment variables",
    "--high-priority-stream-groups dp tp": "priority",
    "--fp8-output-proj": "every block",
    "--fp4-format e2m1": "--fp8-format",
    "--optimizer-offload-fraction 0.5": "--optimizer-cpu-offload",
    "--moe-latent-size 8": "this kind of expert",
    "--moe-expert-rank-capacity-factor 2": "this kind of expert",
}
_LATER_ACCEPTED = (
    "--no-bias-swiglu-fusion",
    "--microbatch-group-size-per-virtual-pipeline-stage 4",
    "--defer-embedding-wgrad-compute",
    "--wgrad-deferral-limit 22",
    "--delay-grad-reduce",
    "--align-param-gather",
    "--overlap-param-gather-with-optimizer-step",
    "--ddp-bucket-size 40000000",
    "--ddp-num-buckets 4",
    "--dist-ckpt-strictness log_all",
    "--logging-level 40",
    "--overlap-p2p-communication-warmup-flush",
    "--no-align-grad-reduce",
    "--no-align-param-gather",
    "--ddp-average-in-collective",
    "--inference-rng-tracker",
    "--use-pytorch-profiler",
)


@pytest.mark.parametrize("words", _LATER_REFUSED)
def test_a_later_flag_for_speed_is_refused_with_the_remedy(words: str) -> None:
    (line,) = problems(words)
    assert line.startswith(f"{words}: ")
    assert _LATER_REFUSED[words] in line


@pytest.mark.parametrize("word", _LATER_ACCEPTED)
def test_a_later_flag_for_what_is_always_so_is_taken(word: str) -> None:
    (line,) = parse(word).notices
    assert line.startswith(f"{word}: ")
