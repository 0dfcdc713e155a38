"""The tool that times products overlapped with communication, at toy size on a CPU."""

import os

from megatron.errors import ConfigError
from tests.launch import run_ranks

TOY = "--tokens 64 --hidden-size 32 --qkv-size 48 --ffn-hidden-size 64 --rounds 1".split()


def test_every_product_has_its_row():
    done = run_ranks(["tools/benchmark_overlap.py", *TOY], os.environ, 2)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in lines[0][1:-1]] == ["us", "product alone", "collective", "cut"]
    assert len(lines) == 2 + 6
    assert all(float(cell.split(",")[0]) > 0 for line in lines[2:] for cell in line[2:-1])


def _refusal(*words: str, ranks: int = 2) -> str:
    done = run_ranks(["tools/benchmark_overlap.py", *words], os.environ, ranks)
    assert done.returncode == ConfigError.exit_code
    return done.stdout + done.stderr


def test_what_cannot_be_measured_is_refused():
    assert "--tokens 63 is not a multiple of the 2 processes" in _refusal("--tokens", "63")
    assert "--rounds 0: must be at least 1" in _refusal("--rounds", "0")
    told = _refusal("--token", "64", ranks=1)
    assert told == "error: unknown flag --token: did you mean --tokens?\n"
