r"""Show a dataset: its documents, the samples that a model sees, and statistics.

    python tools/show_data.py --data-path data/my_text_document --seq-length 64 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt
    python tools/show_data.py --kind bert --show samples --first 7 --count 1 --html sample.html ...

Select the data as for a run, with the data and tokenizer flags of pretrain_gpt.py, pretrain_bert.py
or pretrain_t5.py. A sample is printed as the run would read it, one line per token: the input
token, its label, whether the label counts in the loss, and the document to which the token belongs.
With --retro-workdir, Retro samples are printed chunk by chunk, each with its neighbors.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.command import tool_main
from megatron.config.arguments import ToolParser, add_flags, from_values
from megatron.config.data import DataConfig, DataOptions, TokenizerConfig
from megatron.durable import expect_no_file, replace_file, writing_to
from megatron.errors import ConfigError

_PARTS = ("statistics", "documents", "samples")
_IDS = ("text", "text_enc", "text_dec", "labels")  # arrays of a sample that contain ids
_BAR = 40  # characters of a histogram's longest bar
_NUM_FREQUENT = 10
_MAX_CHARACTERS = 400  # maximum number of characters of a document
_RETRIEVED = "chunks in a neighbor"
_MAX_COUNTED_TOKENS = 10_000_000  # maximum number of tokens that statistics read


class Table(NamedTuple):
    """A section of the output: a title, lines of text, and rows with headings."""

    title: str
    notes: Sequence[str] = ()
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("show_data.py", __doc__)
    parser.add_argument(
        "--kind",
        choices=("gpt", "bert", "t5", "retro"),
        help="The model (default: gpt, or retro with --retro-workdir).",
    )
    parser.add_argument(
        "--show", nargs="+", choices=_PARTS, default=list(_PARTS), help="What to show."
    )
    parser.add_argument("--first", type=int, default=0, help="First document or sample.")
    parser.add_argument("--count", type=int, default=2, help="Number of documents or samples.")
    parser.add_argument("--seed", type=int, default=1234, help="The run's seed.")
    parser.add_argument(
        "--train-samples",
        type=int,
        help="Number of training samples of the run, for example --train-iters times the global "
        "batch size. The order of samples depends on it if the run reads its data more than once "
        "or blends datasets (default: the number shown, or the one for which --retro-workdir was "
        "made).",
    )
    for name, what in (("neighbors", "neighbors of each chunk"), ("retrieved-chunks", _RETRIEVED)):
        parser.add_argument(
            f"--retro-num-{name}", type=int, default=2, help=f"Number of {what} (default: 2)."
        )
    parser.add_argument("--html", help="Write an HTML page to this file instead of printing.")
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing --html.")
    add_flags(parser, DataOptions)
    add_flags(parser, TokenizerConfig)
    return parser


def run(options: argparse.Namespace) -> None:
    """Print the tables or write them to an HTML page.

    Raises:
        UserError: The data cannot be read, the flags select no data, or the page exists or cannot
            be written.
    """
    given = vars(options)
    folder = given.get("retro_workdir")
    options.kind = options.kind or ("gpt" if folder is None else "retro")
    if (options.kind == "retro") != (folder is not None):
        raise ConfigError(
            f"--kind {options.kind}: give --retro-workdir with --kind retro, and only then"
        )
    if folder is not None:
        given |= _workdir_values(given)
    if "seq_length" not in given or ("decoder_seq_length" not in given and options.kind == "t5"):
        missing = "--decoder-seq-length" if "seq_length" in given else "--seq-length"
        raise ConfigError(f"{missing} is required: give the value of the run")
    _check_output(options)
    from megatron.tokenizer import build_tokenizer

    flags = from_values(TokenizerConfig, given)
    data = from_values(DataConfig, given)
    tokenizer = build_tokenizer(flags)
    tables: list[Table] = []
    for section in (part for part in _PARTS if part in options.show):
        if section != "samples":
            tables += _corpora(options, data, flags, tokenizer, section)
        elif options.kind == "retro":
            tables += _retro_samples(options, data, tokenizer)
        else:
            tables += _samples(options, data, flags, tokenizer)
    if options.html:
        from jinja2 import Environment

        page: str = Environment(autoescape=True).from_string(_HTML).render(tables=tables)
        with writing_to("--html", options.html):
            replace_file(Path(options.html), page.encode())
        print(f"wrote {options.html}")
    else:
        print("\n\n".join(map(_as_text, tables)))


class Corpus(NamedTuple):
    """The documents of one entry of --data-path, in any file format.

    Attributes:
        name: The path in the entry.
        documents: A function that yields the sequences of each document, `[tokens]` each, beginning
            with the document of the given index.
        bad: A message for each line that `documents` has read so far without finding a document.
        counts: A text with the numbers of documents, sequences and tokens, and their dtype. Empty
            if the file format does not provide them.
        lengths: The number of tokens in each document, `[documents]`, or `None` if the file format
            does not provide them. Statistics then cover only the documents that begin within the
            first `_MAX_COUNTED_TOKENS` tokens.
    """

    name: str
    documents: Callable[[int], Iterator[list[Any]]]
    bad: Sequence[str] = ()
    counts: str = ""
    lengths: Any = None


def _check_output(options: argparse.Namespace) -> None:
    """Check the range of samples, and that the page does not replace a file without --overwrite."""
    if options.first < 0 or options.count < 1:
        raise ConfigError(
            f"--first {options.first} --count {options.count}: give a --first of at least 0 and a "
            "--count of at least 1"
        )
    if options.html:
        expect_no_file("--html", [options.html], overwrite=options.overwrite)
    if options.train_samples is not None and options.train_samples <= options.first:
        raise ConfigError(
            f"--train-samples {options.train_samples}: the run does not reach --first "
            f"{options.first}: give a smaller --first"
        )


def _corpora(
    options: argparse.Namespace,
    data: DataConfig,
    flags: TokenizerConfig,
    tokenizer: Any,
    section: str,
) -> Iterator[Table]:
    """Yield the tables of statistics or of documents for each dataset that the flags name."""
    from megatron.data.datasets import local_path, parse_weighted_paths

    weighted_paths = data.data_path or data.train_data_path
    if data.mock_data or not weighted_paths:
        raise ConfigError(f"--show {section}: give --data-path, or use --show samples alone")
    flag = "--data-path" if data.data_path else "--train-data-path"
    for _, name in parse_weighted_paths(weighted_paths, flag):
        path = local_path(name, flag, data)
        corpus = _open(path, flag, data, flags, tokenizer)._replace(name=name)
        if section == "statistics":
            yield from _statistics(corpus, tokenizer)
        else:
            yield from _documents(corpus, options, tokenizer)


def _open(name: str, flag: str, data: DataConfig, flags: TokenizerConfig, tokenizer: Any) -> Corpus:
    """Open an indexed dataset, TFRecords or text."""
    import numpy as np

    from megatron.data.indexed import IndexedDataset
    from megatron.data.text_stream import is_text
    from megatron.data.tfrecord import TFRecords, find_tfrecords

    if files := find_tfrecords(name):
        records = TFRecords(name, files)

        def examples(first: int) -> Iterator[list[Any]]:
            for index in range(first, len(records)):
                record = records.get(index)
                yield [record["input_ids"][record["input_mask"] != 0]]

        return Corpus(name, examples)
    if is_text(name):
        return _open_text(name, flag, data, flags, tokenizer)
    dataset = IndexedDataset(name)
    lengths, bounds = dataset.sequence_lengths, dataset.document_indices
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[bounds]
    counts = (
        f"{len(bounds) - 1:,} documents, {len(lengths):,} sequences, {int(ends[-1]):,} tokens of "
        f"{dataset.dtype}"
    )

    def sequences(first: int) -> Iterator[list[Any]]:
        for index in range(first, len(bounds) - 1):
            yield [dataset.get(i) for i in range(bounds[index], bounds[index + 1])]

    return Corpus(name, sequences, counts=counts, lengths=np.diff(ends))


def _open_text(
    name: str, flag: str, data: DataConfig, flags: TokenizerConfig, tokenizer: Any
) -> Corpus:
    import numpy as np

    from megatron.data.preprocess import BlockEncoder, EncodingOptions
    from megatron.data.text_input import read_blocks
    from megatron.data.text_stream import TextCorpus

    files = TextCorpus(name, data.text_key, flag).files
    encoder = BlockEncoder(EncodingOptions(flags, (data.text_key,), append_eod=True), tokenizer)
    bad: list[str] = []

    def texts(first: int) -> Iterator[list[Any]]:
        for block in read_blocks(files, [data.text_key]):
            encoded = encoder(block)
            for line in encoded.bad:
                offset = encoded.block.offset + line.offset
                bad.append(f"{encoded.block.path}: {line.reason} (line starts at byte {offset})")
            column = encoded.columns[0]
            ends = np.concatenate([[0], np.cumsum(column.lengths)])
            ends = ends[np.cumsum(column.sequences_per_document)]  # the end of each document
            for document in np.split(column.tokens, ends)[: len(ends)]:
                if first > 0:
                    first -= 1
                else:
                    yield [document]

    return Corpus(name, texts, bad=bad)


def _documents(corpus: Corpus, options: argparse.Namespace, tokenizer: Any) -> Iterator[Table]:
    documents = itertools.islice(corpus.documents(options.first), options.count)
    is_shown = False
    for index, sequences in enumerate(documents, start=options.first):
        is_shown = True
        texts = [
            repr(tokenizer.detokenize(ids[:_MAX_CHARACTERS].tolist())[:_MAX_CHARACTERS])
            for ids in sequences
        ]
        total = sum(map(len, sequences))
        yield Table(f"{corpus.name}: document {index}, {total} tokens", texts)
    if not is_shown:
        count = "" if corpus.lengths is None else f" (it has {len(corpus.lengths):,} documents)"
        yield Table(f"{corpus.name}: there is no document {options.first}{count}")


def _statistics(corpus: Corpus, tokenizer: Any) -> Iterator[Table]:
    import numpy as np

    counts: Counter[int] = Counter()
    lengths: list[int] = []
    num_tokens, is_whole = 0, True
    for sequences in corpus.documents(0):
        if num_tokens >= _MAX_COUNTED_TOKENS:
            is_whole = False
            break
        lengths.append(sum(map(len, sequences)))
        num_tokens += lengths[-1]
        for ids in sequences:
            counts.update(ids.tolist())
    documents = np.array(lengths) if corpus.lengths is None else corpus.lengths
    beginning = "" if is_whole else " at the beginning; the statistics cover only these"
    notes = [corpus.counts or f"{len(documents):,} documents, {num_tokens:,} tokens{beginning}"]
    if corpus.bad:
        notes.append(f"{len(corpus.bad):,} lines without a document; the first:")
        notes += corpus.bad[:_NUM_FREQUENT]
    if len(documents):
        points = np.percentile(documents, (0, 1, 50, 99, 100), method="nearest").tolist()
        labeled = zip(("shortest", "1%", "median", "99%", "longest"), points, strict=True)
        notes.append("tokens of a document: " + ", ".join(f"{n} {v:,}" for n, v in labeled))
    sizes = Counter(int(length).bit_length() for length in documents.tolist())
    max_count = max(sizes.values(), default=1)
    rows = [
        [
            "0" if bits == 0 else f"{1 << bits - 1:,} to {(1 << bits) - 1:,}",
            f"{sizes[bits]:,}",
            "#" * -(-_BAR * sizes[bits] // max_count),
        ]
        for bits in range(min(sizes, default=0), max(sizes, default=-1) + 1)
    ]
    yield Table(f"{corpus.name}: statistics", notes, ("tokens", "documents", ""), rows)
    yield Table(
        f"{corpus.name}: most frequent of the first {num_tokens:,} tokens",
        (),
        ("id", "token", "share"),
        [
            [str(i), repr(tokenizer.detokenize([i])), f"{count / num_tokens:.2%}"]
            for i, count in counts.most_common(_NUM_FREQUENT)
        ],
    )


def _samples(
    options: argparse.Namespace, data: DataConfig, flags: TokenizerConfig, tokenizer: Any
) -> Iterator[Table]:
    """Yield one or more tables for each training sample, as a run with these flags reads it."""
    import numpy as np

    from megatron.data.datasets import DataRequest

    last = options.first + options.count
    samples = options.train_samples or last
    last = min(last, samples)
    request = DataRequest(data, options.seed, (samples, 0, 0))
    train = _dataset(options.kind, request, flags, tokenizer)
    if train is None:
        raise ConfigError(f"--split {data.split}: the training split is empty: give it a share")
    if options.first >= len(train):
        raise _beyond(options, len(train))
    for index in range(options.first, min(last, len(train))):
        sample = {name: np.atleast_1d(part) for name, part in train[index].items()}
        columns = _gpt_columns(sample, data, tokenizer) if options.kind == "gpt" else sample
        single = {key: part for key, part in columns.items() if part.shape == (1,) and key != "id"}
        for length in dict.fromkeys(len(p) for p in columns.values() if len(p) > 1):
            same_length = {key: p for key, p in columns.items() if len(p) == length}
            text_columns = []
            for name, part in same_length.items():
                text_columns.append([str(int(value)) for value in part])
                if name in _IDS:
                    ids = map(int, part)
                    text_columns[-1] = [
                        "-" if i < 0 else f"{i} {tokenizer.detokenize([i])!r}" for i in ids
                    ]
            rows = list(zip(map(str, range(length)), *text_columns, strict=True))
            notes = [f"{name} {int(part[0])}" for name, part in single.items()]
            yield Table(f"sample {index}", notes, ("index", *same_length), rows)


def _beyond(options: argparse.Namespace, samples: int) -> ConfigError:
    """Return the error for a --first that is not below the number of samples."""
    return ConfigError(
        f"--first {options.first}: there are only {samples:,} training samples: give a smaller "
        "--first"
    )


def _workdir_values(given: dict[str, Any]) -> dict[str, Any]:
    """Return the values that --retro-workdir determines, by field name.

    Raises:
        ConfigError: The folder cannot be read, or a flag does not match it.
    """
    from megatron.config.data_files import read_retro_workdir
    from megatron.config.run import Findings, RunOptions

    for name in ("retro_num_neighbors", "retro_num_retrieved_chunks"):
        if given[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {given[name]}: must be at least 1")
    findings = Findings()
    values = read_retro_workdir(RunOptions(data=from_values(DataOptions, given)), findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    return {path.partition(".")[2]: value for path, value in values.items()}


def _retro_samples(
    options: argparse.Namespace, data: DataConfig, tokenizer: Any
) -> Iterator[Table]:
    """Yield a table for each chunk of the training samples, with its neighbors."""
    from megatron.config.retro import RetroOptions, read_arguments
    from megatron.data.datasets import DataRequest
    from megatron.retro.database import read_corpora
    from megatron.retro.dataset import RetroDataset, build_retro_datasets

    assert data.retro_workdir is not None, "Retro samples come from the working folder"
    arguments = read_arguments(data.retro_workdir)
    counts = ("train_samples", "train_iters", "global_batch_size")
    planned_samples, updates, batch = (
        n if type(n := arguments.get(name)) is int else 0 for name in counts
    )
    samples = options.train_samples or planned_samples or updates * batch
    if samples <= 0:
        raise ConfigError(
            f"--train-samples is required: {data.retro_workdir} does not say how many samples it "
            "was made for"
        )
    if options.first >= samples:
        raise _beyond(options, samples)
    model = from_values(RetroOptions, vars(options))
    request = DataRequest(data, options.seed, (samples, 0, 0))
    dataset = build_retro_datasets(request, model, tokenizer).train
    assert isinstance(dataset, RetroDataset), "training samples were requested"
    names = [corpus.name for corpus in read_corpora(Path(data.retro_workdir))]
    database, length = dataset.texts.database, model.chunk_length

    def decode(ids: Any) -> str:
        words = ids.tolist()
        while words and words[-1] == tokenizer.eod:
            words.pop()  # padding of short chunks
        return repr(tokenizer.detokenize(words))

    for index in range(options.first, min(options.first + options.count, samples)):
        sample: Any = dataset[index]
        first = index * dataset.chunks_per_sample
        neighbors = dataset.table.rows(first, first + dataset.chunks_per_sample)
        for chunk, rows in enumerate(neighbors):
            notes = [decode(sample["text"][chunk * length : (chunk + 1) * length])]
            for i, row in enumerate(rows.tolist()):
                if row < 0:
                    notes.append(f"neighbor {i + 1}: none")
                    continue
                corpus, document = database.documents([row])[0].tolist()
                text = decode(sample["neighbors"][chunk, i])
                notes.append(f"neighbor {i + 1}, document {document} of {names[corpus]}: {text}")
            yield Table(f"sample {index}, chunk {chunk}", notes)


def _dataset(kind: str, request: Any, flags: TokenizerConfig, tokenizer: Any) -> Any:
    data = request.data
    if kind == "bert":
        from megatron.data.bert import build_bert_datasets

        return build_bert_datasets(
            request, seq_length=data.seq_length, tokenizer=tokenizer, binary_head=True
        ).train
    if kind == "t5":
        from megatron.data.t5 import build_t5_datasets

        return build_t5_datasets(
            request,
            encoder_seq_length=data.seq_length,
            decoder_seq_length=data.decoder_tokens,
            tokenizer=tokenizer,
        ).train
    from megatron.data.gpt import build_gpt_datasets

    return build_gpt_datasets(
        request,
        seq_length=data.seq_length,
        vocab_size=tokenizer.vocab_size,
        tokenizer=(flags, tokenizer),
    ).train


def _gpt_columns(sample: Any, data: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """Return the arrays that the model reads from a GPT sample, `[s]` each, by column heading."""
    import numpy as np
    import torch

    from megatron.data.gpt import make_batch

    batch = make_batch(
        {"text": torch.from_numpy(sample["text"])[None]},
        eod=tokenizer.eod,
        reset_position_ids=data.reset_position_ids,
        eod_mask_loss=data.eod_mask_loss,
    )
    text = batch.tokens[0].numpy()
    ends_before = np.cumsum(text == tokenizer.eod) - (text == tokenizer.eod)
    return {
        "text": text,
        "labels": batch.labels[0].numpy(),
        "loss_mask": batch.loss_mask[0].numpy(),
        "position": batch.position_ids[0].numpy(),
        "document": ends_before,
    }


def _as_text(table: Table) -> str:
    rows = [table.headings, *table.rows] if table.rows else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([table.title, *table.notes, *(line.rstrip() for line in lines)])


_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Dataset</title><style>
body { font: 14px system-ui, sans-serif; margin: 2em; color: #222; }
h2 { font-size: 1.1em; margin: 2em 0 .4em; }
table { border-collapse: collapse; font: 12px ui-monospace, monospace; }
th, td { padding: .15em .8em; text-align: left; white-space: pre; }
th, td { border-bottom: 1px solid #e5e5e5; }
p { white-space: pre-wrap; margin: .3em 0; }
</style></head><body>
{%- for table in tables %}
<h2>{{ table.title }}</h2>
{%- for note in table.notes %}<p>{{ note }}</p>{% endfor %}
{%- if table.rows %}
<table><tr>{% for name in table.headings %}<th>{{ name }}</th>{% endfor %}</tr>
{%- for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}</table>
{%- endif %}
{%- endfor %}
</body></html>
"""


main = tool_main(build_parser, run)
