"""Damaged input for every reader of bytes, and random programs for the reader of pickles."""

from __future__ import annotations

import pickletools
import random
from pathlib import Path

from megatron.checkpoint.legacy.unpickler import read_pickle
from tests.checkpoint.legacy.test_malicious import MARK
from tests.fuzz.harness import Outcome, Target, fuzz
from tests.fuzz.targets import TARGETS
from tests.reliability.scoreboard.score import Trials, expect

_SEED = 41
_TEXTS = (b"a", b"x" * 50, b"\xff", b"")
_VALUES = (b"K\x01", b"}", b"]", b")", b"N", b"(", b"U\x01a", b"ccollections\nOrderedDict\n")
_NAMES = (
    *(b"os\nsystem\n", b"builtins\neval\n", b"os\nx.y\n", b"collections\nOrderedDict\n"),
    *(b"torch._utils\n_rebuild_tensor_v2\n", b"argparse\nNamespace\n", b"torch\nFloatStorage\n"),
)


def every_reader(_: Path, count: int) -> Trials:
    """Try each target with damaged inputs, in a process that may not hang, crash or grow."""
    trials = Trials(f"seed {_SEED}")
    for target in TARGETS:
        _try(trials, target, count)
    trials.note("targets", len(TARGETS))
    return trials


def hostile_pickles(_: Path, count: int) -> Trials:
    """Try random programs, and mutations of real and malicious pickles."""
    trials = Trials(f"seed {_SEED}")
    (real,) = [target for target in TARGETS if target.name == "pickle"]
    programs = [_program(random.Random(number)) for number in range(count // 2)]
    written = Target("programs", lambda: programs, _read, real.errors)
    _try(trials, written, 1)
    changed = Target("pickle", real.seeds, _read, real.errors)
    _try(trials, changed, count - len(programs))
    trials.note("programs", len(programs))
    return trials


def _try(trials: Trials, target: Target, count: int) -> None:
    """Count every input as a trial."""
    outcome = Outcome()
    with trials.trial(target.name):
        outcome = fuzz(target, count, _SEED)
        expect(not outcome.failure, f"{outcome.failure} for {outcome.example[:200]!r}")
    trials.tried += max(0, outcome.inputs - 1)
    trials.passed += max(0, outcome.inputs - 1)
    trials.worst = 0.0  # of one input; the harness limits it
    trials.note("refused", outcome.refused)


def _read(data: bytes, folder: Path) -> None:
    try:
        read_pickle(data, "x")
    finally:
        expect(not (folder / MARK).exists(), "the pickle was executed")


def _program(draw: random.Random) -> bytes:
    """Return up to 200 well-formed instructions in any order."""
    code = [b"\x80\x02", draw.choice((b"]", b"}", b"(")), *draw.choices(_VALUES, k=20)]
    simple = [op for op in pickletools.opcodes if op.arg is None and op.name != "STOP"]
    known = [op for op in pickletools.opcodes if op.name != "STOP"]
    for _ in range(draw.randint(1, 200)):
        op = draw.choice(simple if draw.random() < 0.5 else known)
        code.append(op.code.encode("latin-1") + _argument(op.arg.name if op.arg else "", draw))
    return b"".join([*code, b"."])


def _argument(kind: str, draw: random.Random) -> bytes:
    """Return an argument of an instruction; memo places and lengths are small."""
    small = draw.choice((0, 1, 2, 3, 255))
    fixed = {
        "": b"",
        "decimalnl_short": b"%d\n" % small,
        "decimalnl_long": b"%dL\n" % draw.choice((0, -1, 10**50)),
        "floatnl": b"%d\n" % small,
        "stringnl": b"'a'\n",
        "unicodestringnl": b"a\n",
        "stringnl_noescape": b"a\n",
        "stringnl_noescape_pair": draw.choice(_NAMES),
        "float8": draw.randbytes(8),
    }
    if kind in fixed:
        return fixed[kind]
    width = int(kind[-1])
    if kind.startswith(("uint", "int")):
        return small.to_bytes(width, "little")
    text = draw.choice(_TEXTS)
    return len(text).to_bytes(width, "little") + text
