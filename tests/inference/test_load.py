"""Loading a model from its checkpoint, in one process and in several."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.config.data import TokenizerConfig
from megatron.config.run import with_values
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.inference import load
from megatron.inference.load import load_gpt, open_existing, saved_config
from megatron.parallel.collectives import gather_to
from megatron.parallel.layout import Layout
from megatron.tokenizer.fast_bpe import byte_of_character
from megatron.training.checkpointing import save_run
from tests.distributed import run_distributed
from tests.training.toy import build_toy

TOKENS = torch.arange(32).view(2, 16)
ROWS = 104  # the toy's vocabulary


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return an untrained toy model's checkpoint, with its vocabulary padded to 104 rows."""
    folder = str(tmp_path_factory.mktemp("toy"))
    save_run(build_toy(Layout.single(), ["--save", folder, "--save-interval", "1"]))
    return folder


@torch.no_grad()
def _logits(layout, folder):
    """Return [b, s, v] on the last stage, from one pass through all stages."""
    loaded = load_gpt(folder, Device.cpu(), layout)
    stage, peers = layout.pipeline, layout.pipeline.ranks
    hidden = None
    if not stage.is_first:
        hidden = torch.empty(16, 2, 32)
        dist.recv(hidden, peers[stage.rank - 1])
    result = loaded.model(TOKENS, hidden=hidden)
    if not stage.is_last:
        dist.send(result, peers[stage.rank + 1])
        return None
    return gather_to(result, layout.tensor)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}])
def test_every_layout_computes_what_one_process_computes(saved, sizes):
    processes = sizes.get("tensor", 1) * sizes.get("pipeline", 1)
    *_, got = run_distributed(processes, _logits, saved, **sizes)
    expected = _logits(Layout.single(), saved)
    assert expected.shape == (2, 16, ROWS)
    torch.testing.assert_close(got[..., :ROWS], expected, rtol=1e-5, atol=1e-5)


def test_a_vocabulary_gets_rows_that_every_rank_has_in_eights(tmp_path):
    folder = str(tmp_path)
    shape = ["--num-attention-heads", "3", "--hidden-size", "24"]
    save_run(build_toy(Layout.single(), [*shape, "--save", folder, "--save-interval", "1"]))
    assert run_distributed(3, _rows, folder, tensor=3) == [120] * 3
    assert _rows(Layout.single(), folder) == ROWS


def _rows(layout, folder):
    return load_gpt(folder, Device.cpu(), layout).model.plan.embedding.vocabulary


def test_the_few_tokens_of_an_engines_step_are_not_split_over_tensor_ranks(saved):
    assert run_distributed(2, _splits, saved, tensor=2) == [[(False, False), (True, True)]] * 2


def _splits(layout, folder):
    """Return whether a model in an engine splits sequences, and whether another model does."""
    layout = replace(layout, sequence_parallel=True)
    found = [load_gpt(folder, Device.cpu(), layout, row_by_row=x) for x in (True, False)]
    return [(x.layout.sequence_parallel, x.config.parallel.sequence_parallel) for x in found]


def test_a_layout_that_the_network_does_not_divide_over_is_refused(saved):
    (text, *_) = run_distributed(3, _refusal, saved, tensor=3)
    assert "--num-attention-heads 4, --ffn-hidden-size" in text
    assert "are not divisible by --tensor-model-parallel-size 3" in text


def _refusal(layout, folder):
    with pytest.raises(ConfigError) as caught:
        load_gpt(folder, Device.cpu(), layout)
    return str(caught.value)


def test_what_was_trained_in_8_bits_runs_in_16(tmp_path):
    run = build_toy(Layout.single(), ["--bf16", "--save", str(tmp_path), "--save-interval", "1"])
    run.config = with_values(
        run.config, {"precision.fp8_format": "hybrid", "precision.fp8_recipe": "rowwise"}
    )
    save_run(run)
    loaded = load_gpt(str(tmp_path), Device.cpu())
    assert loaded.config.precision.fp8_format is None
    assert loaded.model.embedding.word.weight.dtype == torch.bfloat16


def test_what_was_trained_with_flash_attention_runs_on_a_cpu(tmp_path):
    run = build_toy(Layout.single(), ["--bf16", "--save", str(tmp_path), "--save-interval", "1"])
    of_training = {"use_flash_attn": True, "masked_softmax_fusion": False}
    of_training["perform_initialization"] = False
    run.config = with_values(run.config, {f"model.{k}": v for k, v in of_training.items()})
    save_run(run)
    model = load_gpt(str(tmp_path), Device.cpu()).config.model
    assert {name: getattr(model, name) for name in of_training} == {
        "use_flash_attn": False,
        "masked_softmax_fusion": True,
        "perform_initialization": True,
    }


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="--load .*there is no checkpoint"):
        load_gpt(str(tmp_path), Device.cpu())


def test_another_network_is_refused(saved):
    config = saved_config(open_existing(saved), saved)
    config = replace(config, model=replace(config.model, num_layers=4))
    with pytest.raises(CheckpointError, match="--num-layers is 4 here and 2 in the checkpoint"):
        load_gpt(saved, Device.cpu(), config=config)


def test_a_megatron_checkpoint_brings_its_tokenizer_and_window(golden, monkeypatch):
    folder = str(golden / "gpt_tp2pp2_fp32" / "ckpt")
    with pytest.raises(DataError, match="gpt2-tiny-vocab.json"):
        load_gpt(folder, Device.cpu())
    monkeypatch.chdir(golden)  # where the run's relative paths resolve
    loaded = load_gpt(folder, Device.cpu())
    assert loaded.tokenizer.vocab_size == 5000
    assert loaded.config.data.seq_length == 128
    assert loaded.model(torch.arange(128)[None]).shape == (1, 128, 5120)


def test_relative_paths_are_those_of_the_folder_in_which_training_was_started(
    tmp_path, monkeypatch
):
    """A server may be started in another folder. Files that exist there come first."""
    started, elsewhere = tmp_path / "a", tmp_path / "b"
    for folder in (started / "tok", elsewhere):
        folder.mkdir(parents=True)
    words = ["<|endoftext|>", *byte_of_character()]
    (started / "tok" / "vocab.json").write_text(
        json.dumps({word: i for i, word in enumerate(words)})
    )
    (started / "tok" / "merges.txt").write_text("#version: 0.2\n")
    monkeypatch.chdir(started)
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "tok/vocab.json"]
    flags += ["--merge-file", "tok/merges.txt", "--save", "run", "--save-interval", "1"]
    save_run(build_toy(Layout.single(), flags))
    monkeypatch.chdir(elsewhere)
    assert load_gpt(str(started / "run"), Device.cpu()).tokenizer.vocab_size == len(words)
    reader = open_existing(str(started / "run"))
    assert saved_config(reader, "run").tokenizer.merge_file == str(started / "tok" / "merges.txt")
    (elsewhere / "tok").mkdir()
    (elsewhere / "tok" / "merges.txt").write_text("")
    assert saved_config(reader, "run").tokenizer.merge_file == "tok/merges.txt"


def test_a_tokenizer_in_a_folder_that_cannot_be_accessed_is_found_in_the_companions(tmp_path):
    """Such as the home folder of the user who trained the model."""
    config = TokenizerConfig(tokenizer_model=f"{'x' * 300}/tokenizer.json")
    assert load._with_existing_files(config, tmp_path, "folder") == config
    (tmp_path / "tokenizer.json").touch()
    found = load._with_existing_files(config, tmp_path, "folder")
    assert found.tokenizer_model == str(tmp_path / "tokenizer.json")
