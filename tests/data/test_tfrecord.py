"""TFRecords for the original BERT: published bytes, other writers' bytes, samples, damage."""

from __future__ import annotations

import io
import os
import pickle

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.data.bert import build_bert_datasets
from megatron.data.datasets import DataRequest, corpus_fingerprint
from megatron.data.tfrecord import (
    TFRecordDataset,
    TFRecordOptions,
    TFRecords,
    find_tfrecords,
    masked_crc,
    parse_example,
)
from megatron.errors import DataError
from tests.data import tfrecords
from tests.data.corpus import write_vocabulary
from tests.data.tfrecords import encode, example, record, write
from tests.launch import run_ranks
from tests.repository import ROOT
from tests.tokenizer.test_kinds import build

# The example in TensorFlow's tutorial on TFRecord and tf.train.Example.
PUBLISHED = (
    b"\nR\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01"
    b"\x04\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04["
    b"\xd3|?"
)
# A record written by TFRecordWriter of the library `tfrecord`.
WRITTEN = bytes.fromhex(
    "fe00000000000000db9e94a00afb010a230a0b7365676d656e745f69647312141a120a100000000000000101010101"
    "01010101010a2f0a09696e7075745f69647312221a200a1eb105b404fa04c501c8068006c805ec020ed8059a02f705"
    "a906dc044bdd030a1d0a146e6578745f73656e74656e63655f6c6162656c7312051a030a01000a220a0a696e707574"
    "5f6d61736b12141a120a10010101010101010101010101010101010a1e0a136d61736b65645f6c6d5f706f73697469"
    "6f6e7312071a050a030205000a250a116d61736b65645f6c6d5f776569676874731210120e0a0c0000803f0000803f"
    "000000000a190a0d6d61736b65645f6c6d5f69647312081a060a0407ac02007b4678db"
)


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4, and the check value in CRC catalogs
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_checksums_are_those_of_the_standard(data, crc):
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc(data) == masked


def test_checksums_are_those_of_tensorboard():
    """Its event-file writer uses the same framing. Lengths lie on both sides of a piece's size."""
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    random = np.random.RandomState(0)
    for size in (*range(70), 1000, 4095, 4096, 4097, 4159, 4160, 4161, 9000):
        data, file = random.bytes(size), io.BytesIO()
        writer.RecordWriter(file).write(data)
        assert file.getvalue() == record(data), size


def test_the_published_example():
    found = parse_example(PUBLISHED)
    assert found["feature0"].tolist() == [0]
    assert found["feature1"].tolist() == [4]
    assert found["feature3"].tolist() == [pytest.approx(0.9876)]
    assert set(found) == {"feature0", "feature1", "feature3"}


def test_a_record_of_another_writer(tmp_path):
    (tmp_path / "x").write_bytes(WRITTEN)
    found = TFRecords("x", [tmp_path / "x"]).get(0)
    assert found["input_ids"][:6].tolist() == [689, 564, 634, 197, 840, 768]
    assert found["input_mask"].tolist() == [1] * 16
    assert found["masked_lm_ids"].tolist() == [7, 300, 0]
    assert found["masked_lm_weights"].tolist() == [1, 1, 0]


def test_lists_are_read_packed_or_not():
    numbers = {"a": [0, 1, 127, 128, 300, 2**63 - 1, -1, -(2**63)], "b": [], "weights": [1.5, -2]}
    for packed in (True, False):
        found = parse_example(encode(numbers, packed=packed))
        assert found["a"].tolist() == numbers["a"]
        assert found["weights"].tolist() == numbers["weights"]
        assert not len(found.get("b", []))


def _message(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def _feature(kind: int, numbers: bytes) -> bytes:
    """Return an example of a single list "a"; `kind` 2 has floats, and 3 integers."""
    entry = _message(1, b"a") + _message(2, _message(kind, numbers))
    return _message(1, _message(1, entry))


_TEN = b"\xff" * 9 + b"\x01"  # -1, the longest integer


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x08", "a number that does not end before byte 1"),
        (b"\x08" + b"\x80" * 10 + b"\0", "a number that does not end before byte 11"),
        (b"\x0a\x05abcd", "a field of 5 bytes at byte 2 exceeds 6 bytes"),
        (b"\x09abcdefg", "a field of 8 bytes at byte 1 exceeds 8 bytes"),
        (b"\x0dabc", "a field of 4 bytes at byte 1 exceeds 4 bytes"),
        (b"\x0c", "wire type 4 at byte 1"),
        (b"\x08\x07", "the number 7 instead of a message"),
        (_feature(2, _message(1, b"12345")), "a list of floats ends in the middle of a number"),
        (_feature(3, _message(1, b"\1\x81")), "a list of integers ends in the middle of a number"),
        (_feature(3, _message(1, b"\x81")), "a list of integers ends in the middle of a number"),
        (_feature(3, _message(1, b"\xff" + _TEN)), "an integer of more than 64 bits"),
    ],
)
def test_what_is_no_example_is_described(data, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse_example(data)


def test_other_fields_are_skipped():
    numbers = _feature(3, _message(1, b"\5" + _TEN) + b"\x08\xac\x02" + b"\x10\x07")
    others = b"\x10\x96\x01" + b"\x19" + bytes(8) + _message(4, b"xyz") + b"\x2d" + bytes(4)
    found = parse_example(others + numbers + others)
    assert {name: list(values) for name, values in found.items()} == {"a": [5, -1, 300]}
    assert found["a"].dtype == np.int64
    floats = _feature(2, _message(1, np.array([1.5, -2], "<f4").tobytes()))
    assert parse_example(floats)["a"].tolist() == [1.5, -2]


def test_records_are_found_in_any_file(tmp_path):
    sizes = {"a": 2, "b": 1, "c": 3}
    for name, size in sizes.items():
        write(tmp_path / f"{name}.tfrecord", map(example, range(size)))
    records = TFRecords("x", find_tfrecords(str(tmp_path)))
    assert len(records) == records.size == 6
    length = (tmp_path / "b.tfrecord").stat().st_size
    places = [(name, i, i * length) for name, size in sizes.items() for i in range(size)]
    for index, (name, number, start) in enumerate(places):
        file = tmp_path / f"{name}.tfrecord"
        assert records.location(index) == f"{file}: record {number} (byte {start})"
        assert records.get(index)["input_ids"].tolist() == example(number)["input_ids"]
    again = pickle.loads(pickle.dumps(records))
    assert (again.prefix, again.paths, len(again)) == ("x", records.paths, 6)


def test_every_cut_of_a_file_is_noticed(tmp_path):
    path = tmp_path / "a.tfrecord"
    write(path, map(example, range(2)))
    whole = path.read_bytes()
    second = len(whole) // 2
    for cut, message in (
        (11, "truncated at byte 0 of 11;"),
        (12, "truncated in the record at byte 0;"),
        (second - 1, "truncated in the record at byte 0;"),
        (second + 11, f"truncated at byte {second} of {second + 11};"),
        (second + 12, f"truncated in the record at byte {second};"),
        (len(whole) - 1, f"truncated in the record at byte {second};"),
    ):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=message):
            len(TFRecords("x", [path]))
    path.write_bytes(whole[:second])
    assert len(TFRecords("x", [path])) == 1


def test_a_file_is_known_by_its_name_or_its_first_bytes(tmp_path):
    write(tmp_path / "a.tfrecord-0", [])
    write(tmp_path / "b", [example(0)])
    whole = (tmp_path / "b").read_bytes()
    for name, data in (("c", whole[:11]), ("d", b"?" + whole[1:]), ("e", b""), ("f.idx", whole)):
        (tmp_path / name).write_bytes(data)

    def found(pattern):
        return [path.name for path in find_tfrecords(str(tmp_path / pattern))]

    assert found("[a-e]*") == ["a.tfrecord-0", "b"]
    assert found("") == ["a.tfrecord-0"]
    assert found("b") == ["b"]
    for name in ("c", "d", "e", "f", "none", "g" * 300):  # the last one cannot be accessed
        assert found(name) == []
    (tmp_path / "b.idx").touch()
    assert found("b") == []  # the prefix of an indexed dataset


def test_the_order_of_records_is_that_of_the_seed(tmp_path):
    """Each pass has the next seed. A run that continues with a later version reads the same."""
    path = write(tmp_path / "x.tfrecord", map(example, range(10)))
    records = TFRecords("x", [path])
    ids = [example(i)["input_ids"] for i in range(10)]
    data = TFRecordDataset(records, (3, 9), 20, TFRecordOptions(16, 1000, 2**32 - 1))
    order = [ids.index(data[i]["text"].tolist()) for i in range(20)]
    seeds = (2**32 - 1, 0, 1, 2)
    passes = [3 + np.random.RandomState(seed).permutation(6) for seed in seeds]
    assert order == np.concatenate(passes)[:20].tolist()
    assert [ids.index(data[i]["text"].tolist()) for i in reversed(range(20))] == order[::-1]


def test_masked_positions_at_the_ends_of_a_sequence(tmp_path):
    def read(**values):
        path = write(tmp_path / "x.tfrecord", [example(0) | values])
        options = TFRecordOptions(16, 1000, 0)
        return TFRecordDataset(TFRecords("x", [path]), (0, 1), 1, options)[0]

    ids = {"masked_lm_ids": [7, 9, 3, 5]}
    weights = {"masked_lm_weights": [1.0, 1.0, 0.5, 0.0]}
    labels = read(masked_lm_positions=[0, 15, 1, 99], **ids, **weights)["labels"]
    assert labels.tolist() == [7, 3, *[-1] * 13, 9]
    for positions in ([0, 16, 1, 2], [-1, 3, 1, 2]):
        with pytest.raises(DataError, match="a masked position is outside the sequence"):
            read(masked_lm_positions=positions, **ids, **weights)
    assert read(input_ids=[999, 0] * 8)["text"].max() == 999
    with pytest.raises(DataError, match="holds the token id 1000, but"):
        read(input_ids=[1000, 0] * 8)
    with pytest.raises(DataError, match="inconsistent list lengths"):
        read(next_sentence_labels=[0, 1])
    sample = read(next_sentence_labels=[7], segment_ids=[0, 5] * 8, input_mask=[2, 0] * 8)
    assert sample["is_random"] == 1
    assert sample["types"].tolist() == [0, 1] * 8
    assert sample["padding_mask"].tolist() == [1, 0] * 8


@pytest.fixture
def tokenizer(tmp_path):
    return build(
        "BertWordPieceLowerCase", vocab_file=str(write_vocabulary(tmp_path / "vocab.txt", 50))
    )


def datasets(tokenizer, *paths: str, samples=(30, 0, 0), split="1", length=16):
    data = DataConfig(seq_length=length, data_path=paths, split=split)
    return build_bert_datasets(
        DataRequest(data, 1234, samples), seq_length=length, tokenizer=tokenizer, binary_head=True
    )


def test_samples(tmp_path, tokenizer):
    folder = tmp_path / "records"
    folder.mkdir()
    write(folder / "b.tfrecord", map(example, range(4, 10)))
    write(folder / "a.tfrecord-0", map(example, range(4)))
    train = datasets(tokenizer, str(folder)).train
    assert len(train) == 30
    ids = [tuple(example(i)["input_ids"]) for i in range(10)]
    order = [ids.index(tuple(train[i]["text"].tolist())) for i in range(30)]
    assert [sorted(order[i : i + 10]) for i in (0, 10, 20)] == [[*range(10)]] * 3
    assert order[:10] != order[10:20]
    again = pickle.loads(pickle.dumps(train))
    for i in (29, 3):
        sample, want = again[i], example(order[i])
        assert sample["text"].tolist() == want["input_ids"]
        assert sample["types"].tolist() == want["segment_ids"]
        assert sample["padding_mask"].tolist() == want["input_mask"]
        assert sample["is_random"] == order[i] % 2
        labels = [-1] * 16
        labels[2], labels[5], labels[7] = 7, 98, order[i]
        assert sample["labels"].tolist() == labels
        assert sample["loss_mask"].tolist() == [int(label != -1) for label in labels]
        assert sample["id"] == i
    split = datasets(tokenizer, str(folder / "b.tfrecord"), samples=(4, 2, 0), split="4,2")
    seen = [{tuple(part[i]["text"].tolist()) for i in range(len(part))} for part in split[:2]]
    assert seen == [set(ids[4:8]), set(ids[8:10])]


def test_weights_may_be_missing(tmp_path, tokenizer):
    """Lists are then padded with position 0."""
    without = [
        {name: value for name, value in example(i).items() if "weights" not in name}
        for i in range(3)
    ]
    path = str(write(tmp_path / "x.tfrecord", without))
    assert datasets(tokenizer, path).train[0]["labels"].tolist().count(-1) == 13
    first = without[0] | {"masked_lm_positions": [1, 15, 0, 0], "masked_lm_ids": [7, 9, 3, 5]}
    path = str(write(tmp_path / "y.tfrecord", [first]))
    assert datasets(tokenizer, path).train[0]["labels"].tolist() == [-1, 7, *[-1] * 13, 9]


def test_any_name_will_do(tmp_path, tokenizer):
    write(tmp_path / "tf_examples.0", map(example, range(10)))
    assert len(datasets(tokenizer, str(tmp_path / "tf_examples.0")).train) == 30
    assert len(datasets(tokenizer, str(tmp_path / "tf_exam*")).train) == 30


def test_a_blend_and_another_file_is_another_corpus(tmp_path, tokenizer):
    for name in "ab":
        write(tmp_path / f"{name}.tfrecord", map(example, range(10 if name == "a" else 11)))
    a, b = (str(tmp_path / f"{name}.tfrecord") for name in "ab")
    assert len(datasets(tokenizer, "1", a, "2", b).train) >= 30
    prints = [corpus_fingerprint(DataConfig(seq_length=16, data_path=(path,))) for path in (a, b)]
    assert prints[0] != prints[1]


def _without(name):
    return lambda: [{key: value for key, value in example(0).items() if key != name}]


def _with(**values):
    return lambda: [example(0) | values]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_without("segment_ids"), "record 0 .byte 0.: no segment_ids: write the file with"),
        (_with(input_ids=[1] * 15), "record 0 .byte 0.: inconsistent list lengths"),
        (_with(masked_lm_ids=[1]), "record 0 .byte 0.: inconsistent list lengths"),
        (_with(masked_lm_positions=[2, 5, 16, 0]), "a masked position is outside the sequence"),
        (_with(masked_lm_ids=[7, 9, 4000, 0]), "holds the token id 4000, but the vocabulary has"),
        (_with(input_ids=[4000] + [0] * 15), "holds the token id 4000, but the vocabulary has"),
        (_with(input_ids=[4000, -2] + [0] * 14), "holds the token id -2, but the vocabulary has"),
        (_with(input_ids=[-1] * 16), "holds the token id -1, but the vocabulary has"),
        (lambda: [example(0, 32)], "32 tokens, but --seq-length is 16: give --seq-length 32"),
    ],
)
def test_samples_that_do_not_fit_are_refused(tmp_path, tokenizer, make, message):
    path = write(tmp_path / "x.tfrecord", make())
    with pytest.raises(DataError, match=f"{path}: .*{message}"):
        datasets(tokenizer, str(path))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "truncated in the record at byte"),
        (lambda data: data + b"1", "truncated at byte"),
        (lambda data: b"\0" + data[1:], "not a TFRecord file"),
        (lambda data: data[:400] + b"?" + data[401:], "checksum"),
        (lambda data: data[:-1] + b"?", "wrong checksum of the data"),
        (lambda data: b"", "cannot be read"),
        (lambda data: record(b"\x0b"), r"not a tf.train.Example \(wire type 3 at byte 1\)"),
        (lambda data: record(b"\x0a\x05"), "not a tf.train.Example"),
    ],
)
def test_damage_is_refused(tmp_path, tokenizer, damage, message):
    path = write(tmp_path / "x.tfrecord", map(example, range(2)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{path}: .*{message}"):
        _ = [datasets(tokenizer, str(path)).train[i] for i in range(2)]


def test_bert_trains_on_them(tmp_path):
    vocab = write_vocabulary(tmp_path / "vocab.txt", 50)
    path = write(tmp_path / "x.tfrecord", map(example, range(20)))
    words = f"""--num-layers 1 --hidden-size 32 --num-attention-heads 2 --micro-batch-size 2
        --seq-length 16 --train-iters 3 --lr 0.001 --log-interval 1 --eval-iters 1 --split 8,2
        --eval-interval 3 --vocab-file {vocab} --data-path {path}""".split()
    finished = run_ranks([str(ROOT / "pretrain_bert.py"), *words], os.environ)
    assert finished.returncode == 0, finished.stdout[-2000:]
    assert "iteration        3/       3" in finished.stdout
    assert "sop loss" in finished.stdout


def test_the_helper_writes_what_the_library_writes():
    found = parse_example(WRITTEN[12:-4])
    numbers = {name: found[name].tolist() for name in found}
    assert record(encode(numbers)) == WRITTEN
    assert tfrecords.varint(150) == b"\x96\x01"
