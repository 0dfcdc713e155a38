"""Training adapters (LoRA): layouts, resuming, and mistakes."""

from functools import cache

import pytest
import torch

from megatron.config.adapters import is_adapter_parameter
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.load import open_existing
from megatron.kernels.grouped import Grouping
from megatron.models.adapters import count_adapters
from megatron.models.arithmetic import flops_per_token
from megatron.parallel.layout import Layout
from megatron.planner.memory import estimate_memory
from tests.config.command import problems
from tests.distributed import run_distributed, runner_of
from tests.training.toy import build_toy, fingerprint, losses_and_norms_of, train_toy

NETWORK = """
    --num-layers 4 --hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --eval-iters 0
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
    --train-iters 4
"""
LORA = NETWORK + "--lora-rank 4 --lora-alpha 8 --lr 3e-2 "


@cache
def _whole(more):
    """Return the losses and norms of one process."""
    return losses_and_norms_of(Layout.single(), LORA + more)


def test_only_adapters_are_trained_and_the_model_starts_as_it_was():
    plain = build_toy(Layout.single(), NETWORK.split())
    weights = {name: p.detach().clone() for name, p in plain.named_parameters()}
    recorder, run = train_toy(Layout.single(), LORA.split())
    begun, _ = train_toy(Layout.single(), NETWORK.split())
    assert recorder.values("lm loss")[0] == begun.values("lm loss")[0]
    trained = {name: p for name, p in run.named_parameters() if name not in weights}
    assert all(map(is_adapter_parameter, trained))
    states = {name.rpartition(".")[0] for name in run.optimizer.named_tensors()}
    assert set(trained) == states
    assert len(trained) == 4 * 7 * 2
    assert all(p.equal(weights[n]) for n, p in run.named_parameters() if n in weights)
    assert all(p.any() for p in trained.values())


_TP = "--tensor-model-parallel-size 2"
_PP = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("more", "flags"),
    [
        ("", "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather"),
        ("--use-dora", "--zero-stage 2"),
        ("", "--zero-stage 3"),
        ("--use-dora", "--zero-stage 3"),
        ("", _TP),
        ("--use-dora", f"{_TP} --sequence-parallel"),
        ("", f"{_TP} --sequence-parallel --tp-comm-overlap"),
        ("", "--context-parallel-size 2"),
        ("--use-dora", _PP),
        ("", f"{_PP} --pipeline-schedule zero-bubble"),
    ],
)
def test_layouts_equal_one_process(more, flags):
    losses, norms = _whole(more)
    sizes = {a: 2 for a in ("tensor", "context", "pipeline") if f"--{a}" in flags}
    for ours in runner_of(flags)(2, losses_and_norms_of, f"{LORA} {more} {flags}", **sizes):
        assert ours[0] == pytest.approx(losses, rel=1e-5)
        assert ours[1] == pytest.approx(norms, rel=1e-4)


def test_shards_in_bf16_train_as_one_process():
    """The frozen weights are fp32 shards, and are rounded when gathered."""
    losses, norms = _whole("--bf16")
    for ours in run_distributed(2, losses_and_norms_of, f"{LORA} --bf16 --zero-stage 3"):
        assert ours[0] == pytest.approx(losses, rel=1e-4)
        assert ours[1] == pytest.approx(norms, rel=1e-3)


@pytest.mark.parametrize("more", ["--lora-dropout 0.2", "--bf16 --use-dora"])
def test_resuming_is_exact(tmp_path, more):
    flags = [*LORA.split(), *more.split(), "--save", str(tmp_path), "--save-interval", "2"]
    straight = fingerprint(train_toy(Layout.single(), flags)[1])
    flags += ["--load", str(tmp_path), "--ckpt-step", "2"]
    assert fingerprint(train_toy(Layout.single(), flags)[1]) == straight


def test_memory_and_work_are_those_of_the_adapters():
    run = build_toy(Layout.single(), [*LORA.split(), "--bf16"])
    trained = sum(p.numel() for p in run.parameters() if p.requires_grad)
    assert count_adapters(run.config.model, run.plan.embedding.vocabulary) == trained
    states = sum(tensor.nbytes for tensor, _ in run.optimizer.named_tensors().values())
    estimate = estimate_memory(run.config, run.plan, run.layout, 1)
    assert estimate.optimizer == pytest.approx(states, rel=1e-3)
    assert estimate.gradients == pytest.approx(4 * trained, rel=1e-3)
    whole, frozen = (flops_per_token(run.plan, 16, trains_adapters=x) for x in (False, True))
    assert whole * 2 / 3 < frozen < whole * 0.75


def test_adapters_of_a_trained_model(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "4"]
    _, plain = train_toy(Layout.single(), [*NETWORK.split(), *save])
    flags = [*LORA.split(), "--use-dora", "--load", str(tmp_path)]
    run = build_toy(Layout.single(), [*flags, "--finetune"])
    here = dict(run.named_parameters())
    assert all(here[name].equal(p) for name, p in plain.named_parameters())
    up = here["layers.0.mlp.up.weight"][1].detach()
    magnitude = here["layers.0.mlp.up.adapter.up.magnitude"]
    torch.testing.assert_close(magnitude, up.norm(dim=1))
    for masters in run.optimizer.named_tensors():
        assert is_adapter_parameter(masters)
    with pytest.raises(
        CheckpointError, match="(?s)--lora-rank is 4 here.*--finetune adds adapters"
    ):
        build_toy(Layout.single(), flags)


def test_dropout_is_of_the_adapters_only():
    losses, _ = _whole("")
    dropped, _ = losses_and_norms_of(Layout.single(), LORA + "--lora-dropout 0.5")
    assert dropped[0] == losses[0]  # B is zero
    assert dropped[1:] != losses[1:]


def test_layers_without_adapters():
    flags = LORA + "--lora-target-modules q_proj layers.[12].mlp.up.gate *.layers.3.*.linear_fc2"
    run = build_toy(Layout.single(), flags.split())
    made = {n.removesuffix(".a") for n, p in run.named_parameters() if n.endswith(".a")}
    queries = {f"layers.{i}.attention.qkv.adapter.query" for i in range(4)}
    gates = {f"layers.{i}.mlp.up.adapter.gate" for i in (1, 2)}
    assert made == queries | gates | {"layers.3.mlp.down.adapter.weight"}


def test_a_mixture_has_adapters_outside_its_experts():
    mixture = "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 48"
    flags = f"{LORA} {mixture} --lora-target-modules linear_qkv *.mlp.shared"
    begun = {n: p.detach().clone() for n, p in _build(flags).named_parameters()}
    _, run = train_toy(Layout.single(), flags.split())
    changed = {n for n, p in run.named_parameters() if not p.equal(begun[n])}
    assert changed == {n for n in begun if is_adapter_parameter(n)}
    assert "layers.0.mlp.shared.up.adapter.gate.b" in changed


MIXTURE = "--num-experts 4 --moe-router-topk 2 "


def test_experts_have_adapters():
    flags = LORA + MIXTURE
    begun = {n: p.detach().clone() for n, p in _build(flags).named_parameters()}
    recorder, run = train_toy(Layout.single(), flags.split())
    plain, _ = train_toy(Layout.single(), (NETWORK + MIXTURE).split())
    assert recorder.values("lm loss")[0] == plain.values("lm loss")[0]
    changed = {n for n, p in run.named_parameters() if not p.equal(begun[n])}
    assert changed == {n for n in begun if is_adapter_parameter(n)}
    shapes = {n: tuple(p.shape) for n, p in run.named_parameters()}
    up, down = (f"layers.0.mlp.experts.{name}" for name in ("up", "down"))
    *outputs, inputs = shapes[f"{up}.weight"]
    assert shapes[f"{up}.adapter.weight.a"] == (4, 4, inputs)
    assert shapes[f"{up}.adapter.weight.b"] == (*outputs, 4)
    trained = sum(p.numel() for p in run.parameters() if p.requires_grad)
    assert count_adapters(run.config.model, run.plan.embedding.vocabulary) == trained
    # The result is as if the weights themselves were different.
    layer = run.parts[0].layers["0"].mlp.experts.up
    device = layer.weight.device
    ends = torch.tensor([1, 3, 3, 6], dtype=torch.int32, device=device)
    rows, numbers = torch.randn(6, inputs, device=device), torch.arange(6, device=device)
    grouping = Grouping(numbers, numbers[:, None], ends)
    adapted = layer(rows, grouping)
    layer.adapter._padding = 4  # needed by a GPU's grouped products
    torch.testing.assert_close(layer(rows, grouping), adapted, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        layer.weight.copy_(layer.adapter.merged(layer.weight))
    layer.adapter = None
    torch.testing.assert_close(adapted, layer(rows, grouping))


@pytest.mark.parametrize(
    "flags",
    [
        "--expert-model-parallel-size 2",
        f"{_TP} --sequence-parallel",
        f"{_TP} --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        "--zero-stage 3",
        "--zero-stage 1 --expert-model-parallel-size 2",
        _PP,
    ],
)
def test_experts_in_every_layout(flags):
    losses, norms = _whole(MIXTURE)
    sizes = {"tensor": 2} if _TP in flags else {"pipeline": 2} if _PP in flags else {}
    sizes |= {"expert": 2} if "--expert-model" in flags else {}
    sizes |= {"expert_tensor": 1} if "--expert-tensor" in flags else {}
    for ours in runner_of(flags)(2, losses_and_norms_of, f"{LORA} {MIXTURE} {flags}", **sizes):
        assert ours[0] == pytest.approx(losses, rel=1e-5)
        assert ours[1] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("flag", ["--use-dora", "--lora-dropout 0.1"])
def test_what_adapters_of_experts_cannot_have(flag):
    with pytest.raises(ConfigError, match=f"^{flag}: adapters of experts"):
        _build(f"{LORA} {MIXTURE} {flag}")
    _build(f"{LORA} {MIXTURE} {flag} --lora-target-modules *.attention")


def _build(flags):
    return build_toy(Layout.single(), flags.split())


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--lora-target-modules k_porj", "k_porj matches no layer: try k_proj"),
        ("--lora-target-modules layers.9.mlp", r"layers.9.mlp matches no layer: try layers.\*.mlp"),
        ("--freeze *.adapter", "--freeze .*: all weights are frozen"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(flags, told):
    with pytest.raises(ConfigError, match=told):
        build_toy(Layout.single(), (LORA + flags).split())


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--lora-rank 0", "--lora-rank 0: must be at least 1"),
        ("--bf16 --fp8-format e4m3", "--lora-rank 4: FP8 training does not support frozen weights"),
        ("--ckpt-format legacy --save x", "--lora-rank 4: --ckpt-format legacy"),
    ],
)
def test_what_adapters_cannot_be_combined_with(flags, told):
    lines = problems("--lora-rank 4", flags, world_size=1)
    assert any(line.startswith(told) for line in lines), lines


@pytest.mark.parametrize(
    "flags", ["--use-dora", "--lora-alpha 8", "--lora-target-modules q_proj", "--load-adapter x"]
)
def test_without_a_rank_nothing_is_trained_by_mistake(flags):
    (line,) = problems(flags, world_size=1)
    assert line.startswith(f"{flags} requires --lora-rank")


OTHERS = {
    "bert": "--hidden-dropout 0 --attention-dropout 0 --lr 1e-2",
    "t5": "--hidden-dropout 0 --attention-dropout 0 --lr 1e-2",
}
_PARTS = {"bert": 2 * (3 + 1 + 1 + 1), "t5": 2 * (3 + 1 + 1 + 1) + 2 * (3 + 1 + 1 + 2 + 1 + 1 + 1)}


def _train_other(layout, kind, flags):
    words = [*OTHERS[kind].split(), *_RANK.split(), *flags.split()]
    recorder, run = train_toy(layout, words, kind)
    return recorder.values("lm loss"), recorder.values("grad-norm"), run


_RANK = "--lora-rank 4 --lora-alpha 8"


@cache
def _other(kind):
    return _train_other(Layout.single(), kind, "")


@pytest.mark.parametrize("kind", OTHERS)
def test_only_adapters_of_a_bert_and_a_t5_are_trained(kind):
    begun = build_toy(Layout.single(), [*OTHERS[kind].split(), *_RANK.split()], kind)
    before = {name: p.detach().clone() for name, p in begun.named_parameters()}
    plain, _ = train_toy(Layout.single(), OTHERS[kind].split(), kind)
    losses, _, run = _other(kind)
    assert losses[0] == pytest.approx(plain.values("lm loss")[0], rel=1e-6)
    changed = {name for name, p in run.named_parameters() if not p.equal(before[name])}
    assert changed == {name for name in before if is_adapter_parameter(name)}
    assert len({name.rpartition(".")[0] for name in changed}) == _PARTS[kind]
    assert count_adapters(run.config.model, run.plan.embedding.vocabulary) == sum(
        before[name].numel() for name in changed
    )
    states = sum(tensor.nbytes for tensor, _ in run.optimizer.named_tensors().values())
    estimate = estimate_memory(run.config, run.plan, run.layout, 1)
    assert estimate.optimizer == pytest.approx(states, rel=1e-3)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_bert_and_a_t5_are_saved_resumed_and_merged(kind, tmp_path):
    words = [*OTHERS[kind].split(), *_RANK.split(), "--save", str(tmp_path), "--save-interval", "3"]
    _, straight = train_toy(Layout.single(), words, kind)
    again = [*words, "--load", str(tmp_path), "--ckpt-step", "3"]
    assert fingerprint(train_toy(Layout.single(), again, kind)[1]) == fingerprint(straight)
    reader = open_existing(str(tmp_path))
    assert not any(map(is_adapter_parameter, reader.names()))
    parameters = {name: p.detach() for name, p in straight.named_parameters()}
    stack = "decoder." if kind == "t5" else ""
    name = f"{stack}layers.1.{'cross_attention.output' if kind == 't5' else 'mlp.down'}"
    a, b = (parameters[f"{name}.adapter.weight.{factor}"] for factor in "ab")
    merged = parameters[f"{name}.weight"] + 8 / 4 * b @ a
    assert b.any()
    torch.testing.assert_close(reader.read(f"model.{name}.weight"), merged.cpu())


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("flags", [f"{_TP} --sequence-parallel", _PP, "--use-dora --zero-stage 3"])
def test_layouts_of_a_bert_and_a_t5_equal_one_process(kind, flags):
    expected = _other(kind)
    if "dora" in flags:
        expected = _train_other(Layout.single(), kind, "--use-dora")
    sizes = {axis: 2 for axis in ("tensor", "pipeline") if f"--{axis}" in flags}
    for ours in runner_of(flags)(2, _losses_of_other, kind, flags, **sizes):
        assert ours[0] == pytest.approx(expected[0], rel=1e-5)
        assert ours[1] == pytest.approx(expected[1], rel=1e-4)


def _losses_of_other(layout, kind, flags):
    return _train_other(layout, kind, flags)[:2]
