"""RETRIEVER-EVAL: each passage is embedded once, the best are found, and answers are counted."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.config import parse_config
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.tasks import retrieval
from megatron.tasks.passages import PassageVectors, Question, read_passages, read_questions
from megatron.tasks.table import find_task
from megatron.training.build import build_run
from megatron.training.checkpointing import save_run
from pretrain_ict import ICTRecipe
from tests.distributed import as_given, run_distributed
from tests.tasks.toy import BERT, SAVING, WORDS, save_toy

COUNT = 23


def write_files(folder: Path) -> None:
    """Write passages of random words, and the first nine passages' own texts as questions."""
    random = np.random.RandomState(3)
    texts = [" ".join(random.choice(WORDS, 12)) for _ in range(COUNT)]
    lines = [f'{100 + i}\t"{text} ""end{i:02}"""\tw{i}' for i, text in enumerate(texts)]
    (folder / "passages.tsv").write_text("id\ttext\ttitle\n" + "\n".join(lines) + "\n")
    questions = [f"{texts[i]}\t['none', \"end{i:02}\"]" for i in range(9)]
    (folder / "dev.tsv").write_text("\n".join(questions) + "\n")
    (folder / "test.tsv").write_text("w1 w2\t['not here']\n")


@pytest.fixture(name="toy", scope="module")
def make_toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval")
    write_files(folder)
    vocabulary = folder / "vocab.txt"
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "a", "b", "c", "d"]
    vocabulary.write_text("\n".join(entries) + "\n")
    for name, more in (("ict", []), ("small", ["--biencoder-projection-dim", "6"])):
        words = [*BERT, *SAVING, "--save", str(folder / name), "--vocab-file", str(vocabulary)]
        words += ["--biencoder-shared-query-context-model", *more]
        config = parse_config(words, world_size=1, architecture="ict").config
        save_run(build_run(config, ICTRecipe(), Device.cpu(), Layout.single()))
    return folder


def words_of(toy: Path, *more: str, model: str = "ict") -> list[str]:
    return [
        *("--load", str(toy / model), "--evidence-data-path", str(toy / "passages.tsv")),
        *("--retriever-seq-length", "24", *more),
    ]


def evaluate(layout: Layout, words: list[str]):
    parsed = retrieval.parse("RETRIEVER-EVAL", words, layout.world.size)
    layout = as_given(layout, parsed.config)
    return retrieval.evaluate("RETRIEVER-EVAL", parsed, Device.cpu(), layout)


def by_hand(toy: Path, model: str, k: int) -> list[float]:
    """Return the accuracies of the best 1 to k passages, from all pairs' inner products."""
    parsed = retrieval.parse(
        "RETRIEVER-EVAL", words_of(toy, "--qa-data-dev", str(toy / "dev.tsv"), model=model), 1
    )
    loaded = retrieval.load_towers(parsed.config, 24, Device.cpu(), Layout.single())
    tower, tokenizer = loaded.model.queries, loaded.tokenizer

    def vector(*texts):
        ids = [tokenizer.cls]
        for text in texts:
            ids += [*tokenizer.tokenize(text), tokenizer.sep]
        ids = ids if len(ids) <= 24 else [*ids[:23], tokenizer.sep]
        with torch.no_grad():
            return tower.encode(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool))[0]

    passages = list(read_passages(str(toy / "passages.tsv")))
    contexts = torch.stack([vector(one.title, one.text) for one in passages]).half().float()
    places = []
    for i, question in enumerate(read_questions(str(toy / "dev.tsv"), "--qa-data-dev")):
        order = (contexts @ vector(question.text)).argsort(descending=True).tolist()
        places.append(order.index(i))
    return [100 * sum(place < top for place in places) / 9 for top in range(1, k + 1)]


@pytest.mark.parametrize("model", ["ict", "small"])
@pytest.mark.parametrize(
    ("processes", "tensor", "more"),
    [(1, 1, ""), (2, 1, ""), (2, 2, "--sequence-parallel"), (2, 1, "--faiss-match regex")],
)
def test_accuracies_are_those_of_every_pair(toy, tmp_path, model, processes, tensor, more):
    words = ["--qa-data-dev", str(toy / "dev.tsv"), "--indexer-batch-size", "4", *more.split()]
    words += ["--retriever-report-topk-accuracies", "1", "2", "3", "4", "5", "50"]
    words += ["--tensor-model-parallel-size", str(tensor), "--results", str(tmp_path / "out.json")]
    words = words_of(toy, *words, model=model)
    if processes == 1:
        numbers = evaluate(Layout.single(), words)
    else:
        numbers, others = run_distributed(processes, evaluate, words, tensor=tensor)
        assert others == {}
    expected = by_hand(toy, model, 5)
    assert [numbers[f"dev top-{k}"] for k in range(1, 6)] == pytest.approx(expected)
    assert numbers["dev questions"] == 9
    assert numbers[f"dev top-{COUNT}"] == 100  # of 50: there are no more passages
    assert json.loads((tmp_path / "out.json").read_text())["results"]["dev_questions"] == 9
    assert [path.name for path in toy.iterdir() if "vectors" in path.name] == []


def test_vectors_are_kept_and_used_again(toy, tmp_path, capsys):
    path = tmp_path / "vectors.npz"
    words = words_of(toy, "--embedding-path", str(path))
    assert evaluate(Layout.single(), words) == {}
    held, _ = PassageVectors.load(path)
    assert held.ids.tolist() == list(range(100, 100 + COUNT))
    assert held.vectors.shape == (COUNT, 16)
    before = path.stat().st_mtime_ns
    words += ["--qa-data-dev", str(toy / "dev.tsv"), "--qa-data-test", str(toy / "test.tsv")]
    words += ["--results", str(tmp_path / "out.json")]
    numbers = evaluate(Layout.single(), words)
    assert path.stat().st_mtime_ns == before
    assert "23 vectors for these passages and this model" in capsys.readouterr().out
    assert numbers["test top-1"] == 0
    tops = ("questions", "top-1", "top-5", "top-20", f"top-{COUNT}")
    assert list(numbers) == [f"{split} {top}" for split in ("dev", "test") for top in tops]
    other = words_of(toy, "--embedding-path", str(path), model="small")
    run_distributed(2, evaluate, other)
    assert "replacing vectors" in capsys.readouterr().out or path.stat().st_mtime_ns != before
    assert PassageVectors.load(path)[0].vectors.shape == (COUNT, 6)


def _evaluate_with_a_slow_rank(layout: Layout, words: list[str]) -> dict[str, float]:
    save = PassageVectors.save

    def save_late(self: PassageVectors, path: Path, origin: object) -> None:
        time.sleep(0.5 * layout.world.rank)
        save(self, path, origin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassageVectors, "save", save_late)
        return evaluate(layout, words)


def test_vectors_are_joined_when_the_slowest_rank_has_written_its_own(toy, tmp_path):
    path = tmp_path / "vectors.npz"
    words = words_of(toy, "--embedding-path", str(path), "--indexer-batch-size", "4")
    run_distributed(2, _evaluate_with_a_slow_rank, words)
    assert sorted(PassageVectors.load(path)[0].ids) == list(range(100, 100 + COUNT))


def test_the_progress_of_embedding_is_reported_at_an_interval(toy, capsys):
    words = ["--indexer-batch-size", "4", "--indexer-log-interval", "2"]
    evaluate(Layout.single(), words_of(toy, *words, "--qa-data-test", str(toy / "test.tsv")))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("> ")]
    assert said == ["> batch 2, passage 8", "> batch 4, passage 16"]  # of 6 batches


def test_a_search_on_gpus_needs_a_library_for_gpus(monkeypatch):
    faiss = pytest.importorskip("faiss")
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0, raising=False)
    vectors = PassageVectors(np.arange(2), np.zeros((2, 1), np.float16))
    with pytest.raises(ConfigError, match="--faiss-use-gpu: this build of the package faiss does"):
        retrieval.search(vectors, np.ones((1, 1), np.float32), 1, use_gpu=True)
    monkeypatch.delattr(faiss, "get_num_gpus")
    with pytest.raises(ConfigError, match="--faiss-use-gpu: this build of the package faiss does"):
        retrieval.search(vectors, np.ones((1, 1), np.float32), 1, use_gpu=True)


@pytest.mark.parametrize(("size", "columns"), [(1, 6), (2, 6), (4, 8), (5, 10)])
def test_texts_can_be_shared_by_sequence_parallel_ranks(size, columns):
    """All ranks get equal parts of a text, whose padding is not attended to."""
    seen = []

    def encode(tokens, mask):
        seen.append((tokens, mask))
        return torch.zeros(len(tokens), 3)

    tokenizer = SimpleNamespace(cls=1, sep=2, pad=9)
    layout = SimpleNamespace(sequence=SimpleNamespace(size=size))
    towers = retrieval.LoadedTowers(None, tokenizer, 0, layout, Device.cpu(), 8)
    assert towers.vectors(SimpleNamespace(encode=encode), [[4, 5, 6, 7], [8]]).shape == (2, 3)
    ((tokens, mask),) = seen
    assert tokens.shape == mask.shape == (2, columns)
    assert tokens[0].tolist() == [1, 4, 5, 6, 7, 2, *[9] * (columns - 6)]
    assert mask.sum(1).tolist() == [6, 3]


def test_a_file_that_is_not_of_vectors_is_not_overwritten(toy, tmp_path):
    path = tmp_path / "vectors.pkl"
    path.write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="Megatron-LM's pickles are not read"):
        evaluate(Layout.single(), words_of(toy, "--embedding-path", str(path)))
    assert path.read_bytes() == b"\x80\x04."


@pytest.mark.parametrize(
    ("ids", "vectors"),
    [
        (np.arange(9, dtype=np.int32), np.ones((9, 4), "f2")),
        (np.arange(9), np.ones((9, 4), "f4")),
        (np.arange(9), np.ones(9, "f2")),
        (np.arange(8), np.ones((9, 4), "f2")),
    ],
)
def test_vectors_of_another_kind_or_number_are_refused(tmp_path, ids, vectors):
    PassageVectors(ids, vectors).save(tmp_path / "vectors.npz", {"length": 8})
    with pytest.raises(ConfigError, match="--embedding-path .*: .*unexpected arrays"):
        PassageVectors.load(tmp_path / "vectors.npz")


def test_all_of_many_passages_are_searched():
    count = (1 << 17) + 5
    vectors = PassageVectors(10 * np.arange(count), np.zeros((count, 1), np.float16))
    for i in (0, 1 << 16, (1 << 17) - 1, count - 1):
        vectors.vectors[i] = 1 + i / count
    found = retrieval.search(vectors, np.ones((1, 1), np.float32), 4)
    assert found.tolist() == [[10 * i for i in (count - 1, (1 << 17) - 1, 1 << 16, 0)]]


def test_fp32_weights_are_evaluated_in_bf16(toy):
    words = words_of(toy, "--bf16", "--qa-data-dev", str(toy / "dev.tsv"))
    parsed = retrieval.parse("RETRIEVER-EVAL", words, 1)
    loaded = retrieval.load_towers(parsed.config, 24, Device.cpu(), Layout.single())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert not loaded.model.training


def test_results_are_beside_the_checkpoint_unless_a_file_is_named(toy):
    numbers = evaluate(Layout.single(), words_of(toy, "--qa-data-test", str(toy / "test.tsv")))
    (path,) = (toy / "ict" / "evaluation").iterdir()
    assert json.loads(path.read_text())["results"]["test_top-1"] == numbers["test top-1"]


@pytest.mark.parametrize("damage", ["array", "origin", "compressed"])
def test_damaged_vectors_are_refused(tmp_path, damage):
    path, sound = tmp_path / "vectors.npz", PassageVectors(np.arange(9), np.ones((9, 4), "f2"))
    sound.save(path, {"length": 8})
    if damage == "array":
        with path.open("wb") as file:
            np.save(file, np.arange(3))
    elif damage == "origin":
        np.savez(path, **sound._asdict(), origin=np.array("[1]"))
    else:
        np.savez_compressed(path, **sound._asdict(), origin=np.array("{}"))
        content = path.read_bytes()
        path.write_bytes(content[:60] + bytes(30) + content[90:])
    with pytest.raises(ConfigError, match="--embedding-path .*: give the path of a new file"):
        PassageVectors.load(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\tonly text", "line 2: expected a number, a text and a title.* found 2 columns"),
        ("x\ttext\ttitle", "line 2: expected a number"),
        ("9223372036854775808\ttext\ttitle", "line 2: expected a number"),  # beyond int64
        ("", "there are no passages|found 0 columns"),
    ],
)
def test_broken_passages_are_refused(tmp_path, line, message):
    (tmp_path / "p.tsv").write_text(f"id\ttext\ttitle\n{line}")
    with pytest.raises(DataError, match=message):
        list(read_passages(str(tmp_path / "p.tsv")))


@pytest.mark.parametrize(
    "line",
    [
        *("who?", "who?\tme", "who?\t{'me'}", "who?\t[1]", "who?\t{[]: 1}"),
        "who?\t__import__('os').getcwd()",
    ],
)
def test_broken_questions_are_refused_and_never_executed(tmp_path, line):
    (tmp_path / "q.tsv").write_text(line + "\n")
    with pytest.raises(DataError, match="line 1: expected a question, a tab and a list"):
        read_questions(str(tmp_path / "q.tsv"), "--qa-data-dev")


def test_two_passages_of_one_number_are_refused():
    one = PassageVectors(np.array([3, 5]), np.zeros((2, 4), np.float16))
    two = PassageVectors(np.array([4, 5]), np.zeros((2, 4), np.float16))
    with pytest.raises(DataError, match="passage 5 occurs twice"):
        PassageVectors.joined([one, two])


def test_the_first_passage_that_answers_counts():
    found = np.array([[2, 1, 3], [1, 3, 2]])
    questions = [Question("", ("b",)), Question("", ("z",))]
    texts = {1: "a b", 2: "a", 3: "b"}
    hits = retrieval.first_hits(found, questions, texts, lambda text, all_: all_[0] in text)
    assert hits == [1, 3]


def test_results_of_others_are_refused_before_the_work(toy, tmp_path, monkeypatch):
    started, noted = [], []

    def processes(config, launch):
        started.append(launch)
        return nullcontext((Device.cpu(), Layout.single()))

    monkeypatch.setattr(retrieval, "processes", processes)
    monkeypatch.setattr(retrieval, "print_notices", lambda notices, _: noted.append(notices))
    result = tmp_path / "results.json"
    words = words_of(toy, "--qa-data-dev", str(toy / "dev.tsv"), "--results", str(result))
    assert retrieval.run("RETRIEVER-EVAL", words, Launch()) == 0
    assert len(noted) == 1
    assert json.loads(result.read_text())["task"] == "RETRIEVER-EVAL"
    with pytest.raises(ConfigError, match="results.json already exists"):
        retrieval.run("RETRIEVER-EVAL", words, Launch())
    assert started == [Launch()]
    own = [*words, "--overwrite", "--results", str(toy / "passages.tsv")]
    with pytest.raises(ConfigError, match=r"passages.tsv"):
        retrieval.run("RETRIEVER-EVAL", own, Launch())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --evidence-data-path"),
        (["--evidence-data-path", "none.tsv"], "none.tsv: no such file"),
        (["--evidence-data-path", __file__], "has nothing to do"),
        (["--evidence-data-path", __file__, "--qa-data-dev", "no"], "--qa-data-dev no: no such"),
        (["--valid-data", "x"], "--valid-data: --task RETRIEVER-EVAL reads questions from --qa-d"),
        (["--epochs", "3"], "--epochs belongs to GLUE and RACE, but this is RETRIEVER-EVAL"),
        (["--train-with-neg"], "--train-with-neg belongs to RET-FINETUNE-NQ, but this is RETR"),
    ],
)
def test_mistakes_on_the_command_line(toy, words, message):
    with pytest.raises(ConfigError, match=message):
        retrieval.parse("RETRIEVER-EVAL", ["--load", str(toy / "ict"), *words], 1)


def test_texts_beyond_the_positions_are_refused(toy):
    words = words_of(toy, "--qa-data-dev", str(toy / "dev.tsv"))
    words[words.index("24")] = "256"
    with pytest.raises(ConfigError, match="--retriever-seq-length 256: the model has 24 positions"):
        evaluate(Layout.single(), words)


def test_another_network_is_refused(toy, tmp_path):
    folder = save_toy(str(tmp_path / "gpt"))
    words = ["--load", folder, "--evidence-data-path", str(toy / "passages.tsv")]
    with pytest.raises(CheckpointError, match="holds a gpt, but an ict is needed"):
        retrieval.parse("RETRIEVER-EVAL", words, 1)


def test_names_of_tasks():
    assert find_task(["--task", "ICT-ZEROSHOT-NQ"]) == "ICT-ZEROSHOT-NQ"
    assert find_task(["--task", "RET-FINETUNE-NQ"]) == "RET-FINETUNE-NQ"
