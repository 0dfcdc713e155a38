"""What loading restores, and what is reported if the run differs from the one that saved."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.find import TRACKER
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.parser import parse_config
from megatron.errors import CheckpointError, ConfigError
from megatron.kernels.rope import rotation_table
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from megatron.training.build import build_run
from megatron.training.checkpointing import save_run
from megatron.training.pretrain import main
from megatron.training.restoring import network_of
from megatron.training.run import Run
from pretrain_gpt import GPTRecipe
from tests.data.corpus import write_corpus
from tests.distributed import run_distributed
from tests.training.toy import CPU, TOY, build_toy, train_toy


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return checkpoints of iterations 2 and 4."""
    root = tmp_path_factory.mktemp("saved")
    words = ["--save", str(root), "--save-interval", "2", "--exit-interval", "4"]
    train_toy(Layout.single(), words)
    return root


def _refusal(*words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        build_toy(Layout.single(), words)
    return str(caught.value)


def _changes(lines: list[str]) -> list[str]:
    return [line for line in lines if "changed since" in line]


def _iteration(layout: Layout, *words: str) -> int:
    return build_toy(layout, words).progress.iteration


def test_one_checkpoint_is_loaded_by_its_own_folder(saved, tmp_path):
    older = str(saved / "iter_0000002")
    assert _iteration(Layout.single(), "--load", older) == 2
    assert run_distributed(2, _iteration, "--load", older) == [2, 2]
    copy = tmp_path / "the best one"
    shutil.copytree(saved / "iter_0000004", copy)
    assert _iteration(Layout.single(), "--load", str(copy)) == 4


def test_one_checkpoint_is_loaded_by_its_iteration(saved, tmp_path):
    words = ["--load", str(saved), "--ckpt-step"]
    assert _iteration(Layout.single(), *words, "2") == 2
    assert run_distributed(2, _iteration, *words, "2") == [2, 2]
    assert _iteration(Layout.single(), *words, "2", "--finetune") == 0
    older = CheckpointConfig(load=str(saved), ckpt_step=2)
    assert network_of(older) == network_of(CheckpointConfig(load=str(saved)))
    told = (
        f"--ckpt-step 3: {saved} holds no checkpoint of this iteration: available iterations: 4, 2:"
    )
    assert told in _refusal(*words, "3")
    with pytest.raises(CheckpointError, match="^--ckpt-step 3: "):
        network_of(replace(older, ckpt_step=3))
    assert "--ckpt-step 9: " in _refusal("--load", str(tmp_path / "missing"), "--ckpt-step", "9")


def test_what_everybody_may_write_to_is_loaded_with_a_flag(saved, tmp_path):
    folder = tmp_path / "iter_0000004"
    shutil.copytree(saved / "iter_0000004", folder)
    (folder / "manifest.json").chmod(0o666)
    words = ["--load", str(tmp_path)]
    assert "or give --allow-foreign-checkpoints" in _refusal(*words)
    assert _iteration(Layout.single(), *words, "--allow-foreign-checkpoints") == 4
    options = CheckpointConfig(load=str(tmp_path))
    with pytest.raises(CheckpointError, match="or give --allow-foreign-checkpoints"):
        network_of(options)
    assert network_of(replace(options, allow_foreign_checkpoints=True))


def test_one_of_megatron_s_is_loaded_by_its_iteration(tmp_path):
    words = ["--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "4"]
    whole, _ = train_toy(Layout.single(), [*words, "--ckpt-format", "legacy"])
    assert (tmp_path / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt").is_file()
    words = ["--load", str(tmp_path), "--ckpt-step", "2", "--exit-interval", "4"]
    again, _ = train_toy(Layout.single(), words)
    assert again.values("lm loss") == whole.values("lm loss")[2:]


def test_one_that_was_named_itself_has_no_substitute(saved, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    shard = next((root / "iter_0000004").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "damaged" in _refusal("--load", str(root / "iter_0000004"))
    assert _iteration(Layout.single(), "--load", str(root)) == 2


def test_a_folder_around_checkpoints_is_no_fresh_start(saved, tmp_path):
    renamed = tmp_path / "save"
    shutil.copytree(saved, renamed)
    assert f"its folder save has one: give --load {renamed}" in _refusal("--load", str(tmp_path))
    (renamed / "iter_0000004").rename(renamed / "step4")
    shutil.rmtree(renamed / "iter_0000002")
    (renamed / TRACKER).unlink()
    assert f"give --load {renamed / 'step4'}" in _refusal("--load", str(renamed))
    assert "a file: give the folder" in _refusal("--load", str(saved / TRACKER))


def test_a_run_that_died_before_its_first_checkpoint_starts_afresh(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "best")  # where finetuning keeps the best one
    there = str(tmp_path)
    assert "but its folder best has one" in _refusal("--load", there)
    words = ["--load", there, "--save", f"{there}/../{tmp_path.name}", "--save-interval", "9"]
    assert _iteration(Layout.single(), *words) == 0
    with pytest.raises(CheckpointError, match="there is no checkpoint in this folder$"):
        build_toy(Layout.single(), [*words, "--exit-on-missing-checkpoint"])


def test_one_command_starts_from_other_weights_and_continues(saved, tmp_path):
    """With --pretrained-checkpoint, a restart loses nothing, unlike with --load and --finetune."""
    base, own = str(saved), str(tmp_path / "own")
    straight, _ = train_toy(Layout.single(), ["--load", base, "--finetune"])
    words = ["--load", own, "--save", own, "--save-interval", "2", "--pretrained-checkpoint", base]
    first, run = train_toy(Layout.single(), [*words, "--exit-interval", "4"])
    assert run.config.checkpoint.load == base
    assert run.progress.iteration == 4
    rest, run = train_toy(Layout.single(), words)
    assert run.config.checkpoint.load == own
    assert len(rest.values("lm loss")) == 2
    assert first.values("lm loss") + rest.values("lm loss") == straight.values("lm loss")
    assert run_distributed(2, _iteration, *words) == [6, 6]
    network = network_of(CheckpointConfig(load=str(tmp_path / "none"), pretrained_checkpoint=base))
    assert network == network_of(CheckpointConfig(load=base))


def test_pretrained_weights_that_are_not_there_are_named(saved, tmp_path):
    own, missing = str(tmp_path / "own"), str(tmp_path / "missing")
    words = ["--load", own, "--save", own, "--save-interval", "2", "--pretrained-checkpoint"]
    with pytest.raises(ConfigError, match=f"^--pretrained-checkpoint {missing} does not exist: "):
        build_toy(Layout.single(), [*words, missing])
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "one").symlink_to(saved)
    told = f"give --pretrained-checkpoint {tmp_path / 'jobs' / 'one'}, or drop "
    assert told in _refusal(*words, str(tmp_path / "jobs"))
    assert "--pretrained-checkpoint" in _refusal(*words, str(saved / TRACKER))
    options = CheckpointConfig(load=own, pretrained_checkpoint=missing)
    with pytest.raises(CheckpointError, match=f"--pretrained-checkpoint {missing} holds no"):
        network_of(options)


def test_what_a_dead_first_save_left_is_a_fresh_start(saved, tmp_path):
    (tmp_path / "tensorboard").mkdir()
    shutil.copytree(saved / "iter_0000002", tmp_path / "iter_0000002.tmp-0123456789abcdef")
    words = ["--load", str(tmp_path), "--save", str(tmp_path), "--save-interval", "9"]
    assert _iteration(Layout.single(), *words) == 0


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--bf16", "--bf16 is on here and off in the checkpoint"),
        ("--fp16", "--fp16 is on here and off in the checkpoint"),
        ("--optimizer sgd", "--optimizer is sgd here and adam in the checkpoint"),
    ],
)
@pytest.mark.parametrize("form", ["native", "legacy"])
def test_states_of_another_optimizer_are_refused_by_flag(saved, tmp_path, form, flags, line):
    folder = saved
    if form == "legacy":
        folder = tmp_path / "legacy"
        words = f"--model-type GPT --loader native --load-dir {saved} --save-dir {folder}"
        assert util.main([*words.split(), "--keep-optimizer"]) == 0
    message = _refusal("--load", str(folder), *flags.split())
    assert f"\n  {line}\n" in message
    assert "--no-load-optim to continue with fresh states" in message
    assert build_toy(Layout.single(), ["--load", str(folder), *flags.split(), "--no-load-optim"])


def test_momentum_that_was_not_saved_is_refused_by_flag(tmp_path):
    words = f"--optimizer sgd --eval-iters 0 --train-iters 1 --save {tmp_path} --save-interval 1"
    train_toy(Layout.single(), [*words.split(), "--sgd-momentum", "0"])
    message = _refusal("--load", str(tmp_path), *words.split())
    assert "\n  --sgd-momentum is 0.9 here and 0.0 in the checkpoint\n" in message


def test_another_order_of_samples_is_warned_of(saved, tmp_path, capsys):
    lost = "the order of samples changes, and some are seen again"
    flags = ["--seed", "8", "--train-iters", "7", "--override-opt_param-scheduler"]
    assert build_toy(Layout.single(), ["--load", str(saved), *flags])
    lines = capsys.readouterr().out.splitlines()
    seed = f"WARNING: changed since the checkpoint: --seed 8 instead of --seed 1234: {lost}"
    assert seed in lines
    longer = "  changed since the checkpoint: --train-iters 7 instead of --train-iters 6"
    assert lines[lines.index(longer) + 1] == f"  if the corpus is read more than once, {lost}"
    legacy = tmp_path / "legacy"
    words = f"--model-type GPT --loader native --load-dir {saved} --save-dir {legacy}"
    assert util.main([*words.split(), "--keep-optimizer"]) == 0
    assert build_toy(Layout.single(), ["--load", str(legacy), *flags])
    of_legacy = capsys.readouterr().out.splitlines()
    assert {seed, longer} <= set(of_legacy)
    assert build_toy(Layout.single(), ["--load", str(legacy)])
    assert "changed since" not in capsys.readouterr().out
    # Converted back, the checkpoint describes the same run, as far as its arguments tell.
    back = tmp_path / "back"
    words = f"--model-type GPT --loader megatron --saver native --load-dir {legacy}"
    assert util.main([*words.split(), "--save-dir", str(back), "--keep-optimizer"]) == 0
    assert build_toy(Layout.single(), ["--load", str(back), *flags])
    of_back = capsys.readouterr().out.splitlines()
    assert _changes(of_back) == _changes(of_legacy) == [seed, longer]
    assert build_toy(Layout.single(), ["--load", str(back)])
    assert "changed since" not in capsys.readouterr().out


def test_nothing_has_changed_in_a_schedule_that_continues_as_saved(saved, capsys):
    taken = "--use-checkpoint-opt_param-scheduler"
    flags = ["--lr", "0.5", "--lr-warmup-init", "0.25", "--weight-decay", "0.5", taken]
    run = build_toy(Layout.single(), ["--load", str(saved), *flags])
    before = build_toy(Layout.single(), ["--load", str(saved)])
    assert run.schedules.learning_rate.peak == before.schedules.learning_rate.peak != 0.5
    assert run.schedules.weight_decay.end == before.schedules.weight_decay.end != 0.5
    lines = capsys.readouterr().out.splitlines()
    kept = [line for line in lines if line.startswith(f"  {taken}: continues with --")]
    assert {"--weight-decay 0.5", "--lr 0.5"} <= {line.rpartition(", not ")[2] for line in kept}
    changed = {line.split()[4] for line in _changes(lines)}  # the fixture gave --exit-interval
    assert changed == {"--lr-warmup-init", "--exit-interval", taken}
    # With a fresh optimizer, the schedule in the flags starts.
    fresh = build_toy(Layout.single(), ["--load", str(saved), *flags, "--no-load-optim"])
    assert fresh.schedules.learning_rate.peak == 0.5
    assert "instead of --lr " in "".join(_changes(capsys.readouterr().out.splitlines()))


def test_a_conversion_reports_what_megatron_cannot_continue(tmp_path, capsys):
    """The same is reported if a run saves in that format: tests/config/test_checks.py."""
    ours, flags = tmp_path / "ours", "--lr-decay-style WSD --lr-wsd-decay-iters 2 --bf16"
    flags += f" --fp8-format hybrid --fp8-recipe delayed --save {ours}"
    train_toy(Layout.single(), [*flags.split(), *"--save-interval 1 --exit-interval 1".split()])
    words = f"--model-type GPT --loader native --load-dir {ours} --save-dir".split()
    capsys.readouterr()
    assert util.main([*words, str(tmp_path / "whole"), "--keep-optimizer"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "--saver megatron: " in line]
    assert [line.partition(":")[2].split(",")[0] for line in told] == [
        " Megatron-LM's files cannot store the amax history of --fp8-recipe delayed: a run that "
        "resumes from them starts a new history",
        " Megatron-LM 23.08 does not support --lr-decay-style WSD: to resume there",
    ]
    assert told[1].endswith("use --override-opt_param-scheduler and another style")
    assert util.main([*words, str(tmp_path / "weights")]) == 0
    assert "--saver megatron: " not in capsys.readouterr().out


def test_nothing_is_said_to_have_changed_for_weights_that_no_run_has_trained(
    saved, tmp_path, capsys
):
    folders, source = {}, f"native --load-dir {saved}"
    for saver, root in (("hf", "hf"), ("native", "ours"), ("megatron", "theirs")):
        folders[saver] = tmp_path / root
        words = f"--model-type GPT --loader {source} --saver {saver} --save-dir {folders[saver]}"
        assert util.main(words.split()) == 0
        source = f"hf --load-dir {folders['hf']}"
    capsys.readouterr()
    for folder in folders.values():
        words = ["--load", str(folder), "--no-load-optim", "--seed", "8", "--seq-length", "8"]
        assert build_toy(Layout.single(), words)
        assert "changed since" not in capsys.readouterr().out


def test_a_save_folder_of_another_run_is_warned_of(saved, tmp_path, capsys):
    root = tmp_path / "save"
    shutil.copytree(saved, root)
    words = [*TOY, "--no-exit-signal-handler", "--train-iters", "6", "--exit-interval", "5"]
    words += ["--save", str(root), "--save-interval", "9"]
    assert main(GPTRecipe(), [*words, "--load", str(root)]) == 0
    assert "holds checkpoints up to" not in capsys.readouterr().out
    assert main(GPTRecipe(), words) == 0
    line = f"WARNING: --save {root} holds checkpoints up to iteration 5, and this run starts at 0"
    told = capsys.readouterr().out
    assert line in told
    assert f"To resume from them: --load {root}\n" in told
    assert main(GPTRecipe(), [*words, "--load", str(root), "--finetune"]) == 0
    told = capsys.readouterr().out
    assert line in told
    assert "To resume from them: without --finetune\n" in told
    assert main(GPTRecipe(), [*words, "--load", str(root), "--ckpt-step", "2"]) == 0
    told = capsys.readouterr().out
    assert "holds checkpoints up to iteration 5, and this run starts at 2: they remain" in told
    assert "To resume from them: without --ckpt-step\n" in told


def test_a_save_that_another_programs_folder_would_refuse_is_refused_at_the_start(tmp_path):
    """All other starts work, and the run is not built before the check."""
    theirs = tmp_path / "iter_0000004" / "mp_rank_00"
    theirs.mkdir(parents=True)
    words = ["--save", str(tmp_path), "--save-interval", "3", "--train-iters"]
    often = ["--save-interval", "2"]
    refused = (
        f"--save {tmp_path}: iter_0000004 contains a checkpoint that this program did not write "
        "and will not replace, and this run would save at iteration 4: continue from it with "
        f"--load {tmp_path}, or give another folder to --save"
    )
    assert _refusal(*words, "6", *often) == refused
    assert _refusal(*words, "4") == refused
    assert _refusal(*words, "9", "--exit-interval", "4") == refused
    for length, *flags in (
        ("6",),
        ("3", *often),
        ("9", "--exit-interval", "2", *often),  # the restart is refused
        ("6", *often, "--skip-train"),
        ("6", *often, "--ckpt-format", "legacy"),
    ):
        assert _iteration(Layout.single(), *words, length, *flags) == 0
    theirs.rmdir()  # an empty folder is replaced
    assert _iteration(Layout.single(), *words, "6", *often) == 0


def test_a_run_that_goes_back_before_another_programs_checkpoint_is_refused(saved, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    (root / "iter_0000004" / "manifest.json").unlink()
    (root / "iter_0000004" / "mp_rank_00").mkdir()
    words = ["--load", str(root), "--ckpt-step", "2", "--save", str(root), "--save-interval"]
    assert _refusal(*words, "2").endswith(": move it elsewhere, or give another folder to --save")
    assert _iteration(Layout.single(), *words, "3") == 2
    shutil.rmtree(root / "iter_0000004")
    shutil.copytree(saved / "iter_0000004", root / "iter_0000004")
    assert _iteration(Layout.single(), *words, "2") == 2  # our own checkpoints are replaced


def test_a_save_folder_whose_newest_is_damaged_is_not_recommended(saved, tmp_path, capsys):
    root = tmp_path / "save"
    shutil.copytree(saved, root)
    shard = next((root / "iter_0000004").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    words = [*TOY, "--no-exit-signal-handler", "--train-iters", "6", "--exit-interval", "3"]
    words += ["--save", str(root), "--save-interval", "9", "--load", str(root)]
    assert main(GPTRecipe(), words) == 0
    told = capsys.readouterr().out
    assert "up to iteration 4, and this run starts at 2" in told
    assert "To resume from them" not in told


def test_rotary_positions_may_reach_further_than_the_checkpoint_s(tmp_path, capsys):
    rope = ["--position-embedding-type", "rope"]
    save = ["--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2"]
    train_toy(Layout.single(), [*rope, *save])
    longer = ["--seq-length", "32", "--max-position-embeddings", "32"]
    run = build_toy(Layout.single(), [*rope, *longer, "--load", str(tmp_path)])
    assert run.config.model.max_position_embeddings == 32
    words = [*TOY[: TOY.index("--seq-length")], *TOY[TOY.index("--micro-batch-size") :]]
    words += ["--load", str(tmp_path), "--use-checkpoint-args", "--finetune", "--seq-length", "32"]
    assert main(GPTRecipe(), [*words, "--train-iters", "1", "--lr-warmup-fraction", "0"]) == 0
    told = capsys.readouterr()
    assert "--max-position-embeddings 32: longer than the checkpoint's 16" in told.out + told.err
    assert "iteration        1/       1" in told.out
    table = _refusal(
        "--seq-length", "32", "--max-position-embeddings", "32", "--load", str(tmp_path)
    )
    assert "--position-embedding-type is learned_absolute here and rope" in table


def test_a_finetuning_may_turn_rotary_positions_at_another_speed(tmp_path, capsys):
    rope = ["--position-embedding-type", "rope"]
    save = ["--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2"]
    train_toy(Layout.single(), [*rope, *save])
    faster = [*rope, "--rotary-base", "500000", "--load", str(tmp_path)]
    refused = _refusal(*faster)
    assert "--rotary-base is 500000.0 here and 10000.0 in the checkpoint" in refused
    assert "; --finetune adapts to other rotary frequencies, from iteration 0" in refused
    capsys.readouterr()
    run = build_toy(Layout.single(), [*faster, "--finetune"])
    told = "  --finetune: --rotary-base is 500000.0 here and 10000.0 in the checkpoint: the"
    assert told in capsys.readouterr().out
    table = run.parts[0].get_buffer("rotary.0.table")
    assert torch.equal(table[:, :, 0, 0], rotation_table(16, 8, base=500000))
    share = _refusal(*rope, "--rotary-percent", "0.5", "--load", str(tmp_path), "--finetune")
    assert "--rotary-percent is 0.5 here and 1.0 in the checkpoint" in share

    words = [*TOY, *faster[2:], "--use-checkpoint-args", "--finetune", "--rope-scaling-factor", "4"]
    words += ["--use-rope-scaling", "--train-iters", "1", "--lr-warmup-fraction", "0"]
    assert main(GPTRecipe(), words) == 0
    captured = capsys.readouterr()
    assert told in captured.out
    assert "--use-rope-scaling is on here and off in the checkpoint" in captured.out
    assert "--rope-scaling-factor is 4.0 here and 8.0 in the checkpoint" in captured.out
    assert "is overridden" not in captured.out + captured.err


def test_finetuning_with_another_tokenizer_is_warned_of(saved, capsys):
    words = ["--load", str(saved), "--finetune"]
    assert build_toy(Layout.single(), words)
    assert "a different tokenizer" not in capsys.readouterr().out
    assert build_toy(Layout.single(), [*words, "--vocab-size", "60"])
    assert "but the rows of its 61 entries were learned" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["native", "torch_dist", "legacy"])
def test_documents_are_split_as_in_the_checkpoint(form, tmp_path, capsys):
    corpus = write_corpus(tmp_path / "x", documents=5, vocab_size=100)
    words = [word for word in TOY if word != "--mock-data"]
    words += ["--data-path", str(corpus), "--split", "1,1", "--train-iters", "2", "--eval-iters"]
    words += ["0", "--save-interval", "1", "--data-cache-path", str(tmp_path / "cache")]

    def build(folder: str, *more: str) -> tuple[Run, set[int]]:
        flags = [*words, "--save", str(tmp_path / folder), *more]
        config = parse_config(flags, world_size=1).config
        run = build_run(config, GPTRecipe(), CPU, Layout.single())
        return run, {*run.datasets[0].index.documents.tolist()}

    run, documents = build("a", "--split-rounding", "bounds", "--ckpt-format", form)
    assert documents == {0, 1}
    run.progress.iteration = 1
    save_run(run)
    capsys.readouterr()
    load = ("--load", str(tmp_path / "a"))
    assert build("b", *load)[1] == {0, 1}
    assert "changed since" not in capsys.readouterr().out
    assert build("b", *load, "--split-rounding", "sizes")[1] == {0, 1, 2}
    told = "WARNING: changed since the checkpoint: --split-rounding sizes instead of --split-r"
    assert told in capsys.readouterr().out


def test_another_corpus_under_the_same_name_is_warned_of(tmp_path, capsys):
    prefix, moved = tmp_path / "corpus", tmp_path / "elsewhere" / "corpus"
    moved.parent.mkdir()
    save, cache = str(tmp_path / "save"), tmp_path / "cache"
    toy = [word for word in TOY if word != "--mock-data"]
    toy += ["--data-cache-path", str(cache), "--train-iters", "3", "--no-exit-signal-handler"]

    def run(*words: str) -> str:
        assert main(GPTRecipe(), [*toy, *words]) == 0
        return capsys.readouterr().out

    write_corpus(prefix, vocab_size=100)
    run("--data-path", str(prefix), "--save", save, "--save-interval", "2", "--exit-interval", "2")
    for kind in ("bin", "idx"):
        shutil.copy(f"{prefix}.{kind}", f"{moved}.{kind}")
    told = run("--data-path", str(moved), "--load", save)
    assert "changed since the checkpoint: --data-path" in told
    assert "WARNING" not in told
    write_corpus(prefix, vocab_size=100, seed=1)  # as many documents
    shutil.rmtree(cache)
    told = run("--data-path", str(prefix), "--load", save)
    assert "WARNING: changed since the checkpoint: the training data itself (fingerprint" in told
