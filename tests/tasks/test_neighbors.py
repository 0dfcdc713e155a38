"""Retro's perplexity with right, shuffled and no neighbors, on Megatron-LM's recorded run."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.config import parse_config
from megatron.config.tasks import LanguageModelTaskConfig, TaskConfig
from megatron.data.datasets import DataRequest
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.inference.load import load_gpt
from megatron.inference.score import Sample, Score, windows
from megatron.parallel.layout import Layout
from megatron.retro.blocks import plan_blocks, write_block
from megatron.retro.dataset import NoNeighbors
from megatron.retro.neighbors import neighbors_folder, query_datasets
from megatron.retro.retriever import open_retriever
from megatron.tasks import language_model, neighbors
from megatron.tasks.language_model import Prepared
from megatron.tasks.neighbors import validation_samples
from megatron.training.checkpointing import save_run
from tests.distributed import run_distributed
from tests.retro.corpus import EOD, VOCAB, random_documents, write_dataset
from tests.tasks.toy import SAVING, evaluate, save_toy
from tests.training.toy import FLAGS_BY_KIND, TOY, build_toy
from tools.benchmark_retro_training import make_folder

WORDS = "--load retro_fp32/ckpt --retro-workdir retro_fp32/workdir --retro-eval-samples 32".split()


class Rows:
    """A table whose chunk i has the neighbors 10 i and 10 i + 1."""

    def __len__(self):
        return 5

    def rows(self, start, stop):
        return 10 * np.arange(start, stop)[:, None] + np.arange(2)


def test_no_chunk_has_neighbors():
    assert NoNeighbors(Rows()).rows(1, 3).tolist() == [[-1, -1], [-1, -1]]


def test_every_whole_chunk_of_a_text_gets_neighbors(monkeypatch):
    class Retriever:
        texts = "their texts"

        def find(self, chunks):
            return chunks[:, :2] * 10

    monkeypatch.setattr(neighbors, "open_retriever", lambda *_: Retriever())
    model = SimpleNamespace(chunk_length=4, retro_num_neighbors=2)
    loaded = SimpleNamespace(
        config=SimpleNamespace(model=model), layout=Layout.single(), tokenizer=None
    )
    samples = [Sample(range(start, start + length), 1) for start, length in ((0, 10), (20, 6))]
    prepared = Prepared(samples, lambda _: {}, "two texts", {})
    scored = neighbors._with_neighbors(prepared, loaded, Device.cpu(), None)
    assert scored.rows == [(0, 2), (2, 3)]
    assert scored.table.rows(0, 3).tolist() == [[0, 10], [40, 50], [200, 210]]
    assert scored.data == "two texts, 3 chunks with 2 neighbors"
    samples.insert(0, Sample(range(4), 1))
    scored = neighbors._with_neighbors(prepared, loaded, Device.cpu(), None)
    assert scored.rows == [(0, 0), (0, 2), (2, 3)]  # a text without a whole chunk is scored too
    only = Prepared([Sample(range(5), 1)], lambda _: {}, "a text", {})
    assert neighbors._with_neighbors(only, loaded, Device.cpu(), None).rows == [(0, 1)]
    short = Prepared([Sample(range(4), 1)], lambda _: {}, "a text", {})
    with pytest.raises(DataError, match="none of the texts has a whole chunk of 4 tokens"):
        neighbors._with_neighbors(short, loaded, Device.cpu(), None)


def test_validation_samples_are_scored_after_their_first_token(monkeypatch):
    class Samples:
        samples = tuple({"text": range(start, start + 9)} for start in (0, 100, 200))
        chunks_per_sample, table, texts = 2, "their table", "their texts"

        def __len__(self):
            return len(self.samples)

    monkeypatch.setattr(neighbors, "validation_samples", lambda *_: Samples())
    config = SimpleNamespace(
        data=SimpleNamespace(seq_length=8, retro_workdir="folder"),
        model=SimpleNamespace(retro_num_neighbors=5),
    )
    loaded = SimpleNamespace(config=config, layout=None, tokenizer=None)
    scored = neighbors._validation(loaded, 2)
    assert scored.samples == [Sample(range(9), 8), Sample(range(100, 109), 8)]
    assert scored.rows == [(0, 2), (2, 4)]
    assert scored.data == "folder: 2 of 3 validation samples, 4 chunks with 5 neighbors"
    numbers = scored.summarize([Score(-10.0, False), Score(-6.0, True)])
    assert numbers == {"loss": 1.0, "perplexity": math.e, "tokens": 16}
    assert scored.summarize([Score(-1e5, False)] * 2)["perplexity"] == math.inf
    assert [len(neighbors._validation(loaded, most).samples) for most in (None, 9)] == [3, 3]


@pytest.fixture(scope="module")
def toy_flags(tmp_path_factory):
    """Return the flags of an untrained toy Retro, with a folder for 24 validation samples."""
    folder = tmp_path_factory.mktemp("retro")
    documents = [[*document.tolist(), EOD] for document in random_documents(60)]
    prefix = write_dataset(folder / "corpus", documents)
    flags = [word for word in TOY if word != "--mock-data"]
    flags += [*FLAGS_BY_KIND["retro"], "--split", "80,20,0", "--no-exit-signal-handler"]
    flags += ["--data-path", prefix]
    work = folder / "work"
    make_folder(work, folder / "corpus", flags, 6, VOCAB + 1, 4)
    config = parse_config(["--train-iters", "6", *flags], world_size=1).config
    arguments = json.loads((work / "args.json").read_text())
    request = DataRequest(config.data, arguments["retro_gpt_seed"], (24, 24, 0))
    valid = query_datasets(request, seq_length=16, vocab_size=VOCAB + 1)[1]
    count = len(valid) * 4
    for block in plan_blocks(neighbors_folder(work, "valid", valid), count, count):
        write_block(block, {"neighbors": np.arange(4 * count).reshape(count, 4) % 97})
    told = {"global_batch_size": 4, "train_iters": 6, "train_samples": None}
    told |= {"retro_gpt_eval_interval": 3, "retro_gpt_eval_iters": 2}
    (work / "args.json").write_text(json.dumps(arguments | told))
    words = ["--retro-workdir", str(work)]
    run_words = [*SAVING, "--save", str(folder / "toy"), *words, "--split", "80,20,0"]
    save_run(build_toy(Layout.single(), run_words, "retro"))
    return ["--load", str(folder / "toy"), *words]


@torch.no_grad()
def test_the_loss_of_validation_samples_is_the_model_s(toy_flags):
    words = [*toy_flags, "--retro-eval-samples", "3"]
    numbers = evaluate(Layout.single(), "PERPLEXITY", words)
    config, layout = language_model.parse("PERPLEXITY", words, 1).config, Layout.single()
    loaded = load_gpt(toy_flags[1], Device.cpu(), layout, config=config, kinds=("retro",))
    dataset = validation_samples(config, loaded.tokenizer, layout)
    assert len(dataset) == 25  # 24 and a reserve
    losses = []
    for i in range(3):
        text, found = (torch.from_numpy(dataset[i][name]) for name in ("text", "neighbors"))
        (logits,) = loaded.model(text[None, :-1].long(), found[None])
        losses.append(F.cross_entropy(logits[:, : VOCAB + 1], text[1:].long()).item())
    assert numbers["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert numbers["tokens"] == 3 * 16
    others = {numbers["loss, shuffled neighbors"], numbers["loss, no neighbors"]}
    assert len(others | {numbers["loss"]}) == 3


def test_a_folder_without_validation_samples_is_refused(toy_flags, tmp_path):
    work = Path(shutil.copytree(toy_flags[3], tmp_path / "work"))
    told = json.loads((work / "args.json").read_text()) | {"retro_gpt_eval_iters": 0}
    (work / "args.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=f"--retro-workdir {work} was made without validation"):
        evaluate(Layout.single(), "PERPLEXITY", [*toy_flags[:3], str(work)])


def test_flags_of_a_retro_s_perplexity(toy_flags, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("1 2 3")
    words = [*toy_flags, "--valid-data", str(texts)]
    for given in (toy_flags, words, [*words, "--bert-embedder-load", "bert"]):
        parsed = language_model.parse("PERPLEXITY", given, 1)
        assert parsed.config.model.architecture == "retro"
    for given, message in (
        ([*words, "--retro-eval-samples", "3"], "--retro-eval-samples is for .* without --valid"),
        ([*toy_flags, "--bert-embedder-load", "b"], "--bert-embedder-load b is for .* and --valid"),
        (toy_flags[:2], "--retro-workdir is required"),
    ):
        with pytest.raises(ConfigError, match=message):
            language_model.parse("PERPLEXITY", given, 1)
    with pytest.raises(CheckpointError, match="holds a retro, but a gpt is needed"):
        language_model.parse("LAMBADA", toy_flags[:2], 1)


def test_texts_are_scored_with_the_neighbors_that_are_found(toy_flags, tmp_path, monkeypatch):
    asked = []

    class Retriever:
        def __init__(self, dataset):
            self.texts = dataset.texts

        def find(self, chunks):
            return np.tile([1, 2], (len(chunks), 1))

    def open_toy(config, tokenizer, device, embedder):
        asked.append(embedder)
        return Retriever(validation_samples(config, tokenizer, Layout.single()))

    monkeypatch.setattr(neighbors, "open_retriever", open_toy)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": " ".join(map(str, range(1, 12)))}) + "\n")
    words = [*toy_flags, "--valid-data", str(texts), "--bert-embedder-load", "bert"]
    numbers = evaluate(Layout.single(), "PERPLEXITY", words)
    assert asked == ["bert"]
    assert (numbers["tokens"], numbers["documents"], numbers["neighbors found"]) == (11, 1, 1.0)
    assert numbers["loss"] != numbers["loss, no neighbors"]


@pytest.fixture
def recording(golden, tmp_path, monkeypatch):
    """Copy the recorded run and its data to a folder that may get results and caches."""
    shutil.copytree(golden / "data", tmp_path / "data")
    (tmp_path / "retro_fp32").mkdir()
    for name in ("ckpt", "workdir"):
        shutil.copytree(golden / "retro_fp32" / name, tmp_path / "retro_fp32" / name)
    monkeypatch.chdir(tmp_path)
    return golden / "retro_fp32"


@torch.no_grad()
def test_the_recorded_validation_loss(recording):
    """The original evaluated iteration 20 on the first 32 samples, including padding entries."""
    numbers = evaluate(Layout.single(), "PERPLEXITY", WORDS)
    run = json.loads((recording / "run.json").read_text())
    (recorded,) = (one["lm loss"] for one in run["validation"] if one["iteration"] == 20)
    parsed = language_model.parse("PERPLEXITY", WORDS, 1)
    folder, layout = "retro_fp32/ckpt", Layout.single()
    loaded = load_gpt(folder, Device.cpu(), layout, config=parsed.config, kinds=("retro",))
    dataset = validation_samples(parsed.config, loaded.tokenizer, layout)
    with_padding, without = [], []
    for i in range(32):
        text, neighbors = (torch.from_numpy(dataset[i][name]) for name in ("text", "neighbors"))
        (logits,) = loaded.model(text[None, :-1].long(), neighbors[None])
        with_padding.append(F.cross_entropy(logits, text[1:].long()).item())
        entries = logits[:, : loaded.tokenizer.vocab_size]
        without.append(F.cross_entropy(entries, text[1:].long()).item())
    assert np.mean(with_padding) == pytest.approx(recorded, rel=1e-5)
    assert numbers["loss"] == pytest.approx(np.mean(without), rel=1e-5)
    others = {numbers["loss, shuffled neighbors"], numbers["loss, no neighbors"]}
    assert len(others | {numbers["loss"]}) == 3
    assert numbers["tokens"] == 32 * 256


def test_refusals(recording, tmp_path):
    with pytest.raises(ConfigError, match="--retro-workdir is required"):
        language_model.parse("PERPLEXITY", ["--load", "retro_fp32/ckpt"], 1)
    with pytest.raises(CheckpointError, match="holds a retro, but a gpt is needed"):
        language_model.parse("LAMBADA", ["--load", "retro_fp32/ckpt"], 1)
    with pytest.raises(ConfigError, match="--retro-eval-samples is for .* without --valid-data"):
        language_model.parse("PERPLEXITY", [*WORDS, "--valid-data", "data"], 1)
    with pytest.raises(ConfigError, match="--bert-embedder-load bert is for .* and --valid-data"):
        language_model.parse("PERPLEXITY", [*WORDS, "--bert-embedder-load", "bert"], 1)
    words = ["--load", "retro_fp32/ckpt", "--valid-data", "data"]
    with pytest.raises(ConfigError, match="--retro-workdir is required"):
        language_model.parse("PERPLEXITY", words, 1)
    toy = save_toy(str(tmp_path / "toy"))
    with pytest.raises(ConfigError, match="--retro-workdir .* is only for RETRO"):
        language_model.parse("PERPLEXITY", ["--load", toy, *WORDS[2:4]], 1)


def of_texts(recording, *lengths):
    """Return the command line for texts with these numbers of words."""
    words = "the union of the states is strong and the people who live in peace are free".split()
    texts = [" ".join(words[i % len(words)] for i in range(length)) for length in lengths]
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    # Ranks are forked, and faiss threads in this process would not survive that.
    arguments = Path("retro_fp32/workdir/args.json")
    arguments.write_text(json.dumps({**json.loads(arguments.read_text()), "retro_threads": 1}))
    bert = str(recording.parent / "bert_fp32/ckpt")
    flags = ["--valid-data", "texts.jsonl", "--bert-embedder-load", bert]
    return [*WORDS[:4], *flags, "--overlapping-eval", "100"]


@torch.no_grad()
def test_any_text_is_scored_with_the_neighbors_of_its_chunks(recording):
    words = of_texts(recording, 10, 130, 300)
    numbers = evaluate(Layout.single(), "PERPLEXITY", words)
    config = language_model.parse("PERPLEXITY", words, 1).config
    folder, cpu = "retro_fp32/ckpt", Device.cpu()
    loaded = load_gpt(folder, cpu, config=config, row_by_row=False, kinds=("retro",))
    tokenizer = loaded.tokenizer
    retriever = open_retriever(
        config, tokenizer, cpu, words[words.index("--bert-embedder-load") + 1]
    )
    nobody, expected = retriever.texts.tokens(np.full((1, 2), -1)), {"": 0.0, ", no neighbors": 0.0}
    count = 0
    for line in Path("texts.jsonl").read_text().splitlines():
        ids = np.array([tokenizer.eod, *tokenizer.tokenize_unterminated(json.loads(line)["text"])])
        for sample in windows(ids, 256, 100):
            length = len(sample.tokens) - 1
            whole = -(-length // 64)
            padded = np.full(whole * 64, tokenizer.eod)
            padded[:length] = sample.tokens[:-1]
            found = retriever.texts.tokens(retriever.find(padded.reshape(-1, 64)))
            found[length // 64 :] = nobody
            for name, read in (("", found), (", no neighbors", np.repeat(nobody, whole, axis=0))):
                (logits,) = loaded.model(torch.tensor(padded[None]), torch.tensor(read[None]))
                scored = slice(length - sample.scored, length)
                targets = torch.tensor(sample.tokens[1:])[scored]
                entries = logits[scored, : tokenizer.vocab_size]
                expected[name] += F.cross_entropy(entries, targets, reduction="sum").item()
            count += sample.scored
    assert numbers["tokens"] == count
    assert numbers["documents"] == 3
    for name, total in expected.items():
        assert numbers[f"loss{name}"] == pytest.approx(total / count, rel=1e-6)
    three = {numbers[f"loss{name}"] for name in (*expected, ", shuffled neighbors")}
    assert len(three) == 3
    assert numbers["neighbors found"] == 1


def test_texts_without_a_whole_chunk_are_refused(recording):
    with pytest.raises(DataError, match="none of the texts has a whole chunk of 64 tokens"):
        evaluate(Layout.single(), "PERPLEXITY", of_texts(recording, 10, 20))


def test_the_layout_does_not_matter_to_texts(recording):
    words = of_texts(recording, 10, 130, 300)
    expected = evaluate(Layout.single(), "PERPLEXITY", words)
    for numbers in run_distributed(2, evaluate, "PERPLEXITY", words):
        assert numbers == pytest.approx(expected, rel=1e-5)


def test_the_layout_does_not_matter(recording):
    words = [*WORDS, "--micro-batch-size", "3"]
    expected = evaluate(Layout.single(), "PERPLEXITY", words)
    split = [*words, "--pipeline-model-parallel-size", "3"]
    for numbers in run_distributed(3, evaluate, "PERPLEXITY", split, pipeline=3):
        assert numbers == pytest.approx(expected, rel=1e-5)


def test_each_kind_of_neighbors_is_scored(monkeypatch, capsys):
    """The loss of a sample is the sum of its neighbors' numbers, and 0.5 without neighbors."""
    asked, published = [], []

    @dataclass(frozen=True)
    class NeighborTexts:
        compatible: bool = True

        def tokens(self, rows):
            missing = 99 if self.compatible else -1
            return np.where(rows < 0, missing, rows)[..., None]

    class Scorer:
        def __init__(self, *_):
            pass

        def score(self, samples, progress):
            progress(1, 1)
            asked.append([sample.neighbors() for sample in samples])
            return samples

    def summarize(scores):
        rows = np.concatenate([score.neighbors().reshape(-1) for score in scores])
        loss = float(rows.sum()) if (rows >= 0).any() else 0.5
        return {"loss": loss, "perplexity": math.exp(loss / 1000), "tokens": 3}

    scored = neighbors._Scored(
        [Sample(range(3), 2), Sample(range(9), 8)],
        [(0, 0), (0, 2)],  # the first text is shorter than a chunk
        Rows(),
        NeighborTexts(),
        summarize,
        "two texts",
    )
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(load="folder"),
        training=SimpleNamespace(micro_batch_size=1),
        logging=SimpleNamespace(log_interval=100),
    )
    extra = TaskConfig(), LanguageModelTaskConfig()
    parsed = SimpleNamespace(config=config, extra=extra)
    monkeypatch.setattr(neighbors, "load_gpt", lambda *_, **__: None)
    monkeypatch.setattr(neighbors, "_validation", lambda *_: scored)
    monkeypatch.setattr(neighbors, "Scorer", Scorer)
    monkeypatch.setattr(neighbors, "print_start", lambda *given: published.append(given[-1]))
    monkeypatch.setattr(neighbors, "publish", lambda *given: published.append(given[3]))
    metrics = neighbors.evaluate_neighbors(parsed, Device.cpu(), Layout.single(), None)
    assert published == ["two texts", metrics]
    assert [one[0].size for one in asked] == [0] * 3
    assert [one[1].shape for one in asked] == [(2, 2, 1)] * 3
    assert asked[0][1].ravel().tolist() == [0, 1, 10, 11]
    assert (asked[2][1] == -1).all()
    assert (metrics["loss"], metrics["loss, no neighbors"], metrics["tokens"]) == (22.0, 0.5, 3)
    assert {"loss, shuffled neighbors", "perplexity, shuffled neighbors"} <= metrics.keys()
    assert "tokens, no neighbors" not in metrics
    assert metrics["neighbors found"] == 1.0
    said = capsys.readouterr().out
    assert said.count("> batch 1 of 1\n") == 3
    assert "scoring with the correct neighbors ..." in said
    assert "validation results on PERPLEXITY | avg loss: 2.2000E+01" in said


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 32),  # after 3, 6 and 9 of 10 iterations, and at the end
        ({"train_iters": 9}, 32),
        ({"train_iters": 8}, 24),
        ({"train_samples": 49}, 40),  # 12 iterations
        ({"retro_gpt_eval_interval": 0}, 88),
        ({"retro_gpt_eval_iters": 0}, 0),
    ],
)
def test_the_samples_of_a_folder_are_those_of_all_evaluations(changes, count):
    told = {"global_batch_size": 4, "train_iters": 10, "train_samples": None}
    told |= {"retro_gpt_eval_interval": 3, "retro_gpt_eval_iters": 2, **changes}
    assert neighbors._count_samples("work", told) == count
    for name in ("global_batch_size", "retro_gpt_eval_iters", "retro_gpt_eval_interval"):
        for value in (None, True, "2"):
            with pytest.raises(ConfigError, match=rf"work/args.json lacks {name}, so the number"):
                neighbors._count_samples("work", {**told, name: value})
