"""Folders written for Megatron Core match Megatron Core's own files, from every layout."""

import itertools
import pickle
import pickletools
import random
import shutil

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron.checkpoint.core import writer
from megatron.checkpoint.core.index import INDEX
from megatron.checkpoint.core.reader import COMMON, FORMAT
from megatron.checkpoint.find import COMPLETE, CheckpointFolder, scan
from megatron.checkpoint.legacy.torch_file import TorchZip
from megatron.checkpoint.legacy.unpickler import read_pickle
from megatron.checkpoint.loading import open_checkpoint, open_folder
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from megatron.training.checkpointing import save_run
from tests.checkpoint.core.conftest import NETWORKS, SAVE
from tests.checkpoint.core.core_files import core_tensors
from tests.checkpoint.core.recorded import stored_tensors
from tests.checkpoint.states import read_all
from tests.distributed import run_distributed
from tests.training.toy import build_toy, train_toy

_CORE = ("--ckpt-format", "torch_dist")
_LAYOUTS = {
    "one process": ("bf16", 1, {}, "--use-distributed-optimizer --transformer-impl local"),
    "TP 2": ("mixture", 2, {"tensor": 2}, "--tensor-model-parallel-size 2"),
    "PP 2": ("GPT-2", 2, {"pipeline": 2}, "--pipeline-model-parallel-size 2"),
    "TP 2 with output gates": (
        "gated attention",
        2,
        {"tensor": 2},
        "--tensor-model-parallel-size 2",
    ),
    "TP 2 with another gate": ("another gate", 2, {"tensor": 2}, "--tensor-model-parallel-size 2"),
    "DP 2, ZeRO 3": ("Llama", 2, {}, "--zero-stage 3"),
    "EP 2, ZeRO 1": (
        "mixture in every second layer",
        2,
        {"expert": 2},
        "--expert-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "TP 2, ZeRO 1 of fp32": (
        "mixture with biases of routers",
        2,
        {"tensor": 2},
        "--tensor-model-parallel-size 2 --use-distributed-optimizer",
    ),
}


def _resave(layout, root, words, target):
    """Load our checkpoint, save it for Megatron Core, and return the files by rank."""
    run = build_toy(layout, [*words, "--load", str(root / "native"), "--save", target, *_CORE])
    return [save_run(run)]


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_saves_what_it_loaded(folders, tmp_path, layout):
    network, processes, sizes, flags = _LAYOUTS[layout]
    root, words = folders(network), [*SAVE, *NETWORKS[network], *flags.split()]
    run_distributed(processes, _resave, root, words, str(tmp_path), **sizes)
    ours, theirs = open_checkpoint(root / "native"), open_checkpoint(tmp_path)
    assert theirs.format == "core"
    before, after = read_all(root / "native"), read_all(tmp_path)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype, name
        assert torch.equal(value, after[name]), name
    for key in ("iteration", "consumed_train_samples", "padded_vocab_size", "optimizer"):
        assert theirs.meta[key] == ours.meta[key], key
    for key, value in theirs.meta["schedule"].items():
        assert value == ours.meta["schedule"][key], key
    files = {path.name for path in theirs.path.iterdir()}
    parts = {f"__{rank}_0.distcp" for rank in range(processes)} | {"__0_1.distcp"}
    assert files == {INDEX, COMMON, FORMAT, COMPLETE, *parts}
    # Replicas share their random states, except where they hold different experts.
    grid = [sizes.get(axis, 1) for axis in ("pipeline", "tensor")]
    grid += [sizes["expert"]] if "expert" in sizes else []
    index = dcp.FileSystemReader(theirs.path).read_metadata().state_dict_metadata
    assert {name for name in index if name.startswith("rng_state")} == {
        f"rng_state/shard_{_dotted(place)}_{_dotted(grid)}"
        for place in itertools.product(*map(range, grid))
    }


@pytest.mark.parametrize("flags", ["", "--bf16"])
def test_sgd_without_momentum_continues_although_it_has_no_states(tmp_path, flags):
    words = f"--optimizer sgd --sgd-momentum 0 --train-iters 2 --eval-iters 0 {flags}".split()
    words += ["--save", str(tmp_path), "--save-interval", "1", *_CORE]
    losses = train_toy(Layout.single(), words)[0].values("lm loss")
    resumed, run = train_toy(Layout.single(), [*words, "--load", str(tmp_path), "--ckpt-step", "1"])
    assert resumed.values("lm loss") == losses[1:]
    assert run.optimizer.steps == 2


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ("", []),
        ("--bf16", []),
        ("--transformer-impl local", ["common_step"]),
        ("--bf16 --transformer-impl local", ["common_step"]),
        ("--optimizer sgd", ["common_step"]),
    ],
)
def test_parameters_have_a_step_count_for_optimizers_that_take_one(tmp_path, flags, counts):
    """Transformer Engine's FusedAdam raises KeyError for it, and PyTorch's AdamW without it."""
    words = f"--train-iters 1 --eval-iters 0 {flags} --save {tmp_path} --save-interval 1".split()
    train_toy(Layout.single(), [*words, *_CORE])
    tree = _common(tmp_path / "iter_0000001")["optimizer"]
    tree = tree.get("optimizer", tree)
    assert list(tree["state"]) == counts
    if "sgd" not in flags:
        assert [group["step"] for group in tree["param_groups"]] == [1, 1]
    resumed = build_toy(Layout.single(), [*words, *_CORE, "--load", str(tmp_path)])
    assert resumed.optimizer.steps == 1


def _dotted(numbers):
    return ".".join(map(str, numbers))


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    """Return a function that converts the checkpoint of a network."""
    made = {}

    def make(network):
        if network not in made:
            made[network] = tmp_path_factory.mktemp("written") / "core"
            _convert(folders(network) / "native", made[network], "native")
        return made[network]

    return make


def _convert(source, target, loader, saver="torch_dist"):
    words = ["--model-type", "GPT", "--loader", loader, "--saver", saver, "--keep-optimizer"]
    words += ["--load-dir", str(source), "--save-dir", str(target)]
    list(util.run(util.build_parser().read(words)))


@pytest.mark.parametrize("network", ["GPT-2", "mixture in every second layer"])
def test_pytorch_s_own_loader_reads_it(folders, written, network):
    held, _ = stored_tensors(open_checkpoint(written(network)).path)
    reader = open_checkpoint(folders(network) / "native")
    expected = core_tensors(reader, stacked=network == "GPT-2")
    # With Transformer Engine, the norm before the experts has a different name in some layers.
    assert len(held) == len(expected)
    for name, value in expected.items():
        fused = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        found = held[name] if name in held else held[fused]
        assert torch.equal(found, value), name


def test_it_comes_back_by_the_converter(folders, written, tmp_path):
    _convert(written("mixture"), tmp_path, "megatron", "native")
    before, after = read_all(folders("mixture") / "native"), read_all(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_states_that_some_layers_lack_are_refused(tmp_path, capsys):
    words = "--train-iters 1 --save-interval 1 --eval-iters 0 --freeze layers.0 --save"
    train_toy(Layout.single(), [*words.split(), str(tmp_path / "native")])
    words = f"--model-type GPT --loader native --saver torch_dist --load-dir {tmp_path / 'native'}"
    words = [*words.split(), "--save-dir", str(tmp_path / "core")]
    assert util.main([*words, "--keep-optimizer"]) == 4
    message = "layer 0 was frozen and has no optimizer.state.exp_avg.decoder.layers."
    assert message in capsys.readouterr().err
    assert util.main(words) == 0


@pytest.mark.parametrize(
    "name", ["core_dense", "core_mtp", "core_moe", "core_moe_ep2", "core_moe_sigmoid"]
)
def test_recorded_checkpoints_come_out_as_they_went_in(golden, tmp_path, name):
    """Names, shapes, types, objects, values, settings and counters match the recorded ones."""
    source = golden / name / "ckpt" / "iter_0000010"
    _convert(source, tmp_path, "megatron")
    target = tmp_path / source.name
    indexes = [dcp.FileSystemReader(folder).read_metadata() for folder in (source, target)]
    theirs, ours = (index.state_dict_metadata for index in indexes)
    assert ours.keys() == theirs.keys()
    tensors = {}
    for key, one in theirs.items():
        assert type(ours[key]) is type(one), key
        if isinstance(one, dcp.metadata.TensorStorageMetadata):
            assert (ours[key].size, ours[key].properties) == (one.size, one.properties), key
            tensors[key] = one
    loaded = []
    for folder in (source, target):
        held = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in tensors.items()}
        dcp.load(held, checkpoint_id=str(folder), no_dist=True)
        loaded.append(held)
    assert all(torch.equal(loaded[0][key], loaded[1][key]) for key in tensors)
    before, after = (_common(folder) for folder in (source, target))
    for key in ("iteration", "checkpoint_version", "opt_param_scheduler", "content_metadata"):
        assert after[key] == before[key], key
    _compare_groups(before["optimizer"], after["optimizer"])
    args = after["args"].fields
    assert args["moe_layer_freq"] == before["args"].fields["moe_layer_freq"]
    assert args["consumed_train_samples"] == 160


def _common(folder):
    return read_pickle(bytes(TorchZip(folder / COMMON).record("data.pkl")), COMMON)


def _compare_groups(before, after):
    if "param_groups" not in before:  # one optimizer for the experts, and one for the rest
        assert after.keys() == before.keys()
        for key in before:
            _compare_groups(before[key], after[key])
        return
    assert len(after["param_groups"]) == len(before["param_groups"])
    for theirs, ours in zip(before["param_groups"], after["param_groups"], strict=True):
        assert theirs.keys() <= ours.keys()
        # The learning rate follows from the schedule, and `foreach` from the device.
        for key in theirs.keys() - {"lr", "foreach"}:
            assert ours[key] == theirs[key], key


def test_random_states_are_those_of_the_grid(folders, tmp_path):
    words = [*SAVE, *NETWORKS["GPT-2"], "--tensor-model-parallel-size", "2"]
    run_distributed(2, _resave, folders("GPT-2"), words, str(tmp_path), tensor=2)
    folder = open_checkpoint(tmp_path).path
    index = dcp.FileSystemReader(folder).read_metadata()
    held = {key: None for key in index.state_dict_metadata if key.startswith("rng_state")}
    assert set(held) == {"rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"}
    for place, info in index.storage_data.items():
        if place.fqn in held:
            data = (folder / info.relative_path).read_bytes()
            blob = memoryview(data)[info.offset : info.offset + info.length]
            file = TorchZip(folder, window=blob)
            ((held[place.fqn],),) = read_pickle(bytes(file.record("data.pkl")), place.fqn)
    keys = {"random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state"}
    for states in held.values():
        assert states.keys() == keys | {"rng_tracker_states"}
        kinds = {"data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"}
        assert states["rng_tracker_states"].keys() == kinds


def test_a_failed_save_publishes_nothing(folders, tmp_path, monkeypatch):
    def fails(file, tree, stem="archive"):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "append_torch_file", fails)
    with pytest.raises(StorageError, match="No space left"):
        _convert(folders("GPT-2") / "native", tmp_path, "native")
    assert [path.name for path in tmp_path.iterdir()] == ["save.lock"]


def test_older_ones_are_deleted(folders, tmp_path):
    words = [*SAVE, *NETWORKS["GPT-2"], "--keep-latest", "1", "--exit-interval", "4"]
    run_distributed(1, _train_on, folders("GPT-2"), words, str(tmp_path))
    assert [found.iteration for found in scan(tmp_path)[0]] == [4]


def _train_on(layout, root, words, target):
    _resave(layout, root, words, target)
    train_toy(layout, [*words, "--load", target, "--save", target, *_CORE])


def test_damage_is_refused_or_changes_nothing(written, tmp_path):
    sound = open_checkpoint(written("mixture")).path
    expected, rng, refused = read_all(sound), random.Random(1), 0
    for trial in range(60):
        folder = tmp_path / str(trial) / sound.name
        shutil.copytree(sound, folder)
        path = rng.choice(sorted(path for path in folder.iterdir() if path.name != COMPLETE))
        data = bytearray(path.read_bytes())
        if trial % 4 == 0:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            open_folder(CheckpointFolder("core", 2, folder))
        except CheckpointError:
            refused += 1
            continue
        held = read_all(folder)
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], expected[name]) for name in held), (trial, path.name)
    assert refused > 30


def test_the_index_holds_only_records(written):
    """The written pickles contain only the classes that our reader allows."""
    folder = open_checkpoint(written("mixture")).path
    named = {
        text
        for operation, text, _ in pickletools.genops((folder / INDEX).read_bytes())
        if operation.name == "GLOBAL"
    }
    modules = {text.split()[0] for text in named}
    assert modules <= {
        *("torch", "torch.serialization", "torch.distributed.checkpoint.metadata"),
        *("torch.distributed.checkpoint.filesystem", "collections"),
    }
    assert pickle.loads((folder / INDEX).read_bytes()).state_dict_metadata
