"""Folders in Megatron Core's `torch` format have the names, order and settings of its own files.

The lists of names are those in files that Megatron Core's main branch of August 2026 saved. It
loads the files written here and continues with the same losses, as this package does from its own.
"""

import pytest
import torch

from megatron.checkpoint.legacy.names import architecture_of
from megatron.checkpoint.reader import is_vocabulary_table
from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout
from megatron.training.checkpointing import save_run
from tests.checkpoint.legacy.test_golden import trees_of
from tests.checkpoint.states import read_all
from tests.distributed import run_distributed
from tests.training.toy import build_toy, losses_of, train_toy

_RUN = """
    --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --train-iters 5 --eval-iters 0
    --lr-warmup-fraction 0 --clip-grad 0.5
""".split()
_SAVE = "--save-interval 3 --exit-interval 3 --ckpt-format torch --save".split()
_LLAMA = """
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
    --qk-layernorm --bf16
""".split()
_SPLIT = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 1
""".split()
_LOCAL_NAMES = """
    input_layernorm.weight input_layernorm.bias
    self_attention.linear_proj.weight self_attention.linear_proj.bias
    self_attention.linear_qkv.weight self_attention.linear_qkv.bias
    pre_mlp_layernorm.weight pre_mlp_layernorm.bias
    mlp.linear_fc1.weight mlp.linear_fc1.bias mlp.linear_fc2.weight mlp.linear_fc2.bias
""".split()
_LLAMA_NAMES = """
    input_layernorm.weight self_attention.linear_proj.weight self_attention.linear_qkv.weight
    self_attention.q_layernorm.weight self_attention.k_layernorm.weight pre_mlp_layernorm.weight
    mlp.linear_fc1.weight mlp.linear_fc2.weight
""".split()
_ENGINE_NAMES = """
    self_attention.linear_proj.weight self_attention.linear_proj.bias
    self_attention.linear_qkv.layer_norm_weight self_attention.linear_qkv.layer_norm_bias
    self_attention.linear_qkv.weight self_attention.linear_qkv.bias
    mlp.linear_fc1.layer_norm_weight mlp.linear_fc1.layer_norm_bias
    mlp.linear_fc1.weight mlp.linear_fc1.bias mlp.linear_fc2.weight mlp.linear_fc2.bias
""".split()
_LINEAR = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1")
_LINEAR += ("mlp.linear_fc2",)
_GPT_2 = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_NORM = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias")
_BERT = """
    encoder.final_layernorm.weight encoder.final_layernorm.bias
    lm_head.dense.weight lm_head.dense.bias lm_head.layer_norm.weight lm_head.layer_norm.bias
    output_layer.bias binary_head.weight binary_head.bias pooler.dense.weight pooler.dense.bias
""".split()
_NETWORKS = {
    "GPT-2, local": (["--transformer-impl", "local"], _GPT_2, _LOCAL_NAMES, _NORM),
    "GPT-2": ([], _GPT_2, _ENGINE_NAMES, _NORM),
    "Llama, local": (
        [*_LLAMA, "--transformer-impl", "local"],
        _GPT_2[:1],
        _LLAMA_NAMES,
        (_NORM[0], "output_layer.weight"),
    ),
    "BERT": (
        ["--bf16"],
        (*_GPT_2, "embedding.tokentype_embeddings.weight"),
        _ENGINE_NAMES,
        _BERT,
    ),
}


@pytest.mark.parametrize("network", _NETWORKS)
def test_names_and_their_order_are_those_of_megatron_core(tmp_path, network):
    """The optimizer numbers parameters in this order, those with weight decay first."""
    flags, before, of_layer, after = _NETWORKS[network]
    kind, stack = ("bert", "encoder") if network == "BERT" else ("gpt", "decoder")
    train_toy(Layout.single(), [*_RUN, *flags, *_SAVE, str(tmp_path)], kind)
    ((folder, tree),) = trees_of(tmp_path / "iter_0000003").items()
    assert folder == "mp_rank_00"
    model = tree["model"]
    names = [*before, *(f"{stack}.layers.{i}.{n}" for i in range(4) for n in of_layer), *after]
    assert [name for name in model if not name.endswith("_extra_state")] == names
    modules = {f"{stack}.layers.{layer}.{name}" for layer in range(4) for name in _LINEAR}
    if "local" not in network:
        modules |= {f"{stack}.layers.{i}.self_attention.core_attention" for i in range(4)}
        modules |= {f"{stack}.final_layernorm"}
    states = {name: model[name] for name in model if name.endswith("_extra_state")}
    assert states == {f"{name}._extra_state": None for name in modules | {"output_layer"}}
    decayed = [name for name in names if not name.endswith("bias") and model[name].dim() > 1]
    groups = [decayed, [name for name in names if name not in decayed]]
    optimizer = tree["optimizer"]
    inner = optimizer.get("optimizer", optimizer)
    numbers = iter(range(len(names)))
    for settings, members, decay in zip(inner["param_groups"], groups, (0.01, 0.0), strict=True):
        assert settings["params"] == [next(numbers) for _ in members]
        assert (settings["step"], settings["weight_decay"]) == (3, decay)
        assert (settings["wd_mult"], settings["lr_mult"]) == (float(decay > 0), 1.0)
        assert (settings["max_lr"], settings["min_lr"]) == (1e-2, 1e-3)
        assert (settings["is_expert_parallel"], settings["is_decoupled_lr"]) == (False, False)
    for number, name in enumerate([*groups[0], *groups[1]]):
        state = inner["state"][number]
        # Transformer Engine's optimizer refuses states of any other kind.
        assert state.keys() == {"exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].shape == model[name].shape
        assert state["exp_avg"].dtype == torch.float32
    if "--bf16" in flags:
        for members, masters in zip(groups, optimizer["fp32_from_fp16_params"], strict=True):
            for name, master in zip(members, masters, strict=True):
                assert torch.equal(master.bfloat16(), model[name]), name
    args = tree["args"]
    assert (args.ckpt_format, args.use_dist_ckpt, args.consumed_train_samples) == (
        "torch",
        False,
        12,
    )
    (states,) = tree["rng_state"]
    trackers = {"model-parallel-rng", "data-parallel-rng", "expert-parallel-rng"}
    assert states["rng_tracker_states"].keys() == trackers


_LAYOUTS = {
    "one process": (1, {}, [*_LLAMA[1:], "--quick-geglu"]),
    "split": (4, {"tensor": 2, "pipeline": 2}, _SPLIT),
    "split Llama": (4, {"tensor": 2, "pipeline": 2}, [*_LLAMA, *_SPLIT]),
    "ZeRO": (2, {}, ["--zero-stage", "2"]),
}


@pytest.mark.parametrize("name", _LAYOUTS)
def test_a_run_continues_from_what_it_saved(tmp_path, name):
    processes, sizes, flags = _LAYOUTS[name]
    (expected,) = run_distributed(processes, losses_of, [*_RUN, *flags], **sizes)[-1:]
    first = run_distributed(processes, losses_of, [*_RUN, *flags, *_SAVE, str(tmp_path)], **sizes)
    again = [*_RUN, *flags, "--load", str(tmp_path)]
    second = run_distributed(processes, losses_of, again, **sizes)
    assert [*first[-1], *second[-1]] == expected
    trees = trees_of(tmp_path / "iter_0000003")
    assert len(trees) == sizes.get("tensor", 1) * sizes.get("pipeline", 1)
    if "pipeline" not in sizes:
        return
    for folder, tree in trees.items():
        assert {"model0", "model1"} <= tree.keys()
        last = tree["model1"]
        assert ("output_layer.weight" in last) == folder.endswith("_001")
        assert "decoder.layers.0.mlp.linear_fc2.weight" in last  # numbered within the part
        assert "decoder.layers.1.mlp.linear_fc2.weight" not in last
    if "--qk-layernorm" not in flags:  # the output shares the word embeddings
        for rank in ("00", "01"):
            words = trees[f"mp_rank_{rank}_000"]["model0"]["embedding.word_embeddings.weight"]
            copy = trees[f"mp_rank_{rank}_001"]["model1"]["output_layer.weight"]
            assert torch.equal(words, copy)


def test_a_t5_of_megatron_core_is_refused_by_name():
    tree = {"encoder.layers.0.mlp.linear_fc1.weight": 0, "decoder.final_layernorm.weight": 0}
    with pytest.raises(CheckpointError, match="a T5 of Megatron Core, which is not supported"):
        architecture_of([tree])


def _bert_losses(layout, flags):
    recorder, _ = train_toy(layout, flags, "bert")
    return list(zip(*map(recorder.values, ("lm loss", "sop loss")), strict=True))


def test_a_bert_in_two_stages_continues_in_one(tmp_path):
    sizes = {"tensor": 2, "pipeline": 2}
    (expected,) = run_distributed(4, _bert_losses, [*_RUN, *_SPLIT], **sizes)[-1:]
    words = [*_RUN, *_SPLIT, *_SAVE, str(tmp_path)]
    first = run_distributed(4, _bert_losses, words, **sizes)[-1]
    second = _bert_losses(Layout.single(), [*_RUN, "--load", str(tmp_path)])
    found = torch.tensor([*first, *second])
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)
    trees = trees_of(tmp_path / "iter_0000003")
    last, words = trees["mp_rank_01_001"]["model1"], trees["mp_rank_01_000"]["model0"]
    words = words["embedding.word_embeddings.weight"]
    assert torch.equal(last["output_layer.weight"], words)
    assert last["output_layer.bias"].shape == words.shape[:1]  # split like the output's rows
    assert last["lm_head.dense.weight"].shape == (32, 32)


def _resave(layout, words):
    return [save_run(build_toy(layout, words))]


def test_another_layout_has_the_same_model(tmp_path):
    """Two stages of two tensor-parallel ranks save what one process saved."""
    words = [*_RUN, *_LLAMA]
    train_toy(Layout.single(), [*words, *_SAVE, str(tmp_path / "one")])
    ends = ["--load", str(tmp_path / "one"), *_SAVE, str(tmp_path / "four")]
    run_distributed(4, _resave, [*words, *_SPLIT, *ends], tensor=2, pipeline=2)
    before, after = read_all(tmp_path / "one"), read_all(tmp_path / "four")
    assert before.keys() == after.keys()
    for name, value in before.items():
        # The number of padding rows depends on the number of ranks.
        rows = slice(0, 100 if is_vocabulary_table(name) else None)
        assert torch.equal(value[rows], after[name][rows]), name
