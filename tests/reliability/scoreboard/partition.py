"""Row 17: the network between two machines is cut."""

from __future__ import annotations

import random
import time
from pathlib import Path

from megatron.checkpoint.find import TRACKER, iteration_folder
from megatron.checkpoint.loading import open_checkpoint
from tests.launch import run_ranks
from tests.reliability.machines import ip, launcher_flags, two_machines
from tests.reliability.processes import TIMEOUT, children, environment, module, torchrun, wait_until
from tests.reliability.scoreboard.score import Trials, expect

_DEADLINE = TIMEOUT + 10.0
_NONE = "none:0:0"


def cut_network(folder: Path, count: int) -> Trials:
    """Try row 17: both sides end in time, and the saved checkpoints load."""
    trials = Trials.with_seeds(count)
    for seed in range(count):
        inner = folder / str(seed)
        inner.mkdir()
        with trials.trial(f"seed {seed}"):
            _cut(inner, random.Random(seed))
    return trials


def _cut(folder: Path, rng: random.Random) -> None:
    save = folder / "save"
    flags = ["--save", str(save), "--load", str(save), "--save-interval", "3", "--keep-latest", "3"]
    words = module(*flags, "--train-iters", "100000")
    outputs = [folder / "a", folder / "b"]
    with two_machines() as (a, b):
        first_args, second_args = ([*launcher_flags(machine), *words] for machine in (a, b))
        with (
            torchrun(first_args, _NONE, folder, prefix=a.command_prefix, name="a") as (first, _),
            torchrun(second_args, _NONE, folder, prefix=b.command_prefix, name="b") as (second, _),
        ):
            wait_until((save / TRACKER).exists, 120.0)
            time.sleep(rng.uniform(0.0, 1.0))
            expect(children(first.pid) and children(second.pid), "it ended before the cut")
            ip("-n", a.namespace, "link", "set", a.interface, "down")
            cut = time.monotonic()
            wait_until(
                lambda: not children(first.pid) and not children(second.pid), _DEADLINE + 2.0
            )
            expect(time.monotonic() - cut <= _DEADLINE, "too late")
    text = "".join(path.read_text() for path in outputs)
    expect("error: hang in " in text, f"no report: {text[-500:]}")
    # Only rank 0 publishes, so whatever was published before the cut is complete.
    reader = open_checkpoint(save)
    assert reader is not None
    expected_name = iteration_folder(int((save / TRACKER).read_text()))
    expect(reader.path.name == expected_name, f"{expected_name} is not used")
    last = reader.iteration
    del reader
    resume_args = [*words, "--exit-interval", "1"]
    done = run_ranks(resume_args, environment(_NONE, folder / "fault"), 2)
    expect(done.returncode == 0, f"the next start failed: {done.stdout[-500:]}")
    expect(f"at iteration {last} (read" in done.stdout, "it did not resume from the newest")
    expect(not list(save.glob("*.tmp-*")), "temporary files stayed")
