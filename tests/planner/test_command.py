"""`megatron plan`: layouts that start, limits, files, errors that name the remedy."""

import json
import math
import os
import re
import shlex
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron.config import parse_config
from megatron.config.run import with_values
from megatron.device import datasheet_flops
from megatron.errors import ConfigError, DataError, UserError
from megatron.planner.command import (
    build_parser,
    check,
    command,
    describe,
    goodput,
    predict_configured,
    read_request,
    reasons,
    run,
    show_timeline,
    table,
)
from megatron.planner.machine import MACHINES, read_machine
from megatron.planner.memory import largest_process
from megatron.planner.pipeline_balance import Pipeline
from megatron.planner.search import Search, _schedules, layouts, to_flags
from tests.launch import run_ranks
from tests.repository import ROOT

SMALL = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --bf16 "
    "--max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0"
)
GPT3 = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --bf16 "
    "--max-position-embeddings 2048 --attention-dropout 0 --hidden-dropout 0"
)
HYBRID = (
    f"{SMALL} --hybrid-layer-pattern M-M*-M-M --num-layers 8 --mamba-num-groups 4 "
    "--position-embedding-type none"
)
MIXTURE = f"{SMALL} --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2"


def _options(*words):
    return build_parser().read([word for text in words for word in text.split()])


def _search(*words, memory=None):
    request = read_request(_options(*words))
    limit = memory or request.machine.memory
    return request, Search(request.start, request.vocabulary, request.gpus, request.machine, limit)


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus 16xH100 --global-batch 64 --", SMALL),
        ("--gpus 16xH200 --global-batch 64 --", MIXTURE),
        ("--gpus 16xH200 --global-batch 64 --", HYBRID),
        ("--gpus 64xA100 --global-batch 128 --model gpt-125m",),
        # The run's own layout does not affect the plan.
        ("--gpus 8xB200 --global-batch 64 --", SMALL, "--pipeline-model-parallel-size 4",
         "--num-layers-per-virtual-pipeline-stage 1 --zero-stage 2"),
        ("--gpus 8xB200 --global-batch 64 --", SMALL, "--use-distributed-optimizer "
         "--overlap-grad-reduce --overlap-param-gather --recompute-activations"),
    ],
)  # fmt: skip
def test_every_layout_printed_is_what_its_flags_mean(words):
    request, search = _search(*words)
    plans = search.best(10)
    assert len(plans) == 10
    for plan in plans:
        flags = [*request.flags, *to_flags(plan.values, request.start)]
        found = parse_config(flags, world_size=request.gpus).config
        assert (found.parallel, found.training) == (plan.config.parallel, plan.config.training)
    times = [plan.prediction.seconds for plan in plans]
    assert times == sorted(times)


def test_printed_commands_start():
    for words in (SMALL, MIXTURE):
        request, search = _search("--gpus 4xH200 --global-batch 32 --", words)
        plans = [plan for plan in search.best(40) if "PP" in describe(plan.config, 4)]
        line = command(request, plans[0]).partition("pretrain_gpt.py ")[2]
        dry = ["--dry-run", "--dry-run-world-size", "4"]
        done = run_ranks([str(ROOT / "pretrain_gpt.py"), *shlex.split(line), *dry], os.environ)
        assert done.returncode == 0, done.stdout
        assert "PP 2" in done.stdout or "PP 4" in done.stdout


def test_recipes_whose_layouts_differ_from_the_planned_one(tmp_path):
    """The recipe's settings are unset; extra vocabulary entries are not counted twice."""
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, "
        "max_position_embeddings: 64}\ndata: {seq_length: 64}\n"
        "training: {recompute_granularity: selective}\n"
    )
    for model in (str(recipe), "t5-base"):
        request, search = _search(f"--model {model} --gpus 2xA100 --global-batch 8")
        for plan in search.best(5):
            line = shlex.split(command(request, plan))
            flags = line[line.index(request.program) + 1 :]
            kind = request.start.model.architecture
            found = parse_config(flags, world_size=2, architecture=kind).config
            assert (found.parallel, found.training) == (plan.config.parallel, plan.config.training)
            assert len([word for word in flags if word == "--micro-batch-size"]) <= 1


def test_sizes_in_a_file_its_layouts_or_old_flags_are_predicted(tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "layouts: {2: {training: {micro_batch_size: 4}}}\n"
        "model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, "
        "max_position_embeddings: 64}\ndata: {seq_length: 64}\n"
        "tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 99}\n"
        "training: {global_batch_size: 16}\nschedule: {lr: 0.5}\n"
    )
    for words in (f"--model {recipe}", f"-- --config {recipe}"):
        request = read_request(_options("--gpus 2xH100 --time", words))
        config = parse_config(request.flags, world_size=2).config
        assert (config.training.micro_batch_size, request.vocabulary) == (4, 100)
        assert (config.training.global_batch_size, config.schedule.lr) == (16, 0.5)
    with pytest.raises(ConfigError, match=r"--config .*own.yaml: both name a run: give one"):
        read_request(_options(f"--model gpt-125m --gpus 2xH100 -- --config {recipe}"))
    request = read_request(
        _options("--gpus 2xH100 --time --global-batch 16 --", SMALL, "--batch-size 4")
    )
    assert request.start.training.micro_batch_size == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--decoder-num-layers 2", "--decoder-seq-length is required: give it a value"),
        ("--num-experts 4 --moe-layer-freq [1,0]", "--moe-layer-freq [1,0]: it names 2 layers"),
        ("--num-experts 4 --moe-router-topk 9", "--moe-router-topk 9 is above --num-experts 4"),
        ("--no-rope-freq [1,0]", "--no-rope-freq [1,0]: it names 2 layers"),
        ("--hybrid-layer-pattern M*", "--hybrid-layer-pattern M* names 2 layers"),
        ("--num-layers 0", "--num-layers 0: must be at least 1"),
        ("--bert-no-binary-head --decoder-num-layers 2", "--decoder-num-layers 2 is only for T5"),
        ("--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by 0: must be at least"),
    ],
)
def test_mistakes_in_the_network_are_reported_before_the_search(flags, message):
    with pytest.raises(ConfigError) as caught:
        read_request(_options("--gpus 8xH100 --global-batch 8 --", SMALL, flags))
    assert message in str(caught.value)


def test_recorded_passes_are_planned_without_overlap():
    _, search = _search("--gpus 2xH200 --global-batch 8 --", SMALL, "--cuda-graph-impl local")
    best = search.best(3)
    assert best
    assert not any(plan.config.parallel.overlap_grad_reduce for plan in best)


def test_nothing_left_out_is_faster():
    """Search stops early; simulating all candidates finds the same layouts."""
    _, search = _search("--gpus 4xH100 --global-batch 16 --", SMALL)
    few = [plan.prediction.seconds for plan in search.best(3)]
    _, search = _search("--gpus 4xH100 --global-batch 16 --", SMALL)
    every = search.best(10**6)
    assert few == [plan.prediction.seconds for plan in every[:3]]
    assert not search.dropped["slower than those shown"]


def test_every_layout_is_counted_once():
    counts = []
    for shown in (1, 10):
        _, search = _search("--gpus 4xH100 --global-batch 16 --", SMALL)
        counts.append(len(search.best(shown)) + search.dropped.total())
    assert counts[0] == counts[1] > 100


def test_peaks_are_those_that_runs_report():
    for name, machine in MACHINES.items():
        assert machine.peak == datasheet_flops(f"NVIDIA {name}")


def test_a_thousand_gpus_are_planned_in_ten_seconds():
    request, search = _search("--gpus 1024xH100 --global-batch 1536 --", GPT3)
    start = time.process_time()
    best = search.best(10)[0]
    assert time.process_time() - start < 10
    assert best.prediction.memory.total < request.machine.memory
    assert best.config.parallel.pipeline_model_parallel_size > 1


def test_layers_that_stages_do_not_divide_are_distributed():
    words = SMALL.replace("--num-layers 8", "--num-layers 7")
    plans = _search("--gpus 4xH200 --global-batch 32 --", words)[1].best(60)
    stages = {plan.config.parallel.pipeline_model_parallel_size for plan in plans}
    assert {1, 2, 4} <= stages


def test_layers_are_distributed_in_layouts_at_most_a_fifth_slower_than_the_limit():
    layout = "parallel.pipeline_model_parallel_layout"
    _, search = _search("--gpus 4xH100 --global-batch 16 --model gpt-125m")
    candidate = next(
        one
        for one in search.candidates()
        if one.values[layout] is None
        and (plan := search._examine(one, math.inf, Pipeline))
        and plan.values[layout] is not None
    )
    seconds = search._examine(candidate, 0.0, Pipeline).prediction.seconds
    for limit, is_distributed in ((0.801 * seconds, True), (0.799 * seconds, False)):
        plan = search._examine(candidate, limit, Pipeline)
        assert (
            (plan.values[layout] is not None)
            == (plan.prediction.seconds < seconds)
            == is_distributed
        )


def test_memory_decides_what_is_shown():
    words = ("--gpus 8xH200 --global-batch 64 --", GPT3.replace("12288", "3072"))
    wide = _search(*words)[1].best(1)[0]
    limit = wide.prediction.memory.total * 0.5
    search = _search(*words, memory=limit)[1]
    tight = search.best(1)[0]
    assert tight.prediction.memory.total <= limit
    assert tight.prediction.seconds > wide.prediction.seconds


def test_a_layout_may_fit_if_its_smallest_variant_does():
    """The smallest variant recomputes everything and has micro-batches of 1."""
    _, search = _search("--gpus 1xH100 --global-batch 8 --", SMALL)
    candidates = list(search.candidates())
    sizes = [largest_process(search._resolved(one.values), one.plan, 1).total for one in candidates]
    least = min(sizes)
    assert max(sizes) > 1.5 * least
    for one in (candidates[0], candidates[-1]):
        assert replace(search, memory=least, _fits={})._may_fit(one)
        assert not replace(search, memory=least - 1, _fits={})._may_fit(one)


def test_output_is_yaml_that_a_run_takes(tmp_path, capsys):
    path, picture = tmp_path / "new" / "folder" / "plan.yaml", tmp_path / "plan.png"
    words = ("--gpus 4xH100 --global-batch 16 --top 2", f"--output {path} --draw {picture} --")
    run(_options(*words, SMALL))
    text = capsys.readouterr().out
    assert "1 is the fastest. Its time: " in text
    assert "goodput" in text
    assert picture.stat().st_size > 1000
    assert path.read_text().startswith("# torchrun --nproc-per-node 4 pretrain_gpt.py ")
    config = parse_config(["--config", str(path)], world_size=4).config
    assert (config.training.global_batch_size, config.model.num_layers) == (16, 8)
    assert config.parallel.zero_stage == 1
    with pytest.raises(ConfigError, match="--overwrite"):
        run(_options(*words, SMALL))


_RETRO = f"""
    --num-layers 6 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32
    --retro-workdir {ROOT / "tests/config/retro_workdir"}
"""


def test_a_retro_is_planned_with_its_folder(capsys):
    run(_options("--gpus 2xH100 --global-batch 8 --", _RETRO))
    text = capsys.readouterr().out
    assert "8 samples of 32 tokens" in text
    (line,) = [line for line in text.splitlines() if line.startswith("torchrun")]
    words = shlex.split(line)
    assert words[3] == "pretrain_retro.py"
    parse_config(words[4:], world_size=2, architecture="retro")
    run(_options("--gpus 2xH100 --global-batch 8 --memory --time --", _RETRO))
    assert "memory per process" in capsys.readouterr().out


def test_the_vocabulary_of_a_yaml_file_is_kept(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 300}")
    request = read_request(_options(f"--model {path} --gpus 2xH100 --global-batch 8 --", SMALL))
    assert request.vocabulary == 301
    assert request.start.tokenizer.vocab_size == 300


def test_a_layout_as_given_is_only_predicted(capsys):
    run(_options("--gpus 2xH200 --global-batch 8 --memory --", SMALL, "--zero-stage 1"))
    assert capsys.readouterr().out.startswith("DP 2, ZeRO 1, micro-batch 1\nmemory per process: ")
    run(_options("--gpus 2xH200 --global-batch 8 --time --", SMALL))
    assert "tokens/s per GPU" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="tensor"):
        run(_options("--gpus 2xH200 --global-batch 8 --time --", SMALL,
                     "--tensor-model-parallel-size 3"))  # fmt: skip


def test_layouts_are_written_with_their_flags_and_predictions(tmp_path, capsys):
    path = tmp_path / "new" / "plan.jsonl"
    words = ("--gpus 2xH200 --global-batch 8 --top 40 --jsonl", str(path), "--", SMALL)
    run(_options(*words))
    request, search = _search(*words)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    plans = search.best(40)
    assert len(records) == len(plans) == 40
    for record, plan in zip(records, plans, strict=True):
        flags = shlex.split(f"{record['flags']} {record['layout_flags']}")
        found = parse_config(flags, world_size=2).config
        assert (found.parallel, found.training) == (plan.config.parallel, plan.config.training)
        assert describe(found, 2) == record["layout"]
        assert record["seconds"] == plan.prediction.seconds
        assert record["gib"] == plan.prediction.memory.total / 2**30
    assert len({record["flags"] for record in records}) == 1
    with pytest.raises(ConfigError, match="plan.jsonl already exists"):
        run(_options(*words))
    # A given layout is a different layout of the same run.
    given = tmp_path / "given.jsonl"
    run(_options("--gpus 2xH200 --global-batch 8 --memory --time --jsonl", str(given), "--", SMALL,
                 "--micro-batch-size 2 --context-parallel-size 2"))  # fmt: skip
    record = json.loads(given.read_text())
    assert record["layout_flags"] == "--micro-batch-size 2 --context-parallel-size 2"
    assert record["flags"] == records[0]["flags"]
    assert capsys.readouterr().out.endswith(f"wrote {given}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus many", "256xH100"),
        ("--gpus 8xV100", "use one of A100, H100, H200, B200"),
        ("--gpus 8", "add the type"),
        ("--gpus 8xH100", "--global-batch is required"),
        ("--gpus 8xH100 --global-batch 8 --model gpt-5", "megatron recipes"),
        ("--gpus 8xH100 --global-batch 8 --memory -3", "must be above 0"),
        (
            f"--gpus 8xA100 --global-batch 8 -- {SMALL} --fp8-format hybrid",
            "A100 does not support FP8: drop it",
        ),
        (
            f"--gpus 8xB200 --global-batch 8 -- {SMALL} --num-experts 8 --bf16 --fp8-format hybrid",
            "B200 does not support FP8 for experts: drop --fp8-format",
        ),
        ("--gpus 1xA100 --global-batch 1 --memory 1 --model gpt-125m", "none of"),
        (
            "--gpus 8xH100 --global-batch 7 -- --num-layers 3 --hidden-size 60 "
            "--num-attention-heads 5 --seq-length 64 --max-position-embeddings 64",
            "use a multiple of 8 for --global-batch",
        ),
        ("--gpus 8xH100 --mtbf-hours nan", "--mtbf-hours nan: must be a finite number"),
        ("--gpus 8xH100 --restart-seconds inf", "--restart-seconds inf: must be a finite number"),
        ("--gpus 8xH100 --draw x.qqq", "--draw x.qqq: give a name that ends in .png"),
        ("--gpus 12xH100 --global-batch 24 --model gpt-125m", "use 8 or 16 GPUs"),
        (
            "--gpus 8xH100 --global-batch 8 --model gpt-125m --memory 9 --time",
            "--memory 9: without",
        ),
        ("--gpus 8xH100 --global-batch 8 --model gpt-125m --time --draw x.png", "--draw: without"),
        ("--gpus 2xH100 --global-batch 8 --model gpt-125m --time 1e-6", "slower than --time"),
        (
            f"--gpus 2xH100 --global-batch 8 -- {SMALL} --rampup-batch-size 4 4 8",
            "refused: --rampup-batch-size 4 4 8 counts samples",
        ),
    ],
)
def test_errors_name_the_remedy(words, message):
    with pytest.raises(UserError, match=message):
        run(_options(words))


def test_limits_of_numbers_are_told_together():
    flags = ("memory", "time", "top", "mtbf-hours", "checkpoint-seconds", "global-batch")
    none = " ".join(f"--{flag} 0" for flag in flags)
    with pytest.raises(ConfigError) as caught:
        check(_options(f"--gpus 8xH100 {none} --restart-seconds -1 --draw x.qqq"))
    assert caught.value.problems[:-1] == [
        *(f"--{flag} 0: must be above 0" for flag in flags),
        "--restart-seconds -1: must be at least 0",
    ]
    least = "--memory 1e-9 --time 1e-9 --mtbf-hours 1e-9 --checkpoint-seconds 1e-9 --top 1"
    check(_options(f"--gpus 8xH100 {least} --global-batch 1 --restart-seconds 0"))
    check(_options("--gpus 8xH100 --memory --time"))
    for words, ignored in (
        ("--memory 9 --time", "--memory 9"),
        ("--memory --time 9", "--time 9"),
        ("--memory --time --draw x.png --output y.yaml", "--draw and --output"),
        ("--memory --time 9 --draw x.png", "--time 9 and --draw"),
    ):
        with pytest.raises(ConfigError, match=f"^{ignored}: without a number, --memory and --tim"):
            check(_options(f"--gpus 8xH100 {words}"))


def test_existing_files_are_kept(tmp_path):
    for flag in ("draw", "output", "jsonl"):
        path = tmp_path / f"{flag}.png"
        words = ("--gpus 8xH100", f"--{flag} {path}")
        check(_options(*words))
        path.touch()
        with pytest.raises(ConfigError, match=rf"--{flag}: .*{flag}.png already exists"):
            check(_options(*words))
        check(_options(*words, "--overwrite"))


def test_measured_rates_replace_built_in_ones(tmp_path):
    path = tmp_path / "ceilings.json"
    ceilings = {
        "device": "NVIDIA H200", "datasheet": 989e12, "seconds": 2.0, "products": 660e12,
        "products_fp8": None, "head": 640e12, "attention_forward": 520e12,
        "attention_backward": 430e12, "copy": 4.2e12,
    }  # fmt: skip
    path.write_text(json.dumps(ceilings))
    machine = read_machine(path, MACHINES["H200"])
    assert (machine.name, machine.products) == ("NVIDIA H200", 660e12)
    assert machine.link == MACHINES["H200"].link
    assert machine.copy == pytest.approx(MACHINES["H200"].copy, rel=0.02)
    assert machine.attention == pytest.approx(MACHINES["H200"].attention, rel=0.1)
    path.write_text('{"experts_in_fp8": false, "products": 1e15}')
    machine = read_machine(path, MACHINES["H200"])
    assert (machine.experts_in_fp8, machine.products) == (False, 1e15)
    for wrong in (
        "{}", "[1]", "no JSON", '{"products": 1, "experts_in_fp8": "no"}',
        '{"products": -1}', '{"products": Infinity}', '{"node": 8.5}',
        '{"link": {"speed": 3}}', '{"link": {"bandwidth": "x", "latency": 0}}', "[" * 100_000,
        '{"network": {"bandwidth": 0, "latency": 0}}', '{"attention_forward": 3}',
    ):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(DataError, match="--machine"):
            read_machine(path, MACHINES["H200"])


def test_a_config_json_is_a_model(tmp_path):
    path = tmp_path / "config.json"
    llama = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "vocab_size": 32000, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    path.write_text(json.dumps(llama))
    for model in (tmp_path, path):
        request, search = _search(f"--model {model} --gpus 8xH100 --global-batch 64")
        assert request.vocabulary == 32000
    best = search.best(1)[0]
    assert best.config.data.seq_length == 4096
    assert math.isclose(best.prediction.mfu, 0.45, abs_tol=0.07)
    flags = [*request.flags, *to_flags(best.values, request.start)]
    assert parse_config(flags, world_size=8).config.model == best.config.model
    assert _search(f"--model {tmp_path} --gpus 8xH100 --global-batch 64")[0].vocabulary == 32000
    path.write_text(json.dumps({**llama, "max_position_embeddings": 1 << 17}))
    request, _ = _search(f"--model {tmp_path} --gpus 8xH100 --global-batch 64")
    assert request.start.data.seq_length == 8192


def test_a_teacher_is_named_as_a_model(capsys):
    words = ["--gpus 8xH200 --memory --time --global-batch 8", f"-- {SMALL} --micro-batch-size 1"]
    run(_options("--teacher llama3-8b", *words))
    assert ", teacher 1" in capsys.readouterr().out  # 15 GiB
    with pytest.raises(
        ConfigError, match="does not read checkpoints: name the teacher's network with"
    ):
        run(_options(*words, "--teacher-load out/teacher"))
    with pytest.raises(ConfigError, match="--teacher t5-base: the teacher must be a GPT"):
        run(_options("--teacher t5-base", *words))
    request = read_request(_options("--teacher llama3-8b", words[0], words[1]))
    limit = request.machine.memory
    search = Search(request.start, request.vocabulary, 8, request.machine, limit, teacher=None)
    alone, taught = search.plan_for(2), replace(search, teacher=request.teacher).plan_for(2)
    assert alone.teacher is None
    assert taught.teacher is not None
    assert len(taught.teacher.layers) == 32
    assert taught.teacher.embedding.vocabulary == alone.embedding.vocabulary


def test_the_fewest_and_the_most_chunks_of_a_stage_are_tried():
    network = SimpleNamespace(num_layers=48, decoder_num_layers=None)
    values = [schedule for schedule in _schedules(network, 2) if schedule]
    assert values[0] == {"parallel.pipeline_schedule": "zero-bubble"}
    chunks = "parallel.num_virtual_stages_per_pipeline_rank"
    assert values[1:] == [{chunks: 2}, {chunks: 3}, {chunks: 24}]


def test_layers_that_are_split_split_sequences_too():
    start = _search("--gpus 8xH100 --global-batch 64 --", SMALL)[0].start
    found = list(layouts(start, 8, 4))
    sizes = {values["parallel.tensor_model_parallel_size"] for values in found}
    assert sizes == {1, 2, 4}
    for values in found:
        is_split = values["parallel.tensor_model_parallel_size"] > 1
        assert values["parallel.sequence_parallel"] is is_split
        assert values["parallel.tp_comm_overlap"] is is_split


def test_times_on_other_hosts_are_reported_where_the_host_matters(capsys):
    words = "--gpus 2xH200 --memory --time -- --num-layers 24 --hidden-size 1024 --bf16"
    words += " --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
    words += " --micro-batch-size 8 --global-batch-size 64"
    run(_options(*words.split(), "--cuda-graph-impl", "none"))
    found = re.search(
        r"wait for the host .*: ([\d.]+) s on the fastest .*, ([\d.]+) s on the slow",
        capsys.readouterr().out,
    )
    assert found is not None
    # 0.2664 s on the usual host
    assert float(found[1]) < 0.2
    assert float(found[2]) > 0.45
    run(_options(*words.split(), "--cuda-graph-impl", "local"))
    assert "wait for the host" not in capsys.readouterr().out


def test_a_host_that_was_measured_has_no_range(tmp_path, capsys):
    path = tmp_path / "machine.json"
    path.write_text('{"launch": 50e-6}')
    words = f"--gpus 2xH200 --machine {path} --memory --time -- --num-layers 24 --hidden-size 1024"
    words += " --bf16 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
    words += " --micro-batch-size 8 --global-batch-size 64 --cuda-graph-impl none"
    run(_options(*words.split()))
    assert "wait for the host" not in capsys.readouterr().out


def test_the_timeline_shows_the_first_micro_batches(capsys):
    layout = "--pipeline-model-parallel-size 2"
    words = "--gpus 2xH200 --time --global-batch 64 --", SMALL, layout
    request, search = _search(*words)
    plan = predict_configured(request, memory=False, seconds=False)
    show_timeline(request, plan, search.plan_for(1), _options(*words))
    assert "the first 8 of 64 micro-batches\n" in capsys.readouterr().out


def test_a_layout_that_takes_exactly_the_time_given_is_found():
    _, search = _search("--gpus 2xH200 --global-batch 8 --", SMALL)
    best = search.best(1)[0].prediction.seconds
    (found,) = replace(search, seconds=best).best(1)
    assert found.prediction.seconds == best
    assert replace(search, seconds=0.999 * best).best(1) == []


def _plan(seconds, **parts):
    """Return a layout with a time and its parts, and the configuration of a small run."""
    words = f"{SMALL} --mock-data --lr 1 --train-iters 1 --micro-batch-size 1 --vocab-size 8"
    words += " --tokenizer-type NullTokenizer"
    config = parse_config(words.split(), world_size=1).config
    prediction = SimpleNamespace(
        seconds=seconds,
        parts=parts,
        memory=SimpleNamespace(total=3 * 2**29),
        tokens_per_second=1234.5,
        mfu=0.456,
    )
    return SimpleNamespace(config=config, prediction=prediction)


def test_layouts_are_compared_with_the_fastest():
    plans = [
        _plan(2.0, products=1.5, bubble=0.499, optimizer=0.001),
        _plan(2.5, products=1.6, bubble=0.899, optimizer=0.001),
        _plan(2.0, products=1.5, bubble=0.499, optimizer=0.001),
    ]
    assert reasons(plans).splitlines()[1:] == [
        "1 is the fastest. Its time: products 75.0%, bubble 24.9%.",
        "2 takes 25.0% more: bubble +20.0%, products +5.0%",
        "3 takes 0.0% more",
    ]
    title, first, *_ = table(plans, 1).splitlines()
    assert title.split()[-3:] == ["products", "bubble", "optimizer"]
    layout = "DP 1, micro-batch 1"
    assert first.split() == [*f"1 {layout} 1.5 2 1,234 45.6% 75.0% 24.9% 0.1%".split()]
    assert len({len(line) for line in table(plans, 1).splitlines()}) == 1


def test_the_interval_of_checkpoints_follows_from_the_failures_of_all_gpus():
    words = "--gpus 4xH100 --global-batch 8 --mtbf-hours 800 --checkpoint-seconds 2 --"
    options = _options(words, SMALL)
    request = read_request(options)
    text = goodput(request, _plan(10.0), options)
    assert text.startswith("failures: one every 200 h on average. Save every ")
    updates = int(re.search("Save every ([0-9,]+) updates", text)[1].replace(",", ""))
    daly = 60 * float(re.search("Daly ([0-9.]+)", text)[1])
    assert updates == pytest.approx(daly / 10, rel=0.02)
    assert "Save every 1 updates" in goodput(request, _plan(1e5), options)


def test_encoder_and_decoder_layers_are_pipeline_stages():
    """T5-base has 12 of each, so 64 GPUs may form 16 stages, but not 32."""
    request = read_request(_options("--model t5-base --gpus 64xH100 --global-batch 64"))
    found = {
        values["parallel.pipeline_model_parallel_size"] for values in layouts(request.start, 64, 8)
    }
    assert found == {1, 2, 4, 8, 16}


def test_micro_batches_divide_the_batch_and_have_a_limited_number_of_tokens():
    start = _search("--gpus 2xH100 --global-batch 96 --", SMALL)[0].start  # 256 tokens a sample
    found = {}
    for values in layouts(start, 2, 8):
        stages = values["parallel.pipeline_model_parallel_size"]
        found.setdefault(stages, set()).add(values["training.micro_batch_size"])
    assert found[2] == {1, 2, 4, 8, 16, 32}  # of 96 samples
    start = with_values(start, {"data.seq_length": 65_536})
    found = {values["training.micro_batch_size"] for values in layouts(start, 2, 8)}
    assert found == {1, 2}


@pytest.mark.parametrize(
    ("flags", "gpus", "told"),
    [
        ("", 1, "DP 1, micro-batch 1"),
        ("--tensor-model-parallel-size 2 --zero-stage 1", 4, "TP 2, DP 2, ZeRO 1, micro-batch 1"),
        ("--context-parallel-size 2 --cp-comm-type a2a", 2, "CP 2 a2a, DP 1, micro-batch 1"),
        ("--pipeline-model-parallel-size 2", 2, "PP 2, DP 1, micro-batch 1"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            2,
            "PP 2 x 2, DP 1, micro-batch 1",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
            2,
            "PP 2 zero-bubble, DP 1, micro-batch 1",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettttt|tttL",
            2,
            "PP 2, uneven, DP 1, micro-batch 1",
        ),
        (
            "--num-experts 4 --tensor-model-parallel-size 2 --expert-model-parallel-size 2",
            4,
            "TP 2, EP 2, ETP 2, DP 2, micro-batch 1",
        ),
        ("--recompute-activations", 1, "DP 1, micro-batch 1, selective recomputation"),
    ],
)
def test_a_layout_is_described(flags, gpus, told):
    words = f"{SMALL} --mock-data --lr 1 --train-iters 1 --micro-batch-size 1 --vocab-size 8"
    words += f" --tokenizer-type NullTokenizer --sequence-parallel {flags}"
    if "--tensor" not in flags:
        words = words.replace("--sequence-parallel", "")
    assert describe(parse_config(words.split(), world_size=gpus).config, gpus) == told


@pytest.mark.parametrize(
    ("gpus", "launcher"),
    [
        (4, "torchrun --nproc-per-node 4"),
        (8, "torchrun --nproc-per-node 8"),
        (16, "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29400"),
    ],
)
def test_a_command_has_a_process_for_each_gpu_of_a_node(gpus, launcher):
    request = read_request(_options(f"--gpus {gpus}xH100 --global-batch 16 --", SMALL))
    line = command(request, SimpleNamespace(values={}))
    assert line.startswith(f"{launcher} pretrain_gpt.py --")
