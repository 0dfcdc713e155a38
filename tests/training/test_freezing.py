"""Weights that are not trained: --freeze."""

import pytest

from megatron.config.stages import ModelPart
from megatron.errors import CheckpointError, ConfigError
from megatron.models.freezing import is_frozen, similar_names, trained_share
from megatron.parallel.layout import Layout
from tests.distributed import run_distributed
from tests.models.small import config
from tests.training.toy import build_toy, fingerprint, train_toy

FLAGS = """
    --num-layers 4 --hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --eval-iters 0
    --train-iters 4 --freeze embedding layers.*.attention layers.1
"""


def _is_frozen(name):
    return name.startswith(("embedding.", "layers.1.")) or ".attention." in name


def _train(layout, flags):
    recorder, run = train_toy(layout, flags.split())
    states = {name.rpartition(".")[0] for name in run.optimizer.named_tensors()}
    return recorder.values("lm loss"), recorder.values("grad-norm"), states


@pytest.fixture(scope="module")
def whole():
    return _train(Layout.single(), FLAGS)


def test_frozen_weights_stay_and_have_no_gradients_or_states(whole):
    begun = {
        name: p.detach().clone()
        for name, p in build_toy(Layout.single(), FLAGS.split()).named_parameters()
    }
    _, run = train_toy(Layout.single(), FLAGS.split())
    planned = {m.traits.name for flat in run.gradients.plan.flats for m in flat.members}
    for name, parameter in run.named_parameters():
        assert parameter.equal(begun[name]) == _is_frozen(name), name
        assert (parameter.grad is None) or not _is_frozen(name), name
        assert (name in planned) != _is_frozen(name), name
        assert (name in whole[2]) != _is_frozen(name), name


@pytest.mark.parametrize(
    "flags",
    [
        "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather",
        "--zero-stage 2",
        "--zero-stage 3",
        "--DDP-impl torch",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
    ],
)
def test_layouts_equal_one_process(whole, flags):
    sizes = {a: 2 for a in ("tensor", "context", "pipeline") if f"--{a}" in flags}
    losses, norms, _ = whole
    for ours in run_distributed(2, _train, FLAGS + flags, **sizes):
        assert ours[0] == pytest.approx(losses, rel=1e-5)
        assert ours[1] == pytest.approx(norms, rel=1e-4)


def test_frozen_weights_of_16_bits_have_no_masters():
    _, run = train_toy(Layout.single(), [*FLAGS.split(), "--bf16"])
    assert "layers.0.mlp.up.weight.master" in run.optimizer.named_tensors()
    assert not any(_is_frozen(name) for name in run.optimizer.named_tensors())


@pytest.mark.parametrize("more", ["", "--bf16 --zero-stage 3"])
def test_resuming_is_exact(tmp_path, more):
    flags = [*FLAGS.split(), *more.split(), "--save", str(tmp_path), "--save-interval", "2"]
    (straight,) = run_distributed(1, _fingerprint, flags)
    flags += ["--load", str(tmp_path), "--ckpt-step", "2"]
    (resumed,) = run_distributed(1, _fingerprint, flags)
    assert resumed == straight


def _fingerprint(layout, flags):
    return fingerprint(train_toy(layout, flags)[1])


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("layers.*.mpl", r"--freeze layers.\*.mpl matches no parameter: try layers.\*.mlp"),
        ("*", "--freeze \\*: all weights are frozen"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(pattern, told):
    with pytest.raises(ConfigError, match=told):
        build_toy(Layout.single(), ["--freeze", pattern])


def test_names_that_resemble_a_pattern():
    names = ["embedding.word.weight", "final_norm.weight"]
    names += [f"layers.{i}.{name}" for i in (0, 11) for name in ("mlp.up.weight", "mlp.up.bias")]
    for pattern, similar in (
        ("layers.11.mlp.uo", ["layers.*.mlp.up", "layers.*.mlp", "layers.*.mlp.up.bias"]),
        ("embeding", ["embedding", "embedding.word", "embedding.word.weight"]),
    ):
        assert similar_names(pattern, names) == similar
    assert len(similar_names("zzz", names)) == 3
    assert similar_names("zzz", ["final_norm.weight"]) == ["final_norm.weight", "final_norm"]


@pytest.mark.parametrize(
    ("flags", "frozen"),
    [
        ({}, []),
        ({"freeze": ("embedding", "layers.1.mlp.up")}, ["embedding.word", "layers.1.mlp.up"]),
        ({"lora_rank": 2}, ["embedding.word", "layers.1.mlp.up", "score.weight"]),
        ({"lora_rank": 2, "reward_head": True}, ["embedding.word", "layers.1.mlp.up"]),
        ({"freeze": ("score",), "reward_head": True}, ["score.weight"]),
    ],
)
def test_which_parameters_are_frozen(flags, frozen):
    names = ["embedding.word", "layers.1.mlp.up", "layers.1.mlp.adapter.up.a", "score.weight"]
    assert [name for name in names if is_frozen(name, config(**flags))] == frozen


def test_the_last_stage_trains_its_copy_of_the_word_embedding_alone():
    run = build_toy(Layout.single(), ["--num-layers", "4", "--freeze", "layers.0"])
    first = ModelPart(range(2), embedding=True, head=False)
    last = ModelPart(range(2, 4), embedding=False, head=True)
    sizes = {name: p.numel() for name, p in run.named_parameters()}
    idle = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    whole = sum(
        size for name, size in sizes.items() if name[:9] in ("embedding", "layers.0.", "layers.1.")
    )
    model, plan = run.config.model, run.plan
    assert trained_share(model, plan, [last]) == 1.0
    assert trained_share(model, plan, [first]) == pytest.approx(1 - idle / whole)
    copy = sizes["embedding.word.weight"]
    total = sum(sizes.values()) + copy
    assert trained_share(model, plan, [first, last]) == pytest.approx(1 - idle / total)


def _refusal(layout, flags):
    with pytest.raises(ConfigError) as error:
        build_toy(layout, flags.split())
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--freeze embedding layers.0 layers.1",
            "--freeze embedding layers.0 layers.1: all weights of a pipeline stage are frozen, so "
            "nothing is left to train: freeze fewer weights",
        ),
        (
            "--lora-rank 2 --pipeline-model-parallel-layout Etttt|L",
            "--lora-rank 2: all weights of a pipeline stage are frozen, so nothing is left to "
            "train: give every stage a layer with an adapter",
        ),
    ],
)
def test_a_stage_without_weights_to_train_is_refused_on_all(flags, told):
    flags = f"{FLAGS} --pipeline-model-parallel-size 2 {flags}"
    assert run_distributed(2, _refusal, flags, pipeline=2) == [told, told]


def _losses_of(layout, flags):
    return _train(layout, flags)[0]


@pytest.mark.parametrize("frozen", ["--freeze embedding layers.1", "--lora-rank 2"])
def test_frozen_shards_in_16_bits_are_those_of_the_checkpoint(tmp_path, frozen):
    """They have no masters in the checkpoint, and the initial weights of the resumed run differ."""
    base, saved = tmp_path / "base", tmp_path / "saved"
    train_toy(Layout.single(), f"--seed 5 --train-iters 1 --save {base} --save-interval 1".split())
    plain = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --train-iters 2"
    flags = f"{plain} --bf16 --zero-stage 3 {frozen}"
    start = f"{flags} --load {base} --finetune --save {saved} --save-interval 1"
    losses, _ = run_distributed(2, _losses_of, start)
    resumed, _ = run_distributed(2, _losses_of, f"{flags} --load {saved} --ckpt-step 1")
    assert resumed == losses[1:]


def _refused_load(layout, flags):
    with pytest.raises(CheckpointError) as error:
        build_toy(layout, flags.split())
    return str(error.value)


def test_weights_that_were_frozen_have_no_states_to_continue_with(tmp_path):
    """All processes refuse, including those that update other weights."""
    common = "--eval-iters 0 --train-iters 1 --zero-stage 1"
    saved = f"{common} --freeze embedding.position layers.0.attention.output.bias"
    train_toy(Layout.single(), f"{saved} --save {tmp_path} --save-interval 1".split())
    told = (
        f"--load {tmp_path / 'iter_0000001'}: the checkpoint lacks optimizer states of weights "
        "that this run trains: embedding.position.weight, layers.0.attention.output.bias: give "
        "--freeze embedding.position layers.0.attention.output.bias, as when it was saved, or "
        "--no-load-optim to continue with fresh states (--finetune: from iteration 0)"
    )
    assert run_distributed(2, _refused_load, f"{common} --load {tmp_path}") == [told, told]
