"""Adapters of one served model: each request gets the answer of its merged model alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.loading import open_root
from megatron.checkpoint.reader import NativeReader
from megatron.config.adapters import is_adapter_parameter
from megatron.config.generation import SamplesConfig, ServerConfig, sample_problems, server_problems
from megatron.config.parser import Program
from megatron.config.run import RunConfig
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError
from megatron.inference import build
from megatron.inference.adapters import add_to, open_adapters
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.engine import BatchEngine
from megatron.inference.executor import Executor
from megatron.inference.load import load_gpt, parse_generation
from megatron.inference.request import Request, RequestError, Token
from megatron.kernels.paged_attention import PagedAttention
from megatron.parallel.adapter_stack import AdapterStack
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from megatron.training.checkpointing import save_run
from tests.distributed import run_distributed
from tests.inference.toy import OPTIONS, drain, end_of, greedy, prompt_of, prompts
from tests.repository import ROOT
from tests.training.toy import build_toy
from tools import generate_samples_gpt

CPU = Device.cpu()
PEFT = ROOT / "tests" / "checkpoint" / "huggingface" / "peft"
VOCAB = 100
NEW = 50
NETWORK = """
    --num-layers 2 --swiglu --normalization RMSNorm --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention
    --num-query-groups 2 --hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 96
    --init-method-std 0.2 --save-interval 1
"""
# Different ranks, layers and kinds.
KINDS = {
    "all": "--lora-rank 4 --lora-alpha 8",
    "some": "--lora-rank 3 --use-rslora --lora-target-modules q_proj v_proj layers.1.mlp",
    "lengths": "--lora-rank 2 --use-dora",
}
PROMPTS = prompts(5, longest=20, vocab=VOCAB, seed=3)


@dataclass(frozen=True)
class Saved:
    """Folders of a base model and of adapters: PEFT's files for `some`, runs for the others."""

    base: str
    folders: dict[str, Path]
    run_of_some: Path

    @property
    def words(self) -> list[str]:
        return [f"{name}={folder}" for name, folder in self.folders.items()]


def _save_adapter(base: str, target: Path, flags: str, network: str = NETWORK) -> Path:
    """Save a run with random adapters."""
    words = f"{network} {flags} --load {base} --finetune --save {target}".split()
    run = build_toy(Layout.single(), words)
    generator = torch.Generator().manual_seed(len(flags))
    with torch.no_grad():
        for _, parameter in run.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.15)
    run.optimizer.reload_masters()
    save_run(run)
    return target


def _to_peft(source: Path, target: Path) -> Path:
    words = f"--model-type GPT --loader native --saver peft --load-dir {source}".split()
    assert util.main([*words, "--save-dir", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("adapters")
    base = str(folder / "base")
    save_run(build_toy(Layout.single(), f"{NETWORK} --save {base}".split()))
    runs = {name: _save_adapter(base, folder / name, flags) for name, flags in KINDS.items()}
    peft = _to_peft(runs["some"], folder / "peft")
    return Saved(base, {**runs, "some": peft}, runs["some"])


def _config(base: str, world_size: int = 1, *words: str) -> RunConfig:
    given = ["--load", base, *words]
    return parse_generation(given, world_size, Program(name="serve")).config


def _engine(
    base: str, words: Sequence[str], options: EngineOptions = OPTIONS, layout: Layout | None = None
) -> BatchEngine:
    layout = layout or Layout.single()
    sizes = f"""--tensor-model-parallel-size {layout.tensor.size}
        --pipeline-model-parallel-size {layout.pipeline.size}""".split()
    config = _config(base, layout.world.size, *sizes)
    opened = open_adapters(words, config)
    loaded = add_to(load_gpt(base, CPU, layout, config=config), opened, CPU)
    return build_engine(loaded, CPU, options)


Answers = dict[str, list[tuple[int, float]]]


def _answers(engine: BatchEngine, requests: Sequence[Request]) -> Answers:
    """Return tokens and their log probabilities by request."""
    events = drain(engine, requests)
    return {
        name: [(event.token, event.logprob or 0.0) for event in found if isinstance(event, Token)]
        for name, found in events.items()
    }


def _asked(adapters: int, new: int = NEW) -> list[Request]:
    """Return every prompt for every model, so that each step mixes them."""
    return [
        Request(f"{adapter} {number}", prompt, greedy(new, logprobs=True), adapter)
        for number, prompt in enumerate(PROMPTS)
        for adapter in range(adapters + 1)
    ]


@pytest.fixture(scope="module")
def alone(saved: Saved) -> Answers:
    """Return the answers of each merged model served by itself."""
    folders = [saved.base, *({**saved.folders, "some": saved.run_of_some}.values())]
    found: Answers = {}
    for adapter, folder in enumerate(folders):
        own = [request for request in _asked(3) if request.adapter == adapter]
        plain = [replace(request, adapter=0) for request in own]
        found |= _answers(_engine(str(folder), ()), plain)
    return found


def _assert_same(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for name, pairs in found.items():
        tokens, scores = zip(*pairs, strict=True)
        wanted, values = zip(*expected[name], strict=True)
        assert tokens == wanted, name
        assert scores == pytest.approx(values, abs=1e-5), name


def test_a_mixed_batch_gives_the_answers_of_each_merged_model(saved: Saved, alone: Answers) -> None:
    texts = {tuple(token for token, _ in alone[f"{adapter} 0"]) for adapter in range(4)}
    assert len(texts) == 4, "the models say different things"
    _assert_same(_answers(_engine(saved.base, saved.words), _asked(3)), alone)


def test_files_that_peft_wrote_give_the_results_of_peft() -> None:
    """Serve all adapters of `record_peft` at once, each batched with requests for the others."""
    record = json.loads((PEFT / "record.json").read_text())
    kinds = ["lora", "rslora", "dora", "some"]
    words = [f"{kind}={PEFT / kind}" for kind in kinds]
    flags = "--tokenizer-type NullTokenizer --vocab-size 31".split()
    config = _config(str(PEFT / "base"), 1, *flags)
    loaded = load_gpt(str(PEFT / "base"), CPU, config=config)
    engine = build_engine(add_to(loaded, open_adapters(words, config), CPU), CPU, OPTIONS)
    scored = greedy(0, prompt_logprobs=True, top_logprobs=32)
    requests = [
        Request(f"{kind} {row}", tuple(tokens), scored, adapter)
        for row, tokens in enumerate(record["tokens"])
        for adapter, kind in enumerate(kinds, 1)
    ]
    for name, events in drain(engine, requests).items():
        kind, row = name.split()
        expected = torch.tensor(record[kind]["logits"])[int(row)].log_softmax(-1)
        tops = prompt_of(events).top[::4]  # the positions that are recorded
        assert len(tops) == len(expected) == 3
        for top, scores in zip(tops, expected.tolist(), strict=True):
            found = [score for _, score in sorted(top)]
            assert found == pytest.approx(scores, abs=1e-5)


def test_preemption_and_chunks_change_nothing(saved: Saved, alone: Answers) -> None:
    small = EngineOptions(max_sequences=5, max_step_tokens=7, cache_tokens=160, block_size=4)
    engine = _engine(saved.base, saved.words, small)
    _assert_same(_answers(engine, _asked(3)), alone)
    assert engine.stats.preempted > 3


def _first(layout: Layout, base: str, words: Sequence[str]) -> Answers:
    return _answers(_engine(base, words, layout=layout), _asked(3, new=12))


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor", "pipeline"])
def test_layouts_give_the_same_answers(saved: Saved, alone: Answers, sizes: dict[str, int]) -> None:
    expected = {name: pairs[:12] for name, pairs in alone.items()}
    for found in run_distributed(2, _first, saved.base, saved.words, **sizes):
        _assert_same(found, expected)


def test_a_step_without_adapters_computes_none(
    saved: Saved, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(saved.base, saved.words)
    name = "megatron.parallel.adapter_stack.AdapterStack.add_product"
    monkeypatch.setattr(name, lambda *_: pytest.fail("an adapter is multiplied"))
    own = [request for request in _asked(3) if not request.adapter]
    _assert_same(_answers(engine, own), {request.id: alone[request.id] for request in own})


def test_recorded_steps_give_the_same_answers(
    saved: Saved, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder repeats the work, as in `test_graphs`."""
    read: set[int] = set()  # the addresses where a recording would read adapters
    forward = AdapterStack.project_down

    def project_down(stack: AdapterStack, x: torch.Tensor) -> tuple[torch.Tensor, object]:
        if stack._rows.of_tokens is not None and recording:
            read.add(stack._rows.of_tokens.data_ptr())
        return forward(stack, x)

    recording: list[bool] = []

    def record(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def again() -> torch.Tensor:
            recording.append(True)
            result = work()
            recording.pop()
            return result

        return again

    monkeypatch.setattr(AdapterStack, "project_down", project_down)
    monkeypatch.setattr(PagedAttention, "can_capture", True)
    monkeypatch.setattr(build.Device, "recorder", lambda self: record)
    monkeypatch.setattr(build, "is_asynchronous", lambda device: True)
    engine = _engine(saved.base, saved.words)
    _assert_same(_answers(engine, _asked(3)), alone)
    own = [request for request in _asked(3) if not request.adapter]
    _assert_same(_answers(engine, own), {request.id: alone[request.id] for request in own})
    assert len(read) == 1
    assert isinstance(engine.executor, Executor)
    assert engine.executor.graphs is not None
    kinds = {is_adapted for _, _, is_adapted in engine.executor.graphs._recordings}
    assert kinds == {True, False}


def test_adapters_share_no_prefix(saved: Saved) -> None:
    engine = _engine(saved.base, saved.words)
    prompt = (PROMPTS[0] * 13)[:13]
    cached = {}
    for turn in range(2):
        for adapter in range(3):
            request = Request("a", prompt, greedy(2), adapter)
            cached[turn, adapter] = end_of(drain(engine, [request])["a"]).cached_tokens
    assert cached == {(turn, adapter): 12 * turn for turn in range(2) for adapter in range(3)}


def test_an_unknown_adapter_is_refused(saved: Saved) -> None:
    engine = _engine(saved.base, saved.words)
    with pytest.raises(RequestError, match=r"adapter 4: give 0 \(the base model\) to 3"):
        engine.add(Request("a", (1,), greedy(1), 4))


def test_samples_are_those_of_the_adapter(
    saved: Saved, alone: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = " ".join(map(str, PROMPTS[0]))
    words = ["--load", saved.base, "--prompt", prompt, "--greedy", "--out-seq-length", "5"]
    adapter = ["--serve-adapter", f"mine={saved.folders['all']}"]
    assert generate_samples_gpt.main([*words, *adapter]) == 0
    said = capsys.readouterr().out.split()[len(PROMPTS[0]) :]
    assert [*map(int, said)] == [token for token, _ in alone["1 0"][:5]]


def _refused(base: str, folder: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_adapters([f"mine={folder}"], _config(base))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--serve-adapter mine={folder}: ")
    return str(caught.value)


def test_folders_that_do_not_fit_are_refused_before_the_model_is_loaded(
    saved: Saved, tmp_path: Path
) -> None:
    assert "there is no such folder" in _refused(saved.base, tmp_path / "nowhere")
    assert "there is no such folder" in _refused(saved.base, tmp_path / ("x" * 300))
    assert "adapter_config.json, or the --save folder of" in _refused(saved.base, tmp_path)
    whole = _refused(saved.base, saved.base)
    assert "a whole model without adapters: serve it with --load" in whole
    # The same shapes, different weights.
    other = str(tmp_path / "other")
    save_run(build_toy(Layout.single(), f"{NETWORK} --save {other} --seed 5".split()))
    foreign = _refused(other, saved.folders["all"])
    assert "trained on a different model (embedding" in foreign
    assert "serve the model that it was trained on with --load" in foreign
    # Different shapes, from a run and from PEFT's files.
    wide = f"{NETWORK} --hidden-size 48"
    save_run(build_toy(Layout.single(), f"{wide} --save {tmp_path / 'wide'}".split()))
    told = "for a different network (--hidden-size is 48 here and 32 in the checkpoint): serve the"
    assert told in _refused(str(tmp_path / "wide"), saved.folders["all"])
    assert "has shape [3, 32], but it is [3, 48]" in _refused(
        str(tmp_path / "wide"), saved.folders["some"]
    )
    damaged = tmp_path / "damaged"
    shutil.copytree(saved.folders["some"], damaged)
    with (damaged / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(100)
    told = _refused(saved.base, damaged)
    assert "adapter_model.safetensors: not a safetensors file" in told
    assert "name modules" not in told
    # PEFT's files name modules that this network does not have: GPT-2's are `c_attn` and others.
    save_run(build_toy(Layout.single(), f"--save {tmp_path / 'gpt2'} --save-interval 1".split()))
    fused = _refused(str(tmp_path / "gpt2"), saved.folders["some"])
    assert "does not belong to this network's adapters: serve the model that it" in fused
    shallow = f"{NETWORK} --num-layers 1"
    save_run(build_toy(Layout.single(), f"{shallow} --save {tmp_path / 'shallow'}".split()))
    deep = _refused(str(tmp_path / "shallow"), saved.folders["some"])
    assert "layers.1" in deep
    assert "serve the model that it was trained on" in deep


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"r": "many"}, "r is many, not a positive integer"),
        ({"r": 2.5}, "r is 2.5, not a positive integer"),
        ({"lora_alpha": 0}, "lora_alpha is 0, not a positive number"),
        ({"r": 5}, r"has shape \[3, 32\], but it is \[5, 32\] here"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern .* is not supported"),
    ],
)
def test_settings_of_peft_that_do_not_fit_are_refused(
    saved: Saved, tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    folder = shutil.copytree(saved.folders["some"], tmp_path / "copy")
    said = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**said, **changes}))
    with pytest.raises(CheckpointError, match=told):
        open_adapters([f"mine={folder}"], _config(saved.base))


def test_ranks_that_divide_query_groups_are_refused(saved: Saved) -> None:
    config = _config(saved.base, 4, "--tensor-model-parallel-size", "4")
    with pytest.raises(
        ConfigError, match="2 query groups, which would be split: use at most 2, or merge"
    ):
        open_adapters(saved.words, config)


def test_a_damaged_adapter_is_refused(saved: Saved, tmp_path: Path) -> None:
    folder = shutil.copytree(saved.folders["all"], tmp_path / "copy")
    reader = open_root(folder, verify=False)
    assert isinstance(reader, NativeReader)
    name = next(name for name in reader.names() if is_adapter_parameter(name))
    (piece,) = reader.manifest.tensors[name].pieces
    path = reader.path / piece.file
    data = bytearray(path.read_bytes())
    data[piece.start] ^= 1
    path.write_bytes(data)
    told = _refused(saved.base, folder)
    assert f"damaged: {name} does not match its digest" in told


def _other_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda held: held.clear(), "has no tensors: export the adapter again"),
        (lambda held: held.popitem(), "is missing: serve the model that it was trained on"),
        (
            lambda held: held.update({"base_model.model.lm_head.weight": torch.zeros(2)}),
            "lm_head.weight does not belong to this network's adapters: serve the model",
        ),
    ],
    ids=["nothing", "half", "more"],
)
def test_tensors_of_peft_that_do_not_fit_are_refused(
    saved: Saved, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], told: str
) -> None:
    folder = shutil.copytree(saved.folders["some"], tmp_path / "copy")
    _other_tensors(folder, change)
    assert told in _refused(saved.base, folder)


def test_an_adapter_that_is_not_finite_is_refused(saved: Saved, tmp_path: Path) -> None:
    words = f"{NETWORK} {KINDS['all']} --load {saved.base} --finetune --save {tmp_path}".split()
    run = build_toy(Layout.single(), words)
    with torch.no_grad():
        next(p for n, p in run.named_parameters() if n.endswith(".b")).fill_(torch.inf)
    save_run(run)
    with pytest.raises(CheckpointError, match="values that are not finite: export it again"):
        _engine(saved.base, [f"mine={tmp_path}"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("runs/sql",), "--serve-adapter runs/sql: give NAME=FOLDER"),
        (("=runs/sql",), "--serve-adapter =runs/sql: give NAME=FOLDER"),
        (("a=x", "a=y"), "--serve-adapter a=y: a is given twice: choose another name"),
        ((), "--serve-adapter has no value"),
    ],
)
def test_values_that_name_nothing_are_refused(words: tuple[str, ...], told: str) -> None:
    (problem,) = server_problems(ServerConfig(serve_adapter=words))
    assert problem.startswith(told)


def test_samples_take_a_single_adapter() -> None:
    samples = SamplesConfig(prompt="x", serve_adapter=("a=x", "b=y"))
    assert "give one, or start a server" in sample_problems(samples)[0]


def test_a_repeated_flag_adds_adapters(saved: Saved) -> None:
    program = Program(name="serve", extra=(ServerConfig,), check_extra=server_problems)
    words = ["--load", saved.base, "--serve-adapter", "a=x", "b=y", "--serve-adapter", "c=z"]
    (server,) = parse_generation(words, 1, program).extra
    assert server.serve_adapter == ("a=x", "b=y", "c=z")
    renamed = ["--load", saved.base, "--lora-modules", "a=x"]
    (server,) = parse_generation(renamed, 1, program).extra
    assert server.serve_adapter == ("a=x",)


_MIXTURE = f"{NETWORK} --num-experts 4 --moe-router-topk 2"
_OF_EXPERTS = {
    "all": "--lora-rank 4 --lora-alpha 8",
    "some": "--lora-rank 3 --use-rslora --lora-target-modules layers.1.mlp.experts.up linear_proj",
    "dense": "--lora-rank 2 --use-dora --lora-target-modules linear_qkv",
}


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_adapters_of_experts_are_chosen_per_request(sizes: dict[str, int], tmp_path: Path) -> None:
    """A mixed batch gets each merged model's own answers, and adapters do not share prefixes."""
    base = str(tmp_path / "base")
    save_run(build_toy(Layout.single(), f"{_MIXTURE} --save {base}".split()))
    folders = {
        name: _save_adapter(base, tmp_path / name, flags, _MIXTURE)
        for name, flags in _OF_EXPERTS.items()
    }
    expected: Answers = {}
    for adapter, folder in enumerate([base, *folders.values()]):
        own = [replace(one, adapter=0) for one in _asked(3, new=12) if one.adapter == adapter]
        expected |= _answers(_engine(str(folder), ()), own)
    assert len({tuple(token for token, _ in expected[f"{a} 0"]) for a in range(4)}) == 4
    folders["some"] = _to_peft(folders["some"], tmp_path / "peft")
    words = [f"{name}={folder}" for name, folder in folders.items()]
    for found in run_distributed(2 if sizes else 1, _first, base, words, **sizes):
        _assert_same(found, expected)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_files_of_adapters_of_experts_that_peft_wrote_give_the_results_of_peft(kind: str) -> None:
    record = json.loads((PEFT / "record.json").read_text())
    folder = str(PEFT / f"base_{kind}")
    config = _config(folder, 1, *"--tokenizer-type NullTokenizer --vocab-size 31".split())
    loaded = load_gpt(folder, CPU, config=config)
    opened = open_adapters([f"mine={PEFT / kind}"], config)
    engine = build_engine(add_to(loaded, opened, CPU), CPU, OPTIONS)
    scored = greedy(0, prompt_logprobs=True, top_logprobs=32)
    for row, tokens in enumerate(record["tokens"]):
        events = drain(
            engine, [Request("a", tuple(tokens), scored, 1), Request("b", (3, 4), scored)]
        )
        expected = torch.tensor(record[kind]["logits"])[row].log_softmax(-1)
        for top, scores in zip(prompt_of(events["a"]).top[::4], expected.tolist(), strict=True):
            assert [score for _, score in sorted(top)] == pytest.approx(scores, abs=1e-5)
