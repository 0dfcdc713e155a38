"""How commands end where nobody listens."""

import subprocess
import sys

from tests.repository import ROOT

PRINTS = """
import sys
from megatron.command import run_command
sys.exit(run_command(lambda: print("line\\n" * {count})))
"""


def test_a_reader_that_leaves_ends_a_command_quietly() -> None:
    for count in (1, 100_000):
        process = subprocess.Popen(
            [sys.executable, "-c", PRINTS.format(count=count)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.close()
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (141, b"")


def test_a_run_whose_log_nobody_reads_says_why_it_ends() -> None:
    script = """
import sys
from megatron.training.callbacks.terminal import say
from megatron.training.process import run_process
sys.exit(run_process([], lambda launch: say("iteration 1")))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 141
    assert said.startswith(b"error: the program that read this run's log has ended")
    assert b"Traceback" not in said


def test_other_broken_pipes_are_errors() -> None:
    script = PRINTS.replace(
        'print("line\\n" * {count})', "(_ for _ in ()).throw(BrokenPipeError())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"BrokenPipeError" in done.stderr
