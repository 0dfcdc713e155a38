"""Bi-encoder flags: which flags a bi-encoder takes, and what it cannot be combined with."""

import pytest

from tests.config.command import parse, problems

CORPUS = "--data-path text --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt"
WITHOUT = ["--mock-data", "--tokenizer-type", "--vocab-size"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bert-load x", "--bert-load x is only for ICT"),
        ("--biencoder-projection-dim 8", "is only for ICT"),
        ("--titles-data-path x", "is only for ICT"),
        ("--retriever-score-scaling", "is only for ICT"),
    ],
)
def test_flags_of_a_bi_encoder_are_refused_elsewhere(words, message):
    (line,) = problems(words, architecture="bert")
    assert message in line


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        ("--pipeline-model-parallel-size 2", 2, "--pipeline-model-parallel-size 2: the towers"),
        ("--context-parallel-size 2", 2, "--context-parallel-size 2: context parallelism"),
        (
            "--save x --ckpt-format legacy",
            1,
            "--ckpt-format legacy: Megatron-LM's bi-encoders can be read but not written",
        ),
        ("--micro-batch-size 1", 1, "--micro-batch-size 1 with one data-parallel process"),
        (
            "--eval-micro-batch-size 1",
            1,
            "--eval-micro-batch-size 1 with one data-parallel process",
        ),
        ("--query-in-block-prob 1.5", 1, "--query-in-block-prob 1.5: must be at most 1"),
        ("--retriever-report-topk-accuracies 0", 1, "must be at least 1"),
        ("--ict-head-size 128", 1, "give that instead"),
        ("--ict-load x", 1, "a bi-encoder is loaded with --load"),
        ("--block-data-path x", 1, "REALM is not supported"),
        ("--mask-prob 0.2", 1, "is only for BERT and T5"),
        ("--freeze x", 1, "only for GPT, BERT, T5 and RETRO, and this model is an ICT: drop it"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(words, world, message):
    lines = problems(words, architecture="ict", world_size=world)
    assert [line for line in lines if message in line], lines


def test_one_sample_per_process_is_enough_for_two_processes():
    assert parse("--micro-batch-size 1", architecture="ict", world_size=2).notices == ()


def test_titles_are_required_for_one_corpus():
    (line,) = problems(CORPUS, architecture="ict", without=WITHOUT)
    assert line.startswith("--titles-data-path is required")
    parse(CORPUS, "--titles-data-path titles", architecture="ict", without=WITHOUT)
    titled = f"{CORPUS} --titles-data-path titles"
    (line,) = problems(f"{titled} --data-path a b", architecture="ict", without=WITHOUT)
    assert "tools/merge_datasets.py" in line
    words = titled.replace("--data-path text", "--train-data-path text")
    (line,) = problems(words, architecture="ict", without=WITHOUT)
    assert line.startswith("--train-data-path: ")
