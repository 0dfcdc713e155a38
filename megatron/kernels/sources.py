"""The CUDA sources in the folder `cuda`: their kernels, parameters and constants.

This module does not import torch, so `pip install` can compile the sources.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
FLOATS = ("float", "Half", "BFloat16")  # the element types of common.cuh, ordered by code
IN_16_BITS = FLOATS[1:]
_FLAGS = (False, True)
# The types of the residual stream and of a layer's weights: the same type, or a stream in fp32.
_STREAMS = (*((x, x) for x in FLOATS), *(("float", x) for x in IN_16_BITS))
_FP8 = (0, 1)  # e4m3, e5m2
_KINDS = range(4)  # kinds of activations
_TYPES = {"int64_t": "q", "int": "i", "unsigned": "I", "float": "f", "double": "d"}


def instance(kernel: str, *arguments: str | int) -> str:
    """Return the C++ name of a kernel with template arguments, such as "kernel<float, true>"."""
    values = (str(x).lower() if isinstance(x, bool) else str(x) for x in arguments)
    return f"{kernel}<{', '.join(values)}>" if arguments else kernel


def _elements(weights: str, fewest: int) -> list[int]:
    """Return the possible numbers of elements per thread (`rows.cuh`)."""
    return [e for e in (8, 16, 32) if e >= fewest and (e < 32 or weights in IN_16_BITS)]


def instances() -> Mapping[str, Sequence[str]]:
    """Return the kernels to compile in each source, by its file name without suffix."""
    name = instance
    return {
        "activation": [
            *(name("activation_forward_kernel", t, k) for t in FLOATS for k in _KINDS),
            *(
                name("activation_backward_kernel", t, k, sums)
                for t in FLOATS
                for k in _KINDS
                for sums in _FLAGS
            ),
        ],
        "adam": [name("adam_kernel", g, c) for g in FLOATS for c in FLOATS],
        "append_to_cache": ["append_to_cache_kernel"],
        "column_sums": [name("column_sums_kernel", t) for t in FLOATS],
        "cross_entropy": [
            name(kernel, t) for kernel in ("statistics_kernel", "gradient_kernel") for t in FLOATS
        ],
        "dropout": [
            *(name("bias_dropout_add_forward_kernel", x, w) for x, w in _STREAMS),
            *(
                name("bias_dropout_add_backward_kernel", x, w, sums)
                for x, w in _STREAMS
                for sums in _FLAGS
            ),
        ],
        "embedding_gradient": [
            "sort_kernel",
            *(name("rows_kernel", t) for t in FLOATS),
            "parts_kernel",
        ],
        "experts": [
            *(name("combine_rows_kernel", t) for t in FLOATS),
            *(name("combine_rows_backward_kernel", t) for t in FLOATS),
            *(name("take_gradient_kernel", t, add) for t in FLOATS for add in _FLAGS),
        ],
        "fp8": [
            *(name("amax_kernel", t) for t in FLOATS),
            *(name("cast_kernel", t, f, m) for t in FLOATS for f in _FP8 for m in _FLAGS),
            *(name("cast_rows_kernel", t, f) for t in FLOATS for f in _FP8),
        ],
        "fp8_transpose": [
            *(name("amax_both_kernel", t) for t in FLOATS),
            "transpose_kernel",
            *(name("cast_transpose_kernel", t, f, m) for t in FLOATS for f in _FP8 for m in _FLAGS),
        ],
        "join_parts": [name("join_parts_kernel", t) for t in FLOATS],
        "latent_attention": [
            name("latent_attention_kernel", t, products) for t in IN_16_BITS for products in (2, 8)
        ],
        "norm_backward": [
            name("add_norm_backward_kernel", x, w, e, layer)
            for x, w in _STREAMS
            for e in _elements(w, 16)
            for layer in _FLAGS
        ],
        "norm_forward": [
            name("add_norm_forward_kernel", x, w, e, layer)
            for x, w in _STREAMS
            for layer in _FLAGS
            for e in _elements(w, 16 if layer else 8)
        ],
        "paged_attention": [
            name("paged_attention_kernel", t, d) for t in IN_16_BITS for d in (64, 128, 256)
        ],
        "paged_attention_fp32": [
            name("paged_attention_fp32_kernel", lanes, heads)
            for lanes in (16, 32)
            for heads in (1, 2, 4)
        ],
        "rope": [name("split_rotate_kernel", t, back) for t in FLOATS for back in _FLAGS],
        "unpack": [
            name(kernel, t) for kernel in ("unpack_nf4_kernel", "unpack_fp8_kernel") for t in FLOATS
        ],
        "tensor_sums": [*(name("pieces_kernel", t) for t in FLOATS), "finish_kernel"],
    }


def source_files() -> list[Path]:
    """Return every .cu file."""
    return sorted(HERE.glob("cuda/*.cu"))


def digest(flags: Sequence[str]) -> str:
    """Return a digest of all sources, headers, kernels to compile and flags."""
    state = hashlib.sha256(repr((tuple(flags), instances())).encode())
    for file in sorted(HERE.glob("cuda/*.cu*")):
        state.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return state.hexdigest()[:16]


@cache
def constant(source: str, name: str) -> int:
    """Return the value of an integer constant in a source.

    Args:
        source: The file name of the source, such as "adam.cu".
        name: The name of the constant.

    Raises:
        ValueError: The source has no such constant.
    """
    match = re.search(rf"\b{name} = (\d+)\b", (HERE / f"cuda/{source}").read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{source} has no constant {name}")
    return int(match[1])


@cache
def parameters() -> Mapping[str, str]:
    """Return the types of each kernel's parameters, as format characters of `struct` (P: pointer).

    Raises:
        ValueError: A parameter has an unknown type.
    """
    letters_of = {}
    for file in source_files():
        text = file.read_text(encoding="utf-8")
        for kernel, listed in re.findall(r"__global__[^;{]*?\b(\w+_kernel)\(([^{]*?)\)\s*\{", text):
            letters = []
            for parameter in re.sub(r"<[^<>]*>", "", listed).split(","):
                kind = parameter.replace("const ", "").split()[0]
                if "*" not in parameter and kind not in _TYPES:
                    raise ValueError(
                        f"{file}: {kernel} has a parameter of unknown type: {parameter.strip()}"
                    )
                letters.append("P" if "*" in parameter else _TYPES[kind])
            letters_of[kernel] = "".join(letters)
    return letters_of
