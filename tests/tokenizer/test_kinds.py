"""Every kind of tokenizer except GPT-2's, the flags each needs, and their fingerprints."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from megatron.config.data import TOKENIZER_NEEDS, TokenizerConfig
from megatron.data.indexed import IndexedDataset, best_dtype
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import Tokenizer, build_tokenizer, files_of
from megatron.tokenizer.build import padded_vocab_size, vocabulary_multiple
from megatron.tokenizer.files import digest


def build(kind: str, **flags: object) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **flags))


@pytest.mark.parametrize(
    ("size", "tensor_parallel", "padded"),
    [
        (50257, 1, 50304),
        (50257, 2, 50304),
        (50257, 4, 50304),
        (50257, 3, 50304),
        (30524, 1, 30592),
        (28998, 1, 29056),
        (30624, 1, 30720),
        (50304, 1, 50304),
    ],
)
def test_padded_vocab_size(size, tensor_parallel, padded):
    assert padded_vocab_size(size, 128, tensor_parallel) == padded


# WordPiece


def test_bert_sizes_and_special_ids(shared_data):
    folder = shared_data / "tokenizers" / "bert"
    uncased = str(folder / "bert-base-uncased-vocab.txt")
    lower = build("BertWordPieceLowerCase", vocab_file=uncased)
    assert lower.vocab_size == 30524
    assert (lower.pad, lower.cls, lower.sep, lower.mask) == (0, 101, 102, 103)
    assert (lower.bos, lower.eos, lower.eod) == (30522, 30523, 30523)
    cased = build("BertWordPieceCase", vocab_file=str(folder / "bert-large-cased-vocab.txt"))
    assert cased.vocab_size == 28998
    t5 = build("BertWordPieceLowerCase", vocab_file=uncased, vocab_extra_ids=100)
    assert t5.vocab_size == 30624
    assert t5.additional_special_tokens_ids == list(range(30524, 30624))


def test_wordpiece_splits_words(shared_data):
    vocab_file = str(shared_data / "tokenizers" / "bert" / "bert-base-uncased-vocab.txt")
    tokenizer = build("BertWordPieceLowerCase", vocab_file=vocab_file)
    ids = tokenizer.tokenize("Unaffable, naïve\tCAFÉ [MASK]世")
    pieces = [tokenizer.inv_vocab[i] for i in ids]
    expected = "una ##ffa ##ble , naive cafe [ mask ] 世"
    assert pieces == expected.split()
    assert tokenizer.detokenize(ids) == "unaffable , naive cafe [ mask ] 世"
    # A word of more than 200 characters is unknown, one of 200 is not.
    unknown = tokenizer.vocab["[UNK]"]
    assert tokenizer.tokenize("a" * 201) == [unknown]
    assert unknown not in tokenizer.tokenize("a" * 200)


def test_megatrons_bert_dataset_to_the_id(golden):
    folder = golden / "data"
    tokenizer = build("BertWordPieceLowerCase", vocab_file=str(folder / "bert-5000-vocab.txt"))
    dataset = IndexedDataset(folder / "bert_text_sentence")
    sentences, bounds = [], [0]
    for line in (folder / "speeches.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        text = json.loads(line)["text"].replace("\n", " ")
        encoded = [tokenizer.tokenize(s) for s in re.split(r"(?<=[.!?])\s+", text)]
        sentences += [ids for ids in encoded if ids]
        bounds.append(len(sentences))
    assert bounds == dataset.document_indices.tolist()
    tokens = np.concatenate([np.array(ids, dataset.dtype) for ids in sentences])
    assert tokens.tobytes() == (folder / "bert_text_sentence.bin").read_bytes()
    assert dataset.sequence_lengths.tolist() == [len(ids) for ids in sentences]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["[PAD]", "[CLS]", "a"], r"no entry \[SEP\], \[MASK\], \[UNK\]"),
        (["[PAD]", "a", "b", "a"], "v.txt:4: entry 'a' is already on line 2"),
    ],
)
def test_damaged_wordpiece_vocabulary(tmp_path, lines, message):
    path = tmp_path / "v.txt"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=message):
        build("BertWordPieceCase", vocab_file=str(path))


def test_a_small_wordpiece_vocabulary(tmp_path):
    path = tmp_path / "v.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]", "a", "##a"]))
    tokenizer = build("BertWordPieceCase", vocab_file=str(path), vocab_extra_ids=2)
    assert tokenizer.tokenize("aa") == [6, 7]
    assert [ids.tolist() for ids in tokenizer.tokenize_batch(["aa", "", "b"])] == [[6, 7], [], [1]]
    assert len(tokenizer.tokenize("a" * 200)) == 200
    assert tokenizer.tokenize("a" * 201) == [1]  # as in Google's BERT
    # Only [BOS] and the sentinels are appended, and no text has them.
    assert (tokenizer.eos, tokenizer.bos) == (5, 8)
    assert tokenizer.additional_special_tokens_ids == [9, 10]
    assert (tokenizer.vocab_size, tokenizer.text_vocab_size) == (11, 8)
    assert tokenizer.detokenize([6, 7, 6, 99]) == "aa a [UNK]"


@pytest.mark.parametrize(
    ("word", "kind"), [("Word", "Case"), ("word", "LowerCase"), ("Éa", "LowerCase")]
)
def test_the_wordpiece_of_2019_follows_its_vocabulary(tmp_path, word, kind):
    path = tmp_path / "v.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", word]))
    old = build("BertWordPieceTokenizer", vocab_file=str(path))
    now = build(f"BertWordPiece{kind}", vocab_file=str(path))
    assert old.fingerprint() == now.fingerprint()
    assert old.tokenize(word) == [5 if word.isascii() else 1]


def test_characters():
    """As in 2019, a character's code point follows 8 special entries."""
    tokenizer = build("CharacterLevelTokenizer")
    ids = tokenizer.tokenize("Aé\n")
    assert ids == [8 + 65, 8 + 233, 8 + 10]
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == "Aé\n<eos>"
    assert (tokenizer.pad, tokenizer.bos, tokenizer.cls, tokenizer.mask) == (0, 2, 6, 7)
    assert tokenizer.vocab_size == 264
    assert tokenizer.detokenize([8 + 65, 264]) == "A<unk>"
    with pytest.raises(DataError, match=r"found '世' \(U\+4E16\)"):
        tokenizer.tokenize("a世")


# SentencePiece


def test_sentencepiece_special_tokens(shared_data):
    model = str(shared_data / "tokenizers" / "t5" / "spiece.model")
    plain = sentencepiece.SentencePieceProcessor(model_file=model)
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=model, vocab_extra_ids=2)
    # T5's model has a padding and an end token but no begin token, which follows the other four.
    assert (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask) == (
        32000,
        32001,
        32002,
        32003,
    )
    assert (tokenizer.pad, tokenizer.eos, tokenizer.bos) == (0, 1, 32004)
    assert tokenizer.additional_special_tokens_ids == [32005, 32006]
    assert tokenizer.vocab_size == 32007
    ids = tokenizer.tokenize("Hello <EOD> world.<extra_id_1><MASK>")
    hello, world = plain.encode_as_ids("Hello "), plain.encode_as_ids(" world.")
    assert ids == [*hello, 32002, *world, 32006, 32003]
    assert tokenizer.detokenize(ids) == "Hello <EOD> world. <extra_id_1>  <MASK> "


def test_gpt_sentencepiece_and_llama(shared_data):
    model = str(shared_data / "tokenizers" / "llama" / "tokenizer.model")
    plain = build("GPTSentencePieceTokenizer", tokenizer_model=model)
    llama = build("Llama2Tokenizer", tokenizer_model=model)
    assert plain.vocab_size == llama.vocab_size == 32000
    assert plain.tokenize("Hello world") == [15043, 3186]
    assert llama.tokenize("Hello world") == [1, 15043, 3186]
    assert plain.eod == llama.eod == 2
    assert llama.detokenize([15043, 3186, 32005]) == "Hello world"
    with pytest.raises(ConfigError, match="has no pad token"):
        _ = plain.pad
    assert plain.fingerprint() != llama.fingerprint()


def test_llama_needs_a_begin_token(shared_data):
    model = str(shared_data / "tokenizers" / "t5" / "spiece.model")
    with pytest.raises(DataError, match="use GPTSentencePieceTokenizer"):
        build("Llama2Tokenizer", tokenizer_model=model)


# tokenizer.json


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer as Pipeline
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    vocab = {"<s>": 0, "</s>": 1, "[PAD]": 2, "hello": 3, "world": 4, "<unk>": 5}
    pipeline = Pipeline(WordLevel(vocab, unk_token="<unk>"))
    pipeline.pre_tokenizer = Whitespace()
    pipeline.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    pipeline.add_special_tokens(["<|turn|>"])
    pipeline.enable_truncation(2)
    pipeline.enable_padding(length=10)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_text_that_continues_has_no_end_token(tokenizer_folder):
    import json

    assert build("NullTokenizer", vocab_size=9).tokenize_unterminated("1 2") == [1, 2]
    path = tokenizer_folder / "tokenizer.json"
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(path))
    assert tokenizer.tokenize_unterminated("hello world") == [0, 3, 4]
    assert tokenizer.tokenize_unterminated("") == [0]
    described = json.loads(path.read_text())
    template = described["post_processor"]
    template["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    template["special_tokens"]["</s>"] = {"id": "</s>", "ids": [1], "tokens": ["</s>"]}
    path.write_text(json.dumps(described))
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(path))
    assert tokenizer.tokenize("hello world") == [0, 3, 4, 1]
    assert tokenizer.tokenize_unterminated("hello world") == [0, 3, 4]
    assert tokenizer.tokenize_unterminated("hello<|turn|>") == [0, 3, 6], "this one is of the text"
    assert tokenizer.tokenize_unterminated("") == [0]


def test_huggingface_file_and_folder(tokenizer_folder):
    file = str(tokenizer_folder / "tokenizer.json")
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(tokenizer_folder))
    assert tokenizer.vocab_size == 7
    # Neither truncated to 2 nor padded to 10, whatever the file says.
    assert tokenizer.tokenize("hello world hello<|turn|>") == [0, 3, 4, 3, 6]
    assert tokenizer.eod == 1
    assert tokenizer.detokenize([3, 1]) == "hello </s>"
    old_name = build("PretrainedFromHF", tokenizer_model=file)
    assert old_name.fingerprint() == tokenizer.fingerprint()


def test_a_cached_model_is_found_by_its_name(tokenizer_folder, tmp_path, monkeypatch):
    """The model is in the layout of Hugging Face's download cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--some--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    file = tokenizer_folder / "tokenizer.json"
    file.rename(model / "snapshots" / "abc" / "tokenizer.json")
    tokenizer = build("PretrainedFromHF", tokenizer_model="some/model")
    assert tokenizer.tokenize("hello") == [0, 3]
    with pytest.raises(ConfigError, match="some/other: there is no .* `hf download NAME"):
        build("PretrainedFromHF", tokenizer_model="some/other")


def test_huggingface_settings_name_the_special_tokens(tokenizer_folder):
    settings = {"eos_token": {"content": "<|turn|>"}, "pad_token": "[PAD]", "bos_token": None}
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(tokenizer_folder))
    assert (tokenizer.eod, tokenizer.eos, tokenizer.pad) == (6, 6, 2)
    with pytest.raises(ConfigError, match="has no bos token"):
        _ = tokenizer.bos


@pytest.mark.parametrize("entry", ["<none>", {"content": "<none>"}, {}, 3, None, ["</s>"]])
def test_huggingface_settings_may_name_what_the_vocabulary_lacks(tokenizer_folder, entry):
    settings = {"eos_token": entry, "pad_token": "[PAD]"}
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(tokenizer_folder))
    assert tokenizer.pad == 2
    assert tokenizer.special_ids("eos") == frozenset()


def test_huggingface_settings_must_be_an_object(tokenizer_folder):
    (tokenizer_folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(DataError, match="tokenizer_config.json: expected a JSON object"):
        build("HuggingFaceTokenizer", tokenizer_model=str(tokenizer_folder))


def _replaces(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("decoder", "growth"),
    [
        (None, 2),
        ({"type": "ByteFallback"}, 2),
        (_replaces({"String": "_"}, "four"), 5),
        (_replaces({"String": "three"}, " "), 6),
        ({"type": "Sequence", "decoders": [_replaces({"String": "_"}, " "), {"type": "Fuse"}]}, 4),
    ],
)
def test_the_growth_of_a_text_is_bounded(tokenizer_folder, decoder, growth):
    path = tokenizer_folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": decoder}))
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(path))
    assert tokenizer.text_growth() == growth


def test_the_growth_of_a_text_by_a_regular_expression_is_not_bounded(tokenizer_folder):
    path = tokenizer_folder / "tokenizer.json"
    decoder = _replaces({"Regex": "(a+)+b"}, " ")
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": decoder}))
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(path))
    with pytest.raises(DataError, match="replaces a regular expression"):
        tokenizer.text_growth()


def test_the_characters_of_huggingface_s_tokens(tokenizer_folder):
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(tokenizer_folder))
    ids, spans = tokenizer.tokenize_spans("hello<|turn|>  world")
    assert ids == tokenizer.tokenize_with_special("hello<|turn|>  world") == [3, 6, 4]
    assert spans.tolist() == [[0, 5], [5, 13], [15, 20]]
    assert tokenizer.tokenize_spans("")[1].shape == (0, 2)


def test_huggingface_never_goes_to_the_network(tmp_path):
    with pytest.raises(ConfigError, match="nothing is downloaded"):
        build("HuggingFaceTokenizer", tokenizer_model="openai-community/gpt2")
    with pytest.raises(ConfigError, match="there is no tokenizer.json"):  # it cannot be accessed
        build("HuggingFaceTokenizer", tokenizer_model="x" * 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json: not a Hugging Face tokenizer.json"):
        build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


# tiktoken


def byte_ranks(*pieces: bytes) -> list[bytes]:
    return [*(bytes([byte]) for byte in range(256)), *pieces]


def write_ranks(path: Path, pieces: list[bytes]) -> str:
    lines = (f"{base64.b64encode(piece).decode()} {i}\n" for i, piece in enumerate(pieces))
    path.write_text("".join(lines))
    return str(path)


def test_tiktoken_rank_file(tmp_path):
    model = write_ranks(tmp_path / "mine.tiktoken", byte_ranks(b"he", b"12", b"123"))
    tokenizer = build("TikTokenizer", tokenizer_model=model)
    assert tokenizer.vocab_size == 260
    assert tokenizer.eod == 259
    # cl100k splits digits into threes; special tokens in the text are text.
    assert tokenizer.tokenize("he1234") == [256, 258, ord("4")]
    assert 259 not in tokenizer.tokenize("<|endoftext|>")
    assert tokenizer.detokenize([256, 259, 999]) == "he<|endoftext|>"
    gpt2 = build(
        "TikTokenizer",
        tokenizer_model=model,
        tiktoken_pattern="v2",
        tokenizer_special_tokens=("<s>", "</s>"),
    )
    assert gpt2.tokenize("he123") == [256, *b"123"]
    assert (gpt2.bos, gpt2.eod, gpt2.vocab_size) == (259, 260, 261)


@pytest.mark.parametrize(
    ("names", "end"),
    [
        (("<a>", "<b>"), 0),  # none is known to end a document
        (("<a>", "<eos>", "</s>"), 2),
        (("</s>", "<|end_of_text|>"), 1),
        (("<eos>", "<|endoftext|>"), 1),
    ],
)
def test_the_special_token_that_ends_a_document(tmp_path, names, end):
    """They follow the last rank, even in a file that is known by its name."""
    model = write_ranks(tmp_path / "r50k_base.tiktoken", byte_ranks())
    tokenizer = build("TikTokenizer", tokenizer_model=model, tokenizer_special_tokens=names)
    assert dict(tokenizer.special_texts) == {name: 256 + i for i, name in enumerate(names)}
    assert tokenizer.eod == 256 + end
    assert tokenizer.vocab_size == 256 + len(names)


def test_spelled_special_tokens_and_the_characters_that_tokens_cover(tmp_path):
    """The longest of two special tokens is read. A character may have several tokens."""
    model = write_ranks(tmp_path / "x.tiktoken", byte_ranks(b"ab"))
    names = ("<s>", "<s>>", "<|endoftext|>")
    tokenizer = build("TikTokenizer", tokenizer_model=model, tokenizer_special_tokens=names)
    text = "ab<s>><s>é"
    assert tokenizer.tokenize_with_special(text) == [256, 258, 257, *"é".encode()]
    ids, spans = tokenizer.tokenize_spans(text)
    assert ids == tokenizer.tokenize_with_special(text)
    assert spans.tolist() == [[0, 2], [2, 6], [6, 9], [9, 10], [9, 10]]
    assert tokenizer.detokenize([256, 999, 258]) == "ab<s>>"


def test_special_tokens_of_files_that_are_known_by_name(tmp_path):
    found = {}
    for name in ("r50k_base", "cl100k_base"):
        model = write_ranks(tmp_path / f"{name}.tiktoken", byte_ranks())
        tokenizer = build("TikTokenizer", tokenizer_model=model)
        found[name] = (dict(tokenizer.special_texts), tokenizer.eod, tokenizer.vocab_size)
    assert found["r50k_base"] == ({"<|endoftext|>": 50256}, 50256, 50257)
    assert tokenizer.detokenize([97, 300, 98]) == "ab"  # the file lacks most pieces
    of_cl100k = {
        "<|endoftext|>": 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    }
    assert found["cl100k_base"] == (of_cl100k, 100257, 100277)


def test_tiktoken_equals_gpt2_bpe(shared_data, tmp_path):
    from megatron.tokenizer.fast_bpe import byte_of_character

    folder = shared_data / "tokenizers" / "gpt2"
    files = {
        "vocab_file": str(folder / "gpt2-vocab.json"),
        "merge_file": str(folder / "gpt2-merges.txt"),
    }
    gpt2 = build("GPT2BPETokenizer", **files)
    table = byte_of_character()
    pieces = [bytes(table[c] for c in gpt2.inv_vocab[i]) for i in range(50256)]
    model = write_ranks(tmp_path / "r50k_base.tiktoken", pieces)
    tokenizer = build("TikTokenizer", tokenizer_model=model)
    text = "It's  the year 1999,\n\nsays Müller. " * 20
    assert tokenizer.tokenize(text) == gpt2.tokenize(text)
    assert (tokenizer.eod, tokenizer.vocab_size) == (50256, 50257)


def write_tekken(path: Path, pieces: list[bytes]) -> str:
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(p).decode(), "token_str": None}
        for i, p in enumerate(pieces)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def test_tekken_vocabulary(tmp_path):
    model = write_tekken(tmp_path / "tekken.json", byte_ranks(b"he", b"hel", b"left out"))
    flags = {"tokenizer_model": model, "tiktoken_num_special_tokens": 10}
    tokenizer = build("TikTokenizer", vocab_size=268, **flags)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.vocab_size) == (1, 2, 2, 268)
    assert tokenizer.tokenize("hel") == [10 + 257]
    assert tokenizer.vocab["<SPECIAL_9>"] == 9
    with pytest.raises(ConfigError, match="give --vocab-size 269"):
        build("TikTokenizer", vocab_size=300, **flags)
    with pytest.raises(ConfigError, match="leaves no room"):
        build("TikTokenizer", vocab_size=10, **flags)
    with pytest.raises(ConfigError, match="do not add up to --vocab-size 131072"):  # Mistral's
        build("TikTokenizer", **flags)
    write_tekken(Path(model), byte_ranks()[1:])
    with pytest.raises(DataError, match=r"no piece for byte 0 \(1 bytes are missing\)"):
        build("TikTokenizer", vocab_size=265, **flags)


@pytest.mark.parametrize(
    ("names", "reserved", "is_good"),
    [
        (("<unk>", "<s>", "</s>"), 3, True),
        (("<unk>", "<s>", "</s>"), 2, False),
        (("<unk>", "<s>", "</s>", "<s>"), 10, False),
        (("<unk>", "<s>"), 10, False),
        (("<s>", "</s>", "<unk>", "[INST]"), 4, True),
    ],
)
def test_special_tokens_of_a_tekken_vocabulary(tmp_path, names, reserved, is_good):
    path = tmp_path / "tekken.json"
    write_tekken(path, byte_ranks())
    path.write_text(json.dumps({"vocab": json.loads(path.read_text())}))  # Mistral's own form
    flags = {"tokenizer_model": str(path), "vocab_size": 256 + reserved}
    flags |= {"tiktoken_num_special_tokens": reserved, "tokenizer_special_tokens": names}
    if is_good:
        tokenizer = build("TikTokenizer", **flags)
        assert list(tokenizer.special_texts) == list(names)
        assert tokenizer.tokenize("a") == [reserved + 97]
    else:
        with pytest.raises(ConfigError, match=f"each once, and at most {reserved} tokens"):
            build("TikTokenizer", **flags)


@pytest.mark.parametrize(
    "entry",
    [
        {"rank": 256.5},
        {"rank": float("nan")},
        {"rank": 10**400},
        {"rank": -1},
        {"rank": "256"},
        {"rank": 256, "token_bytes": True},
        {"rank": 256, "token_bytes": 1.5},
        {"rank": 256, "token_bytes": "aG!U="},
        [[[[]]]],
        True,
        "[" * 100_000,
    ],
    ids=range(11),
)
def test_damaged_tekken_vocabulary(tmp_path, entry):
    model = Path(write_tekken(tmp_path / "x.json", byte_ranks(b"he")))
    entries = json.loads(model.read_text())
    text = json.dumps([*entries[:-1], entry])
    if isinstance(entry, str):
        text = text.replace(json.dumps(entry), entry)
    model.write_text(text)
    with pytest.raises(DataError, match=r"x.json"):
        build(
            "TikTokenizer",
            vocab_size=267,
            tokenizer_model=str(model),
            tiktoken_num_special_tokens=10,
        )


@pytest.mark.parametrize("rank", ["-1", "256.0", "nan", "True", str(1 << 64), "1" * 5000])
def test_a_rank_that_is_no_id(tmp_path, rank):
    path = tmp_path / "x.tiktoken"
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    path.write_text("".join(lines) + f"YWI= {rank}\n")
    with pytest.raises(DataError, match=r"x.tiktoken"):
        build("TikTokenizer", tokenizer_model=str(path))


def test_a_piece_that_is_not_base64_is_named(tmp_path):
    path = tmp_path / "x.tiktoken"
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    path.write_text("".join(lines) + "Y*WI= 256\n")
    with pytest.raises(DataError, match="x.tiktoken:257: expected a line `base64 rank`"):
        build("TikTokenizer", tokenizer_model=str(path))


@pytest.mark.parametrize("content", ["%%% 0\n", "YQ== x\n", "YQ== 0\n", ""])
def test_damaged_rank_file(tmp_path, content):
    path = tmp_path / "x.tiktoken"
    path.write_text(content)
    with pytest.raises(DataError, match=r"x.tiktoken"):
        build("TikTokenizer", tokenizer_model=str(path))


# NullTokenizer


def test_null_tokenizer():
    tokenizer = build("NullTokenizer", vocab_size=100)
    assert tokenizer.text_growth() == 2
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("1 22  3") == [1, 22, 3]
    assert tokenizer.detokenize([1, 22]) == "1 22"
    for text in ("1 x", "-1", "65536", "²"):
        with pytest.raises(DataError, match="reads numbers from 0 to 65535"):
            tokenizer.tokenize(text)


@pytest.mark.parametrize(("size", "largest"), [(65498, 65535), (65499, 2**31 - 1)])
def test_the_largest_number_is_that_of_the_dataset(size, largest):
    """Datasets of fewer than 65,500 entries store 16 bits per token."""
    tokenizer = build("NullTokenizer", vocab_size=size)
    assert (best_dtype(tokenizer.vocab_size) == np.uint16) == (largest == 65535)
    assert tokenizer.tokenize(str(largest)) == [largest]
    with pytest.raises(DataError, match=f"reads numbers from 0 to {largest}"):
        tokenizer.tokenize(str(largest + 1))


def test_special_tokens_that_a_tokenizer_has_or_lacks():
    tokenizer = build("NullTokenizer", vocab_size=9)
    assert tokenizer.special_ids("eod", "eos", "mask") == {9}
    assert tokenizer.special_ids() == frozenset()
    assert (tokenizer.has_t5_sentinels, tokenizer.encoder_end) == (False, [])
    with pytest.raises(ConfigError, match=r"has no pad token \(it has: eod, eos\)"):
        _ = tokenizer.pad


def test_a_null_tokenizer_of_no_or_one_number():
    assert build("NullTokenizer", vocab_size=1).vocab == {"0": 0, "1": 1}
    with pytest.raises(ConfigError, match="--vocab-size"):
        build("NullTokenizer", vocab_size=0)


# All kinds


@pytest.mark.parametrize(
    ("rows", "multiple"), [(50304, 50304), (64, 64), (50257, 1), (50288, 16), (32032, 32)]
)
def test_the_multiple_that_keeps_an_embedding_s_rows(rows, multiple):
    assert vocabulary_multiple(rows) == multiple
    entries = rows if multiple == 1 else rows - 7
    assert padded_vocab_size(entries, multiple, 1) == rows


def test_a_digest_depends_on_where_each_part_ends():
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("abc", "")}) == 4
    # It is saved in checkpoints, so it must not change.
    assert digest("ab", "c") == digest(b"ab", b"c") == "4826ed043ab3cdec576d8541fa5d5a80"


def test_the_fields_that_name_files():
    assert files_of(TokenizerConfig()) == ()
    assert files_of(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)) == ()
    gpt2 = TokenizerConfig(tokenizer_type="GPT2BPETokenizer")
    assert files_of(gpt2) == ("vocab_file", "merge_file")


def test_unknown_and_missing_kind():
    with pytest.raises(ConfigError, match="--tokenizer-type None: choose one of"):
        build_tokenizer(TokenizerConfig())
    with pytest.raises(ConfigError, match="--tokenizer-type Bert: choose one of"):
        build("Bert")


@pytest.mark.parametrize("kind", [kind for kind, needs in TOKENIZER_NEEDS.items() if needs])
def test_missing_flags_are_named(kind):
    with pytest.raises(ConfigError, match=rf"--tokenizer-type {kind} requires --(vocab|token)"):
        build(kind)


def test_both_missing_flags_of_gpt2_are_named():
    with pytest.raises(ConfigError) as error:
        build("GPT2BPETokenizer")
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match="requires --merge-file: add it"):
        build("GPT2BPETokenizer", vocab_file="v.json")


@pytest.mark.parametrize(
    "kind",
    [kind for kind, needs in TOKENIZER_NEEDS.items() if needs not in ((), ("vocab_size",))],
)
def test_missing_and_foreign_files_are_named(kind, tmp_path):
    nowhere = str(tmp_path / "nowhere")
    files = {"vocab_file": nowhere, "merge_file": nowhere, "tokenizer_model": nowhere}
    with pytest.raises((DataError, ConfigError), match="nowhere"):
        build(kind, **files)
    Path(nowhere).write_bytes(b"\xff\xfe\x00 not a vocabulary")
    with pytest.raises(DataError, match="nowhere"):
        build(kind, **files)


def test_fingerprint_follows_the_content(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    first.write_text("\n".join(entries))
    second.write_text("\n".join([*entries, "b"]))
    prints = {
        build("BertWordPieceCase", vocab_file=str(first)).fingerprint(),
        build("BertWordPieceLowerCase", vocab_file=str(first)).fingerprint(),
        build("BertWordPieceCase", vocab_file=str(first), vocab_extra_ids=1).fingerprint(),
        build("BertWordPieceCase", vocab_file=str(second)).fingerprint(),
    }
    assert len(prints) == 4
    second.write_text("\n".join(entries))
    again = build("BertWordPieceCase", vocab_file=str(second)).fingerprint()
    assert again == build("BertWordPieceCase", vocab_file=str(first)).fingerprint()
