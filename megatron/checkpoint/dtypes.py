"""Names of number types in safetensors headers."""

from __future__ import annotations

import torch

BY_NAME: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in BY_NAME.items()}


def name_of(dtype: torch.dtype) -> str:
    """Safetensors' name of a type, for example "BF16". ValueError where it has none."""
    if dtype not in _NAMES:
        raise ValueError(f"checkpoints cannot hold {dtype}")
    return _NAMES[dtype]


def size_of(name: str) -> int:
    """Bytes of one element."""
    return BY_NAME[name].itemsize
