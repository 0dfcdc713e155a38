"""tools/checkpoint/util.py: import and export, bit for bit, and training from an import."""

from __future__ import annotations

import json
import threading
import weakref
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron.checkpoint.huggingface.families import families
from megatron.checkpoint.huggingface.files import COMPANION_FOLDER
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.inspection import summarize
from megatron.checkpoint.loading import open_checkpoint
from megatron.config.parser import parse_config
from megatron.device import Device
from megatron.errors import StorageError
from megatron.parallel.layout import Layout
from megatron.tokenizer.build import padded_vocab_size
from megatron.tools.checkpoint import formats, util
from megatron.training.build import build_run
from megatron.training.pretrain import main
from megatron.training.restoring import network_of
from pretrain_gpt import GPTRecipe
from tests.checkpoint.huggingface.models import CASES, logits, tensors_of, write_folder
from tests.checkpoint.legacy import megatron_files
from tests.checkpoint.legacy.megatron_files import whole_model
from tests.checkpoint.states import read_all, read_whole
from tools import generate_samples_gpt


def convert(loader: str, saver: str, source: Path, target: Path, *more: str) -> int:
    words = ["--model-type", "GPT", "--loader", loader, "--saver", saver, *more]
    return util.main([*words, "--load-dir", str(source), "--save-dir", str(target)])


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in a folder's files."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        found |= load_file(file)
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_in_and_out_again_is_the_original_bit_for_bit(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    case, text = CASES[name], str(dtype).removeprefix("torch.")
    tensors = tensors_of(case, dtype=dtype)
    config = {**case.config, "torch_dtype": text}
    folder = write_folder(tmp_path / "original", config, tensors, shards=2)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert convert("hf", "native", folder, tmp_path / "native") == 0
    assert summarize(tmp_path / "native", verify=True, details=False)[1]
    assert convert("native", "hf", tmp_path / "native", tmp_path / "exported") == 0
    assert_same(tensors_in(tmp_path / "exported"), tensors)
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "exported" / file).read_bytes() == (folder / file).read_bytes()


def test_bare_names_of_gpt2_stay_bare(tmp_path: Path) -> None:
    case = CASES["gpt2"]
    tensors = {n.removeprefix("transformer."): t for n, t in tensors_of(case).items()}
    folder = write_folder(tmp_path / "original", case.config, tensors)
    assert convert("hf", "native", folder, tmp_path / "native") == 0
    assert convert("native", "hf", tmp_path / "native", tmp_path / "exported") == 0
    assert_same(tensors_in(tmp_path / "exported"), tensors)


def test_shards_are_cut_by_size_and_indexed(tmp_path: Path) -> None:
    case = CASES["llama"]
    folder = write_folder(tmp_path / "original", case.config, tensors_of(case))
    assert convert("hf", "hf", folder, tmp_path / "cut", "--max-shard-size", "20KB") == 0
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(files) == 5
    assert files[0].name == "model-00001-of-00005.safetensors"
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 20_000 for file in files)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    held = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(case).values())
    assert_same(tensors_in(tmp_path / "cut"), tensors_of(case))


def test_without_the_original_s_files_a_config_is_written_that_reads_the_same(
    tmp_path: Path,
) -> None:
    for name, case in CASES.items():
        folder = write_folder(tmp_path / name / "original", case.config, tensors_of(case))
        native, out = tmp_path / name / "native", tmp_path / name / "exported"
        assert convert("hf", "native", folder, native) == 0
        (native / COMPANION_FOLDER / "config.json").unlink()
        assert convert("native", "hf", native, out) == 0
        again = tmp_path / name / "again"
        assert convert("hf", "native", out, again) == 0
        models = [_config(root)["model"] for root in (native, again)]
        # A window as wide as the context has no effect.
        assert models[0] == models[1], name


def _config(root: Path) -> dict:
    reader = open_checkpoint(root)
    assert reader is not None
    return reader.meta["config"]


def test_a_network_is_written_as_the_first_family_that_has_it(tmp_path: Path, capsys) -> None:
    case = CASES["mistral"]
    folder = write_folder(tmp_path / "original", case.config, tensors_of(case))
    assert convert("hf", "native", folder, tmp_path / "native") == 0
    more = ["--model-family", "llama"]
    assert convert("native", "hf", tmp_path / "native", tmp_path / "as-llama", *more) == 0
    assert json.loads((tmp_path / "as-llama" / "config.json").read_text())["model_type"] == "llama"
    more = ["--model-family", "gpt2"]
    assert convert("native", "hf", tmp_path / "native", tmp_path / "as-gpt2", *more) == 4
    assert "swiglu is True, but a gpt2 model has False" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entries", "rows", "multiple"),
    [(32000, 32000, 1), (50257, 50257, 1), (151665, 151936, 1187), (128000, 128256, 334)],
)
def test_the_vocabulary_is_padded_to_the_model_s_own_rows(entries, rows, multiple) -> None:
    assert formats.padding_multiple(entries, rows) == multiple
    for ranks in (size for size in (1, 2, 4, 8) if rows % size == 0):
        assert padded_vocab_size(entries, multiple, ranks) == rows


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["--loader", "hf", "--keep-optimizer"],
            9,
            "--keep-optimizer: a Hugging Face folder has only weights",
        ),
        (
            ["--saver", "megatron", "--target-tensor-parallel-size", "0"],
            9,
            "--target-tensor-parallel-size 0: must be at least 1",
        ),
        (["--loader", "native"], 4, "there is no checkpoint in this folder"),
        (["--loader", "hf"], 4, "neither model.safetensors nor"),
        (["--loader", "native", "--verify"], 9, "--verify compares our model with Hugging Face"),
        (["--loader", "hf", "--saver", "hf", "--verify"], 9, "--verify compares our model"),
    ],
)
def test_mistakes_say_what_to_fix(words, code, message, tmp_path: Path, capsys) -> None:
    given = ["--model-type", "GPT", "--saver", "native", "--load-dir", str(tmp_path)]
    assert util.main([*given, "--save-dir", str(tmp_path / "out"), *words]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_not_overwritten(tmp_path: Path, capsys) -> None:
    folder = write_folder(tmp_path, CASES["llama"].config, tensors_of(CASES["llama"]))
    assert convert("hf", "hf", folder, folder) == 4
    assert "exists: give a new folder" in capsys.readouterr().err
    assert convert("hf", "hf", folder, tmp_path / "new", "--max-shard-size", "5 GB") == 4
    assert "--max-shard-size 5 GB: expected a size" in capsys.readouterr().err


@pytest.mark.parametrize("saver", ["native", "megatron", "torch_dist", "hf"])
def test_a_folder_that_cannot_be_written_names_its_flag(saver: str, tmp_path: Path, capsys) -> None:
    folder = write_folder(tmp_path / "a", CASES["llama"].config, tensors_of(CASES["llama"]))
    out = folder / "config.json" / "out"  # below a file
    assert convert("hf", saver, folder, out) == StorageError.exit_code
    error = capsys.readouterr().err
    assert error.startswith(f"error: --save-dir {out} cannot be written ({out}")
    assert error.endswith(": Not a directory): give another path\n")


def test_what_is_read_or_was_written_before_is_not_replaced(imported: Path, tmp_path, capsys):
    for saver in ("native", "megatron"):
        before = {file: file.read_bytes() for file in imported.rglob("*") if file.is_file()}
        assert convert("native", saver, imported, imported) == 9
        message = f"--save-dir {imported}: already contains iter_0000000, which the conversion"
        assert message in capsys.readouterr().err
        assert before == {file: file.read_bytes() for file in imported.rglob("*") if file.is_file()}
    assert convert("native", "megatron", imported, tmp_path / "m") == 0
    assert convert("native", "megatron", imported, tmp_path / "m") == 9
    assert "already contains release" in capsys.readouterr().err


def test_another_loader_is_named(imported: Path, tmp_path, capsys):
    assert convert("hf", "native", imported, tmp_path / "out") == 4
    assert "is in a different format: use --loader native" in capsys.readouterr().err
    assert convert("native", "native", tmp_path / "original", tmp_path / "out") == 4
    assert ": it is a Hugging Face folder: use --loader hf" in capsys.readouterr().err


def test_megatron_s_flags_say_that_they_change_nothing(tmp_path: Path, capsys) -> None:
    folder = write_folder(tmp_path / "a", CASES["llama"].config, tensors_of(CASES["llama"]))
    more = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 4 --megatron-path /m"
    assert convert("llama2_hf", "native", folder, tmp_path / "b", *more.split()) == 0
    out = capsys.readouterr().out
    assert "--target-tensor-parallel-size 2: no effect: the written checkpoint loads in any" in out
    assert "--target-pipeline-parallel-size 4: no effect" in out
    assert "--megatron-path /m: not needed" in out


def test_hugging_face_to_megatron_and_back(tmp_path: Path, capsys) -> None:
    case = CASES["llama"]
    folder = write_folder(tmp_path / "a", case.config, tensors_of(case))
    words = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --verify".split()
    assert convert("hf", "megatron", folder, tmp_path / "b", *words) == 0
    out = capsys.readouterr().out
    assert "--rotary-base 1000: Megatron-LM 23.08 always uses 10000" in out
    assert "logits differ by at most" in out or "NOT CHECKED" in out
    assert (tmp_path / "b" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert len(list((tmp_path / "b" / "release").glob("mp_rank_*"))) == 4
    assert convert("megatron", "hf", tmp_path / "b", tmp_path / "c") == 0
    assert_same(tensors_in(tmp_path / "c"), tensors_of(case))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("qwen3", [], "attention.key_norm.weight does not exist in Megatron-LM 23.08"),
        ("qwen2", [], "--add-qkv-bias: Megatron-LM 23.08 has biases in all linear layers or in"),
        ("gpt2", ["--target-tensor-parallel-size", "4"], "[71, 32] cannot be split among 4"),
        (
            "llama",
            ["--target-pipeline-parallel-size", "4"],
            "--target-pipeline-parallel-size 4: --num-layers 2 cannot be split this way",
        ),
        (
            "llama",
            "--target-pipeline-parallel-size 2 "
            "--target-num-layers-per-virtual-pipeline-stage 3".split(),
            "--target-pipeline-parallel-size 2 --target-num-layers-per-virtual-pipeline-stage 3: ",
        ),
    ],
)
def test_what_megatron_has_no_place_for(name, words, message, tmp_path: Path, capsys) -> None:
    case = CASES[name]
    folder = write_folder(tmp_path / "a", case.config, tensors_of(case))
    assert convert("hf", "megatron", folder, tmp_path / "b", *words) != 0
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "b").glob("*_*/"))


def test_the_vocabulary_is_padded_by_megatron_s_rule(tmp_path: Path) -> None:
    """66 of 71 rows are entries, padded to a multiple of 128 x the tensor-parallel size."""
    case = CASES["gpt2"]
    folder = write_folder(tmp_path / "a", case.config, tensors_of(case))
    (tmp_path / "vocab.json").write_text(json.dumps({f"w{index}": index for index in range(66)}))
    (tmp_path / "vocab.txt").write_text("".join(f"w{index}\n" for index in range(66)))
    for words in (
        ["--true-vocab-size", "66"],
        ["--vocab-file", str(tmp_path / "vocab.json")],
        ["--vocab-file", str(tmp_path / "vocab.txt")],
    ):
        out = tmp_path / f"{Path(words[-1]).name}.out"
        words += ["--target-tensor-parallel-size", "2"]
        assert convert("hf", "megatron", folder, out, *words) == 0
        reader = open_checkpoint(out)
        assert reader is not None
        table = read_whole(reader, "model.embedding.word.weight")
        original = tensors_of(case)["transformer.wte.weight"]
        kept = 66 if "--true-vocab-size" in words else 71
        assert torch.equal(table[:kept], original[:kept])
        assert table.shape[0] == 256  # 128 x 2
        torch.testing.assert_close(table[kept:], original[:66].mean(0).expand(256 - kept, -1))


def test_the_command_line_offers_what_the_tables_have() -> None:
    assert set(util.LOADERS) == set(formats.LOADERS)
    assert set(util.SAVERS) == set(formats.SAVERS)
    assert tuple(families()) == util.FAMILIES


def test_padding_rows_are_dropped_on_request(tmp_path: Path) -> None:
    case = CASES["llama"]
    folder = write_folder(tmp_path / "a", case.config, tensors_of(case))
    assert convert("hf", "native", folder, tmp_path / "b", "--true-vocab-size", "66") == 0
    reader = open_checkpoint(tmp_path / "b")
    assert reader is not None
    words = read_whole(reader, "model.embedding.word.weight")
    assert torch.equal(words, tensors_of(case)["model.embed_tokens.weight"][:66])
    assert convert("native", "hf", tmp_path / "b", tmp_path / "c") == 0
    assert json.loads((tmp_path / "c" / "config.json").read_text())["vocab_size"] == 66


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """Import a small Llama with its own tokenizer."""
    case = CASES["llama"]
    folder = write_folder(tmp_path / "original", case.config, tensors_of(case))
    write_word_tokenizer(folder, case.config["vocab_size"])
    assert convert("llama2_hf", "native", folder, tmp_path / "native") == 0
    return tmp_path / "native"


def write_word_tokenizer(folder: Path, entries: int) -> None:
    """Write a tokenizer.json with words "w0", "w1", ... and an end of document."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocab = {f"w{index}": index for index in range(entries - 1)} | {"</s>": entries - 1}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_text_is_generated_from_what_came_in(imported: Path, capsys) -> None:
    case, ids = CASES["llama"], [3, 1, 4]
    for _ in range(6):
        tokens = torch.tensor([ids])
        ids.append(int(logits(case, tensors_of(case), tokens)[0, -1].argmax()))
    assert 69 not in ids  # the end of a document, which would not be printed
    words = ["--prompt", "w3 w1 w4", "--out-seq-length", "6", "--greedy"]
    moved = imported.rename(imported.with_name("moved"))
    assert generate_samples_gpt.main(["--load", str(moved), *words]) == 0
    assert capsys.readouterr().out.split() == [f"w{index}" for index in ids]


TRAINING = """
    --finetune --use-checkpoint-args --seq-length 16 --micro-batch-size 2 --train-iters 2
    --lr 1e-3 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
    --mock-data --tokenizer-type HuggingFaceTokenizer --num-workers 0 --log-interval 1
    --eval-iters 0 --save-interval 2 --no-exit-signal-handler
""".split()


def training_flags(imported: Path, out: Path) -> list[str]:
    tokenizer = imported / COMPANION_FOLDER / "tokenizer.json"
    words = ["--load", str(imported), "--save", str(out), "--tokenizer-model", str(tokenizer)]
    return [*TRAINING, *words]


def test_training_continues_from_what_came_in_and_out_again(
    imported: Path, tmp_path: Path, capsys
) -> None:
    out, exported = tmp_path / "finetuned", tmp_path / "exported"
    assert main(GPTRecipe(), training_flags(imported, out)) == 0
    assert "iteration        2/       2" in capsys.readouterr().out
    assert convert("native", "hf", out, exported) == 0
    original, trained = tensors_in(tmp_path / "original"), tensors_in(exported)
    assert original.keys() == trained.keys()
    for name, tensor in original.items():
        assert trained[name].shape == tensor.shape
        assert not torch.equal(trained[name], tensor), name
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=0.01)
    for file in ("config.json", "tokenizer.json"):
        assert (exported / file).read_bytes() == (tmp_path / "original" / file).read_bytes()


def test_an_export_has_the_files_of_a_tokenizer_that_was_named_by_its_folder(
    imported: Path, tmp_path: Path
) -> None:
    folder, out, exported = tmp_path / "tokenizer", tmp_path / "trained", tmp_path / "exported"
    folder.mkdir()
    contents = (imported / COMPANION_FOLDER / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(contents)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    words = [*TRAINING, "--load", str(imported), "--save", str(out)]
    assert main(GPTRecipe(), [*words, "--tokenizer-model", str(folder)]) == 0
    assert convert("native", "hf", out, exported) == 0
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (exported / file).read_bytes() == (folder / file).read_bytes()


def test_the_run_starts_with_the_model_s_own_loss(imported: Path, tmp_path: Path) -> None:
    words = training_flags(imported, tmp_path / "out")
    parsed = parse_config(words, world_size=1, read_checkpoint=network_of)
    run = build_run(parsed.config, GPTRecipe(), Device.cpu(), Layout.single())
    assert run.plan.embedding.vocabulary == 70  # the model's own rows, over which its softmax runs
    tokens = torch.arange(32).view(2, 16)
    case = CASES["llama"]
    expected = logits(case, tensors_of(case), tokens).float()
    with torch.no_grad():
        found = run.parts[0].eval()(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_training_starts_from_hugging_face_s_folder_without_a_conversion(
    imported: Path, tmp_path: Path, capsys
) -> None:
    """It has the same losses and weights as training from the converted folder."""
    original, file = tmp_path / "original", "tokenizer.json"
    (imported / COMPANION_FOLDER / file).replace(original / file)
    words = ["--tokenizer-model", str(original / file), *TRAINING]
    lines = []
    for folder in (imported, original):
        out = tmp_path / f"from-{folder.name}"
        assert main(GPTRecipe(), [*words, "--load", str(folder), "--save", str(out)]) == 0
        text = capsys.readouterr().out
        lines.append(
            [line.split("lm loss: ")[1][:12] for line in text.splitlines() if "lm loss:" in line]
        )
    assert lines[0] == lines[1]
    one, other = (open_checkpoint(tmp_path / f"from-{f.name}") for f in (imported, original))
    assert one is not None
    assert other is not None
    assert all(torch.equal(read_whole(one, n), read_whole(other, n)) for n in one.names())
    words.remove("--finetune")
    assert main(GPTRecipe(), [*words, "--load", str(original), "--save", str(tmp_path / "x")]) == 4
    told = "holds no optimizer state: use --no-load-optim for a fresh optimizer"
    assert told in capsys.readouterr().err


def test_megatron_s_checkpoints_go_to_ours_and_to_gpt2(tmp_path: Path, capsys) -> None:
    model = whole_model()
    form = megatron_files.Form(tensor=2, stages=2)
    args = Namespace(**vars(megatron_files.arguments(form)), ffn_hidden_size=24)
    megatron_files.write(tmp_path / "megatron", form, model, args=args)
    assert convert("megatron", "native", tmp_path / "megatron", tmp_path / "native") == 0
    reader = open_checkpoint(tmp_path / "native")
    assert reader is not None
    assert reader.iteration == 3
    assert_same({name: read_whole(reader, f"model.{name}") for name in model}, model)
    more = ["--true-vocab-size", "15"]
    assert convert("megatron", "hf", tmp_path / "megatron", tmp_path / "gpt2", *more) == 0
    found = tensors_in(tmp_path / "gpt2")
    assert torch.equal(found["transformer.wte.weight"], model["embedding.word.weight"][:15])
    assert torch.equal(
        found["transformer.h.1.mlp.c_fc.weight"].t(), model["layers.1.mlp.up.weight"]
    )
    capsys.readouterr()
    assert convert("native", "native", tmp_path / "megatron", tmp_path / "again") == 4
    assert "is in a different format: use --loader megatron" in capsys.readouterr().err


def test_megatron_core_s_checkpoints_go_to_ours(golden: Path, tmp_path: Path) -> None:
    source = golden / "core_moe_sigmoid" / "ckpt"
    assert convert("megatron", "native", source, tmp_path / "out", "--keep-optimizer") == 0
    found = read_all(tmp_path / "out")
    assert "model.layers.3.mlp.router.expert_bias" in found
    assert_same(found, read_all(source))


@pytest.mark.parametrize("lost", [False, True])
def test_megatron_s_arguments_name_the_tokenizer(lost: bool, tmp_path: Path) -> None:
    """There are 14 entries in 16 rows, by the rule for two tensor ranks.

    Its files may be gone by now, and a file that it does not read may be any on this machine, so it
    is not passed on.
    """
    (tmp_path / "secret").write_text("of this machine alone")
    tokenizer: dict[str, object] = {"tokenizer_type": "NullTokenizer", "vocab_size": 13}
    tokenizer["tokenizer_model"] = str(tmp_path / "secret")
    if lost:
        tokenizer = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "/gone/model"}
    form = megatron_files.Form(tensor=2)
    args = Namespace(
        **vars(megatron_files.arguments(form)),
        ffn_hidden_size=24,
        make_vocab_size_divisible_by=2,
        **tokenizer,
    )
    megatron_files.write(tmp_path / "two", form, whole_model(), args=args)
    entries = 16 if lost else 14
    for saver, more in (
        ("megatron", ["--target-tensor-parallel-size", "1"]),
        ("native", []),
        ("hf", []),
    ):
        assert convert("megatron", saver, tmp_path / "two", tmp_path / saver, *more) == 0
    one, native = open_checkpoint(tmp_path / "megatron"), open_checkpoint(tmp_path / "native")
    assert one is not None
    assert native is not None
    assert one.global_shape("model.embedding.word.weight")[0] == entries
    assert native.global_shape("model.embedding.word.weight")[0] == 16
    config = native.meta["config"]
    assert config["tokenizer"]["tokenizer_type"] == (None if lost else "NullTokenizer")
    assert config["model"]["make_vocab_size_divisible_by"] == 2
    assert len(tensors_in(tmp_path / "hf")["transformer.wte.weight"]) == entries
    assert convert("native", "hf", tmp_path / "native", tmp_path / "on") == 0
    for folder in (tmp_path / "hf", tmp_path / "on"):
        assert not any(b"machine" in file.read_bytes() for file in folder.iterdir())


def test_no_more_than_a_few_tensors_are_held_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most, lock = 0, 0, threading.Lock()
    read = HFReader.read

    def watched(self: HFReader, *args, **kwargs) -> torch.Tensor:
        nonlocal alive, most
        values = read(self, *args, **kwargs)
        with lock:
            alive += 1
            most = max(most, alive)
        weakref.finalize(values, gone)
        return values

    def gone() -> None:
        nonlocal alive
        alive -= 1

    monkeypatch.setattr(HFReader, "read", watched)
    case = CASES["qwen2"]
    folder = write_folder(tmp_path / "a", case.config, tensors_of(case))
    assert convert("hf", "native", folder, tmp_path / "b") == 0
    assert convert("hf", "hf", folder, tmp_path / "c") == 0
    assert 1 <= most <= 4  # the number of threads that write a file


def test_a_conversion_keeps_what_a_resumed_run_asks_for(imported: Path, tmp_path: Path) -> None:
    """It keeps the tokenizer's kind and fingerprint and the seed, and thus the very next loss."""
    out, copy = tmp_path / "finetuned", tmp_path / "copy"
    assert main(GPTRecipe(), training_flags(imported, out)) == 0
    assert convert("native", "native", out, copy, "--keep-optimizer") == 0
    one, other = open_checkpoint(out), open_checkpoint(copy)
    assert one is not None
    assert other is not None
    for key in ("tokenizer", "rng", "schedule", "optimizer", "consumed_train_samples"):
        assert one.meta[key] == other.meta[key] is not None, key
    kinds = [reader.meta["config"]["tokenizer"]["tokenizer_type"] for reader in (one, other)]
    assert kinds == ["HuggingFaceTokenizer"] * 2
    named = Path(other.meta["config"]["tokenizer"]["tokenizer_model"])
    assert named.is_file()
    given = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(named)]
    assert convert("native", "native", out, tmp_path / "given", *given) == 0
    replaced = open_checkpoint(tmp_path / "given")
    assert replaced is not None
    assert replaced.meta["tokenizer"] is None  # it may be a different one, so it is not compared
