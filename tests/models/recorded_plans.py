"""Plans, costs and results of many networks, to compare them with recorded ones.

`python -m tests.models.recorded_plans` records them again after an intended change of plans or
costs. `python -m tests.models.recorded_plans gpt FLAGS` prints the plan of one network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.parser import Program, parse_config
from megatron.config.stages import whole_model
from megatron.errors import ConfigError
from megatron.models import arithmetic
from megatron.models.block import Block
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.plan import ModelPlan
from megatron.models.plans import model_plan
from megatron.models.recompute import RecomputePlan
from tests.models.drawn import all_networks
from tests.models.recorded_results import results_of

FILE = Path(__file__).with_name("recorded_plans.json")
_SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 96 --micro-batch-size 1 "
    "--max-position-embeddings 96 --lr 1e-3 --train-iters 2 --mock-data --vocab-size 100 "
    "--tokenizer-type NullTokenizer --init-method-std 0.2"
)
_OTHERS = (
    "retro --num-layers 9 --retro-chunk-length 24 --retro-num-neighbors 3",
    "ict --biencoder-projection-dim 16 --biencoder-shared-query-context-model",
)
_SPLITS = [
    WeightSplit(),
    WeightSplit(tensor=2, expert=2, expert_tensor=1),
    WeightSplit(tensor=2, expert=2, expert_tensor=2),
]
_SHARED = MicroBatch(
    sequences=4,
    length=96,
    tensor=2,
    sequence=2,
    expert_tensor=2,
    context=2,
    width=2,
    imbalance=1.5,
    losses=3,
    chunked_loss=True,
)
_EACH = frozenset(
    {"core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts"}
)
_BATCHES: list[tuple[MicroBatch, RecomputePlan | None]] = [
    (MicroBatch(sequences=2, length=96), None),
    (MicroBatch(sequences=2, length=96, tensor=2, keeps_scores=True, losses=2), None),
    (_SHARED, None),
    (dataclasses.replace(_SHARED, recomputed=frozenset({"core_attn"})), RecomputePlan("selective")),
    (
        dataclasses.replace(_SHARED, recomputed=_EACH, keeps_scores=True),
        RecomputePlan("selective", modules=tuple(sorted(_EACH))),
    ),
    (_SHARED, RecomputePlan("full", "uniform", 2)),
    (dataclasses.replace(_SHARED, sequence=1), RecomputePlan("full", "block", 1, True)),
]


def networks() -> Iterator[str]:
    """Yield the kind and flags of each network whose flags do not contradict one another."""
    for one in all_networks():
        name = f"{one.kind} {one.flags}".strip()
        try:
            _parse(name, Program())
        except ConfigError:
            continue
        yield name
    yield from _OTHERS


def plan_of(name: str) -> ModelPlan:
    """Return the plan of the network with this kind and these flags."""
    return model_plan(network_of(name), 128)


def network_of(name: str) -> ModelConfig:
    """Return the network with this kind and these flags."""
    return _parse(name, Program(rules=()))


def _parse(name: str, program: Program) -> ModelConfig:
    kind, *flags = name.split()
    words = f"{_SIZES} --decoder-seq-length 40".split() if kind == "t5" else _SIZES.split()
    words += flags
    return parse_config(words, world_size=1, program=program, architecture=kind).config.model


def plain_values(value: Any) -> Any:
    """Return a plan as plain values, without the fields that have their default values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.compare
        }
        defaults = {field.name: field.default for field in dataclasses.fields(value)}
        kept = {name: plain_values(one) for name, one in fields.items() if one != defaults[name]}
        return {"": type(value).__name__, **kept}
    if isinstance(value, list | tuple):
        return [plain_values(one) for one in value]
    return value if value is None or isinstance(value, int | float | str) else repr(value)


def digest_of(plan: ModelPlan) -> str:
    """Return a digest of everything in a plan that is not a default value."""
    return hashlib.sha256(json.dumps(plain_values(plan), sort_keys=True).encode()).hexdigest()[:16]


def costs_of(plan: ModelPlan) -> dict[str, list[int]]:
    """Return what the planner counts for a network, by what is counted."""
    whole = whole_model(len(plan.layers))
    decoder = 40 if plan.encoder_layers else None
    return {
        "weights": [
            count
            for split in _SPLITS
            for count in (
                arithmetic.count_part_parameters(plan, whole, split),
                arithmetic.count_part_experts(plan, whole, split),
                arithmetic.count_part_matrices(plan, whole, split),
                *arithmetic.largest_layer(plan, split),
                arithmetic.largest_layer_matrix(plan, split),
            )
        ],
        "flops": [
            arithmetic.count_active_parameters(plan),
            arithmetic.flops_per_token(plan, 96, decoder),
            arithmetic.flops_per_token(plan, 20, decoder, trains_adapters=True),
        ],
        "layers": list(_costs_of_layers(plan)),
        "bytes": [
            arithmetic.part_activations(plan, whole, batch, recompute, 96, decoder)
            for batch, recompute in _BATCHES
        ],
        "heads": [arithmetic.head_activations(plan, batch) for batch, _ in _BATCHES[:3]],
    }


def _costs_of_layers(plan: ModelPlan) -> Iterator[int]:
    seen = set()
    for layer in plan.layers:
        if layer not in seen:
            seen.add(layer)
            yield from Block.flops(layer, 96, 40)


def record() -> dict[str, Any]:
    """Return the plans, costs and results of all networks that differ in their plans."""
    found: dict[str, Any] = {}
    digests = set()
    for name in networks():
        plan = plan_of(name)
        digest = digest_of(plan)
        if digest in digests:  # a flag without effect
            continue
        digests.add(digest)
        found[name] = {"plan": digest, **costs_of(plan)}
        results = results_of(network_of(name))
        found[name]["results"] = [float(f"{one:.6g}") for one in results]
    return found


def main() -> None:
    """Print one plan, or record all plans again."""
    if len(sys.argv) > 1:
        print(json.dumps(plain_values(plan_of(" ".join(sys.argv[1:]))), indent=1))
        return
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in record().items())
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
