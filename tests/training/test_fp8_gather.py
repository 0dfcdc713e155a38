"""Weights gathered in 8 bits: a run is bit-identical to one that gathers in 16."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron.parallel import weights
from megatron.training import build, gradient_sharing
from megatron.training.step import Updates
from tests.checkpoint.states import read_all
from tests.distributed import run_distributed
from tests.training.toy import build_toy, fingerprint, train_toy

ITERATIONS = 4
FP8 = f"--fp8-format hybrid --train-iters {ITERATIONS} --eval-interval 2".split()
SHARED = "--use-distributed-optimizer"
DELAYED = "--fp8-recipe delayed --fp8-amax-history-len 3 --fp8-interval 2"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
OURS = "--fp8-param-gather"


def _in_16_bits(config, parts):
    """Return no names, so that a run with the flag gathers the same buffers as one without."""
    return {}


def _train(layout, words, kind="gpt", in_8_bits=gradient_sharing.gathered_in_8_bits):
    """Return logged values, a digest of the checkpoint's content, and gathered bytes by format."""
    # Only in this process.
    gradient_sharing.BUCKET_BYTES = 2**13
    build.gradient_sharing = SimpleNamespace(  # buckets are laid out as with the flag
        **{**vars(gradient_sharing), "gathered_in_8_bits": in_8_bits}
    )
    gathered: Counter[torch.dtype] = Counter()
    start = weights.start_all_gather

    def counted(shard, axis, into):
        gathered[into.dtype] += into.nbytes
        return start(shard, axis, into=into)

    weights.start_all_gather = counted
    try:
        words = words if "--fp16" in words else f"--bf16 {words}"
        recorder, run = train_toy(layout, [*FP8, *words.split()], kind)
    finally:
        weights.start_all_gather = start
    names = ("lm loss", "grad-norm", "params-norm", "loss-scale", "lm loss validation")
    values = {name: recorder.values(name) for name in names}
    return values, fingerprint(run), gathered


def _compare(layout, pairs, kind):
    """Run each pair with the flag: gather in 16 bits with the first words, in 8 bits with all."""
    return [
        (
            _train(layout, f"{first} {OURS}", kind, _in_16_bits),
            _train(layout, f"{first} {more} {OURS}", kind),
        )
        for first, more in pairs
    ]


def _all_equal(processes, pairs, kind="gpt", **sizes):
    """Train in several processes, compare each pair, and return the last process's results."""
    for answers in run_distributed(processes, _compare, pairs, kind, **sizes):
        for (first, more), (theirs, ours) in zip(pairs, answers, strict=True):
            assert ours[:2] == theirs[:2], (first, more)
            assert len(set(ours[0]["grad-norm"])) > 1
            assert ours[2][torch.uint8] > 0
            assert theirs[2][torch.uint8] == 0
    return answers


def test_only_8_bits_travel_in_an_update():
    """A layer's weights have 12 x 32 x 32 elements here."""
    asked = f"{SHARED} --log-params-norm --log-interval 2 --tensorboard-log-interval 2"
    (theirs, ours), (_, asking) = _all_equal(2, [(SHARED, ""), (asked, "")])
    weights_16 = 2 * 2 * 12 * 32 * 32
    assert ours[2][torch.uint8] == ITERATIONS * weights_16 // 2
    saved = theirs[2][torch.bfloat16] - ours[2][torch.bfloat16]
    assert saved == (ITERATIONS - 1) * weights_16  # once, when training is over
    assert asking[2][torch.bfloat16] - ours[2][torch.bfloat16] == weights_16  # for the first norm


def _with_and_without(layout, words):
    return [_train(layout, words), _train(layout, f"{words} {OURS}")]


def test_the_flag_changes_losses_by_rounding():
    """The buffers differ, so the norm's squares add in another order."""
    for (theirs, _, gathered), (ours, _, _) in run_distributed(2, _with_and_without, SHARED):
        assert gathered[torch.uint8] == 0
        for name in ("lm loss", "grad-norm", "lm loss validation"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)
        assert ours["lm loss"][0] == theirs["lm loss"][0]
        assert ours["grad-norm"][0] == pytest.approx(theirs["grad-norm"][0], rel=1e-6)


def test_shards_that_end_within_a_row():
    """A third of [32, 144], which fills a bucket, is 10 rows and two thirds."""
    words = f"{SHARED} --global-batch-size 3 --ffn-hidden-size 144"
    _all_equal(3, [(words, OVERLAP)])


# Flags of the run in 16 bits, and further flags of the run in 8 bits.
IN_PAIRS = [
    (SHARED, OVERLAP),
    (f"{SHARED} {DELAYED}", OVERLAP),
    (f"--zero-stage 2 {OVERLAP}", ""),
    ("--zero-stage 2 --no-fp8-wgrad --micro-batch-size 2", OVERLAP),
    (f"--fp16 --hysteresis 1 --initial-loss-scale {2**19} {SHARED} {DELAYED}", OVERLAP),
    (f"{SHARED} --optimizer-cpu-offload --no-gradient-accumulation-fusion", ""),
]


def test_in_pairs():
    answers = _all_equal(2, IN_PAIRS)
    scales = answers[4][1][0]["loss-scale"]
    assert scales[0] > scales[-1]  # updates were skipped


def test_split_layers():
    words = "--tensor-model-parallel-size 2 --sequence-parallel"
    pairs = [
        (f"{words} {SHARED}", OVERLAP),
        (f"{words} {SHARED} {DELAYED}", ""),
        (f"{words} {SHARED} --tp-comm-overlap", OVERLAP),
    ]
    _all_equal(4, pairs, tensor=2)
    words = f"{words} --num-attention-heads 4 --micro-batch-size 2 --decoder-seq-length 16 {SHARED}"
    _all_equal(4, [(words, OVERLAP)], "t5", tensor=2)


def test_stages():
    words = "--num-layers 4 --pipeline-model-parallel-size 2"
    virtual = "--num-layers-per-virtual-pipeline-stage 1"
    pairs = [
        (f"{words} --pipeline-schedule zero-bubble {SHARED}", OVERLAP),
        (f"{words} {virtual} {SHARED} {DELAYED}", OVERLAP),
        (f"{words} {virtual} --zero-stage 2 {OVERLAP}", ""),
    ]
    _all_equal(4, pairs, pipeline=2)


def test_context():
    words = "--context-parallel-size 2 --seq-length 32 --max-position-embeddings 32"
    _all_equal(4, [(f"{words} --attention-dropout 0 {SHARED}", OVERLAP)], context=2)


def _loss_after_a_change(layout, words):
    """Return an update's losses after its weights were changed, as by loading."""
    run = build_toy(layout, [*FP8, "--bf16", *words.split()])
    updates = Updates(run)
    updates.make(look_ahead=False)
    run.optimizer.wait_for_weights()
    with torch.no_grad():
        for weight in run.layers.fp8_weights():
            weight.mul_(1.5)
    run.optimizer.reload_masters()
    return updates.make(look_ahead=False).losses


def test_what_arrived_is_void_when_weights_are_given_other_values():
    plain = run_distributed(2, _loss_after_a_change, SHARED)
    assert run_distributed(2, _loss_after_a_change, f"{SHARED} {OURS}") == plain


def _casts_of_an_update(layout):
    """Return whether layers multiply by the memory in which weights arrive.

    This covers the first update, and the next one, whose first forward pass has begun.
    """
    run = build_toy(layout, [*FP8, "--bf16", SHARED, OURS, "--micro-batch-size", "2"])
    updates = Updates(run)
    inside = []

    def look(products):
        values, _ = products._weight
        inside.append(values.values.data_ptr() == products.arriving.fp8.values.data_ptr())

    for products in run.layers.fp8_weights().values():
        run.parts[0].register_forward_hook(lambda *_, products=products: look(products))
    updates.make(look_ahead=True)
    return inside


def test_weights_that_have_not_arrived_are_cast_where_they_will():
    """That memory exists anyway; a separate cast would take more memory than without the flag."""
    for inside in run_distributed(2, _casts_of_an_update):
        assert inside == [True] * 8 * 2


@pytest.mark.parametrize("recipe", ["", DELAYED], ids=["tensorwise", "delayed"])
def test_checkpoints_hold_whole_weights_and_runs_continue_from_them(tmp_path, recipe):
    words = f"{SHARED} {recipe} {OVERLAP}"
    saves = "--save-interval 1 --exit-interval 3 --async-save"
    folders = [tmp_path / name for name in ("theirs", "ours")]
    whole = run_distributed(2, _train, f"{words} {OURS}", "gpt", _in_16_bits)
    in_8_bits = gradient_sharing.gathered_in_8_bits
    for folder, optimizer in zip(folders, (_in_16_bits, in_8_bits), strict=True):
        run_distributed(2, _train, f"{words} {OURS} {saves} --save {folder}", "gpt", optimizer)
    theirs, ours = (read_all(folder) for folder in folders)
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    again = run_distributed(2, _train, f"{words} {OURS} --load {folders[1]}")
    for (expected, digest, _), (values, our_digest, _) in zip(whole, again, strict=True):
        assert values["lm loss"] == expected["lm loss"][3:]
        assert our_digest == digest
