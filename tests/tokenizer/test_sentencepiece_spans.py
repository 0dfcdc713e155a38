"""Conversations in the ids of SentencePiece models, with the masks that `transformers` creates."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron.config.data import TokenizerConfig
from megatron.data.conversations import ConversationEncoder, ConversationOptions
from megatron.errors import ConfigError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.chat_template import Chat, ChatTemplate, encode, trained_text

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ANSWER = "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
TEMPLATES = {
    "mistral": "[INST] {{ m.content }} [/INST]",
    "control tokens": "<unk>{{ m.content }}</s>",
}
USERS = ("Hello", "東京  what?", " 🙂🙂 x")
ANSWERS = ("I am fine.", " 🙂 yes\n\nno", "東京", "🙂", "  two   spaces ")


def _template(name: str) -> str:
    turn = f"{{% if m.role == 'user' %}}{TEMPLATES[name]}{{% else %}}{ANSWER}{{% endif %}}"
    return f"{{{{ bos_token }}}}{{% for m in messages %}}{turn}{{% endfor %}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of a few hundred pieces that spells unknown letters in bytes, like Llama."""
    found, model = tmp_path_factory.mktemp("sentencepiece"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Hello there, I am fine [INST] and you? [/INST] two spaces"] * 30),
        model_writer=model,
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (found / "tokenizer.model").write_bytes(model.getvalue())
    return found


def _settings(folder: Path, **more: Any) -> TokenizerConfig:
    said = {"tokenizer_class": "LlamaTokenizer", **SPECIAL, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return TokenizerConfig(
        tokenizer_type="Llama2Tokenizer", tokenizer_model=str(folder / "tokenizer.model")
    )


@pytest.mark.parametrize("legacy", [True, False])
def test_ids_and_masks_are_those_of_transformers(legacy: bool, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours = build_tokenizer(_settings(folder, legacy=legacy))
    theirs = transformers.LlamaTokenizer.from_pretrained(folder)
    for name in TEMPLATES:
        template = ChatTemplate(_template(name), SPECIAL)
        for user in USERS:
            for answer in ANSWERS:
                turns = [("user", user), ("assistant", answer)] * 2
                messages = [{"role": role, "content": text} for role, text in turns]
                wanted = theirs.apply_chat_template(
                    messages,
                    chat_template=_template(name),
                    return_assistant_tokens_mask=True,
                    return_dict=True,
                )
                ids, trained = encode(ours, *trained_text(template, Chat(messages)))
                assert ids.tolist() == wanted["input_ids"]
                assert trained.tolist() == [bool(on) for on in wanted["assistant_masks"]]


def test_bytes_and_added_spaces_stand_for_the_character(folder: Path) -> None:
    tokenizer = build_tokenizer(_settings(folder))
    ids, bounds = tokenizer.tokenize_spans("<s>🙂</s>")
    assert [tokenizer.inv_vocab[i] for i in ids[-5:-1]] == ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert bounds[0].tolist() == [0, 3]
    assert bounds[-5:-1].tolist() == [[3, 4]] * 4
    assert bounds[-1].tolist() == [4, 8]
    assert tokenizer.tokenize_spans("")[1].shape == (0, 2)


def test_a_llama_s_text_begins_with_a_token(folder: Path) -> None:
    llama = build_tokenizer(_settings(folder))
    model = str(folder / "tokenizer.model")
    plain = build_tokenizer(
        TokenizerConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model)
    )
    assert llama.tokenize("Hello") == [llama.bos, *plain.tokenize("Hello")]
    assert llama.tokenize_with_special("Hello") == plain.tokenize("Hello")
    assert plain.detokenize([*plain.tokenize("Hello"), plain.vocab_size]) == "Hello"


def test_models_that_remove_spaces_spell_as_they_tokenize(shared_data: Path) -> None:
    model = str(shared_data / "tokenizers" / "t5" / "spiece.model")
    flags = TokenizerConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model)
    tokenizer = build_tokenizer(flags)
    for text in ("Hello world", " world", "a  b ", " a  b  c "):
        assert tokenizer.tokenize_with_special(text) == tokenizer.tokenize(text)
    ids, bounds = tokenizer.tokenize_spans("  x</s> a")
    assert [tokenizer.inv_vocab[i] for i in ids] == ["▁", "x", "</s>", "▁", "a"]
    assert bounds.tolist() == [[2, 3], [2, 3], [3, 7], [8, 9], [8, 9]]


def test_tokens_that_the_model_lacks_are_refused(folder: Path) -> None:
    flags = _settings(folder, added_tokens_decoder={"400": {"content": "<|im_start|>"}})
    with pytest.raises(ConfigError, match=r"'<\|im_start\|>', which .*Llama2Tokenizer splits"):
        ConversationEncoder(ConversationOptions(flags, "<|im_start|>{{ messages }}", 64))
    ConversationEncoder(ConversationOptions(flags, _template("mistral"), 64))
    flags = _settings(folder, eos_token="<end>")
    with pytest.raises(ConfigError, match="'<end>'.*HuggingFaceTokenizer"):
        ConversationEncoder(ConversationOptions(flags, _template("mistral"), 64))
