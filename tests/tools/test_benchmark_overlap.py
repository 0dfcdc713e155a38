"""The tool that times products beside what they send, at toy size on a CPU."""

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


def test_sizes_that_do_not_divide_are_refused():
    done = run_ranks(["tools/benchmark_overlap.py", "--tokens", "63"], os.environ, 2)
    assert done.returncode == ConfigError.exit_code
    assert "--tokens 63 does not divide by 2 processes" in done.stdout
