"""A T5 saved by Megatron-LM over three pipeline stages: copies are dropped, both halves joined."""

from argparse import Namespace

import pytest
import torch

from megatron.checkpoint.legacy.names import Arrangement
from megatron.checkpoint.loading import open_checkpoint
from tests.checkpoint.legacy.megatron_files import Form, optimizer_of
from tests.checkpoint.legacy.test_golden import trees_of
from tests.checkpoint.legacy.test_writer import assert_same_tensors, convert
from tests.checkpoint.states import read_whole
from tests.models.others import build

TENSOR = 2
_NORMS = {
    "encoder": {"attention_norm": "input", "mlp_norm": "post_attention"},
    "decoder": {
        "attention_norm": "input",
        "cross_norm": "post_attention",
        "mlp_norm": "post_inter_attention",
    },
}
_LINEAR = {
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "cross_attention.query": "inter_attention.query",
    "cross_attention.key_value": "inter_attention.key_value",
    "cross_attention.output": "inter_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_COLUMNS = ("qkv", "query", "key_value", "up")
ARGUMENTS = {
    "num_layers": 3,
    "decoder_num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 12,
    "tensor_model_parallel_size": TENSOR,
    "pipeline_model_parallel_size": 3,
    "pipeline_model_parallel_split_rank": 1,
    "consumed_train_samples": 48,
}
STAGES = (  # what each stage holds: prefixes of our names, in Megatron's order
    ("embedding.", "encoder."),
    ("embedding.", "decoder.layers.0."),
    ("decoder.layers.1.", "decoder.final_norm.", "embedding.word.", "output.bias"),
)


def _path(name, stage):
    """Return where Megatron keeps one of our parameters under `model`."""
    if name.startswith("embedding."):
        if stage == 2:
            return ("word_embeddings_for_head", "weight")
        return ("language_model", "embedding", f"{name.split('.')[1]}_embeddings", "weight")
    if name == "output.bias":
        return ("lm_head", "bias")
    half, _, rest = name.partition(".")
    module, _, kind = rest.rpartition(".")
    if module == "final_norm":
        return ("language_model", half, f"final_layernorm.{kind}")
    _, layer, part = module.split(".", 2)
    local = int(layer) - (stage == 2)
    theirs = _LINEAR.get(part) or f"{_NORMS[half][part]}_layernorm"
    return ("language_model", half, f"layers.{local}.{theirs}.{kind}")


def _part(name, whole, rank):
    module = name.split(".")[-2]
    if name in ("embedding.word.weight", "output.bias") or module in _COLUMNS:
        return whole.chunk(TENSOR, 0)[rank]
    if name.endswith((".output.weight", ".down.weight")):
        return whole.chunk(TENSOR, 1)[rank]
    return whole


def _write(root, model):
    for rank in range(TENSOR):
        for stage, prefixes in enumerate(STAGES):
            names = [n for prefix in prefixes for n in model if n.startswith(prefix)]
            parts = {name: _part(name, model[name], rank) for name in names}
            paths = {name: _path(name, stage) for name in names}
            tree = {"language_model": {}}
            for name, path in paths.items():
                where = tree
                for key in path[:-1]:
                    where = where.setdefault(key, {})
                where[path[-1]] = parts[name]
            folder = root / "iter_0000003" / f"mp_rank_{rank:02d}_{stage:03d}"
            folder.mkdir(parents=True)
            args = Namespace(**ARGUMENTS)
            content = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": 3,
                "model": tree,
                "optimizer": optimizer_of(Form(tensor=TENSOR, stages=3), parts, paths),
                "opt_param_scheduler": {"num_steps": 40},
            }
            torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("3")


def test_a_t5_comes_back_whole(tmp_path):
    model = {name: torch.randn_like(p) for name, p in build("t5").named_parameters()}
    _write(tmp_path, model)
    reader = open_checkpoint(tmp_path)
    states = {f"optimizer.{n}.{kind}" for n in model for kind in ("exp_avg", "exp_avg_sq")}
    assert set(reader.names()) == {f"model.{name}" for name in model} | states
    for name, tensor in model.items():
        assert torch.equal(read_whole(reader, f"model.{name}"), tensor), name
        assert torch.equal(read_whole(reader, f"optimizer.{name}.exp_avg"), 2 * tensor), name
    assert reader.meta["config"]["model"]["architecture"] == "t5"


def _held(tree):
    """Return a file's weights by path, and each parameter's moments in the optimizer's order."""
    state = tree["optimizer"]["state"]
    moments = [{kind: state[i][kind] for kind in ("exp_avg", "exp_avg_sq")} for i in sorted(state)]
    return {"model": tree["model"], "moments": moments}


def test_its_stages_are_written_as_they_were(tmp_path):
    """Copies of embeddings, the encoder's final norm, and the optimizer's order are kept."""
    _write(tmp_path / "a", {n: torch.randn_like(p) for n, p in build("t5").named_parameters()})
    words = ["--keep-optimizer"]
    assert convert("megatron", "native", tmp_path / "a", tmp_path / "b", *words, kind="T5") == 0
    assert convert("native", "megatron", tmp_path / "b", tmp_path / "c", *words, kind="T5") == 0
    expected, found = (trees_of(tmp_path / name / "iter_0000003") for name in "ac")
    assert found.keys() == expected.keys()
    for folder, tree in expected.items():
        assert_same_tensors(_held(found[folder]), _held(tree))
        assert found[folder]["args"].pipeline_model_parallel_split_rank == 1


def test_a_decoder_on_the_last_stage_has_its_embeddings_there(tmp_path):
    """There is no second copy for the output, and the file is read back whole."""
    _write(tmp_path / "a", {n: torch.randn_like(p) for n, p in build("t5").named_parameters()})
    words = "--keep-optimizer --target-tensor-parallel-size 1 --target-pipeline-parallel-size 2"
    words = [*words.split(), "--target-pipeline-parallel-split-rank", "1"]
    assert convert("megatron", "megatron", tmp_path / "a", tmp_path / "b", *words, kind="T5") == 0
    trees = trees_of(tmp_path / "b" / "iter_0000003")
    first, last = (trees[f"mp_rank_00_00{stage}"]["model"] for stage in (0, 1))
    assert (list(first), list(last)) == (["language_model"], ["language_model", "lm_head"])
    halves = [list(tree["language_model"]) for tree in (first, last)]
    assert halves == [["embedding", "encoder"], ["embedding", "decoder"]]
    assert "final_layernorm.weight" in first["language_model"]["encoder"]
    one, other = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert other.names() == one.names()
    assert all(torch.equal(read_whole(one, n), read_whole(other, n)) for n in one.names())


def test_stages_of_both_halves_are_refused(tmp_path, capsys):
    _write(tmp_path / "a", {n: torch.randn_like(p) for n, p in build("t5").named_parameters()})
    for more, message in (
        (["5", "--target-pipeline-parallel-split-rank", "2"], "leaves 2 stages for the 3"),
        (
            ["1", "--target-pipeline-parallel-split-rank", "1"],
            "use a number from 1 to one less than that",
        ),
        (["2"], "does not divide"),
    ):
        words = ["--target-pipeline-parallel-size", *more]
        ends = (tmp_path / "a", tmp_path / "b")
        assert convert("megatron", "megatron", *ends, *words, kind="T5") != 0
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("version", [0, 1])
def test_old_rows_of_keys_and_values_are_ordered_by_head(version):
    heads, size = 2, 3
    ours = torch.arange(heads * 2 * size * 4).view(heads, 2, size, 4)
    theirs = ours.transpose(0, 1) if version == 0 else ours.transpose(1, 2)
    arrangement = Arrangement(float(version), heads, gated=False)
    name = "decoder.layers.0.cross_attention.key_value.weight"
    found = arrangement.arrange(name, theirs.reshape(-1, 4))
    assert torch.equal(found, ours.view(-1, 4))
