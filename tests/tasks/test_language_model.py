"""Perplexity and LAMBADA: each token counts once, in every layout, against plain arithmetic."""

import json
import math
import shutil

import pytest
import torch

from megatron.config.tasks import LanguageModelTaskConfig
from megatron.device import Device
from megatron.errors import ConfigError, DataError, StorageError
from megatron.inference.load import load_gpt
from megatron.parallel.layout import Layout
from megatron.tasks import language_model
from megatron.tasks.language_model import count_words, encode_pair, prepare_perplexity
from megatron.tasks.main import main
from megatron.tasks.table import TASKS, find_task
from megatron.tasks.texts import ptb, wikitext
from tests.distributed import run_distributed
from tests.tasks.toy import evaluate, save_toy

PASSAGES = [" ".join(str((7 * i + 3 * j) % 90 + 1) for j in range(3 + 5 * i)) for i in range(7)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Return a checkpoint with a window of 16 tokens, and a corpus of numbers, partly longer."""
    folder = tmp_path_factory.mktemp("toy")
    save_toy(str(folder / "model"))
    lines = [json.dumps({"text": text}) for text in PASSAGES]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "text.txt").write_text(" ".join(PASSAGES))
    return folder


def _words(toy, file, *flags):
    return ["--load", str(toy / "model"), "--valid-data", str(toy / file), *flags]


@torch.no_grad()
def _plain_loss(toy, tokens, step):
    """Return the summed loss of all tokens but the first, each by its own pass, without padding."""
    model = load_gpt(str(toy / "model"), Device.cpu()).model
    total = 0.0
    for place in range(1, len(tokens)):
        # The start of the window that scores this position.
        start = 0 if place <= 16 else (place - 17) // step * step + step
        logits = model(torch.tensor([tokens[start:place]]))[0, -1, :101]
        total -= logits.log_softmax(-1)[tokens[place]].item()
    return total


@pytest.mark.parametrize("step", [1, 5, 16])
def test_perplexity_is_the_mean_loss_of_every_token_but_the_first(toy, step):
    tokens = [int(word) for word in " ".join(PASSAGES).split()]
    words = _words(toy, "text.txt", "--overlapping-eval", str(step))
    numbers = evaluate(Layout.single(), "WIKITEXT103", words)
    expected = _plain_loss(toy, tokens, step)
    assert numbers["loss"] == pytest.approx(expected / (len(tokens) - 1), rel=1e-5)
    assert numbers["adjusted perplexity"] == pytest.approx(
        math.exp(expected / (numbers["words"] - 1)), rel=1e-4
    )


def test_documents_of_a_corpus_do_not_see_each_other(toy):
    numbers = evaluate(Layout.single(), "PERPLEXITY", _words(toy, "corpus.jsonl"))
    documents = [[100, *map(int, text.split())] for text in PASSAGES]  # 100 ends a document
    expected = sum(_plain_loss(toy, tokens, 16) for tokens in documents)
    assert numbers["tokens"] == sum(len(tokens) - 1 for tokens in documents)
    assert numbers["loss"] == pytest.approx(expected / numbers["tokens"], rel=1e-5)
    size = sum(len(text) for text in PASSAGES)
    assert numbers["bits per byte"] == pytest.approx(expected / math.log(2) / size, rel=1e-5)
    words = sum(len(text.split()) for text in PASSAGES)
    assert (numbers["documents"], numbers["words"]) == (len(PASSAGES), words)
    assert numbers["word perplexity"] == pytest.approx(math.exp(expected / words), rel=1e-4)


LAYOUTS = [
    (2, {"tensor": 2}, ["--tensor-model-parallel-size", "2"]),
    (2, {"pipeline": 2}, ["--pipeline-model-parallel-size", "2"]),
    (3, {}, []),
    (
        8,
        {"tensor": 2, "pipeline": 2},
        [
            *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
            *("--pipeline-model-parallel-size", "2"),
        ],
    ),
]


@pytest.mark.parametrize(("processes", "sizes", "flags"), LAYOUTS)
@pytest.mark.parametrize("task", ["WIKITEXT103", "PERPLEXITY", "LAMBADA"])
def test_every_layout_gives_the_numbers_of_one_process(toy, task, processes, sizes, flags):
    file = "text.txt" if task == "WIKITEXT103" else "corpus.jsonl"
    words = _words(toy, file, "--micro-batch-size", "2")
    expected = evaluate(Layout.single(), task, words)
    got = run_distributed(processes, evaluate, task, [*words, *flags], **sizes)
    assert got == [pytest.approx(expected, rel=1e-5)] * processes


def test_lambada_counts_what_a_greedy_model_gets_right(toy):
    words = _words(toy, "corpus.jsonl")
    model = load_gpt(str(toy / "model"), Device.cpu()).model
    guessed = []
    for text in PASSAGES:
        tokens = [int(word) for word in text.split()]
        logits = model(torch.tensor([tokens[:-1][-16:]]))[0, -1, :101]
        guessed.append(int(logits.argmax()))
    right = [
        f"{text.rpartition(' ')[0]} {best}" for text, best in zip(PASSAGES, guessed, strict=True)
    ]
    lines = [json.dumps({"text": text}) for text in [*right, *PASSAGES]]
    path = toy / "half.jsonl"
    path.write_text("\n".join(lines))
    numbers = evaluate(Layout.single(), "LAMBADA", [*words[:3], str(path)])
    assert numbers["total examples"] == 14
    assert numbers["number correct"] == 7 + sum(
        a == b for a, b in zip(right, PASSAGES, strict=True)
    )
    assert numbers["passages cut to the window"] == 8


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_all_of_lambada_is_counted_once(shared_data, golden, tmp_path, processes):
    vocabulary = [
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", str(golden / "data" / "gpt2-tiny-vocab.json")),
        *("--merge-file", str(golden / "data" / "gpt2-tiny-merges.txt")),
    ]
    tiny = ["--num-layers", "1", "--hidden-size", "8", "--seq-length", "8", "--num-attention-heads"]
    load = save_toy(str(tmp_path), [*vocabulary, *tiny, "1", "--max-position-embeddings", "8"])
    data = str(shared_data / "eval" / "lambada" / "lambada_test.jsonl")
    words = ["--load", load, "--valid-data", data, "--strict-lambada", "--micro-batch-size", "64"]
    got = run_distributed(processes, evaluate, "LAMBADA", words)
    assert [numbers["total examples"] for numbers in got] == [5153] * processes


def test_wikitext_has_the_published_number_of_words(shared_data):
    path = shared_data / "eval" / "wikitext-103" / "wiki.test.tokens"
    assert count_words(path.read_text(encoding="utf-8")) == 245_569


def test_the_results_are_written_beside_the_checkpoint(toy):
    numbers = evaluate(Layout.single(), "PERPLEXITY", _words(toy, "corpus.jsonl"))
    written = json.loads(
        (toy / "model" / "evaluation" / "perplexity-iter_0000000.json").read_text()
    )
    assert written["results"]["loss"] == numbers["loss"]
    assert written["checkpoint"] == {"folder": str(toy / "model"), "iteration": 0}
    other = toy / "mine" / "other.json"
    evaluate(Layout.single(), "LAMBADA", _words(toy, "corpus.jsonl", "--results", str(other)))
    assert json.loads(other.read_text())["results"]["total_examples"] == 7


def test_results_that_cannot_be_written_are_an_error_only_in_a_named_file(toy, tmp_path, capsys):
    # Without the results of other tests.
    ignored = shutil.ignore_patterns("evaluation")
    folder = shutil.copytree(toy / "model", tmp_path / "model", ignore=ignored)
    (folder / "evaluation").write_text("no folder")
    words = ["--load", str(folder), "--valid-data", str(toy / "corpus.jsonl")]
    assert evaluate(Layout.single(), "LAMBADA", words)["total examples"] == 7
    said = capsys.readouterr().out
    assert f"WARNING: {folder}/evaluation" in said.replace("--results ", "")
    assert said.endswith("the results are not saved: give --results FILE to save them\n")
    with pytest.raises(StorageError, match="evaluation"):
        evaluate(Layout.single(), "LAMBADA", [*words, "--results", str(folder / "evaluation/x")])


def test_help_lists_every_task(monkeypatch, capsys):
    shown = []
    for words in (["--help"], ["--task", "LAMBADA", "-h"], ["--help-all"]):
        monkeypatch.setattr("sys.argv", ["main.py", *words])
        assert main() == 0
        shown.append(capsys.readouterr().out)
        listed = shown[-1].partition("\ntasks:\n")[2].splitlines()
        assert [line.split()[0] for line in listed] == [*TASKS]
        assert "--valid-data" in shown[-1]
    assert shown[0] == shown[1]
    assert "--train-iters" not in shown[0]
    assert len(shown[2]) > 2 * len(shown[0])


def test_a_megatron_checkpoint_is_evaluated_without_conversion(golden, shared_data, tmp_path):
    text = (shared_data / "eval" / "wikitext-103" / "wiki.test.tokens").read_text()[:5000]
    (tmp_path / "wiki.tokens").write_text(text)
    words = [
        *("--load", str(golden / "gpt_fp32" / "ckpt")),
        *("--valid-data", str(tmp_path / "wiki.tokens"), "--results", str(tmp_path / "out.json")),
        *("--vocab-file", str(golden / "data" / "gpt2-tiny-vocab.json")),
        *("--merge-file", str(golden / "data" / "gpt2-tiny-merges.txt")),
    ]
    numbers = evaluate(Layout.single(), "WIKITEXT103", words)
    assert numbers["loss"] < math.log(5000)  # it was trained for 20 iterations


@pytest.mark.parametrize(
    ("flag", "task"), [("--cloze-eval", "LAMBADA"), ("--webtext-eval", "PERPLEXITY")]
)
def test_a_flag_of_2019_names_the_task_with_one_notice(toy, flag, task):
    words = _words(toy, "corpus.jsonl", flag)
    assert find_task(words) == task
    parsed = language_model.parse(task, words, 1)
    (notice,) = [line for line in parsed.notices if "old flag" in line]
    assert notice == f"{flag} is an old flag (2019), read as --task {task}"
    assert parsed.extra[0].task == task
    assert find_task(["--task", task, flag]) == task


@pytest.mark.parametrize(
    ("name", "meant"), [("sst2", "SST-2"), ("STSB", "STS-B"), ("LAMBDA", "LAMBADA")]
)
def test_a_task_that_is_spelled_differently(name, meant):
    with pytest.raises(ConfigError, match=f"no such task: did you mean {meant}\\?"):
        find_task(["--task", name])


@pytest.mark.parametrize(
    ("flag", "whose"), [("--epochs", "GLUE and RACE"), ("--lm-eval-limit", "LM_EVAL")]
)
def test_a_flag_of_other_tasks_says_whose_it_is(toy, flag, whose):
    with pytest.raises(ConfigError) as caught:
        language_model.parse("LAMBADA", _words(toy, "corpus.jsonl", flag, "1"), 1)
    assert caught.value.problems == [f"{flag} belongs to {whose}, but this is LAMBADA: drop it"]


def test_flags_of_megatron_without_a_field_belong_to_no_task(toy, tmp_path):
    (tmp_path / "run.yaml").write_text("training: {micro_batch_size: 3}\n")
    given = ["--config", str(tmp_path / "run.yaml"), "--lazy-mpu-init", "yes"]
    parsed = language_model.parse("LAMBADA", _words(toy, "corpus.jsonl", *given), 1)
    assert parsed.config.training.micro_batch_size == 3
    assert [line.split()[0] for line in parsed.notices] == ["--lazy-mpu-init:"]


@pytest.mark.parametrize(
    "flags",
    [["--cloze-eval", "--webtext-eval"], ["--task", "WIKITEXT103", "--cloze-eval"]],
)
def test_a_flag_of_2019_contradicts_another_task(flags):
    with pytest.raises(ConfigError, match=r"--cloze-eval.* name different tasks: give only one of"):
        find_task(flags)


@pytest.mark.parametrize("flag", ["--tas", "--taks", "--tasks"])
def test_a_misspelled_task_flag_is_reported_beside_the_missing_one(flag):
    with pytest.raises(ConfigError) as caught:
        find_task([flag, "LAMBADA", "--load", "x"])
    first, second = caught.value.problems
    assert first == f"unknown flag {flag}: did you mean --task?"
    assert second.startswith("--task is required: give one of WIKITEXT103")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--load is required"),
        (
            ["--valid-data", "/no", "/no"],
            "--valid-data /no: this file is given twice: give it once",
        ),
        (["--dry-run"], "--dry-run is for training: drop it"),
        (
            ["--tp-comm-overlap"],
            "--tp-comm-overlap splits matrix products only in training: drop it",
        ),
        (["--valid-data", "/no/such"], "--valid-data /no/such: no such file"),
        (["--context-parallel-size", "2"], "sequences are split only in training"),
        (
            ["--fp8-format", "hybrid"],
            "--fp8-format hybrid is for training; a trained model computes in 16 bits",
        ),
        (["--overwrite"], "--overwrite without --results: there is no file to replace"),
        (["--overlapping-eval", "0"], "--overlapping-eval 0: must be at least 1"),
        (["--strict-lambda"], "unknown flag --strict-lambda: did you mean --strict-lambada?"),
    ],
)
def test_mistakes_are_found_at_the_start(flags, message):
    with pytest.raises(ConfigError) as caught:
        language_model.parse("LAMBADA", flags, 1)
    assert message in str(caught.value)
    if "--valid-data" not in flags:
        assert "--task LAMBADA needs --valid-data" in str(caught.value)


def test_a_text_is_one_file_and_strictness_is_lambada_s(toy):
    two = _words(toy, "text.txt", str(toy / "corpus.jsonl"))
    strict = _words(toy, "corpus.jsonl", "--strict-lambada", "--overlapping-eval", "1")
    for task, words in (("PERPLEXITY", two), ("LAMBADA", two), ("LAMBADA", strict)):
        language_model.parse(task, words, 1)  # accepted
    for task, words, message in (
        ("WIKITEXT103", two, "reads a single file, but --valid-data names 2 files: give one"),
        ("PERPLEXITY", strict, "--strict-lambada belongs to --task LAMBADA, not PERPLEXITY"),
    ):
        with pytest.raises(ConfigError, match=message):
            language_model.parse(task, words, 1)


@pytest.mark.parametrize("task", ["LAMBADA", "PERPLEXITY"])
@pytest.mark.parametrize("flag", ["--retro-eval-samples", "--bert-embedder-load"])
def test_flags_of_a_retro_are_refused_for_a_gpt(toy, task, flag):
    with pytest.raises(ConfigError, match=f"{flag}.* is for --task PERPLEXITY with --retro-workd"):
        language_model.parse(task, _words(toy, "corpus.jsonl", flag, "3"), 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "1 2"}\n{"text": 3}\n', r'line 2: no text under "text"'),
        ('{"text": "1 2"}\n\n{', "line 3: not JSON: broken JSON"),
        ('{"text": "1 \\ud800"}\n', "line 1: not JSON: broken JSON .half a surrogate pair"),
        ('{"text": ""}\n', "passage 1 has no word to predict"),
        ('{"text": "5"}\n', "passage 1 has no context"),
        ("", "has no passages"),
    ],
)
def test_wrong_lines_are_named(toy, tmp_path, content, message):
    path = tmp_path / "wrong.jsonl"
    path.write_text(content)
    words = ["--load", str(toy / "model"), "--valid-data", str(path)]
    with pytest.raises(DataError, match=message):
        evaluate(Layout.single(), "LAMBADA", words)


def test_a_text_s_own_first_token_is_not_scored(tmp_path):
    class Beginning:
        """Letters after an initial 1."""

        eod = 0

        def tokenize_unterminated(self, text):
            return [1, *(ord(letter) for letter in text)]

    (tmp_path / "corpus.jsonl").write_text('{"text": "ab"}')
    paths = [str(tmp_path / "corpus.jsonl")]
    (sample,) = prepare_perplexity(paths, LanguageModelTaskConfig(), Beginning(), 16).samples
    assert sample.tokens.tolist() == [1, ord("a"), ord("b")]
    assert sample.scored == 2


def test_detokenizing_undoes_wikitext_s_and_ptb_s_tokenization():
    text = ' = Film = \n It cost 1 @,@ 500 , or " so " ( they 1 @-@ 2 ) it \'s N now . \n'
    assert wikitext(text) == ' = Film =\nIt cost 1,500, or "so" (they 1-2) it\'s 1 now.\n'
    assert ptb("it 's $ N now \n x do n't") == "it's $1 now\nx don't"


def test_a_pair_is_encoded_as_one_text():
    class Merging:
        """Characters, except that `ab` is one token and every text begins with 0."""

        def tokenize_unterminated(self, text):
            return [0, *(ord(sign) for sign in text.replace("ab", "c"))]

    assert encode_pair(Merging(), "xa", "y") == ([0, ord("x"), ord("a")], [ord("y")])
    assert encode_pair(Merging(), "xa", "b") == ([0, ord("x")], [ord("c")])
