"""tools/checkpoint/util.py and inspect.py, called as Megatron-LM's users call them.

Wrong or incomplete flags are reported in the users' own terms, and nothing is left behind.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.loading import open_checkpoint
from megatron.config.parser import parse_config
from megatron.errors import ConfigError
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.tools.test_checkpoint_util import convert, write_word_tokenizer
from tests.training.toy import train_toy
from tools.checkpoint import inspect


@pytest.fixture
def gpt(golden: Path) -> Path:
    """Return Megatron-LM's own checkpoint: 5,000 entries in 5,120 rows, 4 layers, 4 heads."""
    return golden / "gpt_tp2pp2_fp32" / "ckpt"


def _files(golden: Path) -> list[str]:
    data = golden / "data"
    vocab, merges = data / "gpt2-tiny-vocab.json", data / "gpt2-tiny-merges.txt"
    return ["--vocab-file", str(vocab), "--merge-file", str(merges)]


def _rows(root: Path) -> int:
    reader = open_checkpoint(root)
    assert reader is not None
    return reader.global_shape("model.embedding.word.weight")[0]


@pytest.mark.parametrize("saver", ["native", "megatron", "hf"])
@pytest.mark.parametrize("size", [-5, 0, 5121])
def test_a_vocabulary_of_no_rows_or_of_more_than_there_are(gpt, saver, size, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        convert("megatron", saver, gpt, out, f"--true-vocab-size={size}") == ConfigError.exit_code
    )
    text = capsys.readouterr().err
    assert f"--true-vocab-size {size}" in text
    assert ("at least 1" if size < 1 else "give at most that many") in text
    assert not out.exists()


def test_a_vocabulary_smaller_than_the_tokenizer(tmp_path, capsys):
    """It is refused by every saver that writes the tokenizer or its settings."""
    case = CASES["llama"]
    original = write_folder(tmp_path / "original", case.config, tensors_of(case))
    write_word_tokenizer(original, 68)  # 71 rows
    ours, out = tmp_path / "ours", tmp_path / "out"
    assert convert("hf", "native", original, ours, "--true-vocab-size", "68") == 0
    for loader, saver in (("hf", "native"), ("native", "hf"), ("native", "torch_dist")):
        source = original if loader == "hf" else ours
        assert convert(loader, saver, source, out, "--true-vocab-size", "67") == 9
        assert (
            "--true-vocab-size 67: the tokenizer has 68 entries, and the last ones would have no "
            "rows: give at least 68, drop the flag, or give the files of a smaller tokenizer"
        ) in capsys.readouterr().err
        assert not out.exists()
    # Megatron-LM's tool counts the entries of a vocabulary that is given alone.
    (tmp_path / "vocab.txt").write_text("w\n" * 66)
    words = ["--true-vocab-size", "66", "--vocab-file", str(tmp_path / "vocab.txt")]
    assert convert("hf", "megatron", original, out, *words) == 0
    words[1] = "65"
    assert convert("hf", "megatron", original, tmp_path / "b", *words) == 9
    assert "--true-vocab-size 65: the tokenizer has 66 entries" in capsys.readouterr().err
    # A smaller tokenizer makes room.
    (tmp_path / "small").mkdir()
    write_word_tokenizer(tmp_path / "small", 60)
    words = ["--tokenizer-model", str(tmp_path / "small" / "tokenizer.json")]
    assert convert("native", "hf", ours, tmp_path / "c", "--true-vocab-size", "60", *words) == 0
    assert json.loads((tmp_path / "c" / "config.json").read_text())["vocab_size"] == 60


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--target-tensor-parallel-size", "3"],
            "--target-tensor-parallel-size: Megatron-LM 23.08 gives every tensor-parallel rank "
            "whole heads, and --num-attention-heads 4 is not divisible by 3 ranks: use 1, 2 or 4",
        ),
        (
            ["--target-pipeline-parallel-size", "3"],
            "--target-pipeline-parallel-size 3: --num-layers 4 cannot be split this way",
        ),
        (
            [
                *("--target-pipeline-parallel-size", "2"),
                *("--target-num-layers-per-virtual-pipeline-stage", "3"),
            ],
            "--target-pipeline-parallel-size 2 --target-num-layers-per-virtual-pipeline-stage 3: ",
        ),
        (["--hf-files", "nowhere"], "--hf-files nowhere: there is no such folder"),
    ],
    ids=["heads", "layers", "virtual", "hf-files"],
)
def test_a_target_that_does_not_fit_is_named_by_its_flag(gpt, words, message, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert("megatron", "megatron", gpt, out, *words) == ConfigError.exit_code
    text = capsys.readouterr().err
    assert message in text
    # Training flags, which this program does not have.
    assert "--pipeline-model-parallel" not in text
    assert not out.exists()


def test_query_groups_are_not_cut_for_megatron(tmp_path, capsys):
    """Megatron-LM 23.08 needs a multiple of the tensor-parallel size; ours repeats groups."""
    case = CASES["llama"]  # 4 heads, 2 groups
    folder, out = write_folder(tmp_path / "a", case.config, tensors_of(case)), tmp_path / "b"
    words = ["--true-vocab-size", "70", "--target-tensor-parallel-size", "4"]
    assert convert("hf", "megatron", folder, out, *words) == ConfigError.exit_code
    assert "--num-query-groups 2 is not divisible by 4 ranks: use 1 or 2" in capsys.readouterr().err
    assert convert("hf", "megatron", folder, out, *words[:3], "2") == 0
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    flags += "--num-query-groups 2 --tensor-model-parallel-size 4 --mock-data --seq-length 8 "
    flags += "--micro-batch-size 1 --train-iters 1 --lr 1 --max-position-embeddings 8 "
    flags += "--tokenizer-type NullTokenizer --vocab-size 9"
    assert parse_config(flags.split(), world_size=4)
    with pytest.raises(ConfigError, match="--ckpt-format legacy: .*--num-query-groups 2"):
        parse_config([*flags.split(), "--ckpt-format", "legacy"], world_size=4)


def test_rows_that_do_not_split_tell_how_they_are_padded(tmp_path, capsys):
    case = CASES["gpt2"]  # 71 rows
    folder, out = write_folder(tmp_path / "a", case.config, tensors_of(case)), tmp_path / "b"
    words = ["--target-tensor-parallel-size", "2"]
    assert convert("hf", "megatron", folder, out, *words) != 0
    assert "or give --true-vocab-size" in capsys.readouterr().err
    assert convert("hf", "megatron", folder, out, *words, "--true-vocab-size", "71") == 0
    assert _rows(out) == 256


def test_vocabulary_files_need_no_tokenizer_type(gpt, golden, tmp_path):
    """Megatron's tool has no --tokenizer-type: the kind follows from the model."""
    out = tmp_path / "gpt2"
    assert convert("megatron", "hf", gpt, out, *_files(golden)) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 5000  # without padding rows
    end = json.loads((out / "vocab.json").read_text())["<|endoftext|>"]
    assert config["eos_token_id"] == end  # not GPT-2's own 50256
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == end


def test_half_a_tokenizer_is_not_exported(gpt, golden, tmp_path, capsys):
    for saver in ("hf", "native"):
        out = tmp_path / saver
        words = _files(golden)[:2]
        assert convert("megatron", saver, gpt, out, *words) == ConfigError.exit_code
        assert "requires --merge-file: add it" in capsys.readouterr().err
        assert not out.exists()


def test_the_vocabulary_of_a_bert_is_taken_as_word_pieces(golden, tmp_path):
    words = ["--model-type", "BERT", "--loader", "megatron", "--saver", "native"]
    words += ["--load-dir", str(golden / "bert_fp32" / "ckpt"), "--save-dir", str(tmp_path / "o")]
    vocab = golden / "data" / "bert-5000-vocab.txt"
    assert util.main([*words, "--vocab-file", str(vocab)]) == 0
    reader = open_checkpoint(tmp_path / "o")
    assert reader is not None
    tokenizer = reader.meta["config"]["tokenizer"]
    assert tokenizer["tokenizer_type"] == "BertWordPieceLowerCase"
    assert Path(tokenizer["vocab_file"]).read_bytes() == vocab.read_bytes()


def test_the_sentinels_and_the_case_of_a_t5_s_vocabulary_stay(tmp_path):
    """--vocab-extra-ids and --tokenizer-type are training flags, not flags of Megatron's tool."""
    vocab, root = str(tmp_path / "vocab.txt"), tmp_path / "run"
    Path(vocab).write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nA\nb\n")
    words = ["--vocab-extra-ids", "10", "--vocab-file", vocab, "--save", str(root)]
    words += ["--tokenizer-type", "BertWordPieceCase", "--save-interval", "1"]
    words += ["--ckpt-format", "legacy", "--train-iters", "1"]
    train_toy(Layout.single(), words, "t5")
    flags = f"--model-type T5 --loader megatron --saver native --load-dir {root}"
    out = tmp_path / "o"
    assert util.main([*flags.split(), "--save-dir", str(out), "--vocab-file", vocab]) == 0
    reader = open_checkpoint(out)
    assert reader is not None
    tokenizer = reader.meta["config"]["tokenizer"]
    assert tokenizer["vocab_extra_ids"] == 10
    assert tokenizer["tokenizer_type"] == "BertWordPieceCase"
    # Megatron-LM's own default takes the place of a type that reads no such file.
    words = f"--save {tmp_path / 'null'} --save-interval 1 --ckpt-format legacy --train-iters 1"
    train_toy(Layout.single(), words.split(), "t5")
    flags = flags.replace(str(root), str(tmp_path / "null"))
    words = f"{flags} --save-dir {tmp_path / 'lower'} --vocab-file {vocab}"
    assert util.main(words.split()) == 0
    reader = open_checkpoint(tmp_path / "lower")
    assert reader is not None
    assert reader.meta["config"]["tokenizer"]["tokenizer_type"] == "BertWordPieceLowerCase"


def test_a_bi_encoder_is_not_converted(tmp_path, capsys):
    root = str(tmp_path / "run")
    train_toy(Layout.single(), f"--save {root} --save-interval 1 --train-iters 1".split(), "ict")
    flags = f"--model-type BERT --loader native --saver megatron --load-dir {root}"
    assert util.main([*flags.split(), "--save-dir", str(tmp_path / "o")]) != 0
    assert "bi-encoders cannot be converted" in capsys.readouterr().err


def test_without_a_tokenizer_no_end_of_text_is_made_up(gpt, tmp_path):
    """If config.json names no end of text, `transformers` takes id 2 for Llamas."""
    assert convert("megatron", "hf", gpt, tmp_path / "o") == 0
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert config["eos_token_id"] is None
    assert config["bos_token_id"] is None
    assert config["pad_token_id"] is None


def test_a_small_phi_has_no_padding_token_outside_its_vocabulary(tmp_path):
    """`transformers` assumes id 32000 unless config.json says otherwise."""
    pytest.importorskip("transformers")
    words = """--position-embedding-type rope --rotary-percent 0.5 --normalization RMSNorm --swiglu
        --disable-bias-linear --untie-embeddings-and-output-weights --train-iters 1 --eval-iters 0
        --save-interval 1"""
    train_toy(Layout.single(), [*words.split(), "--save", str(tmp_path / "run")])
    words = f"--model-type GPT --loader native --saver hf --load-dir {tmp_path / 'run'} --verify"
    assert util.main([*words.split(), "--save-dir", str(tmp_path / "o")]) == 0
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert (config["model_type"], config["pad_token_id"]) == ("phi3", None)


def test_layers_for_further_tokens_are_left_out_of_families_that_lack_them(tmp_path, capsys):
    words = """--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
        --untie-embeddings-and-output-weights --num-experts 2 --moe-router-topk 1
        --mtp-num-layers 1 --train-iters 1 --eval-iters 0 --save-interval 1"""
    train_toy(Layout.single(), [*words.split(), "--save", str(tmp_path / "run")])
    assert convert("native", "hf", tmp_path / "run", tmp_path / "a", "--verify") == 0
    assert "a mixtral model has no layers for multi-token prediction" in capsys.readouterr().out
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("mixtral", 2)
    words = ["--model-family", "gpt2"]
    assert convert("native", "hf", tmp_path / "run", tmp_path / "b", *words) == 4
    assert "a gpt2 model cannot express this network" in capsys.readouterr().err


def test_adapters_beside_layers_for_further_tokens(tmp_path):
    words = """--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
        --untie-embeddings-and-output-weights --mtp-num-layers 1 --lora-rank 2 --train-iters 1
        --eval-iters 0 --save-interval 1"""
    train_toy(Layout.single(), [*words.split(), "--save", str(tmp_path / "run")])
    assert convert("native", "peft", tmp_path / "run", tmp_path / "a") == 0
    names = load_file(tmp_path / "a" / "adapter_model.safetensors").keys()
    assert names
    assert not any("layers.2." in name or "mtp" in name for name in names)


def test_dropout_rates_are_taken_over_from_megatron(gpt, tmp_path):
    """The golden run had no dropout; Megatron's default is 0.1."""
    assert convert("megatron", "hf", gpt, tmp_path / "o") == 0
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert [config[f"{place}_pdrop"] for place in ("attn", "embd", "resid")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("labels", [{}, {"id2label": {"0": "a", "1": "b"}}, {"num_labels": 2}])
def test_a_classifier_of_several_labels_is_refused(labels, tmp_path, capsys):
    case = CASES["llama"]
    tensors = tensors_of(case)
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:2].clone()
    config = {**case.config, **labels, "architectures": ["LlamaForSequenceClassification"]}
    folder = write_folder(tmp_path / "a", config, tensors)
    assert convert("hf", "native", folder, tmp_path / "b") == 4
    assert "supported only for reward models with a single label" in capsys.readouterr().err


def test_a_model_of_another_class_says_so(tmp_path, capsys):
    case = CASES["llama"]
    tensors = tensors_of(case)
    tensors["qa_outputs.weight"] = tensors.pop("lm_head.weight")[:2].clone()
    config = {**case.config, "architectures": ["LlamaForQuestionAnswering"]}
    folder = write_folder(tmp_path / "a", config, tensors)
    assert convert("hf", "native", folder, tmp_path / "b") == 4
    text = capsys.readouterr().err
    assert "names the class LlamaForQuestionAnswering, which is not supported" in text
    assert "class is LlamaForCausalLM; lm_head.weight is missing" in text


def test_an_adapter_is_to_be_merged_first(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CASES["llama"].config))
    save_file({"q_proj.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    assert convert("hf", "native", tmp_path, tmp_path / "b") == 4
    assert "merge both first" in capsys.readouterr().err


def test_families_of_another_kind_are_not_listed(golden, tmp_path, capsys):
    words = ["--model-type", "BERT", "--loader", "megatron", "--saver", "hf"]
    words += ["--load-dir", str(golden / "bert_fp32" / "ckpt"), "--save-dir", str(tmp_path / "o")]
    assert util.main(words) == 4
    text = capsys.readouterr().err
    assert "apply_residual_connection_post_layernorm is False, but a bert model has True" in text
    assert "llama" not in text


@pytest.mark.parametrize("tool", ["inspect", "diff", "util"])
def test_where_there_is_none_it_says_where_one_is(golden, gpt, tool, tmp_path, capsys):
    def refusal(path: Path) -> str:
        if tool == "util":
            assert convert("megatron", "native", path, tmp_path / "o") == 4
        else:
            words = ["diff", str(path), str(gpt)] if tool == "diff" else [str(path)]
            assert inspect.main(words) == 4
        return capsys.readouterr().err

    assert f"give {gpt}" in refusal(gpt.parent)
    assert "there is no such folder" in refusal(golden / "nowhere")
    assert "a file: give the folder" in refusal(golden / "data" / "speeches.jsonl")


def test_flags_for_another_format_say_that_they_change_nothing(tmp_path, capsys):
    case = CASES["llama"]
    folder = write_folder(tmp_path / "a", case.config, tensors_of(case))
    words = ["--model-family", "qwen2", "--max-shard-size", "1GB", "--hf-files", str(folder)]
    assert convert("hf", "native", folder, tmp_path / "b", *words) == 0
    text = capsys.readouterr().out
    for flag in words[::2]:
        assert f"{flag} " in text
    assert text.count(": no effect: ") == 3


def test_a_family_given_for_peft_s_files_gets_no_notice(tmp_path) -> None:
    """The export of adapters names layers as this family does."""
    words = ["--model-type", "GPT", "--load-dir", str(tmp_path), "--save-dir", str(tmp_path / "b")]
    options = util.build_parser().read([*words, "--saver", "peft", "--model-family", "qwen2"])
    assert not [text for text in util.notices(options) if "--model-family" in text]
