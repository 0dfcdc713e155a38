"""RET-FINETUNE-NQ: questions learn to find their passages among wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.config import parse_config
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.tasks import towers
from megatron.tasks.classify import Epochs
from megatron.tasks.passages import ids_of_passage
from megatron.tasks.retrieval import LoadedTowers, load_towers
from megatron.tasks.towers import TrainingQuestions, read_labeled
from megatron.tokenizer import build_tokenizer
from megatron.training.build import build_run
from megatron.training.checkpointing import save_run
from pretrain_bert import BertRecipe
from pretrain_ict import ICTRecipe
from tests.distributed import as_given, run_distributed
from tests.tasks.toy import BERT, SAVING, WORDS

QUESTIONS, LENGTH = 12, 16


def entries(count: int = QUESTIONS) -> list[dict]:
    """Return questions that are their passages' first words. The third has no hard negatives."""
    random = np.random.RandomState(5)
    texts = [" ".join(random.choice(WORDS, 9)) for _ in range(count + 6)]
    passages = [{"title": f"w{i}", "text": text, "score": 1.5} for i, text in enumerate(texts)]
    return [
        {
            "question": " ".join(texts[i].split()[:4]) + "?",
            "answers": ["none"],
            "positive_ctxs": [passages[i], passages[-1]],
            "hard_negative_ctxs": [] if i == 2 else [passages[count + i % 3], passages[count + 3]],
            "negative_ctxs": [passages[count + 4], passages[count + 5]],
        }
        for i in range(count)
    ]


@pytest.fixture(name="toy", scope="module")
def make_toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    (folder / "train.json").write_text(json.dumps(entries(), indent=4))
    vocabulary = folder / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *WORDS, "?"]) + "\n")
    for kind, recipe in (("ict", ICTRecipe()), ("bert", BertRecipe())):
        words = [*BERT, *SAVING, "--save", str(folder / kind), "--vocab-file", str(vocabulary)]
        config = parse_config(words, world_size=1, architecture=kind).config
        save_run(build_run(config, recipe, Device.cpu(), Layout.single()))
    return folder


def words_of(toy: Path, *more: object) -> list[str]:
    data = str(toy / "train.json")
    words = ["--train-data", data, "--valid-data", data, "--epochs", 8, "--lr", "1e-2"]
    words += ["--retriever-seq-length", LENGTH, "--micro-batch-size", 4, "--eval-iters", 0]
    words += ["--retriever-report-topk-accuracies", 1, 3, "--log-interval", 1]
    words += ["--lr-decay-style", "constant", "--no-exit-signal-handler", "--num-workers", 0]
    return [*map(str, words), *map(str, more)]


TASK = "RET-FINETUNE-NQ"


def start(toy: Path) -> list[str]:
    return ["--pretrained-checkpoint", str(toy / "ict")]


NEGATIVES = ("--train-with-neg", "--train-hard-neg", 2)


def test_a_stopped_run_ends_as_the_uninterrupted_one(toy, tmp_path):
    words = [*words_of(toy, *NEGATIVES, "--epochs", 2), *start(toy)]
    whole, resumed = tmp_path / "whole.json", tmp_path / "resumed.json"
    assert towers.run(TASK, [*words, "--results", str(whole)], Launch()) == 0
    save = ["--save", str(tmp_path / "run"), "--results", str(resumed)]
    stop = ["--exit-interval", "4", "--save-interval", "4"]
    assert towers.run(TASK, [*words, *save, *stop], Launch()) == 0
    assert not resumed.exists()
    assert towers.run(TASK, [*words, *save, "--load", str(tmp_path / "run")], Launch()) == 0
    found = [json.loads(path.read_text())["results"] for path in (whole, resumed)]
    assert found[0] == found[1]


def test_it_learns_and_reports(toy, tmp_path, capsys):
    words = words_of(toy, *NEGATIVES, "--save", tmp_path / "run")
    assert towers.run(TASK, [*words, *start(toy)], Launch()) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith(TASK)]
    assert [line.split(":")[0] for line in lines] == [
        f"{TASK} at iteration {3 * epoch}" for epoch in range(1, 9)
    ]
    (path,) = (tmp_path / "run" / "evaluation").iterdir()
    content = json.loads(path.read_text())
    assert path.name == "ret-finetune-nq-iter_0000024.json"
    assert (content["iteration"], content["save"]) == (24, str(tmp_path / "run"))
    assert content["layout"] == Layout.single().describe()
    (found,) = content["results"].values()
    assert found.keys() == {"rank", "top1_acc", "top3_acc"}
    first = float(lines[0].split("rank ")[1].split()[0])
    assert found["rank"] < 0.7 * first < QUESTIONS + 6  # of that many passages
    correct = found["top3_acc"] * QUESTIONS / 100
    assert 0 < correct == pytest.approx(round(correct), abs=1e-3)
    assert "correct predictions" in said
    # The saved model is a bi-encoder like any other.
    parsed = towers.parse(TASK, [*words_of(toy), "--load", str(tmp_path / "run")], 1)
    loaded = load_towers(parsed.config, LENGTH, Device.cpu(), Layout.single())
    assert loaded.iteration == 24
    saved = sorted(path.name for path in (tmp_path / "run").glob("iter_*"))
    assert saved == [f"iter_{3 * epoch:07}" for epoch in range(1, 9)]


def test_the_towers_start_from_a_bert(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = words_of(toy, *NEGATIVES, "--bert-load", toy / "bert", "--epochs", 1)
    assert towers.run(TASK, words, Launch()) == 0
    assert "the towers start from" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())  # without --save or --results


def test_towers_of_another_network_are_refused(toy):
    words = [*words_of(toy), *start(toy), "--biencoder-projection-dim", "8"]
    with pytest.raises(CheckpointError, match="--biencoder-projection-dim is 8 here and 0 in the"):
        towers.run(TASK, words, Launch())


def _one_step(layout, words):
    """Return the loss and accuracy of a batch, and the evaluation before training."""
    parsed = towers.parse(TASK, words, layout.world.size)
    config, recipe, extras = towers.prepare(parsed, layout.world.size)
    run = build_run(config, recipe, Device.cpu(), as_given(layout, config))
    extras.begin(run)
    numbers = extras.evaluate_all(run)
    batch = 8 // layout.data.size
    dataset = recipe.build_datasets(config, run.tokenizer, (24, 0, 0), layout)[0]
    mine = range(layout.data.rank * batch, (layout.data.rank + 1) * batch)
    samples = [dataset[i] for i in mine]
    tensors = {name: torch.tensor(np.stack([s[name] for s in samples])) for name in samples[0]}
    (part,) = run.parts
    part.eval()
    found = recipe.forward(part, tensors, None, config, run.tokenizer, layout)
    return [found[name].item() for name in recipe.loss_names(config)], numbers


def _ranks(loaded: LoadedTowers, path: Path) -> np.ndarray:
    """Return how many passages of its group of 4 questions beat each question's own passage."""
    ranks, tokenizer = [], loaded.tokenizer
    questions = read_labeled(str(path), "--valid-data", None, 9)
    for first in range(0, len(questions), 4):
        group = questions[first : first + 4]
        passages = [one.positive for one in group]
        passages += [text for one in group for text in (*one.hard_negatives, *one.negatives)]
        texts = [ids_of_passage(*passage, tokenizer) for passage in passages]
        asked = [tokenizer.tokenize_with_special(one.text) for one in group]
        vectors = loaded.vectors(loaded.model.contexts, texts)
        scores = loaded.vectors(loaded.model.queries, asked) @ vectors.T
        ranks += [(row > row[i]).sum() for i, row in enumerate(scores)]
    return np.array(ranks)


def test_loss_and_ranks_are_those_of_every_pair_in_any_layout(toy, monkeypatch):
    words = [*words_of(toy, *NEGATIVES, "--global-batch-size", 8), *start(toy)]
    words += ["--retriever-score-scaling", "--seed", "5"]  # scaling by 1/sqrt(16)
    words += ["--hidden-dropout", "0.5"]  # not in evaluations
    monkeypatch.setattr(towers, "_EMBED_BATCH", 3)
    losses, numbers = _one_step(Layout.single(), words)
    for tensor in (1, 2):
        split = [*words, "--tensor-model-parallel-size", str(tensor)]
        other, same = run_distributed(2, _one_step, split, tensor=tensor)[0]
        assert other == pytest.approx(losses, rel=1e-5)
        assert same == numbers
    # By hand: each question against all ranks' passages and negatives, with the saved weights.
    config, recipe, _ = towers.prepare(towers.parse(TASK, words, 1), 1)
    saved = towers.parse(TASK, [*words_of(toy), "--load", str(toy / "ict")], 1).config
    loaded = load_towers(saved, LENGTH, Device.cpu(), Layout.single())
    dataset = recipe.build_datasets(config, loaded.tokenizer, (24, 0, 0), Layout.single())[0]
    part = loaded.model
    right, wrong, queries = [], [], []
    with torch.no_grad():
        for i in range(8):
            sample = {name: torch.tensor(value) for name, value in dataset[i].items()}
            query = (sample["query_tokens"][None], sample["query_pad_mask"][None].bool())
            queries.append(part.queries.encode(*query)[0])
            for place, mask in enumerate(sample["context_pad_mask"]):
                if mask.any():
                    one = (sample["context_tokens"][place][None], mask[None].bool())
                    (wrong if place else right).append(part.contexts.encode(*one)[0])
    scores = torch.stack(queries) @ torch.stack([*right, *wrong]).t() / 4
    loss, correct = F.cross_entropy(scores, torch.arange(8)), scores.argmax(1) == torch.arange(8)
    assert losses == pytest.approx([loss.item(), 100 * correct.float().mean().item()], rel=1e-4)
    assert 0 < losses[1] < 100
    ranks = _ranks(loaded, toy / "train.json")
    shares = [100 * (ranks < top).mean() for top in (1, 3)]
    (found,) = numbers.values()
    assert [*found.values()] == pytest.approx([ranks.mean(), *shares])


def test_wrong_passages_are_drawn_anew_and_stood_in_for(toy):
    config = towers.parse(TASK, [*words_of(toy), *start(toy)], 1).config
    tokenizer = build_tokenizer(config.tokenizer)
    questions = read_labeled(str(toy / "train.json"), "--train-data", None, 1)
    assert not questions[0].text.endswith("?")
    assert [len(questions[i].hard_negatives) for i in (0, 2)] == [2, 0]
    assert len(questions[0].negatives) == 1
    order = Epochs(range(QUESTIONS), seed=1, length=200)
    dataset = TrainingQuestions(questions, tokenizer, LENGTH, order, negatives=2, seed=1)
    drawn = set()
    for i in range(200):
        sample, question = dataset[i], questions[order[i]]
        tokens = sample["context_tokens"]
        texts = [tokenizer.detokenize(row[row != tokenizer.pad].tolist()) for row in tokens]
        assert texts[0] == f"[CLS] {question.positive[0]} [SEP] {question.positive[1]} [SEP]"
        if order[i] == 2:
            assert (
                texts[1]
                == f"[CLS] {question.negatives[0][0]} [SEP] {question.negatives[0][1]} [SEP]"
            )
            assert sample["context_pad_mask"].any(1).tolist() == [True, True, False]
        else:
            drawn.add((order[i], texts[1]))
    assert len(drawn) == 2 * (QUESTIONS - 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "not a JSON list of questions in DPR's format: give such a file"),
        ("[]", "the file has no questions"),
        ("[{]", "or truncated: fix the file"),
        ('[{"question": "a"}', r'entry 1 has no passages in "positive_ctxs"'),
        ('[{"positive_ctxs": []}]', 'entry 1 has no "question"'),
        ("[3]", 'entry 1 has no "question"'),
        ('[{"question": "a", "positive_ctxs": [{"title": "b"}]}]', 'entry 1: "positive_ctxs" is'),
        ('[{"question": "a", "positive_ctxs": 3}]', 'entry 1: "positive_ctxs" is not a list'),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_broken_files_are_reported_by_entry(tmp_path, text, said):
    path = tmp_path / "nq.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"--train-data .*nq.json.*{said}"):
        read_labeled(str(path), "--train-data", None, 0)
    with pytest.raises(DataError, match="no.json: cannot be read"):
        read_labeled(str(tmp_path / "no.json"), "--train-data", None, 0)


def test_wrong_passages_are_read_only_if_they_are_trained_on(toy):
    for more, hard, other in (((), 0, 0), (NEGATIVES, 2, 2)):
        parsed = towers.parse(TASK, [*words_of(toy, *more), *start(toy)], 1)
        _, recipe, _ = towers.prepare(parsed, 1)
        question = recipe._train[0]
        assert (len(question.hard_negatives), len(question.negatives)) == (hard, other)


@pytest.mark.parametrize(("more", "ends"), [([], {1, 2, 3}), (["--keep-last"], {2, 3, 5})])
def test_an_epoch_ends_with_a_full_batch_or_with_its_last_question(toy, more, ends):
    words = [*words_of(toy, "--epochs", 3, "--global-batch-size", 8), *start(toy), *more]
    config, _, extras = towers.prepare(towers.parse(TASK, words, 1), 1)
    assert (config.training.train_iters, extras._ends) == (max(ends), ends)


@pytest.mark.parametrize(
    ("words", "length", "is_refused"),
    [("", 15, False), ("--sequence-parallel", 16, False), ("--sequence-parallel", 15, True)],
)
def test_split_sequences_are_split_evenly(toy, words, length, is_refused):
    given = [*words_of(toy), *start(toy), "--tensor-model-parallel-size", "2", *words.split()]
    given += ["--retriever-seq-length", str(length)]
    if is_refused:
        with pytest.raises(ConfigError, match="15: --sequence-parallel needs a multiple of 2"):
            towers.parse(TASK, given, 2)
    else:
        towers.parse(TASK, given, 2)


def test_a_dry_run_of_many_processes(toy, capsys):
    words = ["--dry-run", "--dry-run-world-size", "2", "--global-batch-size", "8"]
    assert towers.run(TASK, [*words_of(toy), *start(toy), *words], Launch()) == 0
    assert "DP 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", "0"], "needs --epochs: give a number of at least 1"),
        (["--train-with-neg"], "--train-with-neg needs --train-hard-neg"),
        (["--train-hard-neg", "3"], "--train-hard-neg 3: add --train-with-neg"),
        (["--train-data", "no"], "--train-data no: no such file"),
        (["--retriever-seq-length", "25"], "--retriever-seq-length 25: the model has 24 positions"),
        (["--qa-data-dev", "x"], "--qa-data-dev belongs to RETRIEVER-EVAL"),
        (["--train-iters", "9"], "--epochs sets the length of training: drop --train-iters"),
    ],
)
def test_mistakes_are_reported_by_flag(toy, words, said):
    with pytest.raises(ConfigError, match=said):
        towers.parse(TASK, [*words_of(toy), *start(toy), *words], 1)


def test_existing_results_are_refused_before_the_training(toy, tmp_path, capsys):
    (tmp_path / "out.json").write_text("mine")
    words = [*words_of(toy), *start(toy), "--results", str(tmp_path / "out.json")]
    with pytest.raises(ConfigError, match="out.json already exists"):
        towers.run(TASK, words, Launch())
    assert "iteration" not in capsys.readouterr().out


def test_results_need_questions_to_evaluate_on(toy):
    words = ["--train-data", toy / "train.json", "--epochs", 1, *start(toy), "--results", "x"]
    with pytest.raises(ConfigError) as caught:
        towers.parse(TASK, [*map(str, words)], 1)
    assert "--results x without --valid-data: nothing is evaluated" in str(caught.value)
    assert "needs --train-data" not in str(caught.value)
    with pytest.raises(ConfigError, match="needs --train-data: give a file of questions"):
        towers.parse(TASK, [*map(str, words[2:])], 1)


def test_a_start_is_required(toy):
    with pytest.raises(ConfigError, match="--pretrained-checkpoint is required"):
        towers.parse(TASK, words_of(toy), 1)
