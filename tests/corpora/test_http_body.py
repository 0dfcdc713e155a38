"""Decoding of HTTP bodies: as servers send them, already decoded, damaged."""

from __future__ import annotations

import gzip
import zlib

import pyarrow
import pytest

from megatron.corpora.http_body import decode_body

_LIMIT = 1 << 20
_PAGE = (
    b"<html><body>" + b"".join(b"<p>line %d</p>\n" % i for i in range(20_000)) + b"</body></html>"
)


def _raw_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


def _chunks(data: bytes, size: int, extension: bytes = b"") -> bytes:
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    return b"".join(b"%X%s\r\n%s\r\n" % (len(one), extension, one) for one in [*parts, b""])


_BODIES = {
    "": _PAGE,
    "identity": _PAGE,
    "utf-8": _PAGE,  # some servers confuse this header with another one
    "gzip": gzip.compress(_PAGE, mtime=0),
    "X-GZIP": gzip.compress(_PAGE, mtime=0),
    "deflate": zlib.compress(_PAGE),
    "Deflate": _raw_deflate(_PAGE),
    "br": pyarrow.compress(_PAGE, "brotli", asbytes=True),
    "gzip, gzip": gzip.compress(gzip.compress(_PAGE, mtime=0), mtime=0),
}


def _zstd(tmp_path) -> bytes:
    path = tmp_path / "page.zst"
    with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(_PAGE)
    return path.read_bytes()


@pytest.mark.parametrize("encoding", _BODIES)
def test_encoded_bodies(encoding) -> None:
    body, content = _BODIES[encoding], [encoding] if encoding else []
    assert decode_body(body, [], content, _LIMIT) == _PAGE
    for chunked in (_chunks(body, 1000), _chunks(body, 1 << 30, b'; name="value"')):
        assert decode_body(chunked, ["Chunked"], content, _LIMIT) == _PAGE
        assert decode_body(chunked, [", ".join([*content, "chunked"])], [], _LIMIT) == _PAGE


def test_zstandard(tmp_path) -> None:
    assert decode_body(_zstd(tmp_path), [], ["zstd"], _LIMIT) == _PAGE


@pytest.mark.parametrize("encoding", [*_BODIES, "zstd"])
@pytest.mark.parametrize("body", [_PAGE, b"\n<!DOCTYPE html>\n<p>short</p>", b"plain text", b""])
def test_bodies_that_the_crawler_has_decoded(encoding, body) -> None:
    assert decode_body(body, ["chunked"], [encoding], _LIMIT) == body


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_the_part_before_the_damage_is_kept(encoding) -> None:
    body = _BODIES[encoding]
    cut = decode_body(_chunks(body, 999)[: len(body) // 2], ["chunked"], [encoding], _LIMIT)
    assert len(_PAGE) // 3 < len(cut) < len(_PAGE)
    assert _PAGE.startswith(cut)
    wrong_checksum = decode_body(body[:-4] + bytes(4), [], [encoding], _LIMIT)
    assert len(wrong_checksum) > len(_PAGE) // 2
    assert _PAGE.startswith(wrong_checksum)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "Deflate", "br", "zstd"])
def test_a_small_body_does_not_become_a_huge_one(encoding, tmp_path) -> None:
    body = _zstd(tmp_path) if encoding == "zstd" else _BODIES[encoding]
    assert decode_body(body, [], [encoding], 100) == _PAGE[:100]


def test_an_empty_chunked_body_is_empty() -> None:
    assert decode_body(b"0\r\n\r\n", ["chunked"], ["gzip"], _LIMIT) == b""
