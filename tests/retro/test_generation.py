"""Text generation with retrieval, against brute force and a single forward pass."""

import numpy as np
import pytest
import torch

from megatron.config.generation import SamplesConfig
from megatron.config.parser import Program
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.extras import packages_of
from megatron.inference import samples
from megatron.inference.load import load_gpt, parse_generation
from megatron.inference.request import RequestError, Sampling
from megatron.parallel.layout import Layout
from megatron.retro.database import ChunkDatabase
from megatron.retro.dataset import NeighborTexts
from megatron.retro.embedding import DecodedChunks, EmbedderOptions, build_embedder
from megatron.retro.generation import Retriever, write
from megatron.retro.neighbors import QueryOptions, Searcher
from tests.retro.recorded import CHUNK, Recorded

CPU = Device.cpu()
WORDS = "--load retro_fp32/ckpt --retro-workdir retro_fp32/workdir".split()
INDEXED = 200  # chunks in the index of the test, the first of the database


@pytest.fixture
def folder(golden, tmp_path, monkeypatch):
    for name in ("data", "retro_fp32"):
        (tmp_path / name).symlink_to(golden / name)
    monkeypatch.chdir(tmp_path)
    return golden


def load(words=WORDS):
    program = Program(name="test", extra=(SamplesConfig,))
    config = parse_generation(words, 1, program, kinds=("gpt", "retro")).config
    return load_gpt(
        "retro_fp32/ckpt", CPU, Layout.single(), config=config, row_by_row=False, kinds=("retro",)
    )


@torch.no_grad()
def test_greedy_text_is_the_argmax_of_full_passes_with_neighbors_by_brute_force(folder):
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
    read = []
    passed = loaded.model.register_forward_pre_hook(lambda _, inputs: read.append(inputs[1]))
    # From the middle of the second chunk into the third and the fourth.
    prompt = database.tokens(np.arange(300, 302)).ravel()[:100].tolist()
    written = list(write(loaded, retriever, prompt, Sampling(max_new_tokens=95), CPU, 7))
    passed.remove()
    again = list(
        write(loaded, retriever, prompt, Sampling(max_new_tokens=95, temperature=0), CPU, 0)
    )
    for result, temperature in ((written, 1.0), (again, 0.0)):
        text = np.array(prompt + [one.token for one in result])
        assert len(text) == 195
        chunks = text[: 3 * CHUNK].reshape(3, CHUNK)
        queries = embedder.embed(DecodedChunks(chunks, tokenizer))
        distances = ((queries[:, None] - vectors[None]) ** 2).sum(2)
        nearest = distances.argsort(axis=1, kind="stable")[:, :2]
        np.testing.assert_array_equal(result[-1].neighbors, nearest)
        if temperature:
            for place, neighbors in enumerate(read):
                complete = (100 + place) // CHUNK
                assert neighbors.shape[1] == -(-(100 + place) // CHUNK)
                expected = texts.tokens(nearest[:complete])
                np.testing.assert_array_equal(neighbors[0, :complete], expected)
            continue
        # One pass over the whole text: causal, so each place sees what it saw when it was last.
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


def test_refusals(folder, capsys):
    with pytest.raises(ConfigError, match="--retro-workdir is required"):
        load(WORDS[:2])
    assert samples.main("megatron generate", [*WORDS, "--num-samples", "2"]) != 0
    assert "a Retro continues a single prompt" in capsys.readouterr().err
    with pytest.raises(RequestError, match="300 tokens: give 1 to 255"):
        next(write(load(), None, [1] * 300, Sampling(max_new_tokens=1), CPU, 0))
