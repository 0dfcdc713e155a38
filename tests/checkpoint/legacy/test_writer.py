"""Files that we write for Megatron, compared with Megatron's own files and PyTorch's own reader."""

import shutil
from argparse import Namespace

import pytest
import torch

from megatron.checkpoint.entries import Entry, model_state
from megatron.checkpoint.find import checkpoint_at
from megatron.checkpoint.legacy import writer
from megatron.checkpoint.legacy.arguments import megatron_arguments
from megatron.checkpoint.loading import open_checkpoint, open_folder
from megatron.checkpoint.retention import RetentionPolicy, is_as_listed, prune
from megatron.config.parser import parse_config
from megatron.config.yaml_file import to_dict
from megatron.device import Device
from megatron.errors import CheckpointError, StorageError
from megatron.models.build import build_model, run_context
from megatron.models.t5 import T5Model
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from tests.checkpoint.legacy.test_golden import trees_of
from tests.checkpoint.states import read_whole, save
from tests.config.command import parse
from tests.distributed import run_distributed
from tests.parity.golden import continue_run
from tests.training.toy import losses_of, train_toy

# Only Megatron's own run has these: Apex's optimizer has two settings that PyTorch's lacks, and
# `model_type` is Megatron's own enum.
OURS_ONLY = {"bias_correction", "step"}


def convert(loader, saver, load, out, *words, kind="GPT"):
    ends = ["--model-type", kind, "--load-dir", str(load), "--save-dir", str(out)]
    return util.main([*ends, "--loader", loader, "--saver", saver, *words])


def leaves(tree, path=()):
    """Return every tensor with its path."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))


def assert_same_tensors(found, expected):
    """Check for the same paths, types, shapes and bits; the bits of random states may differ."""
    found, expected = dict(leaves(found)), dict(leaves(expected))
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        assert (found[path].dtype, found[path].shape) == (tensor.dtype, tensor.shape), path
        assert path[0] == "rng_state" or torch.equal(found[path], tensor), path


@pytest.mark.parametrize("run", ["gpt_fp32", "gpt_tp2pp2_fp32", "bert_fp32"])
def test_megatron_s_files_come_back_bit_for_bit(golden, tmp_path, run):
    original, native, again = golden / run / "ckpt", tmp_path / "native", tmp_path / "megatron"
    kind = run.partition("_")[0].upper()
    assert convert("megatron", "native", original, native, "--keep-optimizer", kind=kind) == 0
    assert convert("native", "megatron", native, again, "--keep-optimizer", kind=kind) == 0
    assert (again / "latest_checkpointed_iteration.txt").read_bytes() == (
        original / "latest_checkpointed_iteration.txt"
    ).read_bytes()
    found, expected = trees_of(again / "iter_0000020"), trees_of(original / "iter_0000020")
    assert found.keys() == expected.keys()
    for folder, tree in expected.items():
        assert found[folder].keys() == tree.keys()
        assert_same_tensors(found[folder], tree)
        assert found[folder]["opt_param_scheduler"] == tree["opt_param_scheduler"]
        groups = zip(
            found[folder]["optimizer"]["param_groups"], tree["optimizer"]["param_groups"],
            strict=True,
        )  # fmt: skip
        for group, theirs in groups:
            assert group.keys() - OURS_ONLY == theirs.keys()
            changed = {key for key in theirs if group[key] != theirs[key]}
            assert changed <= {"lr"}  # Megatron sets it from its schedule
        args, theirs = vars(found[folder]["args"]), vars(tree["args"])
        assert theirs.keys() - args.keys() == {"model_type"}
        # Scalars and flat lists are unchanged.
        differing = {key for key in theirs if key in args and args[key] != theirs[key]}
        assert differing <= {"rank", "local_rank", "world_size"}, differing


def test_other_splits_hold_the_same_model(golden, tmp_path):
    original = golden / "gpt_fp32" / "ckpt"
    words = "--keep-optimizer --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"
    assert convert("megatron", "megatron", original, tmp_path / "split", *words.split()) == 0
    words += " --target-num-layers-per-virtual-pipeline-stage 1"
    assert convert("megatron", "megatron", original, tmp_path / "virtual", *words.split()) == 0
    one = open_checkpoint(original)
    for folder in ("split", "virtual"):
        other = open_checkpoint(tmp_path / folder)
        assert other.names() == one.names()
        assert all(torch.equal(read_whole(one, n), read_whole(other, n)) for n in one.names())
    shapes = {
        key: {path: tensor.shape for path, tensor in leaves(tree) if path[0] != "optimizer"}
        for key, tree in trees_of(tmp_path / "split" / "iter_0000020").items()
    }
    theirs = {
        key: {path: tensor.shape for path, tensor in leaves(tree) if path[0] != "optimizer"}
        for key, tree in trees_of(golden / "gpt_tp2pp2_fp32" / "ckpt" / "iter_0000020").items()
    }
    assert shapes == theirs
    tree = trees_of(tmp_path / "virtual" / "iter_0000020")["mp_rank_00_001"]
    assert {"model0", "model1"} <= tree.keys()
    assert tree["args"].virtual_pipeline_model_parallel_size == 2
    back = tmp_path / "whole"
    words = "--keep-optimizer --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1"
    assert convert("megatron", "megatron", tmp_path / "virtual", back, *words.split()) == 0
    assert_same_tensors(
        trees_of(back / "iter_0000020")["mp_rank_00"],
        trees_of(original / "iter_0000020")["mp_rank_00"],
    )


def test_a_split_bert_goes_back_bit_for_bit(golden, tmp_path):
    """The last stage's copy of the word embeddings precedes the heads, as in Megatron's files."""
    original, split = golden / "bert_fp32" / "ckpt", tmp_path / "split"
    words = "--keep-optimizer --target-tensor-parallel-size {0} --target-pipeline-parallel-size {0}"
    assert (
        convert("megatron", "megatron", original, split, *words.format(2).split(), kind="BERT") == 0
    )
    last = trees_of(split / "iter_0000020")["mp_rank_01_001"]
    assert list(last["model"]) == [
        "language_model", "word_embeddings_for_head", "lm_head", "binary_head"
    ]  # fmt: skip
    decayed = len(last["optimizer"]["param_groups"][0]["params"])
    shapes = [tuple(last["optimizer"]["state"][i]["exp_avg"].shape) for i in range(decayed)]
    assert shapes[-4:] == [(64, 64), (2560, 64), (64, 64), (2, 64)]
    back = tmp_path / "back"
    assert convert("megatron", "megatron", split, back, *words.format(1).split(), kind="BERT") == 0
    trees = (trees_of(root / "iter_0000020")["mp_rank_00"] for root in (back, original))
    assert_same_tensors(*trees)


@pytest.mark.parametrize("head", ["classification_head", "multichoice_head"])
def test_finetuned_berts(golden, tmp_path, head):
    """A task's head is stored next to the language model, in place of the pretraining heads."""
    original = golden / "bert_fp32" / "ckpt" / "iter_0000020"
    (tree,) = trees_of(original).values()
    for key in ("lm_head", "binary_head"):
        del tree["model"][key]
    tree["model"][head] = {"weight": torch.randn(3, 64), "bias": torch.randn(3)}
    tree["args"] = Namespace(**{k: v for k, v in vars(tree["args"]).items() if k != "model_type"})
    del tree["optimizer"], tree["rng_state"]
    place = tmp_path / "a" / "iter_0000020" / "mp_rank_00"
    place.mkdir(parents=True)
    torch.save(tree, place / "model_optim_rng.pt")
    words = ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]
    assert convert("megatron", "native", tmp_path / "a", tmp_path / "b", kind="BERT") == 0
    assert convert("native", "megatron", tmp_path / "b", tmp_path / "c", *words, kind="BERT") == 0
    words = ["--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "1"]
    assert convert("megatron", "megatron", tmp_path / "c", tmp_path / "d", *words, kind="BERT") == 0
    found = trees_of(tmp_path / "d" / "iter_0000020")["mp_rank_00"]
    assert_same_tensors(found["model"], tree["model"])


TOY = """
    --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --global-batch-size 8 --eval-iters 0
    --make-vocab-size-divisible-by 16
""".split()
SAVES = "--save-interval 3 --exit-interval 3 --ckpt-format legacy --save".split()
LAYOUTS = {
    "sharded by ZeRO": (2, {}, ["--zero-stage", "2"]),
    "distributed optimizer": (2, {}, ["--use-distributed-optimizer", "--bf16"]),
    "split": (4, {"tensor": 2, "pipeline": 2}, [
        "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2",
        "--num-layers-per-virtual-pipeline-stage", "1", "--use-distributed-optimizer",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_that_saves_so_continues_from_it(tmp_path, name):
    processes, sizes, flags = LAYOUTS[name]
    (expected,) = run_distributed(processes, losses_of, [*TOY, *flags], **sizes)[-1:]
    first = run_distributed(processes, losses_of, [*TOY, *flags, *SAVES, str(tmp_path)], **sizes)
    more = [flag for flag in flags if flag == "--bf16"]
    second = losses_of(Layout.single(), [*TOY, *more, "--load", str(tmp_path)])
    rel = 2e-3 if more else 1e-5
    assert [*first[-1], *second] == pytest.approx(expected, rel=rel)
    (path,) = tmp_path.glob("iter_*")
    beside = [one.name for one in path.iterdir() if not one.name.startswith("mp_rank_")]
    assert beside == ["complete"]
    trees = trees_of(path)
    assert len(trees) == sizes.get("tensor", 1) * sizes.get("pipeline", 1)
    for tree in trees.values():
        assert tree["args"].padded_vocab_size % (16 * sizes.get("tensor", 1)) == 0
        assert tree["iteration"] == 3
        states = tree["optimizer"].get("optimizer", tree["optimizer"])
        assert ("state" in states) == ("--use-distributed-optimizer" not in flags)


def test_files_are_the_same_from_the_background(tmp_path):
    """Two processes share their states; the last save is never in the background."""
    words = "--use-distributed-optimizer --bf16 --ckpt-format legacy --save-interval 2 --save"
    for name, more in (("now", []), ("later", ["--async-save"])):
        flags = [*TOY, *words.split(), str(tmp_path / name), *more, "--train-iters", "4"]
        run_distributed(2, losses_of, flags)
    folders = [tmp_path / name / "iter_0000002" for name in ("now", "later")]
    now, later = (open_folder(checkpoint_at(folder)) for folder in folders)
    assert any(name.startswith("optimizer.") for name in now.names())
    assert later.names() == now.names()
    assert all(torch.equal(read_whole(now, n), read_whole(later, n)) for n in now.names())


T5_RUN = """
    --hidden-dropout 0 --attention-dropout 0 --num-layers 2 --decoder-num-layers 4 --eval-iters 0
    --global-batch-size 4 --micro-batch-size 2
""".split()


def _t5_losses(layout, flags):
    return train_toy(layout, [*T5_RUN, *flags], "t5")[0].values("lm loss")


def test_a_t5_in_three_stages_continues_in_one(tmp_path):
    split = "--pipeline-model-parallel-size 3 --pipeline-model-parallel-split-rank 1".split()
    expected = _t5_losses(Layout.single(), [])
    saves = [*SAVES, str(tmp_path)]
    first = run_distributed(3, _t5_losses, [*split, *saves], pipeline=3)[-1]
    second = _t5_losses(Layout.single(), ["--load", str(tmp_path)])
    assert [*first, *second] == pytest.approx(expected, rel=1e-5)
    args = trees_of(tmp_path / "iter_0000003")["mp_rank_00_002"]["args"]
    assert args.pipeline_model_parallel_split_rank == 1


@pytest.mark.parametrize("frozen", ["embedding", "layers.1"])
def test_frozen_weights_of_16_bits_have_masters(tmp_path, frozen):
    """Megatron has one for every weight, so files that lack some would have none."""
    flags = [*TOY, "--bf16", "--freeze", frozen]
    expected = losses_of(Layout.single(), flags)
    first = losses_of(Layout.single(), [*flags, *SAVES, str(tmp_path)])
    assert [*first, *losses_of(Layout.single(), [*flags, "--load", str(tmp_path)])] == expected


def test_states_that_megatron_lacks_are_refused(tmp_path, capsys):
    native, out = tmp_path / "native", tmp_path / "megatron"
    words = "--train-iters 1 --save-interval 1 --eval-iters 0 --optimizer muon --save"
    train_toy(Layout.single(), [*words.split(), str(native)])
    assert convert("native", "megatron", native, out, "--keep-optimizer") == 4
    message = "momentum_buffer: Megatron-LM 23.08 has no such optimizer state: convert only the"
    assert message in capsys.readouterr().err
    assert checkpoint_at(out / "iter_0000001") is None
    assert convert("native", "megatron", native, out) == 0


@pytest.mark.parametrize("more", [[], ["--async-save"]], ids=["foreground", "background"])
def test_old_files_go_but_for_megatron_s_own_and_those_being_read(tmp_path, more):
    theirs = tmp_path / "iter_0000001" / "mp_rank_00"
    theirs.mkdir(parents=True)
    flags = "--ckpt-format legacy --save-interval 2 --keep-latest 2 --train-iters 6 --save".split()
    expected = losses_of(Layout.single(), [*TOY, "--train-iters", "6"])
    assert losses_of(Layout.single(), [*TOY, *more, *flags, str(tmp_path)]) == expected
    kept = [tmp_path / f"iter_000000{iteration}" for iteration in (1, 4, 6)]
    assert sorted(tmp_path.glob("iter_*")) == kept
    reader = open_folder(checkpoint_at(kept[1]))
    assert prune(tmp_path, 6, RetentionPolicy(1)) == []
    del reader
    assert prune(tmp_path, 6, RetentionPolicy(1)) == [kept[1]]
    assert theirs.exists()
    words = ["--load", str(tmp_path), "--train-iters", "7"]
    assert len(losses_of(Layout.single(), [*TOY, *words, "--override-opt_param-scheduler"])) == 1


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    assert losses_of(Layout.single(), [*TOY, *SAVES, str(tmp_path)])
    (before,) = tmp_path.glob("iter_*")

    def full(path, tree):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(writer, "write_torch_file", full)
    flags = [*TOY, *SAVES, str(tmp_path), "--load", str(tmp_path), "--exit-interval", "4"]
    with pytest.raises(StorageError, match=r"model_optim_rng.pt: No space left"):
        losses_of(Layout.single(), flags)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [before]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_a_converted_run_continues_as_from_the_original(golden, tmp_path, monkeypatch):
    """Weights, moments, schedule and position carry over: the next losses are bit for bit the
    same."""
    monkeypatch.chdir(golden)
    original = golden / "gpt_tp2pp2_fp32" / "ckpt"
    assert convert("megatron", "native", original, tmp_path / "n", "--keep-optimizer") == 0
    assert convert("native", "megatron", tmp_path / "n", tmp_path / "m", "--keep-optimizer") == 0
    losses = [
        [
            record["lm loss"]
            for record in continue_run(
                Layout.single(),
                golden,
                "gpt_tp2pp2_fp32",
                tmp_path / "cache",
                ["--load", str(folder), "--exit-interval", "3"],
            )
            if "lm loss" in record
        ]
        for folder in (original, tmp_path / "n", tmp_path / "m")
    ]
    assert len(losses[0]) == 1
    assert losses[0] == losses[1] == losses[2]


def test_files_can_be_mapped_and_name_megatron_s_padding(tmp_path):
    flags = [*TOY, *SAVES, str(tmp_path), "--tensor-model-parallel-size", "2"]
    run_distributed(2, losses_of, flags, tensor=2)
    file = tmp_path / "iter_0000003" / "mp_rank_01" / "model_optim_rng.pt"
    tree = torch.load(file, mmap=True, weights_only=False)
    words = tree["model"]["language_model"]["embedding"]["word_embeddings"]["weight"]
    assert words.shape == (64, 32)  # 101 entries padded to a multiple of 16 * 2, halved
    assert tree["args"].padded_vocab_size == 128
    assert words.data_ptr() % 64 == 0


T5 = """
    --encoder-num-layers 2 --decoder-num-layers 3 --hidden-size 32 --num-attention-heads 4
    --seq-length 16 --decoder-seq-length 8 --max-position-embeddings 16 --micro-batch-size 1
    --train-iters 1 --lr 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 8
""".split()


def test_a_t5_with_adam_s_moments(tmp_path):
    """Write it with two tensor ranks under Megatron's names, and read it back bit for bit."""
    config = parse_config(T5, world_size=1, architecture="t5").config
    model = build_model(T5Model, config, run_context(config, Layout.single(), Device.cpu()), 64)
    state = {}
    for name, entry in model_state([model]).items():
        entry.tensor.normal_()
        state[name] = entry
        for factor, kind in ((2, "exp_avg"), (3, "exp_avg_sq")):
            moment = Entry.whole(factor * entry.tensor)
            state[f"{name.replace('model.', 'optimizer.', 1)}.{kind}"] = moment
    meta = {
        "iteration": 7,
        "consumed_train_samples": 7,
        "optimizer": {"step": 7, "loss_scale": {}},
        "schedule": {"num_steps": 7},
        "config": to_dict(config),
    }
    save(tmp_path / "native", 7, state, meta, Layout.single())
    words = ["--keep-optimizer", "--target-tensor-parallel-size", "2"]
    out = tmp_path / "megatron"
    assert convert("native", "megatron", tmp_path / "native", out, *words, kind="T5") == 0
    tree = trees_of(out / "iter_0000007")["mp_rank_01"]
    language = tree["model"]["language_model"]
    assert list(language) == ["embedding", "encoder", "decoder"]
    assert list(tree["model"]) == ["language_model", "lm_head"]
    layer = [name for name in language["decoder"] if name.startswith("layers.2.")]
    modules = "input_layernorm self_attention.query_key_value self_attention.dense "
    modules += "post_attention_layernorm inter_attention.query inter_attention.key_value "
    modules += "inter_attention.dense post_inter_attention_layernorm mlp.dense_h_to_4h "
    modules += "mlp.dense_4h_to_h"
    assert layer == [f"layers.2.{m}.{k}" for m in modules.split() for k in ("weight", "bias")]
    assert language["decoder"]["layers.0.inter_attention.key_value.weight"].shape == (32, 32)
    assert tree["model"]["lm_head"]["bias"].shape == (32,)
    reader = open_checkpoint(out)
    assert reader.names() == sorted(state)
    assert all(torch.equal(read_whole(reader, n), entry.tensor) for n, entry in state.items())
    for stages in ("1", "5"):
        words[-2:] = ["--target-pipeline-parallel-size", stages]
        out = tmp_path / f"of {stages}"
        assert convert("native", "megatron", tmp_path / "native", out, *words, kind="T5") == 0


def _megatron_saves(folder, rank):
    """Overwrite a rank's file in place, as Megatron-LM does, with different weights."""
    path = folder / rank / "model_optim_rng.pt"
    tree = torch.load(path, weights_only=False)
    for _, tensor in leaves(tree["model"]):
        tensor.add_(1)
    torch.save(tree, path)


def test_a_mark_stands_for_the_files_that_it_lists_only(tmp_path, capsys):
    """Megatron-LM saves over a checkpoint that we have marked: first partly, then completely."""
    flags = "--ckpt-format legacy --save-interval 2 --train-iters 6 --save".split()
    sizes = {"tensor": 2}
    words = [*TOY, "--tensor-model-parallel-size", "2", *flags, str(tmp_path)]
    run_distributed(2, losses_of, words, **sizes)
    newest, second = (tmp_path / f"iter_000000{iteration}" for iteration in (6, 4))
    assert is_as_listed(newest)
    _megatron_saves(newest, "mp_rank_00")
    with pytest.raises(CheckpointError, match=r"two saves: mp_rank_01/.* unchanged since"):
        open_folder(checkpoint_at(newest))
    assert open_checkpoint(tmp_path).iteration == 4  # the newest sound one
    assert "files from two saves" in capsys.readouterr().err
    assert prune(tmp_path, 6, RetentionPolicy(1)) == [
        tmp_path / "iter_0000002"
    ]  # 4 is our newest, so 6 stays too
    _megatron_saves(newest, "mp_rank_01")
    assert not is_as_listed(newest)
    assert open_checkpoint(tmp_path).iteration == 6
    assert prune(tmp_path, 6, RetentionPolicy(1)) == []
    assert second.exists()


def test_files_of_a_wider_split_beside_ours_are_refused(tmp_path):
    losses_of(Layout.single(), [*TOY, *SAVES, str(tmp_path)])
    (folder,) = tmp_path.glob("iter_*")
    shutil.copytree(folder / "mp_rank_00", folder / "mp_rank_01")
    with pytest.raises(CheckpointError, match=r"mp_rank_01/model_optim_rng.pt written or removed"):
        open_folder(checkpoint_at(folder))
    (folder / "complete").unlink()
    with pytest.raises(CheckpointError, match=r"2 tensor ranks x 1 stages, .* has 1 x 1"):
        open_folder(checkpoint_at(folder))


@pytest.mark.parametrize("text", [b"All files are here.\n", b"{", b'{"files": 1}', b"[" * 100_000])
def test_a_mark_that_lists_nothing_vouches_for_nothing(tmp_path, text):
    flags = "--ckpt-format legacy --save-interval 2 --train-iters 4 --save".split()
    losses_of(Layout.single(), [*TOY, *flags, str(tmp_path)])
    (tmp_path / "iter_0000002" / "complete").write_bytes(text)
    assert prune(tmp_path, 4, RetentionPolicy(1)) == []
    open_folder(checkpoint_at(tmp_path / "iter_0000002"))


@pytest.mark.parametrize(("words", "evaluated"), [("", 64), ("--full-validation", 0)])
def test_the_validation_samples_seen_are_those_that_megatron_skips(
    words: str, evaluated: int
) -> None:
    """Evaluations on all samples always begin with the first one."""
    evaluations = "--eval-interval 10 --eval-iters 2 --global-batch-size 8"
    data = "--train-data-path a --valid-data-path b"
    config = parse(words, evaluations, data, without=["--mock-data"]).config
    meta = {"iteration": 40}
    sizes = {"rows": 128, "dtype": torch.float32, "data_parallel": 1}
    assert megatron_arguments(config, meta, **sizes).consumed_valid_samples == evaluated
