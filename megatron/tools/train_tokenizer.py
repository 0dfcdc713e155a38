"""Train a tokenizer on your own text: BPE (as in GPT-2), WordPiece (as in BERT) or SentencePiece.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output-dir tokenizer
    python tools/train_tokenizer.py --input corpus.jsonl --kind wordpiece --output-dir tokenizer
    python tools/train_tokenizer.py corpus.jsonl tokenizer --kind sentencepiece --model-type bpe

The first command writes vocab.json and merges.txt, for --tokenizer-type GPT2BPETokenizer with
--vocab-file and --merge-file. The second writes vocab.txt, for BertWordPieceLowerCase (with
--cased, BertWordPieceCase) with --vocab-file. Both also write tokenizer.json, for
HuggingFaceTokenizer. The third command takes the input and the folder as positional arguments. It
writes tokenizer.model, for GPTSentencePieceTokenizer, SentencePieceTokenizer or Llama2Tokenizer
with --tokenizer-model, and tokenizer.vocab, a readable list of the pieces. The same input always
gives the same files. An existing tokenizer is not replaced without --overwrite, because datasets
and models may depend on it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.command import rehearsed, tool_main
from megatron.config.arguments import ToolParser, add_max_line_mb
from megatron.durable import expect_no_file, replace_file
from megatron.errors import ConfigError, DataError, StorageError

_END = "<|endoftext|>"
_MIN_BPE_SIZE = 257  # the bytes and the end-of-document entry
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # T5's masks require id 0 for [PAD]
# The files that each kind of tokenizer writes.
_NAMES = (
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "tokenizer.vocab"),
)
_MIN_PIECES = 261  # the bytes, <unk>, <s>, </s>, <pad> and one piece
_MAX_SENTENCE_BYTES = 1 << 16  # maximum number of bytes of a line for SentencePiece
_THREADS = 4  # fixed, because it determines the order of sums and therefore the scores
# The library takes time quadratic in the length of a word: minutes for a few megabytes.
_LONG_RUN = re.compile(r"\S{1000}|\s{1000}")
# Maximum number of characters in a WordPiece vocabulary. Words with other characters are unknown.
_MAX_ALPHABET = 1000

Files = dict[str, bytes]


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("train_tokenizer.py", __doc__)
    parser.add_argument("file", nargs="?", metavar="FILE", help="Short for --input FILE.")
    parser.add_argument("folder", nargs="?", metavar="DIR", help="Short for --output-dir DIR.")
    text = parser.add_argument_group("Input")
    text.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="Files, glob patterns or directories: .jsonl or .json (one JSON object per line), "
        "also with .gz, .bz2 or .zst; .parquet; .txt.",
    )
    text.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="Keys of the text to train on (default: text).",
    )
    add_max_line_mb(text)
    output = parser.add_argument_group("Tokenizer")
    output.add_argument(
        "--kind",
        choices=("bpe", "wordpiece", "sentencepiece"),
        default="bpe",
        help="Kind of tokenizer: bpe as in GPT-2, wordpiece as in BERT, sentencepiece as in T5 and "
        "Llama (default: bpe).",
    )
    output.add_argument(
        "--model-type",
        choices=("unigram", "bpe"),
        help="With --kind sentencepiece, how pieces are chosen (default: unigram, as in T5; Llama "
        "uses bpe).",
    )
    output.add_argument(
        "--character-coverage",
        type=float,
        metavar="X",
        help="With --kind sentencepiece, fraction of the text's characters that get their own "
        "pieces; the others are spelled in bytes (default: 0.9995).",
    )
    output.add_argument(
        "--cased", action="store_true", help="With --kind wordpiece, keep upper case and accents."
    )
    output.add_argument("--output-dir", metavar="DIR", help="Folder to write to.")
    output.add_argument(
        "--overwrite", action="store_true", help="Replace the tokenizer in that folder."
    )
    output.add_argument(
        "--vocab-size",
        type=int,
        default=32768,
        metavar="N",
        help="Number of entries, including special ones. A small text may yield fewer "
        "(default: 32768).",
    )
    output.add_argument(
        "--min-frequency",
        type=int,
        default=2,
        metavar="N",
        help="Merge only pairs that occur at least this often (default: 2).",
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Train the tokenizer and write its files.

    Raises:
        UserError: A flag or the input is invalid, or the output cannot be written.
    """
    _check(options)
    started = time.monotonic()
    with rehearsed():
        from megatron.data.preprocess import map_in_order
        from megatron.data.text_input import find_inputs

    paths = find_inputs(options.input)
    remedy = "To reduce memory, train on less text or with a smaller --max-line-mb"
    # The library ends its process if memory runs out, so it runs in a separate process.
    with map_in_order(lambda paths: _train(paths, options), lambda: [paths], 1, remedy) as results:
        size, files = next(results)
    _write(files, Path(options.output_dir))
    print(
        f"{options.output_dir}: {', '.join(files)} with {size:,} entries "
        f"in {time.monotonic() - started:.1f} s"
    )
    if size < options.vocab_size:
        reason = f"no other pair occurs {options.min_frequency} times"
        if options.kind == "sentencepiece":
            reason = "it has no other pieces"
        print(f"The text yields fewer entries than --vocab-size {options.vocab_size:,}: {reason}")


def _train(paths: Sequence[str], options: argparse.Namespace) -> tuple[int, Files]:
    """Train a tokenizer, and return the size of its vocabulary and the files to write."""
    if options.kind == "sentencepiece":
        return _train_sentencepiece(_texts(paths, options), options)
    if options.kind == "bpe":
        tokenizer = _train_bpe(_texts(paths, options), options.vocab_size, options.min_frequency)
        return tokenizer.get_vocab_size(), _bpe_files(tokenizer)
    tokenizer = _train_wordpiece(lambda: _texts(paths, options), options)
    return tokenizer.get_vocab_size(), _wordpiece_files(tokenizer)


def _check(options: argparse.Namespace) -> None:
    _use_positional_arguments(options)
    if options.kind == "sentencepiece" and options.vocab_size < _MIN_PIECES:
        raise ConfigError(
            f"--vocab-size {options.vocab_size}: give at least {_MIN_PIECES} (256 bytes, "
            "<unk>, <s>, </s>, <pad> and one piece)"
        )
    for name, value in (
        ("--model-type", options.model_type),
        ("--character-coverage", options.character_coverage),
    ):
        if value is not None and options.kind != "sentencepiece":
            raise ConfigError(
                f"{name} {value} has an effect only with --kind sentencepiece: drop {name}"
            )
    if options.character_coverage is not None and not 0.9 <= options.character_coverage <= 1:
        raise ConfigError(
            f"--character-coverage {options.character_coverage}: give a share from 0.9 to 1"
        )
    if options.kind == "bpe" and options.vocab_size < _MIN_BPE_SIZE:
        raise ConfigError(
            f"--vocab-size {options.vocab_size}: give at least {_MIN_BPE_SIZE} (256 bytes and "
            f"{_END})"
        )
    if options.max_line_mb < 1:
        raise ConfigError(f"--max-line-mb {options.max_line_mb}: give at least 1")
    if options.min_frequency < 1:
        raise ConfigError(f"--min-frequency {options.min_frequency}: give at least 1")
    if options.cased and options.kind != "wordpiece":
        raise ConfigError(
            "--cased has an effect only with --kind wordpiece, because byte-level BPE always keeps "
            "case: drop --cased"
        )
    outputs = [os.path.join(options.output_dir, name) for name in _NAMES]
    expect_no_file("--output-dir", outputs, overwrite=options.overwrite)


def _use_positional_arguments(options: argparse.Namespace) -> None:
    """Use the positional arguments as the values of --input and --output-dir.

    Raises:
        ConfigError: One of the two is missing or given twice.
    """
    if options.file is not None and options.folder is None and options.output_dir is None:
        raise ConfigError("give FILE and DIR, or --input and --output-dir")
    if options.file is not None:
        if options.input is not None and options.folder is None:
            options.file, options.folder = None, options.file
        elif options.input is not None:
            raise ConfigError(f"--input and FILE {options.file}: give only one of them")
    if options.folder is not None and options.output_dir is not None:
        raise ConfigError(f"--output-dir and DIR {options.folder}: give only one of them")
    options.input = options.input or ([options.file] if options.file else None)
    options.output_dir = options.output_dir or options.folder
    missing = [
        flag
        for flag, value in (("--input", options.input), ("--output-dir", options.output_dir))
        if not value
    ]
    if missing:
        raise ConfigError(f"the following arguments are required: {', '.join(missing)}")


def _texts(paths: Sequence[str], options: argparse.Namespace) -> Iterator[str]:
    """Yield the texts of the input, with long words cut.

    Raises:
        DataError: A line is invalid, or there is no text.
    """
    from megatron.data.text_input import parse_block, read_blocks

    empty, path, line, keys = True, "", 1, options.json_keys
    for block in read_blocks(paths, keys, max_line_mb=options.max_line_mb):
        if block.path != path:
            path, line = block.path, 1
        documents = parse_block(block, keys)
        for bad in documents.bad[:1]:
            remedy = "raise --max-line-mb, or" if block.problem else "fix or"
            raise DataError(f"{path}:{line + bad.line}: {bad.reason}; {remedy} remove the line")
        line += documents.lines
        for value in (value for values in documents.values for value in values):
            for text in [value] if isinstance(value, str) else value:
                empty = empty and not text
                yield from _cut_long_words(text)
    if empty:
        raise DataError(f"--input {' '.join(paths)}: there is no text to learn from")


def _cut_long_words(text: str) -> Iterator[str]:
    """Yield a text in pieces, splitting it only within long words and long runs of whitespace."""
    start = 0
    for long_word in _LONG_RUN.finditer(text):
        yield text[start : long_word.end()]
        start = long_word.end()
    yield text[start:]


def _train_bpe(texts: Iterator[str], vocab_size: int, min_frequency: int) -> Any:
    """Train byte-level BPE. The vocabulary begins with the bytes and ends with end-of-document."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=min_frequency,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    # As in GPT-2, the special entry comes after the merges.
    tokenizer.add_special_tokens([_END])
    return tokenizer


def _bpe_files(tokenizer: Any) -> Files:
    import orjson

    definition = orjson.loads(tokenizer.to_str())
    vocab = dict(definition["model"]["vocab"])
    vocab[_END] = tokenizer.token_to_id(_END)
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in definition["model"]["merges"]
    ]
    return {
        "vocab.json": orjson.dumps(dict(sorted(vocab.items(), key=lambda item: item[1]))),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
        "tokenizer.json": orjson.dumps(definition, option=orjson.OPT_INDENT_2),
        "tokenizer_config.json": orjson.dumps({"eos_token": _END}),
    }


def _train_wordpiece(texts: Callable[[], Iterator[str]], options: argparse.Namespace) -> Any:
    """Train WordPiece. The vocabulary begins with special entries, then single characters.

    Args:
        texts: A function that starts a pass over the input. The first pass finds the characters,
            and the second finds the words.
        options: The command line.

    Raises:
        ConfigError: --vocab-size is too small for the characters of the text.
    """
    from tokenizers.decoders import WordPiece as WordPieceDecoder
    from tokenizers.trainers import WordPieceTrainer

    from megatron.tokenizer.wordpiece import wordpiece_pipeline

    draft = wordpiece_pipeline({"[UNK]": 0}, lower_case=not options.cased)
    counts: Counter[str] = Counter()
    for text in texts():
        counts.update(draft.normalizer.normalize_str(text))
    frequent = sorted(counts, key=lambda character: (-counts[character], character))
    alphabet = sorted([c for c in frequent if not c.isspace()][:_MAX_ALPHABET])
    # The library numbers the characters inside words in an order that changes from run to run and
    # affects ties. Passing them as special entries fixes their order.
    # Punctuation is always a separate word, so it never occurs inside one.
    split = draft.pre_tokenizer.pre_tokenize_str
    continuing = [f"##{character}" for character in alphabet if len(split(f"a{character}")) == 1]
    min_size = len(_SPECIAL) + len(continuing) + len(alphabet)
    if options.vocab_size < min_size:
        raise ConfigError(
            f"--vocab-size {options.vocab_size}: the characters of the text alone need {min_size} "
            "entries: give at least that many"
        )
    trainer = WordPieceTrainer(
        vocab_size=options.vocab_size,
        min_frequency=options.min_frequency,
        special_tokens=[*_SPECIAL, *continuing],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=sys.stderr.isatty(),
    )
    draft.train_from_iterator(texts(), trainer=trainer)
    # A new pipeline is needed, because the draft also recognizes its special entries in text.
    tokenizer = wordpiece_pipeline(draft.get_vocab(), lower_case=not options.cased)
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.decoder = WordPieceDecoder()
    return tokenizer


def _train_sentencepiece(texts: Iterator[str], options: argparse.Namespace) -> tuple[int, Files]:
    """Train a SentencePiece model that represents every text exactly, including whitespace.

    Returns:
        The number of pieces and the files.

    Raises:
        ConfigError: The library rejects the size of the vocabulary.
    """
    import io

    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in _lines(text)),
            model_writer=model,
            model_type=options.model_type or "unigram",
            vocab_size=options.vocab_size,
            character_coverage=options.character_coverage or 0.9995,
            hard_vocab_limit=False,  # a small text yields fewer entries
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=_THREADS,
            pad_id=3,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].strip().splitlines()[0]
        raise ConfigError(f"--vocab-size {options.vocab_size}: {reason}") from error
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = trained.get_piece_size()
    vocab_lines = [f"{trained.id_to_piece(i)}\t{trained.get_score(i):g}\n" for i in range(size)]
    files = {"tokenizer.model": model.getvalue(), "tokenizer.vocab": "".join(vocab_lines).encode()}
    return size, files


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, with long lines cut into pieces that the library accepts."""
    step = _MAX_SENTENCE_BYTES // 4  # characters, of up to 4 bytes
    for line in text.split("\n"):
        yield from (line[start : start + step] for start in range(0, len(line), step))


def _wordpiece_files(tokenizer: Any) -> Files:
    vocab = tokenizer.get_vocab()
    lines = sorted(vocab, key=lambda entry: int(vocab[entry]))
    import orjson

    names = ("pad", "unk", "cls", "sep", "mask")
    special = {f"{name}_token": entry for name, entry in zip(names, _SPECIAL, strict=True)}
    return {
        "vocab.txt": "\n".join([*lines, ""]).encode(),
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": orjson.dumps(special),
    }


def _write(files: Files, folder: Path) -> None:
    """Write each file completely or not at all, and remove other files of a replaced tokenizer."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            replace_file(folder / name, data)
        for name in _NAMES:
            if name not in files:
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"--output-dir {folder}: cannot write ({error.strerror}); choose another folder"
        ) from error


main = tool_main(build_parser, run)
