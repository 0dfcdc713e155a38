r"""Show a dataset: its documents, the samples that a model sees, and statistics.

    python tools/show_data.py --data-path data/my_text_document --seq-length 64 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt
    python tools/show_data.py --kind bert --show samples --first 7 --count 1 --html sample.html ...

The data is named as in a run: by the flags for data and tokenizers of pretrain_gpt.py,
pretrain_bert.py or pretrain_t5.py. A sample is printed as the run would read it, one line for each
token: what the model reads, what it must predict, whether that counts in the loss, and to which
document it belongs.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.command import run_command
from megatron.config.arguments import ToolParser, add_flags, from_given
from megatron.config.data import DataConfig, DataOptions, TokenizerConfig
from megatron.errors import ConfigError

_PARTS = ("statistics", "documents", "samples")
_IDS = ("text", "text_enc", "text_dec", "labels")  # arrays of a sample that hold ids
_BAR = 40  # characters of a histogram's longest bar
_FREQUENT = 10
_SHOWN = 400  # characters of a document
_COUNTED = 10_000_000  # tokens among which the most frequent ones are counted


class Table(NamedTuple):
    """A part of the page: a title, lines of text, and rows under headings."""

    title: str
    notes: Sequence[str] = ()
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def build_parser() -> ToolParser:
    """Define the command line."""
    parser = ToolParser("show_data.py", __doc__)
    parser.add_argument("--kind", choices=("gpt", "bert", "t5"), default="gpt", help="The model.")
    parser.add_argument(
        "--show", nargs="+", choices=_PARTS, default=list(_PARTS), help="What to show."
    )
    parser.add_argument("--first", type=int, default=0, help="First document or sample.")
    parser.add_argument("--count", type=int, default=2, help="Number of documents or samples.")
    parser.add_argument("--seed", type=int, default=1234, help="The run's seed.")
    parser.add_argument("--html", help="Write a page to this file instead of the terminal.")
    add_flags(parser, DataOptions)
    add_flags(parser, TokenizerConfig)
    return parser


def run(options: argparse.Namespace) -> None:
    """Print the tables, or write them to a page.

    Raises:
        UserError: The data cannot be read, or the flags do not name any.
    """
    given = vars(options)
    if "seq_length" not in given or ("decoder_seq_length" not in given and options.kind == "t5"):
        missing = "--decoder-seq-length" if "seq_length" in given else "--seq-length"
        raise ConfigError(f"{missing} is required: give the run's own")
    if options.first < 0 or options.count < 1:
        raise ConfigError(
            f"--first {options.first} --count {options.count}: give 0 or more, 1 or more"
        )
    from megatron.tokenizer import build_tokenizer

    flags = from_given(TokenizerConfig, given)
    data = from_given(DataConfig, given)
    tokenizer = build_tokenizer(flags)
    tables: list[Table] = []
    for part in _PARTS:
        if part in options.show:
            tables += (
                _samples(options, data, flags, tokenizer)
                if part == "samples"
                else _corpora(options, data, tokenizer, part)
            )
    if options.html:
        from megatron.durable import replace_file

        replace_file(Path(options.html), _page(tables).encode())
        print(f"wrote {options.html}")
    else:
        print("\n\n".join(map(_text, tables)))


def _corpora(
    options: argparse.Namespace, data: DataConfig, tokenizer: Any, part: str
) -> Iterator[Table]:
    """Yield statistics, or documents, of each dataset that the flags name."""
    from megatron.data.datasets import parse_weighted_paths
    from megatron.data.indexed import IndexedDataset
    from megatron.data.text_stream import is_text

    words = data.data_path or data.train_data_path
    if data.mock_data or not words:
        raise ConfigError(f"--show {part}: give --data-path, or only --show samples")
    for _, prefix in parse_weighted_paths(words, "--data-path"):
        if is_text(prefix):
            yield Table(f"{prefix}: {part}", ["text is tokenized as it is read: --show samples"])
            continue
        dataset = IndexedDataset(prefix)
        if part == "statistics":
            yield from _statistics(dataset, tokenizer)
            continue
        bounds = dataset.document_indices
        for number in range(options.first, min(options.first + options.count, len(bounds) - 1)):
            sequences = [dataset.get(i) for i in range(bounds[number], bounds[number + 1])]
            texts = [
                repr(tokenizer.detokenize(ids[:_SHOWN].tolist())[:_SHOWN]) for ids in sequences
            ]
            total = sum(map(len, sequences))
            title = f"{prefix}: document {number}, {total} tokens"
            yield Table(title, texts)


def _statistics(dataset: Any, tokenizer: Any) -> Iterator[Table]:
    import numpy as np

    lengths, bounds = dataset.sequence_lengths, dataset.document_indices
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[bounds]
    documents = np.diff(ends)
    shares = (0, 1, 50, 99, 100)
    notes = [
        f"{len(documents):,} documents, {len(lengths):,} sequences, {int(ends[-1]):,} tokens of "
        f"{dataset.dtype}",
    ]
    if len(documents):
        points = np.percentile(documents, shares, method="nearest").tolist()
        named = zip(("shortest", "1%", "median", "99%", "longest"), points, strict=True)
        notes.append("tokens of a document: " + ", ".join(f"{n} {v:,}" for n, v in named))
    sizes = Counter(int(length).bit_length() for length in documents.tolist())
    most = max(sizes.values(), default=1)
    rows = [
        [
            "0" if bits == 0 else f"{1 << bits - 1:,} to {(1 << bits) - 1:,}",
            f"{sizes[bits]:,}",
            "#" * -(-_BAR * sizes[bits] // most),
        ]
        for bits in range(min(sizes, default=0), max(sizes, default=-1) + 1)
    ]
    yield Table(f"{dataset.prefix}: statistics", notes, ("tokens", "documents", ""), rows)
    counts: Counter[int] = Counter()
    read = 0
    for number, length in enumerate(lengths.tolist()):
        if read >= _COUNTED:
            break
        counts.update(dataset.get(number).tolist())
        read += length
    yield Table(
        f"{dataset.prefix}: most frequent of the first {read:,} tokens",
        (),
        ("id", "token", "share"),
        [
            [str(i), repr(tokenizer.detokenize([i])), f"{count / read:.2%}"]
            for i, count in counts.most_common(_FREQUENT)
        ],
    )


def _samples(
    options: argparse.Namespace, data: DataConfig, flags: TokenizerConfig, tokenizer: Any
) -> Iterator[Table]:
    """Yield training samples as a run with these flags reads them."""
    import numpy as np

    from megatron.data.datasets import DataRequest

    last = options.first + options.count
    request = DataRequest(data, options.seed, (last, 0, 0))
    train = _dataset(options.kind, request, flags, tokenizer)
    if train is None:
        raise ConfigError(f"--split {data.split}: the training split is empty: give it a share")
    for number in range(options.first, min(last, len(train))):
        sample = {name: np.atleast_1d(part) for name, part in train[number].items()}
        columns = _gpt_columns(sample, data, tokenizer) if options.kind == "gpt" else sample
        single = {n: part for n, part in columns.items() if part.shape == (1,) and n != "id"}
        for length in dict.fromkeys(len(p) for p in columns.values() if len(p) > 1):
            shown = {n: p for n, p in columns.items() if len(p) == length}
            rows = [
                [
                    str(place),
                    *(_cell(name, int(part[place]), tokenizer) for name, part in shown.items()),
                ]
                for place in range(length)
            ]
            notes = [f"{name} {int(part[0])}" for name, part in single.items()]
            yield Table(f"sample {number}", notes, ("place", *shown), rows)


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
    """Return what the model gets of a GPT sample, `[s]` each."""
    import numpy as np
    import torch

    from megatron.data.gpt import make_batch

    batch = make_batch(
        torch.from_numpy(sample["text"])[None],
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


def _cell(name: str, value: int, tokenizer: Any) -> str:
    if name not in _IDS:
        return str(value)
    return "-" if value < 0 else f"{value} {tokenizer.detokenize([value])!r}"


def _text(table: Table) -> str:
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


def _page(tables: Sequence[Table]) -> str:
    from jinja2 import Environment

    page: str = Environment(autoescape=True).from_string(_HTML).render(tables=tables)
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    options = build_parser().read(argv)
    return run_command(lambda: run(options))
