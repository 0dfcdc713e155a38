"""Files of every version are joined and reordered into the same whole tensors."""

from argparse import Namespace

import pytest
import torch

from megatron.checkpoint.entries import Box
from megatron.checkpoint.loading import open_checkpoint
from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout
from tests.checkpoint.legacy.megatron_files import Form, whole_model, write
from tests.checkpoint.states import read_whole
from tests.training.toy import build_toy

FORMS = [
    Form(),
    Form(tensor=2),
    Form(stages=2),
    Form(tensor=2, stages=2),
    Form(tensor=4, version=2.0),
    Form(version=0, old_names=True),
    Form(tensor=2, version=0, old_names=True),
    Form(version=1.0),
    Form(tensor=2, version=1.0),
    Form(tensor=2, swiglu=True),
    Form(tensor=2, stages=2, swiglu=True, tied=False),
    Form(tensor=2, stages=2, dtype=torch.bfloat16),
    Form(dtype=torch.float16, tied=False),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_and_optimizer_come_back_whole(tmp_path, form):
    model = whole_model(swiglu=form.swiglu, tied=form.tied)
    write(tmp_path, form, model)
    reader = open_checkpoint(tmp_path)
    kinds = {"exp_avg": 2, "exp_avg_sq": 3} | ({} if form.dtype == torch.float32 else {"master": 1})
    expected = {f"model.{name}": tensor.to(form.dtype) for name, tensor in model.items()}
    for name, tensor in model.items():
        expected |= {f"optimizer.{name}.{kind}": by * tensor for kind, by in kinds.items()}
    assert reader.names() == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(read_whole(reader, name), tensor), name
        assert reader.dtype(name) == tensor.dtype
    assert (reader.format, reader.iteration) == ("legacy", 3)
    assert reader.meta["consumed_train_samples"] == 48
    assert reader.meta["schedule"] == {"max_lr": 0.1, "num_steps": 40}
    assert reader.meta["optimizer"]["step"] == 3
    scale = {"scale": 1024.0, "growth_tracker": 5, "hysteresis_tracker": 2}
    assert reader.meta["optimizer"]["loss_scale"] == (scale if "master" in kinds else {})
    assert reader.meta["padded_vocab_size"] == 16
    assert reader.meta["legacy_args"]["data_path"] == ["a", "b"]
    assert "nested" not in reader.meta["legacy_args"]


def test_any_box_is_joined_from_tensor_parts(tmp_path):
    model = whole_model(swiglu=True)
    write(tmp_path, Form(tensor=4, swiglu=True), model)
    name = "layers.1.mlp.up.weight"
    wanted = Box((0, 2, 3), (2, 6, 4))
    part = open_checkpoint(tmp_path).read(f"model.{name}", wanted, global_shape=(2, 12, 8))
    assert torch.equal(part, model[name][:, 2:8, 3:7])


def test_a_release_starts_a_new_run(tmp_path):
    model = whole_model()
    write(tmp_path, Form(), model, folder="release")
    reader = open_checkpoint(tmp_path)
    assert reader.path.name == "release"
    assert (reader.iteration, reader.meta["consumed_train_samples"]) == (0, 0)
    assert reader.meta["optimizer"] is None
    name = "model.final_norm.weight"
    assert torch.equal(read_whole(reader, name), model["final_norm.weight"])


def test_a_file_without_optimizer_is_read(tmp_path):
    write(tmp_path, Form(), whole_model(), optimizer=None)
    assert open_checkpoint(tmp_path).meta["optimizer"] is None


def test_before_the_first_update_there_are_no_states(tmp_path):
    """The first loss scales of a run in fp16 are too high, and the optimizer's state is empty."""
    folder = write(tmp_path, Form(dtype=torch.float16), whole_model())

    def empty(tree):
        tree["optimizer"]["optimizer"]["state"] = {}
        tree["args"].fp16 = True

    _rewrite(folder / "mp_rank_00" / "model_optim_rng.pt", empty)
    flags = f"--load {tmp_path} --use-checkpoint-args --fp16 --seq-length 6 --vocab-size 15"
    said = "lacks optimizer states of .*embedding.word.weight.* give --no-load-optim to continue"
    with pytest.raises(CheckpointError, match=said):
        build_toy(Layout.single(), [*flags.split(), "--train-iters", "20"])


def _swap(a, b):
    def change(tree):
        state = tree["optimizer"]["state"]
        state[a], state[b] = state[b], state[a]

    return change


def _rewrite(path, change):
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_swap(0, 2), "exp_avg of embedding.word.weight does not have the parameter's shape"),
        (
            lambda t: t["optimizer"]["param_groups"].append({}),
            "groups with their own learning rate",
        ),
        (lambda t: t["optimizer"]["param_groups"][0]["params"].pop(), "do not match"),
        (lambda t: t["optimizer"]["state"][0].update(step=4), "step counts differ"),
        (lambda t: t["model"].update(vision_head={}), "contains vision_head: only GPT"),
        (lambda t: t["model"].pop("language_model"), "not a GPT, BERT, T5 or Retro file"),
        (lambda t: t["model"]["language_model"]["encoder"].update(x=0), "x is not a tensor"),
        (
            lambda t: t["model"]["language_model"]["encoder"].update(x=torch.ones(1)),
            "parameter encoder.x does not exist",
        ),
        (
            lambda t: t["model"]["language_model"]["encoder"].update(
                {"layers.0.mlp.router.weight": torch.ones(2, 8)}
            ),
            "mlp.router.weight does not exist in our gpt: of mixtures of experts, only Megatron C",
        ),
        (lambda t: t.update(checkpoint_version=5.0), "checkpoint_version 5.0 is not supported"),
        (lambda t: t.update(iteration="3"), "iteration '3'"),
        (lambda t: t.update(model0=t.pop("model"), model1={}), "not a GPT, BERT, T5 or Retro file"),
        (lambda t: t.update(args={}), "not an argparse.Namespace"),
        (lambda t: t["model"].update({1: 2}), "not a Megatron-LM checkpoint"),
        (lambda t: t["model"]["language_model"]["encoder"].update({1: 2}), "not a string"),
        (
            lambda t: t["model"]["language_model"].update(embedding={"a": {"b": {}}}),
            "more entries than",
        ),
        (lambda t: t["optimizer"]["state"].update({0: [1]}), "not a Megatron-LM checkpoint"),
        (lambda t: t["optimizer"].update(param_groups={}), "groups with their own learning rate"),
        (lambda t: t.update(opt_param_scheduler=[1]), "meta.schedule is missing"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, message):
    path = write(tmp_path, Form(), whole_model())
    _rewrite(path / "mp_rank_00" / "model_optim_rng.pt", change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_an_incomplete_grid_is_refused(tmp_path):
    path = write(tmp_path, Form(tensor=2, stages=2), whole_model())
    (path / "mp_rank_01_000").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"mp_rank_\* folders are missing"):
        open_checkpoint(tmp_path)


def test_files_of_two_saves_are_refused(tmp_path):
    path = write(tmp_path, Form(tensor=2), whole_model())
    _rewrite(path / "mp_rank_01" / "model_optim_rng.pt", lambda t: t.update(iteration=4))
    with pytest.raises(CheckpointError, match="differ in iteration"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("folder", "file", "message"),
    [
        ("mp_rank_00_000", "optim.pt", "folders are missing"),
        ("mp_rank_00_000_000", "model_optim_rng.pt", "per data rank"),
        ("mp_rank_00", "weights.pt", "missing"),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path, folder, file, message):
    (tmp_path / "iter_0000001" / folder).mkdir(parents=True)
    torch.save({"args": Namespace()}, tmp_path / "iter_0000001" / folder / file)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)
