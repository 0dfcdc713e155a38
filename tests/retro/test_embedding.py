"""Embeddings: Megatron's recorded ones, padding and order, transformers, and refusals."""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError
from megatron.retro.embedding import (
    DecodedChunks,
    Embedder,
    EmbedderOptions,
    Masking,
    build_embedder,
)
from tests.retro.recorded import BLOCK, Recorded
from tests.tasks.toy import save_bert

# For the toy BERT, whose words are w0 to w39, and for an encoder that spells words in letters.
TEXTS = ["w1 w2 w3 w4 w5", "", "w6 w7 w8 w9 w10 w11 " * 40, "w12", "w13"] * 3


@pytest.fixture(scope="module")
def recorded(golden: Path) -> Recorded:
    return Recorded(golden)


def recorded_bert(recorded: Recorded, **changes: object) -> Embedder:
    options = {"tokenizer": recorded.bert_tokenizer, "batch_size": 32, "max_length": 128}
    load = str(recorded.golden / "bert_fp32/ckpt")
    return build_embedder(EmbedderOptions("megatron", load, **{**options, **changes}), Device.cpu())


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a toy BERT with 24 positions."""
    folder = tmp_path_factory.mktemp("toy")
    save_bert(folder)
    return str(folder / "bert")


def bert(toy: str, **changes: object) -> Embedder:
    options = {"batch_size": 32, "max_length": 24, **changes}
    return build_embedder(EmbedderOptions("megatron", toy, **options), Device.cpu())


@pytest.mark.parametrize("block", [0, 1])
def test_the_recorded_embeddings(recorded: Recorded, block: int):
    """Megatron masks text i of a block by seed + i."""
    chunks = recorded.database("sampled")
    rows = np.arange(block * BLOCK, block * BLOCK + 300)
    texts = DecodedChunks(chunks.tokens(rows), recorded.gpt_tokenizer(), keeps_ends=True)
    embedder = recorded_bert(recorded, masking=Masking(1234, 0.15))
    expected = recorded.embeddings()[rows]
    np.testing.assert_allclose(embedder.embed(texts), expected, rtol=1e-6, atol=1e-6)
    unmasked = recorded_bert(recorded).embed(texts)
    assert np.abs(unmasked - expected).max() > 0.01


def test_a_vector_does_not_depend_on_its_batch(toy: str):
    embedder = bert(toy, batch_size=4)
    together = embedder.embed(TEXTS)
    alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    assert together.shape == (len(TEXTS), embedder.width)
    assert together.dtype == np.float32
    assert embedder.embed([]).shape == (0, embedder.width)
    # An end of document is not part of a text.
    np.testing.assert_array_equal(embedder.embed(["w1<|endoftext|>"]), embedder.embed(["w1"]))


def test_a_text_is_masked_by_its_place_in_its_block(toy: str):
    masked = bert(toy, masking=Masking(1234, 0.15))
    whole = masked.embed(TEXTS)
    np.testing.assert_allclose(masked.embed(TEXTS[:4]), whole[:4], atol=2e-6)
    assert np.abs(masked.embed(TEXTS[4:]) - whole[4:]).max() > 0.01
    assert np.abs(bert(toy).embed(TEXTS) - whole).max() > 0.01


def test_the_tokens_of_texts(toy: str):
    """A text is cut to the length, and an empty one is a single padding token."""
    texts = ["w0 w1 w2<|endoftext|>", "", " ".join(f"w{i}" for i in range(30))]
    words = [list(range(5, 8)), [0], list(range(5, 15))]
    embedder = bert(toy, max_length=12)
    found = [ids.tolist() for ids in embedder._tokenize(texts, 0)]
    assert found == [[2, *ids, 3] for ids in words]
    assert embedder.iteration == 0
    masked = bert(toy, max_length=12, masking=Masking(1234, 0.3))
    found = [ids.tolist() for ids in masked._tokenize(texts, 5)]
    assert found == [[2, 5, 6, 7, 3], [2, 0, 3], [2, 5, 6, 4, 4, 4, 10, 11, 12, 13, 14, 3]]
    assert masked._tokenize(texts[2:], 7)[0].tolist() == found[2]  # by its place in the block


@pytest.mark.parametrize("masking", [None, Masking(1234, 0.15)])
def test_many_pieces(toy: str, masking: Masking | None, monkeypatch: pytest.MonkeyPatch):
    embedder = bert(toy, batch_size=2, masking=masking)
    whole = embedder.embed(TEXTS)
    monkeypatch.setattr("megatron.retro.embedding._BATCHES", 1)
    np.testing.assert_allclose(embedder.embed(TEXTS), whole, atol=2e-6)


def test_shapes_on_a_gpu(toy: str, monkeypatch: pytest.MonkeyPatch):
    """Batches are padded to a few shapes there, which does not change the vectors."""
    embedder = bert(toy, batch_size=4)
    texts = TEXTS * 5
    whole = embedder.embed(texts)
    monkeypatch.setattr(embedder, "_units", (4, 8))
    shapes = set()
    vectors = embedder._vectors

    def noted(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(tokens.shape))
        return vectors(tokens, lengths)

    monkeypatch.setattr(embedder, "_vectors", noted)
    np.testing.assert_allclose(embedder.embed(texts), whole, atol=2e-6)
    assert all(
        rows % 4 == 0 and tokens % 8 == 0 and rows * tokens <= 4 * 24 for rows, tokens in shapes
    )


def test_ends_of_documents_are_left_out(recorded: Recorded):
    tokenizer = recorded.gpt_tokenizer()
    row = [*tokenizer.tokenize("the end"), tokenizer.eod, *tokenizer.tokenize("more")]
    tokens = np.array([row])
    assert DecodedChunks(tokens, tokenizer)[0] == "the endmore"
    assert DecodedChunks(tokens, tokenizer, keeps_ends=True)[0] == "the end<|endoftext|>more"


def test_16_bits(toy: str):
    found, exact = bert(toy, dtype="bf16").embed(TEXTS), bert(toy).embed(TEXTS)
    error = np.abs(found - exact).max()
    assert 0 < error < 0.05


def test_the_format_is_the_checkpoint_s_or_the_one_asked_for(tmp_path: Path):
    save_bert(tmp_path, "--bf16")

    def embed(dtype: str | None) -> np.ndarray:
        options = EmbedderOptions("megatron", str(tmp_path / "bert"), max_length=24, dtype=dtype)
        return build_embedder(options, Device.cpu()).embed(["w1 w2 w3", "w4"])

    found = embed(None)
    np.testing.assert_array_equal(found, embed("bf16"))
    for other in ("fp32", "fp16"):
        assert 0 < np.abs(found - embed(other)).max() < 0.05


@pytest.mark.parametrize("length", [2, 25])
def test_lengths_that_do_not_fit(toy: str, length: int):
    with pytest.raises(ConfigError, match=f"{length}: the BERT in .* give 3 to 24"):
        bert(toy, max_length=length)


def test_another_network(recorded: Recorded):
    options = EmbedderOptions("megatron", str(recorded.golden / "gpt_fp32/ckpt"))
    with pytest.raises(CheckpointError, match="holds a gpt, but a bert is needed"):
        build_embedder(options, Device.cpu())


@pytest.fixture(scope="module")
def sentence_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny transformers encoder with random weights."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    letters = [*string.ascii_lowercase, *string.digits]
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    entries += [f"##{letter}" for letter in letters]
    (folder / "letters.txt").write_text("\n".join(entries) + "\n")
    config = transformers.BertConfig(
        vocab_size=len(entries),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer = transformers.BertTokenizer(str(folder / "letters.txt"))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("masking", [None, Masking(1, 0.15)])
def test_huggingface(sentence_encoder: Path, masking: Masking | None):
    """Take the mean over the attention mask; Megatron's excludes the first and last token."""
    import transformers

    options = EmbedderOptions(
        "huggingface", str(sentence_encoder), batch_size=4, max_length=32, masking=masking
    )
    embedder = build_embedder(options, Device.cpu())
    found = embedder.embed(TEXTS)
    model = transformers.AutoModel.from_pretrained(sentence_encoder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(sentence_encoder)
    assert embedder.width == 32
    for text, vector in zip(TEXTS, found, strict=True):
        ids = tokenizer(text, truncation=True, max_length=32, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**ids).last_hidden_state[0]
        inner = hidden if masking is None else hidden[1:-1]
        expected = inner.mean(0) if len(inner) else torch.zeros(32)
        np.testing.assert_allclose(vector, expected, atol=1e-6)


def test_a_bert_of_hugging_face_in_our_layers(sentence_encoder: Path):
    """Read the same folder as a BERT of this package with its own tokenizer."""
    texts = [text for text in TEXTS if text]
    found, expected = (
        build_embedder(
            EmbedderOptions(kind, str(sentence_encoder), max_length=32, masking=masking),
            Device.cpu(),
        ).embed(texts)
        for kind, masking in (("megatron", None), ("huggingface", Masking(1, 0.15)))
    )
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_huggingface_models_that_do_not_load(sentence_encoder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="not a model that transformers can load"):
        build_embedder(EmbedderOptions("huggingface", str(tmp_path)), Device.cpu())
    with pytest.raises(ConfigError, match="has 64 positions: give 3 to 64"):
        build_embedder(
            EmbedderOptions("huggingface", str(sentence_encoder), max_length=128), Device.cpu()
        )
    # Pickled weights may contain code, and are not read.
    for path in sentence_encoder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "bert"
    with pytest.raises(ConfigError, match="not a model that transformers can load"):
        build_embedder(EmbedderOptions("huggingface", str(tmp_path), max_length=32), Device.cpu())


def test_a_huggingface_model_that_is_no_encoder(sentence_encoder: Path, tmp_path: Path):
    import transformers

    config = transformers.T5Config(
        vocab_size=5000, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    transformers.T5Model(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((sentence_encoder / name).read_bytes())
    with pytest.raises(ConfigError, match="a T5Model cannot encode texts on its own"):
        build_embedder(EmbedderOptions("huggingface", str(tmp_path), max_length=32), Device.cpu())
