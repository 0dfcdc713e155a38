"""Filling in masked words, by models that know one sentence by heart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.data import DataConfig, DataOptions, TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.run import RunOptions
from megatron.data.t5 import replace_spans
from megatron.device import Device
from megatron.errors import ConfigError, UserError
from megatron.inference.fill import FilledText, Filler, load_filler
from megatron.models.bert import BertModel, BertResult
from megatron.models.plans import model_plan
from megatron.models.t5 import T5Model
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tools import fill_in
from megatron.training.checkpointing import save_run
from tests.data.corpus import write_vocabulary
from tests.tokenizer.t5 import t5_tokenizer
from tests.training.toy import build_toy

SENTENCE = "w1 w2p3 w4 w5 w6 w7"  # w2p3 is two tokens
STEPS = 100  # with 60, rounding on another processor may leave a word unlearned


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab.txt", words=20)
    return build_tokenizer(
        TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase", vocab_file=str(path), vocab_extra_ids=3
        )
    )


def new_model(cls: Any, tokenizer: Tokenizer, **sizes: object) -> Any:
    flags: dict[str, Any] = {
        "architecture": "t5" if cls is T5Model else "bert",
        "num_layers": 1,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "kv_channels": 16,
        "max_position_embeddings": 16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **sizes,
    }
    model = cls(
        model_plan(ModelConfig(**flags), 128),
        BuildContext(Layout.single()),
    )
    initialize(model.named_parameters(), 1)
    assert tokenizer.vocab_size < 128
    return model


def filler(model: Any, tokenizer: Tokenizer) -> Filler:
    data = DataConfig(seq_length=16, decoder_seq_length=16)
    return Filler(model.eval(), tokenizer, RunOptions(data=data))


@pytest.fixture(name="bert", scope="module")
def _bert(tokenizer: Tokenizer) -> Filler:
    model = new_model(BertModel, tokenizer, bert_binary_head=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    text = torch.tensor([[tokenizer.cls, *tokenizer.tokenize(SENTENCE), tokenizer.sep]])
    places = text.shape[1] - 2
    text = text.expand(places, -1)
    masked = text.clone()  # each position in its own row
    masked[range(places), range(1, places + 1)] = tokenizer.mask
    masked[0, places] = tokenizer.mask
    for _ in range(STEPS):
        result = model(masked, torch.ones_like(text, dtype=torch.bool), labels=text)
        assert isinstance(result, BertResult)
        optimizer.zero_grad()
        result.tokens[masked == tokenizer.mask].mean().backward()
        optimizer.step()
    return filler(model, tokenizer)


@pytest.fixture(name="t5", scope="module")
def _t5(tokenizer: Tokenizer) -> Filler:
    return train_t5(tokenizer, SENTENCE)


def train_t5(tokenizer: Tokenizer, sentence: str) -> Filler:
    model = new_model(
        T5Model, tokenizer, architecture="t5", decoder_num_layers=1, bert_binary_head=False
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    text = np.array(tokenizer.tokenize_with_special(sentence))
    sentinels = tuple(tokenizer.additional_special_tokens_ids)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for spans in ([[1, 2], [5]], [[0], [3, 4]], [[1, 2, 3]]):
            left, hidden = replace_spans(text, spans, sentinels)
            encoder = torch.tensor([[*left, *tokenizer.encoder_end]])
            decoder = torch.tensor([[tokenizer.decoder_start, *hidden]])
            labels = torch.tensor([[*hidden, tokenizer.eos]])
            padding = torch.ones_like(encoder, dtype=torch.bool)
            model(encoder, decoder, padding, labels).mean().backward()
        optimizer.step()
    return filler(model, tokenizer)


@pytest.fixture(name="own_t5", scope="module")
def _own_t5(tmp_path_factory: pytest.TempPathFactory) -> Filler:
    """Return a T5 with a T5 tokenizer."""
    tokenizer = t5_tokenizer(tmp_path_factory.mktemp("t5"))
    return train_t5(tokenizer, "w1 w2 w3 w4 w5 w6 w7")


def test_a_t5_with_its_own_sentinels(own_t5: Filler) -> None:
    ((first,), (second,)) = own_t5.fill("w1 [MASK] w4 w5 [MASK] w7")
    assert (first.text, second.text) == ("w2 w3", "w6")
    # The end token of the encoder's text counts.
    with pytest.raises(UserError, match="17 tokens, but the model reads at most 16"):
        own_t5.fill("[MASK] " + "w1 " * 15)


def test_a_bert_finds_hidden_tokens(bert: Filler) -> None:
    (guesses,) = bert.fill("w1 w2p3 [MASK] w5 w6 w7", top=3)
    assert guesses[0].text == "w4"
    assert len(guesses) == 3
    shares = [guess.probability for guess in guesses]
    assert 1 >= shares[0] > 0.5
    assert shares == sorted(shares, reverse=True)
    first, last = bert.fill("[MASK] w2p3 w4 w5 w6 [MASK]")
    assert (first[0].text, last[0].text) == ("w1", "w7")
    assert (len(first), len(last)) == (1, 1)


def test_a_t5_finds_hidden_spans(t5: Filler) -> None:
    ((first,), (second,)) = t5.fill("w1 [MASK] w4 w5 [MASK] w7")
    assert (first.text, second.text) == ("w2p3", "w6")
    assert 0.5 < first.probability <= 1
    ((span,),) = t5.fill("w1 [MASK] w5 w6 w7")
    assert span.text == "w2p3 w4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w1 w2", r"write \[MASK\]"),
        ("[MASK] " + "w1 " * 20, "the model reads at most 16"),
    ],
)
def test_texts_that_cannot_be_filled(bert: Filler, t5: Filler, text: str, message: str) -> None:
    for model in (bert, t5):
        with pytest.raises(UserError, match=message):
            model.fill(text)


def test_at_most_as_many_candidates_as_the_vocabulary_has_entries(bert: Filler) -> None:
    count = bert.tokenizer.vocab_size
    assert len(bert.fill("w1 [MASK]", top=count)[0]) == count
    with pytest.raises(ConfigError, match=f"--top {count + 1}: the vocabulary has {count} entries"):
        bert.fill("w1 [MASK]", top=count + 1)


def test_more_places_than_sentinels(t5: Filler) -> None:
    with pytest.raises(UserError, match="at most 3: use fewer"):
        t5.fill("[MASK] w1 [MASK] w2 [MASK] w3 [MASK]")
    narrow = DataConfig(seq_length=16, decoder_seq_length=4)
    with pytest.raises(UserError, match="at most 1: use fewer"):
        Filler(t5.model, t5.tokenizer, RunOptions(data=narrow)).fill("[MASK] w1 [MASK]")


def test_an_untrained_t5_keeps_to_the_form(tokenizer: Tokenizer) -> None:
    """Spans are neither empty nor endless, and contain no special tokens."""
    model = new_model(
        T5Model, tokenizer, architecture="t5", decoder_num_layers=1, bert_binary_head=False
    )
    for (span,) in filler(model, tokenizer).fill("w1 [MASK] w4 [MASK] w7 [MASK]"):
        assert "[" not in span.text
        assert "<" not in span.text


def test_a_span_that_would_be_empty_takes_the_best_word(t5: Filler) -> None:
    """A sentinel is never directly followed by a sentinel or the end, whatever the scores are."""
    tokenizer = t5.tokenizer
    word, *_ = tokenizer.tokenize("w5")
    scores = torch.zeros(128)
    scores[word] = 5
    scores[[*tokenizer.additional_special_tokens_ids, tokenizer.eos]] = 10
    model = new_model(T5Model, tokenizer, decoder_num_layers=1, bert_binary_head=False)
    model.forward = lambda encoder, decoder, padding: scores.repeat(1, decoder.shape[1], 1)
    spans = filler(model, tokenizer).fill("w1 [MASK] w4 [MASK] w7")
    assert [span.text for (span,) in spans] == ["w5", "w5"]
    assert all(0.1 < span.probability < 0.9 for (span,) in spans)


def test_lengths_are_those_of_the_run_or_of_the_published_t5(tokenizer: Tokenizer) -> None:
    (word,) = tokenizer.tokenize("w5")
    scores = torch.zeros(128)
    scores[word] = 5
    model = new_model(T5Model, tokenizer, decoder_num_layers=1, bert_binary_head=False)
    model.forward = lambda encoder, decoder, padding: scores.repeat(1, decoder.shape[1], 1)

    def fill(text: str, **lengths: int) -> list[int]:
        """Return the number of words in each span, which the model would never end."""
        spans = Filler(model, tokenizer, RunOptions(data=DataOptions(**lengths))).fill(text)
        assert {word for (span,) in spans for word in span.text.split()} == {"w5"}
        return [len(span.text.split()) for (span,) in spans]

    assert fill("w1 [MASK]") == [20]
    for length, words in ((8, 2), (9, 3), (99, 20)):
        assert fill("[MASK] w1 [MASK]", decoder_seq_length=length) == [words, words]
    assert fill("[MASK] w1 [MASK] w2 [MASK]", decoder_seq_length=7) == [1, 1, 1]
    for kind, window in (({}, 512), ({"seq_length": 9}, 9)):
        longest = window - 1 - len(tokenizer.encoder_end)
        assert fill("[MASK]" + " w1" * longest, **kind) == [20]
        message = f"{window + 1} tokens, but the model reads at most {window}: shorten it"
        with pytest.raises(UserError, match=message):
            fill("[MASK]" + " w1" * (longest + 1), **kind)


@pytest.mark.parametrize(
    ("top", "chance", "warned"), [(1, 0.9, False), (2, 0.006, False), (2, 0.005, True)]
)
def test_the_command_prints_the_best_words_first(
    top: int,
    chance: float,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    guesses = [FilledText("i", chance), FilledText("j", chance / 2)]
    model = SimpleNamespace(fill=lambda text, top: [guesses[:top]] * text.count("[MASK]"))
    monkeypatch.setattr("megatron.inference.fill.load_filler", lambda *_, **__: model)
    words = ["--load", "x", "--top", str(top), "--text", "for [MASK] in [MASK]:"]
    assert fill_in.main(words) == 0
    said = capsys.readouterr()
    candidates = [f"i {chance:.0%}", f"j {chance / 2:.0%}"][:top]
    assert said.out == "for [MASK] in [MASK]:\n  for <i> in <i>:\n" + 2 * (
        f"    {', '.join(candidates)}\n"
    )
    assert ("has most likely not learned enough yet" in said.err) is warned


def test_no_candidates_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert fill_in.main(["--load", "x", "--top", "0", "--text", "[MASK]"]) != 0
    assert "--top 0: give at least 1" in capsys.readouterr().err


def test_the_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    flags = ["--bf16", "--save", str(tmp_path), "--save-interval", "1", "--seed", "3"]
    run = build_toy(Layout.single(), flags, "bert")
    save_run(run)
    found = load_filler(str(tmp_path), Device.cpu())
    (saved,) = run.parts
    weights = dict(found.model.named_parameters())
    assert weights.keys() == dict(saved.named_parameters()).keys()
    for name, weight in saved.named_parameters():
        assert torch.equal(weights[name], weight), name
    assert not found.model.training
    assert found.tokenizer.vocab_size == run.tokenizer.vocab_size


def test_a_gpt_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(build_toy(Layout.single(), ["--save", str(tmp_path), "--save-interval", "1"]))
    assert fill_in.main(["--load", str(tmp_path), "--text", "[MASK]"]) != 0
    assert "holds a gpt, but a bert or t5 is needed" in capsys.readouterr().err
