"""Predicted time and memory against everything that was measured, and against Megatron's table."""

import json
from itertools import product
from pathlib import Path
from statistics import median

import pytest

from megatron.config import parse_config
from megatron.errors import ConfigError
from megatron.models.plans import model_plan
from megatron.planner.machine import MACHINES
from megatron.planner.prediction import predict
from megatron.tokenizer import padded_vocabulary
from tests.repository import ROOT

FOLDER = Path(__file__).parent
MEASURED = json.loads((FOLDER / "measured.json").read_text())
PUBLISHED = json.loads((FOLDER / "published.json").read_text())
KINDS = {"BERT": "bert", "T5": "t5"}
PAGE = ROOT / "docs" / "planner.md"
TIME, MEMORY = 0.07, 0.05  # largest relative errors


def predicted(words, gpus, machine="H200", kind="gpt"):
    config = parse_config(words, world_size=gpus, architecture=kind).config
    plan = model_plan(config.model, padded_vocabulary(config))
    return predict(config, plan, gpus, MACHINES[machine])


def _measured(row):
    """Return the prediction for a row, and the seconds that were measured."""
    words = f"{MEASURED['common']} {MEASURED['models'][row['model']]} {row['flags']}"
    found = predicted(words.split(), row["gpus"], kind=KINDS.get(row["model"], "gpt"))
    if "milliseconds" in row:
        return found, row["milliseconds"] / 1000
    return found, found.tokens / row["tokens_per_second"]


def test_every_row_is_in_the_documentation():
    texts = {row["source"]: (ROOT / row["source"]).read_text() for row in MEASURED["rows"]}
    assert not [row["name"] for row in MEASURED["rows"] if row["line"] not in texts[row["source"]]]


def test_time_and_memory_of_what_was_measured(capsys):
    wrong, lines = [], []
    for row in MEASURED["rows"]:
        found, seconds = _measured(row)
        error = found.seconds / seconds - 1
        # A row that is predicted again is taken off the list of those that miss.
        if (abs(error) > TIME) != ("miss" in row):
            wrong.append((row["name"], f"{error:+.1%}"))
        gib = found.memory.total / 2**30
        if "gib" in row and abs(gib / row["gib"] - 1) > MEMORY:
            wrong.append((row["name"], f"{gib:.1f} GiB"))
        shown = f"{row['gib']:.1f}, {gib / row['gib'] - 1:+.1%}" if "gib" in row else ""
        lines.append(
            f"| {row['name']} | {row['gpus']} | {1000 * seconds:,.1f} | "
            f"{1000 * found.seconds:,.1f} | {error:+.1%} | {shown} | "
            f"{'fitted' if 'fitted' in row else ''} |"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert not wrong
    page = PAGE.read_text()
    missing = [line for line in lines if line not in page]
    assert not missing, "copy the lines that were printed into docs/planner.md"


def _published(row):
    """Return the fastest micro-batch and number of chunks: the table does not name them."""
    each = row["layers"] // row["pipeline"]
    chunks = [n for n in range(1, each + 1) if each % n == 0] if row["pipeline"] > 1 else [1]
    words = (
        f"--num-layers {row['layers']} --hidden-size {row['hidden']} --bf16 --mock-data --lr 1e-4 "
        f"--num-attention-heads {row['heads']} --seq-length 4096 --max-position-embeddings 4096 "
        f"--global-batch-size {row['batch']} --vocab-size 131071 --tokenizer-type NullTokenizer "
        "--attention-dropout 0 --hidden-dropout 0 --train-iters 5 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --untie-embeddings-and-output-weights "
        f"--tensor-model-parallel-size {row['tensor']} "
        f"--pipeline-model-parallel-size {row['pipeline']}"
    ).split()
    if row["tensor"] > 1:
        words += ["--sequence-parallel", "--tp-comm-overlap"]
    found = []
    for micro_batch, parts in product((1, 2, 4), chunks):
        more = ["--micro-batch-size", str(micro_batch)]
        if parts > 1:
            more += ["--num-virtual-stages-per-pipeline-rank", str(parts)]
        try:
            one = predicted([*words, *more], row["gpus"], "H100")
        except ConfigError:
            continue  # too many virtual stages for the number of micro-batches
        if one.memory.total <= 80 * 2**30:
            found.append(one)
    return min(found, key=lambda one: one.seconds)


def test_megatron_s_published_table(capsys):
    errors = {}
    for row in PUBLISHED["rows"]:
        errors[row["name"]] = _published(row).tflops / row["tflops"] - 1
    with capsys.disabled():
        print("\n" + "  ".join(f"{name} {error:+.1%}" for name, error in errors.items()))
    page = PAGE.read_text()
    assert all(f"| {name} | {errors[name]:+.1%} |" in page for name in errors)
    assert max(map(abs, errors.values())) < 0.10
    assert median(map(abs, errors.values())) < 0.05
    held_out = [errors[row["name"]] for row in PUBLISHED["rows"] if not row["fitted"]]
    assert median(map(abs, held_out)) < 0.05


def test_machines_scaled_by_datasheet_are_not_far_off():
    """Nothing was fitted to A100s. The page shows the errors."""
    page = PAGE.read_text()
    for row in PUBLISHED["a100"]:
        words = (
            f"--num-layers {row['layers']} --hidden-size {row['hidden']} --bf16 --mock-data "
            f"--num-attention-heads {row['heads']} --seq-length 2048 --tokenizer-type "
            f"NullTokenizer --vocab-size 51199 --micro-batch-size {row['micro_batch']} --lr 1e-4 "
            f"--global-batch-size {row['batch']} --tensor-model-parallel-size 8 "
            f"--sequence-parallel --pipeline-model-parallel-size {row['pipeline']} "
            "--max-position-embeddings 2048 --recompute-activations --train-iters 5"
        ).split()
        if row["chunks"] > 1:
            words += ["--num-virtual-stages-per-pipeline-rank", str(row["chunks"])]
        error = predicted(words, row["gpus"], "A100").seconds / row["seconds"] - 1
        assert f"| {row['name']} | {error:+.1%} |" in page
        assert abs(error) < 0.25


def test_parts_add_up_to_the_whole():
    words = MEASURED["common"].split() + MEASURED["models"]["7B"].split()
    words += "--global-batch-size 32 --tensor-model-parallel-size 2".split()
    words += "--pipeline-model-parallel-size 2 --sequence-parallel --zero-stage 1".split()
    found = predicted(words, 8)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert all(time >= -1e-9 for time in found.parts.values())
    assert found.parts["bubble"] > 0 < found.parts["data parallel"]
