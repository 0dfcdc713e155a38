"""Folders in Megatron-DeepSpeed's format load to the same values as ours, in every layout."""

import math
import random
import shutil

import pytest
import torch

from megatron.checkpoint.entries import Box, flatten
from megatron.checkpoint.inspection import summarize
from megatron.checkpoint.loading import open_checkpoint
from megatron.config.parser import parse_config
from megatron.errors import CheckpointError
from megatron.tools.checkpoint import util
from megatron.training.checkpointing import state_of
from megatron.training.restoring import network_of
from tests.checkpoint.deepspeed.deepspeed_files import Form, save, scaler, to_deepspeed
from tests.checkpoint.states import read_whole
from tests.distributed import run_distributed
from tests.training.toy import TOY, build_toy, losses_of, train_toy

_SAVE = "--save-interval 2 --exit-interval 2 --eval-iters 0 --num-layers 4".split()
_LLAMA = """
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights
""".split()
_MIXTURE = """
    --num-experts 4 --topk 2 --expert-interval 2 --moe-loss-coeff 0
    --disable-moe-token-dropping --disable-moe-top2-2nd-expert-sampling
""".split()
NETWORKS = {
    "GPT-2": [],
    "Llama": _LLAMA,
    "Llama, bf16": [*_LLAMA, "--bf16"],
    "grouped queries": [*_LLAMA, "--group-query-attention", "--num-query-groups", "2"],
    "mixture": [*_LLAMA, *_MIXTURE],
    "mixture, bf16": [*_LLAMA, *_MIXTURE, "--bf16"],
    "residual mixture": [*_MIXTURE, "--mlp-type", "residual"],
    "pyramid": [*_MIXTURE, "--num-experts", "2", "4"],
}
FORMS = {
    "GPT-2": [
        Form(),
        Form(blocks=False),
        Form(zero=1, data=3),
        Form(zero=3, data=2, groups=3),
        Form(zero=1, data=2, stages=2),
        Form(tensor=2),
    ],
    "Llama": [Form(zero=2, data=2, tensor=2), Form(zero=1, stages=2, tensor=2, data=2)],
    "Llama, bf16": [Form(zero=-1, data=2), Form(zero=3, data=3), Form(zero=-1, data=2, stages=4)],
    "grouped queries": [Form(zero=1, data=2, tensor=2, blocks=False)],
    "mixture": [
        Form(),
        Form(experts=2),
        Form(zero=1, data=4, experts=2),
        Form(zero=2, data=2),
        Form(zero=1, data=2, experts=2, stages=2),
    ],
    "mixture, bf16": [Form(zero=-1, data=4, experts=4)],
    "residual mixture": [Form(), Form(zero=1, data=2, experts=2)],
}
CASES = [(network, form) for network, forms in FORMS.items() for form in forms]


@pytest.fixture(scope="module")
def natives(tmp_path_factory):
    """Return the folder of a network in our format."""
    made = {}

    def make(network):
        if network not in made:
            root = tmp_path_factory.mktemp("native")
            run_distributed(1, _train, [*_SAVE, *NETWORKS[network], "--save", str(root)])
            made[network] = root
        return made[network]

    return make


def _train(layout, words):
    train_toy(layout, words)


@pytest.mark.parametrize(("network", "form"), CASES, ids=str)
def test_it_holds_the_same_tensors_and_position(natives, tmp_path, network, form):
    ours = open_checkpoint(natives(network))
    to_deepspeed(ours, tmp_path, form)
    theirs = open_checkpoint(tmp_path)
    assert theirs.format == "deepspeed"
    assert theirs.names() == ours.names()
    for name in ours.names():
        assert theirs.dtype(name) == ours.dtype(name), name
        assert torch.equal(read_whole(theirs, name), read_whole(ours, name)), name
    counts = ("iteration", "consumed_train_samples", "consumed_train_tokens")
    for key in (*counts, "padded_vocab_size", "optimizer"):
        assert theirs.meta[key] == ours.meta[key], key
    notices = theirs.meta["notices"]
    assert notices[0] == "random states are not loaded: dropout follows from --seed"
    # Rotary embeddings have been different since 2024, except in a PipelineModule.
    is_rotary = "rope" in " ".join(NETWORKS[network])
    assert len(notices) == 1 + (is_rotary and form.blocks and not form.stages)


@pytest.mark.parametrize("form", [Form(), Form(zero=1, data=2, experts=2)], ids=str)
def test_layers_may_have_different_numbers_of_experts(natives, tmp_path, form):
    ours = open_checkpoint(natives("pyramid"))
    to_deepspeed(ours, tmp_path, form)
    theirs = open_checkpoint(tmp_path)
    assert theirs.meta["optimizer"] is None
    assert any("layers with different experts" in line for line in theirs.meta["notices"])
    weights = [name for name in ours.names() if name.startswith("model.")]
    assert theirs.names() == weights
    for name in weights:
        assert torch.equal(read_whole(theirs, name), read_whole(ours, name)), name


def test_any_box_is_read(natives, tmp_path):
    to_deepspeed(open_checkpoint(natives("mixture")), tmp_path, Form(zero=1, data=4, experts=2))
    reader, rng = open_checkpoint(tmp_path), random.Random(1)
    for name in reader.names():
        whole = read_whole(reader, name)
        for _ in range(3):
            spans = [sorted(rng.sample(range(size + 1), 2)) for size in whole.shape]
            box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
            assert math.prod(box.shape)
            expected = whole[tuple(slice(a, b) for a, b in spans)]
            assert torch.equal(reader.read(name, box), expected), (name, box)


_LAYOUTS = {
    "TP 2": ({"tensor": 2}, "--tensor-model-parallel-size 2"),
    "PP 2": ({"pipeline": 2}, "--pipeline-model-parallel-size 2"),
    "EP 2, ZeRO 1": ({"expert": 2}, "--expert-model-parallel-size 2 --use-distributed-optimizer"),
    "ZeRO 3": ({}, "--zero-stage 3"),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_loads_it(natives, tmp_path, layout):
    sizes, flags = _LAYOUTS[layout]
    native = natives("mixture")
    to_deepspeed(open_checkpoint(native), tmp_path, Form(zero=1, data=4, experts=2))
    words = [*_SAVE, *NETWORKS["mixture"], *flags.split(), "--load", str(tmp_path)]
    assert run_distributed(2, _load, native, words, **sizes) == [True, True]


def _load(layout, native, words):
    """Load, and return whether this rank then has the values of the native checkpoint."""
    run, ours = build_toy(layout, words), open_checkpoint(native)
    for name, entry in flatten(state_of(run)):
        assert torch.equal(entry.tensor, ours.read(name, entry.box)), name
    return run.progress.iteration == 2


def test_training_continues_with_the_losses_of_our_own_checkpoint(natives, tmp_path):
    native = natives("mixture")
    to_deepspeed(open_checkpoint(native), tmp_path, Form(zero=1, data=2, experts=2))
    words = ["--eval-iters", "0", "--num-layers", "4", *NETWORKS["mixture"]]
    ours, theirs = (
        run_distributed(1, losses_of, [*words, "--load", str(root)]) for root in (native, tmp_path)
    )
    assert ours == theirs
    assert len(ours[0]) == 4


def test_its_network_is_taken_over(natives, tmp_path):
    form = Form(zero=1, data=2)
    to_deepspeed(open_checkpoint(natives("residual mixture")), tmp_path, form)
    words = [*_SAVE[:-2], "--load", str(tmp_path), "--use-checkpoint-args"]
    parsed = parse_config(
        [*TOY, "--train-iters", "6", *words], world_size=1, read_checkpoint=network_of
    )
    model = parsed.config.model
    assert (model.num_layers, model.num_experts, model.moe_layer_freq) == (4, (4,), "last-of-2")
    assert (model.mlp_type, model.moe_router_gating) == ("residual", "deepspeed")


def test_the_arguments_in_it_are_compared_with_the_flags(natives, tmp_path):
    to_deepspeed(open_checkpoint(natives("GPT-2")), tmp_path, Form())
    with pytest.raises(RuntimeError, match="--swiglu is on here and off in the checkpoint"):
        run_distributed(1, _build, [*_SAVE, "--swiglu", "--load", str(tmp_path)])


def _build(layout, words):
    build_toy(layout, words)


def test_it_is_converted(natives, tmp_path):
    native = open_checkpoint(natives("mixture"))
    to_deepspeed(native, tmp_path / "theirs", Form(zero=1, data=4, experts=2))
    words = "--model-type GPT --loader megatron --saver native --keep-optimizer".split()
    words += ["--load-dir", str(tmp_path / "theirs"), "--save-dir", str(tmp_path / "ours")]
    assert util.main(words) == 0
    ours = open_checkpoint(tmp_path / "ours")
    assert ours.names() == native.names()
    for name in native.names():
        assert torch.equal(read_whole(ours, name), read_whole(native, name)), name


# Checkpoints with missing parts


def test_without_all_partitions_only_the_weights_are_read(natives, tmp_path):
    ours = open_checkpoint(natives("Llama, bf16"))
    folder = to_deepspeed(ours, tmp_path, Form(zero=-1, data=2))
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    reader = open_checkpoint(tmp_path)
    assert reader.meta["optimizer"] is None
    assert reader.meta["notices"][0] == (
        "only 1 of 2 partitions of the optimizer are present: only the weights are read"
    )
    assert reader.names() == [name for name in ours.names() if name.startswith("model.")]


def test_without_all_partitions_zero_3_has_no_weights(natives, tmp_path):
    ours = open_checkpoint(natives("GPT-2"))
    folder = to_deepspeed(ours, tmp_path, Form(zero=3, data=2))
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="with ZeRO 3 they contain the weights"):
        open_checkpoint(tmp_path)


def test_states_of_stages_without_zero_do_not_name_their_parameters(natives, tmp_path):
    to_deepspeed(open_checkpoint(natives("GPT-2")), tmp_path, Form(stages=2))
    reader = open_checkpoint(tmp_path)
    assert reader.meta["optimizer"] is None
    assert "pipeline stages do not name their parameters" in reader.meta["notices"][0]


_SCALES = {
    "dynamic": (
        {
            "cur_scale": 1024.0,
            "cur_iter": 30,
            "last_overflow_iter": 7,
            "scale_window": 10,
            "cur_hysteresis": 2,
        },
        {"scale": 1024.0, "growth_tracker": 2, "hysteresis_tracker": 2},
    ),
    "static": ({"cur_scale": 1024.0}, {}),
}


@pytest.mark.parametrize("kind", _SCALES)
def test_a_dynamic_loss_scale_is_taken_over(natives, tmp_path, kind):
    held, expected = _SCALES[kind]
    folder = to_deepspeed(open_checkpoint(natives("GPT-2")), tmp_path, Form(zero=1))
    model, states = (
        folder / f"{name}_states.pt"
        for name in ("mp_rank_00_model", "zero_pp_rank_0_mp_rank_00_optim")
    )
    tree = torch.load(model, weights_only=False)
    tree["args"].fp16 = True
    save(tree, model)
    tree = _load_with_classes(states)
    tree["optimizer_state_dict"]["loss_scaler"] = scaler(**held)
    save(tree, states)
    reader = open_checkpoint(tmp_path)
    assert reader.meta["optimizer"]["loss_scale"] == expected
    told = (
        "the loss scale has a different format, so it starts from its initial value"
        in reader.meta["notices"]
    )
    assert told == (kind == "static")


@pytest.mark.parametrize("form", [Form(), Form(zero=1, data=2), Form(zero=3)], ids=str)
def test_steps_counted_by_group_are_taken_over(natives, tmp_path, form):
    """Apex's FusedAdam counts steps there, and fewer than iterations after an overflow."""
    folder = to_deepspeed(open_checkpoint(natives("GPT-2")), tmp_path, form)
    for path in folder.glob("*optim_states.pt" if form.zero else "*model_states.pt"):
        tree = _load_with_classes(path)
        kept = {0: "optimizer", 1: "base_optimizer_state", 3: "optimizer_state_dict"}[form.zero]
        base = (tree["optimizer_state_dict"] if form.zero else tree)[kept]
        for state in base["state"].values():
            del state["step"]
        for group in base["param_groups"]:
            group["step"] = 1
        save(tree, path)
    reader = open_checkpoint(tmp_path)
    assert (reader.iteration, reader.meta["optimizer"]["step"]) == (2, 1)


@pytest.mark.parametrize("form", [Form(), Form(zero=1, data=2)], ids=str)
def test_the_momentum_of_sgd_is_read(natives, tmp_path, form):
    ours = open_checkpoint(natives("GPT-2"))
    folder = to_deepspeed(ours, tmp_path, form)
    for path in folder.glob("*optim_states.pt" if form.zero else "*model_states.pt"):
        tree = _load_with_classes(path)
        base = tree["optimizer_state_dict"]["base_optimizer_state"] if form.zero else None
        for state in (base or tree["optimizer"])["state"].values():
            state["momentum_buffer"] = state.pop("exp_avg")
            del state["exp_avg_sq"], state["step"]
        save(tree, path)
    theirs = open_checkpoint(tmp_path)
    kinds = {name.rpartition(".")[2] for name in theirs.names() if name.startswith("optimizer.")}
    assert kinds == {"momentum"}
    name = "optimizer.layers.1.mlp.up.weight"
    momentum = read_whole(theirs, f"{name}.momentum")
    assert momentum.any()
    assert torch.equal(momentum, read_whole(ours, f"{name}.exp_avg"))


def _load_with_classes(path):
    from tests.checkpoint.deepspeed import deepspeed_files

    with deepspeed_files.in_their_modules():
        return torch.load(path, weights_only=False)


# Folders


def test_latest_names_the_folder(natives, tmp_path):
    folder = to_deepspeed(open_checkpoint(natives("GPT-2")), tmp_path, Form())
    later = tmp_path / "global_step7"
    shutil.copytree(folder, later)
    assert open_checkpoint(tmp_path).path.name == "global_step2"
    assert open_checkpoint(folder).path.name == "global_step2"
    assert open_checkpoint(tmp_path, step=2).path.name == "global_step2"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert open_checkpoint(tmp_path).path.name == "global_step2"
    lines, _ = summarize(tmp_path, verify=False, details=False)
    assert lines[0] == f"{tmp_path}: the tracker names iter_0000002"


def test_a_folder_of_another_iteration_is_refused(natives, tmp_path):
    folder = to_deepspeed(open_checkpoint(natives("GPT-2")), tmp_path, Form())
    folder.rename(tmp_path / "global_step7")
    with pytest.raises(CheckpointError, match="for iteration 2"):
        open_checkpoint(tmp_path)
