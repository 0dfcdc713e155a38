"""Where the seed of dropout comes from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.parallel.random import micro_batch_seed
from megatron.training.passes import Passes


def _seeds(*, stage: int, context: int, replica: int = 0, samples: int = 40) -> tuple[int, int]:
    """Return the seeds of the dropout and routing of the first chunk in the third micro-batch."""
    seen: list[int] = []
    routers = SimpleNamespace(seed=None)
    run = SimpleNamespace(
        batches=SimpleNamespace(samples_per_pass=8, micro_batch=4),
        layout=SimpleNamespace(
            data=SimpleNamespace(rank=replica),
            pipeline=SimpleNamespace(rank=stage, size=3),
            context=SimpleNamespace(rank=context),
        ),
        progress=SimpleNamespace(dropout_seed=5),
        layers=SimpleNamespace(routers=routers),
        device=SimpleNamespace(seed=seen.append),
    )
    passes: Any = SimpleNamespace(_first_sample=samples, _run=run)
    Passes._seed(passes, 0, 2)
    assert routers.seed is not None
    return seen[0], routers.seed


def test_each_part_of_a_model_and_of_a_sequence_drops_other_values() -> None:
    places = [(stage, context) for stage in range(3) for context in range(3)]
    seeds = [_seeds(stage=stage, context=context) for stage, context in places]
    own, routing = zip(*seeds, strict=True)
    assert len(set(own)) == len(places)
    assert own[0] == micro_batch_seed(5, 40 + 2 * 8), "one process draws from the sample's seed"
    assert set(routing) == {own[0]}, "routing is that of one process everywhere"


def test_the_seed_is_that_of_the_samples() -> None:
    """The second of two replicas reads the later half, as if it were a micro-batch of its own."""
    assert _seeds(stage=0, context=0, replica=1) == _seeds(stage=0, context=0, samples=44)
