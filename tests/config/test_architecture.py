"""BERT and T5 flags: which architecture takes which flag, and how a T5's layers are distributed."""

import pytest

from megatron.config.parser import Program, parse_config
from megatron.config.stages import plan_model
from megatron.config.yaml_file import dump
from megatron.errors import ConfigError
from tests.config.command import parse, problems

T5 = "--decoder-seq-length 32"


@pytest.mark.parametrize(
    ("architecture", "flag"),
    [
        ("gpt", "--bert-no-binary-head"),
        ("gpt", "--decoder-seq-length 32"),
        ("gpt", "--mask-prob 0.2"),
        ("gpt", "--short-seq-prob 0"),
        ("bert", "--decoder-num-layers 2"),
        ("bert", "--pipeline-model-parallel-split-rank 1"),
        ("bert", "--eod-mask-loss"),
        ("gpt", "--position-embedding-type relative"),
        ("bert", "--position-embedding-type relative"),
        ("bert", "--position-embedding-type alibi"),
        ("gpt", "--scale-decoder-outputs"),
        ("bert", "--disable-output-bias"),
        ("bert", "--softmax-scale 1"),
    ],
)
def test_flags_of_another_network_are_refused(architecture, flag):
    lines = problems(flag, architecture=architecture, world_size=1)
    assert [line for line in lines if line.startswith(flag) and "drop it" in line]


def test_a_loss_of_tokens_excludes_one_of_samples():
    words = "--calculate-per-token-loss"
    (line,) = problems(words, architecture="bert", world_size=1)
    assert line.startswith(words)
    assert "--bert-no-binary-head" in line
    for kind, more in (("bert", "--bert-no-binary-head"), ("t5", T5), ("gpt", "--eod-mask-loss")):
        parsed = parse(words, more, architecture=kind)
        assert parsed.config.training.calculate_per_token_loss
        assert parsed.notices == ()
    (notice,) = parse(words).notices
    assert notice.startswith(words)
    assert "without --eod-mask-loss" in notice


@pytest.mark.parametrize(
    ("flag", "rule"),
    [("--mask-prob 1.5", "must be at most 1"), ("--short-seq-prob -0.1", "must be at least 0")],
)
def test_shares_are_between_0_and_1(flag, rule):
    lines = problems(flag, architecture="bert", world_size=1)
    assert f"{flag}: {rule}" in lines


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_padding_masks_exclude_contexts(architecture):
    more = T5 if architecture == "t5" else ""
    words = f"--context-parallel-size 2 --use-flash-attn --bf16 {more}"
    (line,) = problems(words, architecture=architecture, world_size=2)
    assert "padding masks" in line


def test_a_t5_has_as_many_decoder_layers_as_encoder_layers_unless_told():
    model = parse(T5, architecture="t5").config.model
    assert (model.decoder_num_layers, model.num_layers) == (4, 4)
    assert model.max_position_embeddings == 128
    model = parse("--decoder-seq-length 256 --decoder-num-layers 2", architecture="t5").config.model
    assert (model.decoder_num_layers, model.max_position_embeddings) == (2, 256)
    assert "--decoder-seq-length is required" in problems(architecture="t5")[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--relative-attention-num-buckets 7", "use an even number of at least 4"),
        ("--relative-attention-num-buckets 2", "use an even number of at least 4"),
        ("--relative-attention-max-distance 16", "use at least 17"),
        ("--geglu --relu", "--geglu and --relu: an MLP has a single activation function"),
        ("--softmax-scale 0", "must be above 0"),
        ("--ckpt-format legacy --save x", "--position-embedding-type relative: Megatron-LM 23.08"),
        (
            "--zero-stage 3 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 1",
            "the virtual stages of a rank share a table",
        ),
    ],
)
def test_relative_positions_that_cannot_be(words, message):
    words = f"{T5} --position-embedding-type relative {words}"
    lines = problems(words, architecture="t5", world_size=4)
    assert [line for line in lines if message in line]


@pytest.mark.parametrize("name", ["num-buckets 16", "max-distance 64"])
def test_buckets_belong_to_relative_positions(name):
    flag = f"--relative-attention-{name}"
    assert parse(f"{T5} --position-embedding-type relative {flag}", architecture="t5")
    (line,) = problems(f"{T5} {flag}", architecture="t5")
    assert line.startswith(f"{flag} requires --position-embedding-type relative")


def _layers(*words, stages):
    flags = f"--pipeline-model-parallel-size {stages}"
    config = parse(T5, flags, *words, architecture="t5", world_size=stages).config
    return [list(part.layers) for part in plan_model(config.model, config.parallel)]


def test_the_split_rank_says_where_the_decoder_begins():
    assert _layers(stages=2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    split = "--pipeline-model-parallel-split-rank"
    assert _layers(f"{split} 1", "--decoder-num-layers 2", stages=3) == [[0, 1, 2, 3], [4], [5]]
    assert _layers(f"{split} 2", stages=3) == [[0, 1], [2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("0", "each need at least one of"),
        ("2", "each need at least one of"),
        ("1 --decoder-first-pipeline-num-layers 1", "use one of them"),
        ("1 --num-virtual-stages-per-pipeline-rank 2", "use one of them"),
    ],
)
def test_a_split_that_cannot_be(words, message):
    words = f"{T5} --pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank {words}"
    assert message in problems(words, architecture="t5", world_size=2)[0]


def test_a_split_whose_layers_do_not_divide():
    words = f"{T5} --pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank 1"
    assert "4 decoder layers" in problems(words, architecture="t5", world_size=4)[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--decoder-num-layers 2", "here one stage has both"),
        (
            "--decoder-num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
            "does not support virtual stages",
        ),
        ("--decoder-num-layers 4 --pipeline-model-parallel-layout Etttt|ttttL", ""),
        ("--decoder-num-layers 2 --pipeline-model-parallel-split-rank 1", ""),
    ],
)
def test_files_of_megatron_hold_stages_of_one_half(words, message):
    saves = "--save here --save-interval 5 --ckpt-format legacy --pipeline-model-parallel-size 2"
    words = f"{T5} {saves} {words}"
    if not message:
        parse(words, architecture="t5", world_size=2)
        return
    (line,) = problems(words, architecture="t5", world_size=2)
    assert line.startswith("--ckpt-format legacy: Megatron-LM 23.08")
    assert message in line
    assert "choose another --pipeline-model-parallel-split-rank" in line


@pytest.mark.parametrize("words", ["", "--pipeline-model-parallel-layout Ett|ttL"])
def test_layers_that_do_not_fit_are_named_by_both_flags(words):
    words = f"{T5} --pipeline-model-parallel-size 2 --decoder-num-layers 3 {words}"
    line = problems(words, architecture="t5", world_size=2)[0]
    assert "--num-layers 4 + --decoder-num-layers 3 = 7" in line


def test_the_yaml_file_of_another_script_is_refused_by_name(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(dump(parse(architecture="bert").config))
    words = ["--config", str(path)]
    parsed = parse_config(words, world_size=1, architecture="bert")
    assert parsed.config.model.architecture == "bert"
    with pytest.raises(ConfigError, match=r"run pretrain_bert\.py"):
        parse_config(words, world_size=1)
    with pytest.raises(ConfigError, match=r"is a bert, and pretrain_t5\.py trains a t5"):
        parse_config(words, world_size=1, program=Program(name="pretrain_t5.py"), architecture="t5")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("BertWordPieceCase --vocab-file v", "BertWordPieceCase without --vocab-extra-ids has no"),
        ("BertWordPieceCase --vocab-file v --vocab-extra-ids 9", None),
        ("SentencePieceTokenizer --tokenizer-model m", None),  # the model may contain sentinels
        ("HuggingFaceTokenizer --tokenizer-model m", None),
        (
            "HuggingFaceTokenizer --tokenizer-model m --vocab-extra-ids 9",
            "--vocab-extra-ids 9: --tokenizer-type HuggingFaceTokenizer does not support extra "
            "entries",
        ),
        ("NullTokenizer --vocab-size 99", "--tokenizer-type NullTokenizer has no sentinels"),
    ],
)
def test_sentinels_come_from_somewhere(words: str, message: str | None) -> None:
    words = f"{T5} --data-path corpus --tokenizer-type {words}"
    run = {"architecture": "t5", "without": ["--mock-data", "--tokenizer-type", "--vocab-size"]}
    if message is None:
        assert parse(words, **run)
    else:
        (line,) = problems(words, **run)
        assert message in line
