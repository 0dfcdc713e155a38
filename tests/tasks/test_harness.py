"""lm-evaluation-harness on our models, with local task files."""

import json
import math
from functools import partial

import pytest
import torch

from megatron.device import Device
from megatron.errors import ConfigError
from megatron.inference.load import load_gpt
from megatron.parallel.layout import Layout
from megatron.tasks import harness
from tests.distributed import run_distributed
from tests.tasks.toy import save_toy

harness_tasks = pytest.importorskip("lm_eval.tasks", reason="needs the extra [eval]")

CHOICES = """
task: toy_choice
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: toy_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
metric_list: [{{metric: word_perplexity}}]
"""
WRITING = """
task: toy_writing
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
output_type: generate_until
doc_to_text: question
doc_to_target: next
generation_kwargs: {{until: [" 999"], max_gen_toks: 3}}
metric_list: [{{metric: exact_match}}]
"""
QUESTIONS = [" ".join(str((11 * i + 5 * j) % 90) for j in range(2 + 4 * i)) for i in range(6)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Return a checkpoint, a dataset on which it should get the full score, and the task files."""
    folder = tmp_path_factory.mktemp("toy")
    save_toy(str(folder / "model"))
    model = load_gpt(str(folder / "model"), Device.cpu()).model
    records = []
    for question in QUESTIONS:
        tokens = [int(word) for word in question.split()]
        scores = _entries(model, tokens).log_softmax(-1)
        choices = [3, 44, 97]
        best = max(range(3), key=lambda i, s=scores: s[choices[i]].item())
        written = list(tokens)
        for _ in range(3):
            # The engine leaves room for three new tokens in the window of 16.
            written.append(
                int(
                    _entries(
                        model, written[len(tokens) - 13 :] if len(tokens) > 13 else written
                    ).argmax()
                )
            )
        records.append(
            {
                "question": question,
                "choices": [str(choice) for choice in choices],
                "answer": best,
                "next": " ".join(map(str, written[len(tokens) :])),
            }
        )
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, text in (("choice", CHOICES), ("rolling", ROLLING), ("writing", WRITING)):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder


@torch.no_grad()
def _entries(model, tokens):
    return model(torch.tensor([tokens[-16:]]))[0, -1, :101]


def _evaluate(layout, folder, words):
    arguments = ["--load", str(folder / "model"), "--lm-eval-include-path", str(folder), *words]
    parsed = harness.parse("LM_EVAL", arguments, layout.world.size)
    return harness.evaluate(parsed, Device.cpu(), layout)


TASKS = ["--lm-eval-tasks", "toy_choice", "toy_rolling", "toy_writing"]


def test_choices_perplexity_and_written_text_are_the_model_s(toy, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    numbers = _evaluate(Layout.single(), toy, TASKS)
    assert numbers["toy_choice acc"] == 1
    assert numbers["toy_writing exact_match"] == 1
    assert math.isfinite(numbers["toy_rolling word_perplexity"])
    written = json.loads((toy / "model" / "evaluation" / "lm_eval-iter_0000000.json").read_text())
    assert written["tasks"]["n-samples"]["toy_choice"]["effective"] == 6


@pytest.mark.parametrize(
    ("processes", "sizes", "flags"),
    [
        (2, {}, ""),
        (
            8,
            {"tensor": 2, "pipeline": 2},
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        ),
    ],
)
def test_every_layout_gives_the_same(toy, monkeypatch, processes, sizes, flags):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    expected = _evaluate(Layout.single(), toy, TASKS)
    got = run_distributed(processes, _evaluate, toy, [*TASKS, *flags.split()], **sizes)
    assert got == [pytest.approx(expected, rel=1e-5), *[None] * (processes - 1)]


def test_a_task_file_can_be_named(toy):
    words = ["--lm-eval-tasks", str(toy / "choice.yaml"), "--lm-eval-limit", "2"]
    numbers = _evaluate(Layout.single(), toy, words)
    assert numbers["toy_choice acc"] == 1


def test_mistakes_are_reported(toy, monkeypatch):
    own_only = partial(harness_tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(
        harness_tasks, "TaskManager", lambda include_path, **_: own_only(include_path=include_path)
    )
    with pytest.raises(ConfigError, match="the harness has no such task"):
        _evaluate(Layout.single(), toy, ["--lm-eval-tasks", "no_such_task"])
    with pytest.raises(ConfigError) as caught:
        harness.parse("LM_EVAL", ["--valid-data", "x", "--lm-eval-limit", "0"], 1)
    assert len(caught.value.problems) == 4  # including --load and --lm-eval-tasks
