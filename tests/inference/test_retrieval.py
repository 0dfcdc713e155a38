"""Generation with retrieval, compared with brute force and a single forward pass."""

import json
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.config.data import DataOptions
from megatron.config.generation import SamplesConfig
from megatron.config.parser import Program
from megatron.config.run import ModelRun
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.extras import packages_of
from megatron.inference import build, retrieval, samples
from megatron.inference.build import EngineOptions
from megatron.inference.load import Loaded, load_gpt, parse_generation
from megatron.inference.request import (
    EngineLimits,
    NeighborPassage,
    Prompt,
    Request,
    Retrieved,
    Sampling,
    Token,
)
from megatron.inference.retrieval import (
    RetroExecutor,
    RetroStepCache,
    build_any_engine,
    check_retrieval,
)
from megatron.inference.sampling import choose, unpack
from megatron.inference.scheduler import SchedulerSettings
from megatron.parallel.layout import Layout
from megatron.retro.database import ChunkDatabase
from megatron.retro.dataset import NeighborTexts
from megatron.retro.embedding import DecodedChunks, EmbedderOptions, build_embedder
from megatron.retro.neighbors import QueryOptions, Searcher
from megatron.retro.retriever import Retriever
from tests.inference.toy import drain, end_of, prompt_of, tokens_of
from tests.models import test_retro as small
from tests.retro.recorded import CHUNK, Recorded

CPU = Device.cpu()
WORDS = "--load retro_fp32/ckpt --retro-workdir retro_fp32/workdir".split()
OPTIONS = EngineOptions(max_sequences=4)
INDEXED = 200  # chunks in the test's index, the first ones of the database


@pytest.fixture
def folder(golden, tmp_path, monkeypatch):
    for name in ("data", "retro_fp32"):
        (tmp_path / name).symlink_to(golden / name)
    monkeypatch.chdir(tmp_path)
    return golden


def load(words=WORDS):
    program = Program(name="test", extra=(SamplesConfig,))
    config = parse_generation(words, 1, program, kinds=("gpt", "retro")).config
    return load_gpt("retro_fp32/ckpt", CPU, Layout.single(), config=config, kinds=("retro",))


def test_each_token_attends_to_the_neighbors_of_the_chunk_that_it_reads():
    """The tokens of two prompts, whose steps begin and end within chunks, against a plain loop."""
    m, keys, heads, size = 4, 3, 2, 5
    rows = [SimpleNamespace(start=2, size=7), SimpleNamespace(start=5, size=2)]
    # Token 2 reads no chunk, so its block is arbitrary; from token 3 on, a chunk has ended.
    blocks = [np.array([6, 6, 6, 6, 6, 1, 1]), np.array([4, 4])]
    groups, places = retrieval._grouped(rows, blocks, m)
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(2, 7 * keys, heads, size, generator=generator)
    query = torch.randn(9, 1, heads, size, generator=generator)

    def attend(query, key, value):  # [s, G, n, d], [k, G, n, d]
        weights = torch.einsum("sgnd,kgnd->gnsk", query, key).softmax(-1)
        return torch.einsum("gnsk,kgnd->sgnd", weights, value).flatten(2)

    class Core:
        layer_number = 3

        def __call__(self, query, key, value, mask):
            return attend(query, key, value)

    of_chunks = SimpleNamespace(layers={3: memory}, sizes=SimpleNamespace(chunk=m, keys=keys))
    unused = "memory positions lengths slots outputs singles chunks neighbors ending_blocks"
    step = RetroStepCache(
        **dict.fromkeys(unused.split()),
        chunk_memory=of_chunks,
        neighbor_singles=None,
        groups=torch.from_numpy(groups),
        query_indices=torch.from_numpy(places),
    )
    found = step.attend_to_neighbors(query, None, Core())
    for token, block in enumerate(np.concatenate(blocks)):
        key, value = memory[:, None, block * keys : (block + 1) * keys].transpose(1, 2)
        expected = attend(query[token : token + 1], key, value)
        torch.testing.assert_close(found[token : token + 1], expected)


@torch.no_grad()
def test_greedy_text_is_the_argmax_of_full_passes_with_neighbors_by_brute_force(
    folder, monkeypatch
):
    with packages_of("retro"):
        import faiss
    recorded, loaded = Recorded(folder), load()
    tokenizer = loaded.tokenizer
    database = ChunkDatabase(recorded.workdir, CHUNK, tokenizer.eod)
    load_from, vocabulary = str(folder / "bert_fp32/ckpt"), recorded.bert_tokenizer
    bert = EmbedderOptions("megatron", load_from, vocabulary, max_length=128)
    embedder = build_embedder(bert, CPU)
    vectors = embedder.embed(DecodedChunks(database.tokens(np.arange(INDEXED)), tokenizer))
    index = faiss.IndexFlatL2(vectors.shape[1])
    index.add(vectors)
    texts = NeighborTexts(database, 2)
    searcher = Searcher(index, database, QueryOptions(queried=2))
    retriever = Retriever(searcher, embedder, texts, tokenizer)
    monkeypatch.setattr(retrieval, "open_retriever", lambda *_: retriever)
    engine = build_any_engine(loaded, CPU, OPTIONS)
    read = []
    model_inputs = engine.executor.inputs

    def inputs(plan, outputs):
        tokens, cache = model_inputs(plan, outputs)
        read.append((plan[0].start + plan[0].size, cache.neighbors[0].numpy()))
        return tokens, cache

    monkeypatch.setattr(engine.executor, "inputs", inputs)
    # From the middle of the second chunk through the third into the fourth.
    prompt = tuple(database.tokens(np.arange(300, 302)).ravel()[:100].tolist())
    written = drain(engine, [Request("1", prompt, Sampling(max_new_tokens=95, seed=7))])["1"]
    seen = read.copy()
    again = drain(engine, [Request("2", prompt, Sampling(max_new_tokens=95, temperature=0))])["2"]
    for events, temperature in ((written, 1.0), (again, 0.0)):
        text = np.array([*prompt, *tokens_of(events)])
        assert len(text) == 195
        chunks = text[: 3 * CHUNK].reshape(3, CHUNK)
        queries = embedder.embed(DecodedChunks(chunks, tokenizer))
        distances = ((queries[:, None] - vectors[None]) ** 2).sum(2)
        nearest = distances.argsort(axis=1, kind="stable")[:, :2]
        passages = [
            each for event in events if isinstance(event, Retrieved) for each in event.passages
        ]
        assert [each.chunk for each in passages] == [0, 0, 1, 1, 2, 2]
        found = texts.tokens(nearest).reshape(6, -1)
        assert [each.text for each in passages] == [*DecodedChunks(found, tokenizer)]
        documents = [[each.corpus, each.document] for each in passages]
        assert documents == database.documents(nearest.ravel()).tolist()
        if temperature:
            # Each chunk is encoded once, in the step that computes its last token.
            assert [end for end, neighbors in seen if len(neighbors)] == [100, 128, 192]
            encoded = np.concatenate([neighbors for _, neighbors in seen])
            np.testing.assert_array_equal(encoded, texts.tokens(nearest))
            continue
        # One causal pass over the whole text: each position sees what it saw as the last one.
        filled = np.append(text, np.full(4 * CHUNK - len(text), tokenizer.eod))
        rows = np.concatenate((nearest, nearest[:1]))
        tokens = torch.from_numpy(texts.tokens(rows)[None])
        logits = loaded.model(torch.from_numpy(filled[None]), tokens)[0, :, : tokenizer.vocab_size]
        assert logits[99:194].argmax(1).tolist() == text[100:].tolist()


def test_the_command_prints_the_text_and_the_passages(folder, capsys):
    prompt = "the quick brown fox jumps over " * 20
    bert = ["--bert-embedder-load", str(folder / "bert_fp32/ckpt")]
    words = [*WORDS, *bert, "--prompt", prompt, "--greedy", "--out-seq-length", "3"]
    assert samples.main("megatron generate", words) == 0
    shown, *passages = capsys.readouterr().out.split("----- ")
    assert shown.startswith(prompt)
    assert len(shown) > len(prompt) + 1
    assert [line.split(" read")[0] for line in passages] == [
        f"chunk {i}" for i in (1, 1, 2, 2, 3, 3)
    ]


@dataclass
class WholeTexts:
    """An executor without a cache: every step computes every text from the first token."""

    cached: RetroExecutor
    model: torch.nn.Module
    filler: int

    def __post_init__(self):
        self.device, self.replica = self.cached.device, self.cached.replica
        self.retrieved = self.cached.retrieved

    @torch.no_grad()
    def begin(self, plan, wanted):
        if not wanted:
            return list
        rows = groupby(wanted, key=lambda each: each.row)
        logits = [self._logits(plan[i], [each.offset for each in group]) for i, group in rows]
        choices = [each.choice for each in wanted]
        result = choose(torch.cat(logits), choices)
        return lambda: unpack(result.flatten().tolist(), choices)

    def _logits(self, row, places):
        sizes, retriever = self.cached.chunk_memory.sizes, self.cached.retriever
        text = row.sequence.tokens[: row.start + row.size]
        filled = np.array([*text, *[self.filler] * (-len(text) % sizes.chunk)])
        chunks = filled.reshape(-1, sizes.chunk)
        neighbors = [retriever.tokens(retriever.find(chunk[None])) for chunk in chunks]
        tokens = torch.from_numpy(np.concatenate(neighbors)[None])
        logits = self.model(torch.from_numpy(filled[None]), tokens)
        return logits[0, [row.start + place for place in places], : self.cached.vocab_size]


class ToyRetriever:
    """Neighbors drawn from a generator seeded with the chunk."""

    def __init__(self, model):
        self.sizes, self.vocab = model.plan.layers[5].cross_attention.retrieval, small.VOCAB

    def find(self, chunks):
        return np.array([[hash(tuple(chunk.tolist())) % 2**31] for chunk in chunks])

    def tokens(self, neighbors):
        shape = self.sizes.neighbors, self.sizes.retrieved
        draws = [
            np.random.default_rng(row[0]).integers(self.vocab, size=shape) for row in neighbors
        ]
        return np.stack(draws)

    def passages(self, neighbors):
        return [NeighborPassage(0, 0, int(neighbors[0, 0]), "")]


def modern(_):
    """Return a small Retro and its retriever: rotary embeddings, gated MLPs and grouped queries."""
    flags = {**small.LLAMA, "max_position_embeddings": 32}
    data = DataOptions(seq_length=32, retro_workdir="work")
    config = ModelRun(model=small.config(**{**small.FLAGS, **flags}), data=data)
    model = small.retro(flags)
    tokenizer = SimpleNamespace(vocab_size=small.VOCAB, eod=0)
    return Loaded(model.eval(), tokenizer, config, 0, Layout.single()), ToyRetriever(model)


def recorded(request):
    folder, loaded = request.getfixturevalue("folder"), load()
    bert = str(folder / "bert_fp32/ckpt")
    return loaded, retrieval.open_retriever(loaded.config, loaded.tokenizer, CPU, bert)


@pytest.mark.parametrize("network", [recorded, modern])
def test_texts_equal_those_of_an_engine_without_a_cache(request, monkeypatch, network):
    loaded, retriever = network(request)
    monkeypatch.setattr(retrieval, "open_retriever", lambda *_: retriever)
    m, vocab = loaded.config.model.chunk_length, loaded.tokenizer.vocab_size
    # Prompts in parts that end within chunks, too few blocks for all texts, and shared prefixes.
    options = EngineOptions(max_sequences=4, max_step_tokens=m // 2 + 1, cache_tokens=6 * m)
    engine = build_any_engine(loaded, CPU, options)
    whole = replace(
        engine, executor=WholeTexts(engine.executor, loaded.model, loaded.tokenizer.eod)
    )
    words = np.random.default_rng(5).integers(vocab, size=3 * m).tolist()
    prompts = [
        *(words[: m + m // 2], words[: m + m // 2 + 1], words[: 2 * m], words[: 2 * m + 1]),
        *(words[5 : 5 + m - 1], words[5 : 5 + m], words[:1], words[7 : 7 + 2 * m - 1]),
    ]
    new = m // 2 + 3
    samplings = [Sampling(max_new_tokens=new, temperature=i % 2, seed=i) for i in range(8)]
    requests = [
        Request(str(i), tuple(prompt), replace(sampling, logprobs=True, prompt_logprobs=i == 3))
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    search = Sampling(max_new_tokens=new, beam_width=2)
    requests.append(Request("beams", tuple(words[: m + m // 2]), search))
    ours, theirs = drain(engine, requests), drain(whole, requests)
    assert engine.stats.preempted > 0
    assert engine.stats.cached_tokens > 0
    for asked in requests:
        mine, other = ours[asked.id], theirs[asked.id]
        assert tokens_of(mine) == tokens_of(other)
        scores = [[each.logprob for each in x if isinstance(each, Token)] for x in (mine, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
        read = [[e.passages for e in x if isinstance(e, Retrieved)] for x in (mine, other)]
        assert [*map(list, read[0])] == [*map(list, read[1])]
        if asked.id != "beams":
            # Each chunk is read once. Nothing follows the last token, which completes none.
            text = [*asked.prompt, *tokens_of(mine)]
            chunks = [text[i * m : i * m + m] for i in range((len(text) - 1) // m)]
            found = [
                replace(passage, chunk=i)
                for i, chunk in enumerate(chunks)
                for passage in retriever.passages(retriever.find(np.array([chunk])))
            ]
            assert [passage for passages in read[0] for passage in passages] == found
    beams = [end_of(each["beams"]).beams for each in (ours, theirs)]
    assert [beam.tokens for beam in beams[0]] == [beam.tokens for beam in beams[1]]
    assert prompt_of(ours["3"]).logprobs == pytest.approx(prompt_of(theirs["3"]).logprobs, abs=1e-4)


def test_an_engine_of_retro_has_a_block_for_each_chunk(monkeypatch):
    loaded, retriever = modern(None)
    m, vocab = loaded.config.model.chunk_length, loaded.tokenizer.vocab_size
    monkeypatch.setattr(retrieval, "open_retriever", lambda *_: retriever)
    options = EngineOptions(max_sequences=3, max_step_tokens=2, cache_tokens=6 * m + 1, seed=9)
    engine = build_any_engine(loaded, CPU, options)
    settings = SchedulerSettings(blocks=6, block_size=m, max_sequences=3, max_tokens=3)
    limits = EngineLimits(vocab_size=vocab, max_length=32, cache_tokens=6 * m, max_beams=3)
    assert (engine.settings, engine.limits) == (settings, limits)
    assert (engine.seed, engine.looks_ahead) == (9, False)
    rows = dict(engine.panel_rows)
    memory, chunks = engine.executor.memory, engine.executor.chunk_memory
    block = chunks.block_bytes(loaded.model.plan, torch.float32)
    assert chunks.size_bytes == 7 * block
    size = f"{(memory.size_bytes + 7 * block) / 1e9:.3g} GB"
    assert rows["cache"] == f"{6 * m} tokens and the passages of 6 chunks: {size}"
    assert rows["passages"] == "work, for each complete chunk of a text"
    assert rows["batch"] == "up to 3 sequences"
    # If the memory sets the limit, each block also takes what is kept of its chunk.
    monkeypatch.setattr(build, "_CPU_CACHE_BYTES", 5 * (memory.size_bytes // 7 + block))
    options = replace(options, cache_tokens=None)
    assert build_any_engine(loaded, CPU, options).settings.blocks == 5


def test_texts_of_a_batch_are_those_of_each_alone_and_scores_those_of_a_full_pass(folder):
    loaded = load()
    bert, vocab = str(folder / "bert_fp32/ckpt"), loaded.tokenizer.vocab_size
    engine = build_any_engine(loaded, CPU, OPTIONS, embedder=bert)
    texts = engine.executor.retriever.texts
    prompts = [tuple(np.arange(7, 7 + size).tolist()) for size in (1, 63, 64, 129, 130)]
    drawn = Sampling(max_new_tokens=3, seed=3, logprobs=True)
    requests = [Request(str(i), prompt, drawn) for i, prompt in enumerate(prompts)]
    together = drain(engine, requests)
    for request in requests:
        alone = drain(engine, [request])[request.id]
        assert tokens_of(alone) == tokens_of(together[request.id])
        for events in (alone, together[request.id]):
            passages = sum(len(each.passages) for each in events if isinstance(each, Retrieved))
            assert passages == (len(request.prompt) + 2) // CHUNK * 2
        # Chunks of earlier prompts are cached, and their passages are still reported.
        assert end_of(alone).cached_tokens == (len(request.prompt) - 1) // CHUNK * CHUNK
    scored = Sampling(max_new_tokens=1, temperature=0, logprobs=True, prompt_logprobs=True)
    events = drain(engine, [Request("s", prompts[3], scored)])["s"]
    (found,) = (event.logprobs for event in events if isinstance(event, Prompt))
    filled = np.full((1, 3 * CHUNK), loaded.tokenizer.eod)
    filled[0, :129] = prompts[3]
    rows = engine.executor.retriever.find(filled.reshape(3, CHUNK))
    neighbors = torch.from_numpy(texts.tokens(rows)[None])
    with torch.no_grad():
        logits = loaded.model(torch.from_numpy(filled), neighbors)[0, :128, :vocab].float()
    places = torch.arange(128), torch.tensor(prompts[3][1:])
    expected = logits.log_softmax(1)[places].tolist()
    assert found == pytest.approx(expected, abs=1e-5)
    # A beam search over a shared prompt finds a text at least as likely as the greedy one.
    greedy = drain(engine, [Request("g", prompts[3], scored)])["g"]
    search = Sampling(max_new_tokens=2, beam_width=3)
    beams = end_of(drain(engine, [Request("b", prompts[3], search)])["b"]).beams
    assert len(beams) == 3
    assert beams[0].score >= beams[1].score >= beams[2].score
    assert tokens_of(greedy)[0] in {beam.tokens[0] for beam in beams}


def test_a_file_of_samples_has_the_passages(folder, tmp_path):
    prompts = ["the quick brown fox jumps over " * 10, "short"]
    (tmp_path / "prompts").write_text("\n".join(prompts))
    bert = ["--bert-embedder-load", str(folder / "bert_fp32/ckpt")]
    words = [*WORDS, *bert, "--sample-input-file", "prompts", "--out-seq-length", "2"]
    assert samples.main("megatron generate", words) == 0
    lines = [json.loads(line) for line in (tmp_path / "prompts.out").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert {passage["chunk"] for passage in lines[0]["passages"]} == {0}
    assert "passages" not in lines[1]
    settings = json.loads((tmp_path / "prompts.out.settings.json").read_text())
    assert settings["--retro-workdir"] == str(folder.resolve() / "retro_fp32/workdir")


def other_workdir(folder, **changes):
    """Return a working folder like the recorded one, with different arguments."""
    made = Path("workdir")
    made.mkdir()
    for entry in (folder / "retro_fp32/workdir").iterdir():
        if entry.name != "args.json":
            (made / entry.name).symlink_to(entry)
    told = json.loads((folder / "retro_fp32/workdir/args.json").read_text())
    (made / "args.json").write_text(json.dumps({**told, **changes}))
    return made


OTHER = ("--retro-workdir", "workdir")
REFUSALS = {
    "no folder": (WORDS[:2], {}, "--retro-workdir is required"),
    # This package's checkpoints store the length; Megatron-LM's do not.
    "other chunks": (
        [*WORDS[:2], *OTHER, "--retro-chunk-length", "64"],
        {"retro_gpt_chunk_length": 32},
        "--retro-chunk-length 64: --retro-workdir workdir was created with --retro-chunk-length 32",
    ),
    "other tokenizer": (
        [*WORDS[:2], *OTHER],
        {"retro_made_from": {"gpt_tokenizer": "another"}},
        "--retro-workdir workdir was made with a different tokenizer",
    ),
    "moved network": (WORDS, {}, "--bert-embedder-load bert_ckpt: there is no checkpoint"),
    "no network": (
        [*WORDS[:2], *OTHER],
        {"bert_embedder_load": None, "load": None},
        "give --bert-embedder-load FOLDER",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(folder, capsys, case):
    words, changes, message = REFUSALS[case]
    if changes:
        other_workdir(folder, **changes)
    assert samples.main("megatron generate", [*words, "--prompt", "x"]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_index_that_is_missing_is_named(folder, capsys):
    made = other_workdir(folder)
    (made / "index").unlink()
    bert = ["--bert-embedder-load", str(folder / "bert_fp32/ckpt")]
    words = [*WORDS[:2], *OTHER, *bert, "--prompt", "x"]
    assert samples.main("megatron generate", words) != 0
    assert "workdir/index/" in capsys.readouterr().err


def test_a_prompt_that_fills_the_window_is_an_error(folder, capsys):
    bert = ["--bert-embedder-load", str(folder / "bert_fp32/ckpt")]
    words = [*WORDS, *bert, "--prompt", "the quick brown fox " * 100]
    assert samples.main("megatron generate", words) != 0
    assert "tokens, and the model's 256 positions leave no room" in capsys.readouterr().out


def test_flags_of_the_other_kind_of_model_are_refused():
    retro = ModelRun(model=small.config(**small.FLAGS))
    check_retrieval(retro, "bert")
    check_retrieval(retro, None)
    split = replace(retro, parallel=replace(retro.parallel, tensor_model_parallel_size=2))
    with pytest.raises(ConfigError, match="not on 2: drop --tensor-model-parallel-size"):
        check_retrieval(split, None)
    split = replace(split, parallel=replace(split.parallel, pipeline_model_parallel_size=3))
    with pytest.raises(ConfigError, match="not on 6: drop --tensor-model-parallel-size"):
        check_retrieval(split, None)
    gpt = replace(split, model=replace(retro.model, architecture="gpt"))
    check_retrieval(gpt, None)
    with pytest.raises(ConfigError, match="--bert-embedder-load bert is for Retro models"):
        check_retrieval(gpt, "bert")
