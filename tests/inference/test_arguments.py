"""Flags of inference programs: those without effect there are reported in one line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from megatron.config import ParsedRun
from megatron.config.generation import SamplesConfig
from megatron.config.parser import Program
from megatron.config.run import sections
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.load import SAVED_MODEL_READS, load_gpt, parse_generation
from megatron.parallel.layout import Layout
from megatron.tasks import harness, language_model
from megatron.tasks import main as tasks
from megatron.training.checkpointing import save_run
from tests.tasks.toy import save_toy
from tests.training.toy import CPU, build_toy, train_toy
from tools import generate_samples_gpt

TRAINING = """
    --lr 1e-3 --train-iters 7 --split 98,1,1 --hidden-dropout 0.3 --global-batch-size 6
    --use-distributed-optimizer --overlap-param-gather --fp8-param-gather --save x --save-interval 5
    --no-load-optim --hysteresis 5 --use-cpu-initialization --no-manual-gc --eval-iters 3
""".split()
IN_VAIN = {word for word in TRAINING if word.startswith("--")}

# Used by layers or modules that training shares, but without effect outside of training.
HANDED_ON = {
    *(f"model.{name}" for name in ("attention_dropout", "hidden_dropout")),
    *(f"model.{name}" for name in ("init_method_std", "init_method_xavier_uniform")),
    *(f"precision.cross_entropy_{name}" for name in ("fusion_impl", "loss_fusion")),
    "precision.fp16_lm_cross_entropy",
    *(f"parallel.{name}" for name in ("async_tensor_model_parallel_allreduce", "cp_comm_type")),
    "parallel.distribute_saved_activations",
    "parallel.zero_stage",  # stage 3 is refused
    "precision.first_last_layers_bf16",  # needs --fp8-format, which is refused
    *(f"training.recompute_{name}" for name in ("activations", "granularity")),
    "training.cuda_graph_impl",  # refused without a GPU, which records by default
    "training.fine_grained_activation_offloading",
    # The folder for reports of a hang.
    *("checkpoint.save", "reliability.flight_recorder_dump_path"),
    "data.decoder_seq_length",
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint, and a passage to evaluate it on."""
    folder = tmp_path_factory.mktemp("toy")
    save_toy(str(folder / "model"))
    (folder / "corpus.jsonl").write_text(json.dumps({"text": "1 2 3 4 5"}) + "\n")
    return folder


def _generation(toy: Path, *words: str) -> ParsedRun:
    given = ["--load", str(toy / "model"), *words]
    program = Program(name="generate_samples_gpt.py", extra=(SamplesConfig,))
    return parse_generation(given, 1, program)


def _evaluation(toy: Path, *words: str) -> ParsedRun:
    given = ["--load", str(toy / "model"), "--valid-data", str(toy / "corpus.jsonl"), *words]
    return language_model.parse("LAMBADA", given, 1)


def _vain(parsed: ParsedRun) -> set[str]:
    """Return the flags in the line that lists those without effect."""
    if not parsed.notices:
        return set()
    (line,) = parsed.notices
    start, flags = line.split(": ")
    assert start == "these flags have no effect here"
    return set(flags.split(", "))


@pytest.mark.parametrize("parse", [_generation, _evaluation])
def test_flags_of_training_are_accepted_and_reported_in_one_line(toy: Path, parse) -> None:
    assert _vain(parse(toy, *TRAINING)) == IN_VAIN
    # Flags that the checkpoint also specifies, and flags that have an effect.
    assert not parse(toy, "--num-layers", "2", "--bf16", "--max-position-embeddings", "16").notices


@pytest.mark.parametrize("parse", [_generation, _evaluation])
def test_an_iteration_is_found_as_in_training(toy: Path, tmp_path: Path, parse) -> None:
    root = str(tmp_path / "two")
    words = ["--save", root, "--save-interval", "1", "--exit-interval", "2", "--eval-iters", "0"]
    train_toy(Layout.single(), words)
    older = parse(toy, "--load", root, "--ckpt-step", "1")
    assert not older.notices
    assert load_gpt(root, CPU, config=older.config).iteration == 1
    assert load_gpt(root, CPU, config=parse(toy, "--load", root).config).iteration == 2
    with pytest.raises(CheckpointError, match="^--ckpt-step 3: .*: available iterations: 2, 1: "):
        parse(toy, "--load", root, "--ckpt-step", "3")


@pytest.mark.parametrize("parse", [_generation, _evaluation])
def test_what_everybody_may_write_to_is_loaded_with_a_flag(
    toy: Path, tmp_path: Path, parse
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(toy / "model", root)
    next(root.glob("iter_*/manifest.json")).chmod(0o666)
    with pytest.raises(CheckpointError, match="or give --allow-foreign-checkpoints"):
        parse(toy, "--load", str(root))
    parsed = parse(toy, "--load", str(root), "--allow-foreign-checkpoints")
    assert not parsed.notices
    assert load_gpt(str(root), CPU, config=parsed.config).iteration == 0


@pytest.mark.parametrize("parse", [_generation, _evaluation])
def test_what_is_said_to_change_nothing_changes_nothing(toy: Path, parse) -> None:
    """This holds even on a CPU, where training with them is refused."""
    words = ["--cuda-graph-impl", "local", "--global-batch-size", "4", "--zero-stage", "1"]
    assert _vain(parse(toy, *words)) == {*words[::2]}
    assert parse(toy, *words).config == parse(toy).config


def test_each_program_has_its_own(toy: Path) -> None:
    words = "--micro-batch-size 3 --seq-length 8 --log-interval 2 --seed 4".split()
    assert _vain(_evaluation(toy, *words)) == {"--seed"}
    of_evaluation = {"--micro-batch-size", "--seq-length", "--log-interval"}
    assert _vain(_generation(toy, *words)) == of_evaluation


def test_lm_evaluation_harness_splits_no_sequence(toy: Path, monkeypatch) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda _: True)
    words = ["--load", str(toy / "model"), "--lm-eval-tasks", "x", "--sequence-parallel"]
    size = ["--tensor-model-parallel-size", "2"]
    assert _vain(harness.parse("LM_EVAL", [*words, *size], 2)) == {"--sequence-parallel"}


def test_numbers_of_lm_evaluation_harness_have_bounds(toy: Path, monkeypatch) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda _: True)
    words = ["--load", str(toy / "model"), "--lm-eval-tasks", "x"]
    least = ["--lm-eval-num-fewshot", "0", "--lm-eval-limit", "0.1"]
    parsed = harness.parse("LM_EVAL", [*words, *least], 1)
    assert (parsed.extra[1].lm_eval_num_fewshot, parsed.extra[1].lm_eval_limit) == (0, 0.1)
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda _: None)
    wrong = ["--lm-eval-num-fewshot", "-1", "--lm-eval-limit", "0", "--valid-data", "y"]
    with pytest.raises(ConfigError) as caught:
        harness.parse("LM_EVAL", [*words[:2], *wrong, "--lm-eval-include-path", "none"], 1)
    assert caught.value.problems == [
        "--task LM_EVAL needs --lm-eval-tasks: give names of tasks, or task files",
        "--lm-eval-include-path none: no such folder: fix the path",
        "--lm-eval-num-fewshot -1: must be at least 0",
        "--lm-eval-limit 0: must be above 0",
        "--valid-data: the tasks of --lm-eval-tasks name their own data: drop the flag",
        harness._INSTALL,
    ]


@pytest.mark.parametrize("parse", [_generation, _evaluation])
def test_a_file_of_a_training_is_taken_too(toy: Path, tmp_path: Path, parse) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("schedule: {lr: 0.1}\ntraining: {train_iters: 3, deterministic_mode: true}\n")
    parsed = parse(toy, "--config", str(file))
    assert _vain(parsed) == {"--lr", "--train-iters"}
    assert parsed.config.training.deterministic_mode


@pytest.mark.parametrize("parse", [_generation, _evaluation])
def test_what_training_computes_differently_is_still_refused(toy: Path, parse) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(toy, "--fp8-format", "hybrid", "--zero-stage", "3", "--lr", "-1")
    flags = [problem.split()[0] for problem in caught.value.problems]
    assert sorted(flags) == ["--fp8-format", "--lr", "--zero-stage"]


@pytest.mark.parametrize("parse", [_generation, _evaluation])
def test_the_checkpoint_s_network_is_taken_in_any_case(toy: Path, parse) -> None:
    parsed = parse(toy, "--use-checkpoint-args")
    (line,) = parsed.notices
    assert line == "--use-checkpoint-args: the network always comes from the checkpoint"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return which settings have been read since, other than by the configuration itself."""
    found: set[str] = set()

    def watch(section: str, kind: type) -> None:
        plain, fields = kind.__getattribute__, frozenset(kind.__dataclass_fields__)

        def get(self: object, name: str) -> object:
            if name in fields:
                by = Path(sys._getframe(1).f_code.co_filename)
                if by.parent.name != "config" and by.name not in ("dataclasses.py", "<string>"):
                    found.add(f"{section}.{name}")
            return plain(self, name)

        monkeypatch.setattr(kind, "__getattribute__", get)

    for section, kind in sections().items():
        watch(section, kind)
    # `prepare` writes launch variables into the environment, where later tests would see them.
    monkeypatch.setattr("megatron.processes.process.prepare", lambda *_, **__: None)
    return found


def test_what_a_program_reads_is_not_called_without_effect(
    toy: Path, read: set[str], capsys
) -> None:
    words = ["--load", str(toy / "model")]
    asked = ["--num-samples", "1", "--out-seq-length", "2", "--genfile", str(toy / "samples")]
    assert generate_samples_gpt.main([*words, *asked]) == 0
    assert "model.num_layers" in read
    assert "training.seed" in read
    assert read - HANDED_ON - {"data.seq_length"} <= SAVED_MODEL_READS | {"training.seed"}
    read.clear()
    data = ["--valid-data", str(toy / "corpus.jsonl"), "--results", str(toy / "results.json")]
    assert tasks.main(["--task", "LAMBADA", *words, *data]) == 0
    assert "training.seed" not in read
    own = {"training.micro_batch_size", "data.seq_length", "logging.log_interval"}
    assert own <= read
    assert read - HANDED_ON <= SAVED_MODEL_READS | own
    assert HANDED_ON.isdisjoint(SAVED_MODEL_READS)


def test_another_kind_of_network_is_refused(tmp_path: Path) -> None:
    flags = ["--save", str(tmp_path / "model"), "--save-interval", "1"]
    save_run(build_toy(Layout.single(), flags, "bert"))
    with pytest.raises(CheckpointError, match="holds a bert, but a gpt is needed"):
        _generation(tmp_path)
