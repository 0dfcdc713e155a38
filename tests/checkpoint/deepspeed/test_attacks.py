"""Damaged and hostile folders are refused by name before any tensor changes, and run no code.

Each variant changes one thing in a sound folder of a small network.
"""

import os
import random
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.deepspeed import names
from megatron.checkpoint.entries import Box
from megatron.checkpoint.find import CheckpointFolder
from megatron.checkpoint.loading import open_folder
from megatron.checkpoint.reader import Reader, TensorMeta
from megatron.errors import CheckpointError
from tests.checkpoint.deepspeed import deepspeed_files as files
from tests.checkpoint.deepspeed.deepspeed_files import Form, to_deepspeed
from tests.checkpoint.legacy.test_malicious import CORPUS, MARK, Calls, with_pickle

_MODEL = "mp_rank_00_model_states.pt"
_STATES = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
_EXPERT = "layer_0_expert_1_mp_rank_00_model_states.pt"
_FILES = (_MODEL, _STATES, _EXPERT)
_ROUTED = "language_model.encoder.layers.1.mlp.deepspeed_moe."


class _Mixture(Reader):
    """A checkpoint of ours in memory: two layers, the second with four experts."""

    format, iteration = "native", 3

    def __init__(self):
        hidden, words, inner, generator = 8, 16, 12, torch.Generator().manual_seed(0)
        shapes = {
            "embedding.word.weight": (words, hidden),
            "embedding.position.weight": (6, hidden),
            "final_norm.weight": (hidden,),
            "output.weight": (words, hidden),
            "layers.0.mlp.up.weight": (2, inner, hidden),
            "layers.0.mlp.down.weight": (hidden, inner),
            "layers.1.mlp.router.weight": (4, hidden),
            "layers.1.mlp.experts.up.weight": (4, 2, inner, hidden),
            "layers.1.mlp.experts.down.weight": (4, hidden, inner),
        }
        for layer in (0, 1):
            shapes |= {
                f"layers.{layer}.attention_norm.weight": (hidden,),
                f"layers.{layer}.attention.qkv.weight": (3 * hidden, hidden),
                f"layers.{layer}.attention.output.weight": (hidden, hidden),
                f"layers.{layer}.mlp_norm.weight": (hidden,),
            }
        self.values = {}
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator)
            self.values[f"model.{name}"] = weight
            self.values[f"optimizer.{name}.exp_avg"] = 2 * weight
            self.values[f"optimizer.{name}.exp_avg_sq"] = 3 * weight
        model = {
            "num_layers": 2,
            "hidden_size": hidden,
            "num_attention_heads": 2,
            "ffn_hidden_size": inner,
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
            "position_embedding_type": "learned_absolute",
            "num_experts": [4],
            "moe_layer_freq": "last-of-2",
        }
        self.meta = {
            "config": {"model": model},
            "consumed_train_samples": 48,
            "consumed_train_tokens": 48 * 16,
            "padded_vocab_size": words,
            "optimizer": {"step": 3, "loss_scale": {}},
            "schedule": {"num_steps": 48, "max_lr": 1.0},
        }
        self.path = Path("small")
        tensors = self.values.items()
        self.tensors = {name: TensorMeta(tuple(one.shape), one.dtype) for name, one in tensors}

    def _read(self, name, box):
        return self.values[name][box.slices_in(Box.whole(self.tensors[name].shape))]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Return a mixture saved with ZeRO 1 by two ranks that divide its experts."""
    root = tmp_path_factory.mktemp("deepspeed")
    return to_deepspeed(_Mixture(), root, Form(zero=1, data=2, experts=2))


@pytest.fixture
def folder(sound, tmp_path, monkeypatch):
    """Return a copy of a sound folder, and check after the test that none of its code has run."""
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / sound.name
    shutil.copytree(sound, copy)
    yield copy
    assert not (tmp_path / MARK).exists()


def _open(folder):
    return open_folder(CheckpointFolder("deepspeed", 3, folder))


def refused(folder, match="."):
    """Check that the folder is refused with an error that names one of its files or the problem."""
    with pytest.raises(CheckpointError, match=match) as caught:
        _open(folder)
    assert "MemoryError" not in str(caught.value)
    return str(caught.value)


def test_the_sound_folder_is_read(folder):
    reader = _open(folder)
    source = _Mixture()
    assert reader.names() == source.names()
    assert all(torch.equal(reader.read(name), source.read(name)) for name in source.names())


# Pickles


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.parametrize("file", _FILES)
def test_a_hostile_pickle_is_refused(folder, file, name):
    with_pickle(folder / file, CORPUS[name])
    assert file in refused(folder, "nothing in it was run")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("deepspeed.utils.tensor_fragment", "get_full_hp_param"),
        ("deepspeed.runtime.zero.config", "os"),
        ("deepspeed.runtime.fp16.loss_scaler", "CreateLossScaler"),
        ("deepspeed.checkpoint.utils", "clone_tensors_for_torch_save"),
        ("deepspeed", "initialize"),
        ("deepspeed.launcher.runner", "main"),
        ("megatron.core.enums", "ModelTypes"),
        ("megatron.training", "pretrain"),
        ("torch._tensor", "_rebuild_from_type"),
        ("torch._utils", "_rebuild_wrapper_subclass"),
        ("os", "system"),
    ],
)
def test_a_name_that_no_such_file_needs_is_refused_by_name(folder, module, name):
    with_pickle(folder / _STATES, b"\x80\x02c" + f"{module}\n{name}\n.".encode())
    refused(folder, f"it names {module}.{name}")


_TYPED = {
    "another function": (os.system, torch.Tensor, ("touch x",), {}),
    "another class": (torch._utils._rebuild_tensor_v2, torch.Size, (1,), {}),
    "no storage": (torch._utils._rebuild_tensor_v2, torch.Tensor, (1, 0, (1,), (1,)), {}),
    "no arguments": (torch._utils._rebuild_tensor_v2, torch.Tensor, (), {}),
}


@pytest.mark.parametrize("case", _TYPED)
def test_a_tensor_of_its_own_class_calls_nothing_else(folder, case):
    value = Calls(torch._tensor._rebuild_from_type_v2, *_TYPED[case])
    files.save({"optimizer_state_dict": value}, folder / _STATES)
    refused(folder, "nothing in it was run")


def test_objects_that_nobody_needs_may_hold_anything_and_nothing_is_made_of_it(folder):
    tree = _tree(folder / _MODEL)
    tree["ds_config"] = Calls(os.system, f"touch {MARK}")
    files.save(tree, folder / _MODEL)
    refused(folder, "it names posix.system")


# Trees


def _tree(path):
    with files.in_their_modules():
        return torch.load(path, weights_only=False)


def _changed(folder, name, change):
    tree = _tree(folder / name)
    change(tree)
    files.save(tree, folder / name)


def _put(*keys):
    """Return a change that sets the last of `keys` in the container that the other keys lead to."""
    *path, last, value = keys

    def change(tree):
        for key in path:
            tree = vars(tree)[key] if isinstance(tree, Namespace) else tree[key]
        if isinstance(tree, Namespace | files.FragmentAddress):
            setattr(tree, last, value)
        else:
            tree[last] = value

    return change


def _drop(*keys):
    *path, last = keys

    def change(tree):
        for key in path:
            tree = tree[key]
        del tree[last]

    return change


_MODULE = ("module", "language_model", "encoder")
_QKV = "layers.0.self_attention.query_key_value.weight"
_MODELS = {
    "no arguments": _put("args", None),
    "arguments in a dict": _put("args", {"num_layers": 2}),
    "no iteration": _put("iteration", None),
    "an iteration of text": _put("iteration", "3"),
    "a negative iteration": _put("iteration", -3),
    "another iteration": _put("iteration", 4),
    "a version of the future": _put("checkpoint_version", 9.0),
    "a version of text": _put("checkpoint_version", "3"),
    "no schedule": _put("lr_scheduler", None),
    "no position in the schedule": _drop("lr_scheduler", "num_steps"),
    "a schedule of text": _put("lr_scheduler", "num_steps", "x"),
    "other layers": _put("args", "num_layers", 3),
    "layers of text": _put("args", "num_layers", "2"),
    "more experts": _put("args", "num_experts", [8]),
    "experts of text": _put("args", "num_experts", ["4"]),
    "layers with different experts": _put("args", "num_experts", [4, 2]),
    "no interval": _put("args", "expert_interval", 0),
    "an interval of text": _put("args", "expert_interval", "2"),
    "more tensor ranks": _put("args", "tensor_model_parallel_size", 2),
    "more stages": _put("args", "pipeline_model_parallel_size", 2),
    "no tensor ranks": _put("args", "tensor_model_parallel_size", 0),
    "tensor ranks without end": _put("args", "tensor_model_parallel_size", 1 << 40),
    "ranks of text": _put("args", "tensor_model_parallel_size", "1"),
    "no heads": _put("args", "num_attention_heads", None),
    "more heads than rows": _put("args", "num_attention_heads", 7),
    "a width of text": _put("args", "hidden_size", "wide"),
    "negative samples": _put("args", "consumed_train_samples", -1),
    "Megatron's other experts": _put("args", "num_experts_switch", 4),
    "another normalization": _put("args", "normalization", "batchnorm"),
    "no weights": _put("module", None),
    "weights of text": _put("module", "x"),
    "no embedding": _drop("module", "language_model", "embedding"),
    "no words": _drop("module", "language_model", "embedding", "word_embeddings"),
    "words of text": _put("module", "language_model", "embedding", "word_embeddings", "x"),
    "a part of another network": _put("module", "vision_model", {"weight": torch.zeros(2)}),
    "an unknown parameter": _put(*_MODULE, "layers.0.mlp.unheard_of.weight", torch.zeros(2)),
    "an unknown expert": _put(*_MODULE, "layers.1.mlp.deepspeed_moe.x.weight", torch.zeros(2)),
    "experts that share a tensor": _put(*_MODULE, "layers.1.mlp.experts.w1", torch.zeros(2)),
    "a parameter of a later layer": _put(*_MODULE, "layers.9999999.x.weight", torch.zeros(2)),
    "a name that is a number": _put(*_MODULE, 7, torch.zeros(2)),
    "text for a tensor": _put(*_MODULE, _QKV, "x"),
    "a number for a tensor": _put(*_MODULE, _QKV, 1),
    "a tensor of more dimensions": _put(*_MODULE, _QKV, torch.zeros(3, 3, 3, 3)),
    "a scalar": _put(*_MODULE, _QKV, torch.zeros(())),
    "other rows": _put(*_MODULE, _QKV, torch.zeros(9, 8)),
    "another type": _put(*_MODULE, _QKV, torch.zeros(24, 8, dtype=torch.float64)),
    "a missing tensor": _drop(*_MODULE, _QKV),
    "deep nesting": _put("module", "language_model", {"a": {"b": {"c": {"d": {"e": {}}}}}}),
}


@pytest.mark.parametrize("case", _MODELS)
def test_a_file_of_weights_of_something_else_is_refused(folder, case):
    _changed(folder, _MODEL, _MODELS[case])
    refused(folder)


_INNER = "optimizer_state_dict"
_WORDS = "language_model.embedding.word_embeddings.weight"
_AT = (_INNER, "param_slice_mappings", 0)
_NAME = "language_model.encoder.layers.1.self_attention.dense.weight"
_EXPERT_NAME = f"{_ROUTED}experts.deepspeed_experts.0.dense_h_to_4h.weight"
_STATE_TREES = {
    "no states": _drop(_INNER),
    "states of text": _put(_INNER, "x"),
    "no masters": _drop(_INNER, "single_partition_of_fp32_groups"),
    "masters of text": _put(_INNER, "single_partition_of_fp32_groups", "xyz"),
    "fewer masters": _drop(_INNER, "single_partition_of_fp32_groups", 0),
    "text for a master": _put(_INNER, "single_partition_of_fp32_groups", 0, "x"),
    "a shorter master": _put(_INNER, "single_partition_of_fp32_groups", 0, torch.zeros(3)),
    "a master with rows": _put(_INNER, "single_partition_of_fp32_groups", 0, torch.zeros(9999, 1)),
    "a master with gaps": _put(
        _INNER, "single_partition_of_fp32_groups", 0, torch.zeros(9999)[::2]
    ),
    "mappings of text": _put(_INNER, "param_slice_mappings", "xyz"),
    "fewer mappings": _drop(_INNER, "param_slice_mappings", 0),
    "text for a mapping": _put(*_AT, "x"),
    "no base optimizer": _drop(_INNER, "base_optimizer_state"),
    "a base optimizer of text": _put(_INNER, "base_optimizer_state", "x"),
    "no groups": _drop(_INNER, "base_optimizer_state", "param_groups"),
    "a group of text": _put(_INNER, "base_optimizer_state", "param_groups", 0, "x"),
    "a group without parameters": _drop(
        _INNER, "base_optimizer_state", "param_groups", 0, "params"
    ),
    "a group with two": _put(_INNER, "base_optimizer_state", "param_groups", 0, "params", [0, 1]),
    "a group with text": _put(_INNER, "base_optimizer_state", "param_groups", 0, "params", ["0"]),
    "a group's state missing": _drop(_INNER, "base_optimizer_state", "state", 0),
    "a group's state of text": _put(_INNER, "base_optimizer_state", "state", 0, "x"),
    "an unknown state": _put(_INNER, "base_optimizer_state", "state", 0, "hessian", torch.zeros(2)),
    "a missing moment": _drop(_INNER, "base_optimizer_state", "state", 0, "exp_avg"),
    "a shorter moment": _put(_INNER, "base_optimizer_state", "state", 0, "exp_avg", torch.zeros(2)),
    "other steps": _put(_INNER, "base_optimizer_state", "state", 0, "step", torch.tensor(9.0)),
    "steps of text": _put(_INNER, "base_optimizer_state", "state", 0, "step", "3"),
    "many steps": _put(_INNER, "base_optimizer_state", "state", 0, "step", torch.zeros(2)),
    "steps without end": _put(_INNER, "base_optimizer_state", "state", 0, "step", float("inf")),
    "a name that is a number": _put(*_AT, 7, files.FragmentAddress(1, 0)),
    "an unknown name": _put(*_AT, "language_model.x.weight", files.FragmentAddress(1, 0)),
    "an expert that is not there": _put(
        *_AT, _EXPERT_NAME.replace("experts.0", "experts.7"), files.FragmentAddress(1, 0)
    ),
    "text for an address": _put(*_AT, _NAME, "x"),
    "a tuple for an address": _put(*_AT, _NAME, (1, 2)),
    "an address of another class": _put(*_AT, _NAME, files.scaler(numel=1, start=0)),
    "a negative start": _put(*_AT, _NAME, "start", -1),
    "a start of text": _put(*_AT, _NAME, "start", "0"),
    "a start beyond the end": _put(*_AT, _NAME, "start", 1 << 40),
    "a start beyond numbers": _put(*_AT, _NAME, "start", 1 << 90),
    "no elements": _put(*_AT, _NAME, "numel", 0),
    "negative elements": _put(*_AT, _NAME, "numel", -1),
    "fewer elements": _put(*_AT, _NAME, "numel", 1),
    "more elements": _put(*_AT, _NAME, "numel", 10**9),
    "elements of text": _put(*_AT, _NAME, "numel", "64"),
    "a fraction of elements": _put(*_AT, _NAME, "numel", 0.5),
    "a truth of elements": _put(*_AT, _NAME, "numel", True),
    "a parameter without a place": _drop(*_AT, _NAME),
}


@pytest.mark.parametrize("case", _STATE_TREES)
def test_partitions_that_contradict_the_weights_are_refused(folder, case):
    _changed(folder, _STATES, _STATE_TREES[case])
    refused(folder)


_ONE = f"{_ROUTED}experts.deepspeed_experts.1.dense_h_to_4h.weight"
_EXPERTS = {
    "another expert's name": lambda t: t.update(
        {_ONE.replace(".1.dense", ".2.dense"): t.pop(_ONE)}
    ),
    "no parameters": dict.clear,
    "a missing parameter": lambda t: t.pop(_ONE),
    "text": lambda t: t.update({_ONE: "x"}),
    "another shape": lambda t: t.update({_ONE: torch.zeros(2, 2)}),
    "another type": lambda t: t.update({_ONE: torch.zeros(12, 8, dtype=torch.float16)}),
    "a dense layer's name": lambda t: t.update({_QKV: t.pop(_ONE)}),
    "an expert of attention": lambda t: t.update(
        {_ONE.replace("dense_h_to_4h", "self_attention.dense"): t.pop(_ONE)}
    ),
}


@pytest.mark.parametrize("case", _EXPERTS)
def test_an_expert_s_file_of_something_else_is_refused(folder, case):
    _changed(folder, _EXPERT, _EXPERTS[case])
    refused(folder)


def test_the_number_of_an_expert_does_not_decide_how_long_reading_takes(tmp_path, monkeypatch):
    folder = to_deepspeed(_Mixture(), tmp_path, Form())
    last = folder / "layer_0_expert_3_mp_rank_00_model_states.pt"
    tree = torch.load(last, weights_only=False)
    far = {name.replace("experts.3.", "experts.999999."): value for name, value in tree.items()}
    torch.save(far, last.with_name(last.name.replace("expert_3", "expert_999999")))
    last.unlink()
    calls = []
    count = names.local_expert
    monkeypatch.setattr(names, "local_expert", lambda name: calls.append(name) or count(name))
    refused(folder)
    assert 0 < len(calls) < 1000


# Files


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("name", _FILES)
def test_a_truncated_file_is_refused(folder, name, share):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * share)])
    assert name in refused(folder)


@pytest.mark.parametrize("kind", ["folder", "FIFO", "link", "device", "random"])
@pytest.mark.parametrize("name", _FILES)
def test_what_is_no_such_file_is_refused(folder, name, kind):
    path = folder / name
    path.rename(folder.parent / "kept")
    {
        "folder": path.mkdir,
        "FIFO": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(folder.parent / "kept"),
        "device": lambda: path.symlink_to("/dev/zero"),
        "random": lambda: path.write_bytes(random.Random(1).randbytes(100_000)),
    }[kind]()
    assert name in refused(folder)


@pytest.mark.parametrize("name", [_MODEL, _EXPERT])
def test_a_missing_file_of_weights_is_refused(folder, name):
    (folder / name).unlink()
    refused(folder)


@pytest.mark.parametrize(
    "name",
    [
        "expert_0_mp_rank_00_model_states.pt",
        "mp_rank_0000000000_model_states.pt",
        "mp_rank_-1_model_states.pt",
        "zero_pp_rank_x_mp_rank_00_optim_states.pt",
        "layer_00_model_states.pt",
        "x_states.pt",
    ],
)
def test_a_file_of_an_unknown_kind_is_refused(folder, name):
    shutil.copy(folder / _MODEL, folder / name)
    assert name in refused(folder, "not a file that DeepSpeed")


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_1_model_states.pt",
        "mp_rank_07_model_states.pt",
        "mp_rank_0_model_states.pt",
        "zero_pp_rank_01_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "layer_00_expert_1_mp_rank_00_model_states.pt",
        "layer_5_expert_1_mp_rank_00_model_states.pt",
    ],
)
def test_a_second_file_or_one_of_another_split_is_refused(folder, name):
    original = {"mp": _MODEL, "la": _EXPERT}.get(name[:2], _STATES)
    shutil.copy(folder / original, folder / name)
    refused(folder)


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_byte_of_a_tensor_is_refused(folder, seed):
    rng = random.Random(seed)
    name = rng.choice(sorted(path.name for path in folder.iterdir()))
    data = bytearray((folder / name).read_bytes())
    # The tensors' records lie between the tree and the version.
    first, last = data.index(b"/data/0"), data.rindex(b"/version")
    data[rng.randrange(first + 200, last - 200)] ^= 1 << rng.randrange(8)
    (folder / name).write_bytes(data)
    try:
        reader = _open(folder)
    except CheckpointError:
        return
    source = _Mixture()  # the byte was padding between records
    assert all(torch.equal(reader.read(one), source.read(one)) for one in source.names())


def test_there_are_enough_variants():
    parts = (3 * len(CORPUS), 11, len(_TYPED), len(_MODELS), len(_STATE_TREES), len(_EXPERTS))
    assert sum(parts) + 6 * 3 + 5 * 3 + 2 + 6 + 7 >= 200
