"""The entry point: exit codes, dry run, resolved configuration, network from a checkpoint."""

import errno
import json
import re
from types import SimpleNamespace

import pytest

from megatron.checkpoint import store
from megatron.checkpoint.lock import LOCK
from megatron.config import parse_config, yaml_file
from megatron.config.run import Findings
from megatron.errors import CheckpointError, ConfigError, CrashLoopError
from megatron.models.plans import model_plan
from megatron.parallel.layout import Layout
from megatron.processes import process
from megatron.processes.crashes import CrashLog
from megatron.processes.launch import Launch
from megatron.processes.watchdog import Verdict
from megatron.training import pretrain
from megatron.training.panel import size_rows
from megatron.training.pretrain import main
from pretrain_gpt import GPTRecipe
from tests.data.corpus import write_corpus
from tests.training.toy import FLAGS_BY_KIND, TOY

FLAGS = [*TOY, "--train-iters", "4", "--no-exit-signal-handler"]


def _main(*flags):
    return main(GPTRecipe(), [*FLAGS, *flags])


def test_a_run_saves_its_resolved_configuration(tmp_path, capsys):
    assert _main("--save", str(tmp_path), "--save-interval", "2") == 0
    saved = yaml_file.read(tmp_path / "config.yaml", Findings())
    assert saved["model.ffn_hidden_size"] == 128  # resolved
    again = main(GPTRecipe(), ["--config", str(tmp_path / "config.yaml"), "--dry-run"])
    assert again == 0
    assert "validation loss at the end of training for test data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        ("gpt", "half of causal attention counted"),
        ("bert", "all of attention counted"),
        ("t5", "half of the decoder's causal attention counted"),
    ],
)
def test_the_panel_tells_how_attention_is_counted(kind, counted):
    words = [*TOY, "--train-iters", "1", *FLAGS_BY_KIND.get(kind, [])]
    config = parse_config(words, world_size=1, architecture=kind).config
    rows = dict(size_rows(config, 1, model_plan(config.model, 104)))
    assert rows["model FLOPs per token"].endswith(f" GFLOP ({counted})")


def test_a_blend_in_a_file_is_that_of_the_command_line(tmp_path, monkeypatch):
    """The index caches are equal too, and config.yaml works without the file."""
    monkeypatch.chdir(tmp_path)
    words = ["0.3", str(write_corpus(tmp_path / "a", vocab_size=99))]
    words += ["0.7", str(write_corpus(tmp_path / "b", vocab_size=99, seed=1))]
    (tmp_path / "blend.txt").write_text("\n".join(words))
    flags = [*(word for word in FLAGS if word != "--mock-data"), "--data-cache-path", "cache"]
    recipe = GPTRecipe()
    assert main(recipe, [*flags, "--data-path", *words, "--metrics-jsonl", "0.jsonl"]) == 0
    caches = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len(caches) > 2
    more = ["--save", "run", "--save-interval", "4", "--metrics-jsonl", "1.jsonl"]
    assert main(recipe, [*flags, "--data-args-path", "blend.txt", *more]) == 0
    (tmp_path / "blend.txt").unlink()
    saved = ["--config", "run/config.yaml", "--save", "", "--metrics-jsonl", "2.jsonl"]
    assert main(recipe, saved) == 0
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert after == caches
    records = [map(json.loads, (tmp_path / f"{i}.jsonl").open()) for i in range(3)]
    losses = [[row["lm loss"] for row in rows if "lm loss" in row] for rows in records]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1] == losses[2]


def test_dry_run_of_a_world_that_is_not_here(capsys):
    flags = ["--dry-run", "--dry-run-world-size", "512", "--global-batch-size", "1024"]
    assert _main(*flags) == 0
    text = capsys.readouterr().out
    assert "512 processes: TP 1, CP 1, DP 512, PP 1" in text
    assert "1024 samples = micro-batch size 1 x DP 512 x micro-batches 2" in text
    assert "16,384" in text  # tokens per iteration


def test_dry_run_of_a_mixture_knows_its_exchange_and_its_device(capsys):
    flags = ["--dry-run", "--dry-run-world-size", "8", "--global-batch-size", "8"]
    flags += ["--num-experts", "8", "--expert-model-parallel-size", "4"]
    for size, answer in (("80", "is enough for any load"), ("1e-4", "is not enough for any load")):
        assert _main(*flags, "--dry-run-memory-gib", size) == 0
        text = capsys.readouterr().out
        assert "processes that exchange tokens: 0 1 2 3 | 4 5 6 7" in text
        assert "a token goes to 1.39 other processes" in text  # 3 x (1 - (6 x 5) / (8 x 7))
        assert "if all tokens choose the experts of one process (4.00 times an even share)" in text
        assert answer in text


def test_all_mistakes_are_reported_at_once_and_nothing_runs(capsys):
    assert _main("--num-attention-heads", "5", "--lr", "fast", "--sead", "3") == 9
    errors = capsys.readouterr().err
    assert "--num-attention-heads" in errors
    assert "'fast'" in errors
    assert "did you mean --seed?" in errors


@pytest.mark.parametrize(
    "flag", ["--save", "--tensorboard-dir", "--metrics-jsonl", "--profile-dir"]
)
def test_a_path_that_cannot_be_written_is_reported_before_training(flag, tmp_path, capsys):
    path = tmp_path / "file" / "below"
    path.parent.touch()
    more = ["--save-interval", "2", "--profile", "--profile-step-start", "2"]
    assert _main(*more, "--profile-dir", str(tmp_path), flag, str(path)) == 8
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {flag} {path} cannot be written (")
    assert output.err.count("\n") == 1
    assert " iteration        1/" not in output.out


def test_too_little_memory_says_what_helps(capsys):
    assert _main("--max-position-embeddings", "2000000000", "--hidden-size", "16384") == 10
    error = capsys.readouterr().err
    # 131 TB, plus some bytes that depend on the version of PyTorch.
    size = r"(131\d{12} bytes|1220\d\d\.\d\d GiB)"
    assert re.match(rf"error: out of memory: cannot allocate {size}\. ", error)
    assert "--micro-batch-size" in error


def test_kernels_are_compiled_before_processes_wait_for_each_other(monkeypatch):
    """Compiling takes a minute, which is not a hang."""
    order = []

    def meet(*_):
        order.append("processes")
        raise ConfigError("far enough")

    monkeypatch.setattr(process, "find_library", lambda _: order.append("kernels"))
    monkeypatch.setattr(process, "process_group", meet)
    assert _main() == 9
    assert order == ["kernels", "processes"]


def test_network_from_the_checkpoint(tmp_path, capsys):
    assert _main("--save", str(tmp_path), "--save-interval", "4", "--swiglu") == 0
    flags = ["--load", str(tmp_path), "--use-checkpoint-args", "--num-layers", "7"]
    capsys.readouterr()
    assert _main(*flags, "--train-iters", "5", "--lr-decay-iters", "4") == 0
    assert "iteration        5/       5" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert _main("--save", str(blocker / "deeper"), "--save-interval", "1") == 8
    assert f"--save {blocker / 'deeper'}" in capsys.readouterr().err


def test_a_run_that_could_not_save_is_refused_before_it_trains(tmp_path, monkeypatch, capsys):
    flags = ["--save", str(tmp_path), "--save-interval", "4"]
    assert _main(*flags, "--dry-run") == 0
    assert re.search(r"checkpoint size +0\.3 MiB", capsys.readouterr().out)
    size = 3 * 4 * 29312  # weights and two moments
    free = size + (64 << 20) - 1
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert _main(*flags) == 8
    told = capsys.readouterr()
    assert f"{tmp_path}: a checkpoint needs {size:,} bytes" in told.err
    assert "iteration" not in told.out
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("iter_")]
    free += 2  # config.yaml is as large as before
    assert _main(*flags) == 0
    free = 0
    assert _main(*flags, "--load", str(tmp_path)) == 0  # nothing is left to train or to save


def test_a_refused_job_leaves_the_files_of_the_other_alone(tmp_path, monkeypatch, capsys):
    assert _main("--save", str(tmp_path), "--save-interval", "2") == 0
    CrashLog(tmp_path).record(Verdict(7, 0, "not finite", 3))
    holder = json.dumps({"host": "elsewhere", "pid": 1, "started": "1"})
    (tmp_path / LOCK).write_text(holder)

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("megatron.checkpoint.lock.fcntl.lockf", no_locks)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    words = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "1"]
    assert _main(*words) == CheckpointError.exit_code
    assert "process 1 on elsewhere is saving into this folder" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_weights_alone_can_be_loaded_into_another_precision(tmp_path, capsys, flag):
    assert _main("--save", str(tmp_path), "--save-interval", "4") == 0
    assert _main("--load", str(tmp_path), flag, "--bf16", "--train-iters", "6") == 0
    first = 1 if flag == "--finetune" else 5
    assert f"iteration {first:8d}/       6" in capsys.readouterr().out


def test_a_changed_schedule_is_refused_with_the_remedy(tmp_path, capsys):
    assert _main("--save", str(tmp_path), "--save-interval", "4") == 0
    assert _main("--load", str(tmp_path), "--train-iters", "6") == 4
    assert "--override-opt_param-scheduler" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "is_restart", "skipped", "told"),
    [
        ([], False, None, None),  # a person has started it, which forgets the failures
        ([], True, None, r"fix the cause, and .*, or skip .* with --on-crash-loop skip$"),
        (["--on-crash-loop", "skip"], False, None, None),
        (["--on-crash-loop", "skip"], True, (2,), None),
        (["--on-crash-loop", "skip", "--iterations-to-skip", "7", "1"], True, (1, 2, 7), None),
    ],
)
def test_a_loop_of_failures(flags, is_restart, skipped, told, tmp_path, capsys, monkeypatch):
    ended = []
    monkeypatch.setattr(pretrain, "end_launcher", ended.append)
    config = parse_config([*FLAGS, *flags], world_size=1).config
    launch, layout = Launch(is_restart=is_restart), Layout.single()
    log = CrashLog(tmp_path)
    for _ in range(2):
        assert pretrain._end_crash_loop(config, log, launch, layout) == config
        log.record(Verdict(7, 0, "not finite", 3))
    if told is None:
        found = pretrain._end_crash_loop(config, log, launch, layout)
        assert found.training.iterations_to_skip == (skipped or config.training.iterations_to_skip)
        warning = "WARNING: iteration 3 failed twice in the same way: not finite. --on-crash-loop "
        assert (warning in capsys.readouterr().out) == (skipped is not None)
        again = pretrain._end_crash_loop(config, log, launch, layout)
        assert again == (found if skipped else config)
        assert not ended
        return
    with pytest.raises(CrashLoopError, match="iteration 3 failed twice .*: not finite: .*" + told):
        pretrain._end_crash_loop(config, log, launch, layout)
    assert ended == [launch]


def test_an_iteration_that_cannot_be_skipped_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "end_launcher", lambda _: None)
    config = parse_config([*FLAGS, "--on-crash-loop", "skip"], world_size=1).config
    log = CrashLog(tmp_path)
    for _ in range(2):
        log.record(Verdict(7, 0, "not finite", 0))
    with pytest.raises(CrashLoopError, match="iteration 0 failed .* start the run by hand$"):
        pretrain._end_crash_loop(config, log, Launch(is_restart=True), Layout.single())
