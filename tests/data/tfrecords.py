"""TFRecords for BERT, written according to the definitions of the two formats."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron.data.tfrecord import masked_crc

Example = Mapping[str, Sequence[float]]


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    digits = []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def encode(example: Example, *, packed: bool = True) -> bytes:
    """Encode a tf.train.Example with lists of integers, or of floats for names containing
    "weights"."""
    features = []
    for name, numbers in example.items():
        if "weights" in name:
            parts, kind, wire = [struct.pack("<f", number) for number in numbers], 2, 5
        else:
            parts, kind, wire = [varint(int(number)) for number in numbers], 3, 0
        if packed:
            values = field(1, b"".join(parts))
        else:
            values = b"".join(varint(1 << 3 | wire) + part for part in parts)
        features.append(field(1, field(1, name.encode()) + field(2, field(kind, values))))
    return field(1, b"".join(features))


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return b"".join(
        [head, struct.pack("<I", masked_crc(head)), data, struct.pack("<I", masked_crc(data))]
    )


def write(path: Path, examples: Iterable[Example]) -> Path:
    path.write_bytes(b"".join(record(encode(example)) for example in examples))
    return path


def example(number: int, length: int = 16) -> dict[str, Sequence[float]]:
    """Return a sample in the format of create_pretraining_data.py, with up to 4 predictions."""
    random = np.random.RandomState(number)
    used = length - number % 4
    ids = [*random.randint(5, 100, used).tolist(), *[0] * (length - used)]
    return {
        "input_ids": ids,
        "input_mask": [1] * used + [0] * (length - used),
        "segment_ids": [0] * 6 + [1] * (used - 6) + [0] * (length - used),
        "masked_lm_positions": [2, 5, 7, 0],
        "masked_lm_ids": [7, 98, number % 100, 0],
        "masked_lm_weights": [1.0, 1.0, 1.0, 0.0],
        "next_sentence_labels": [number % 2],
    }
