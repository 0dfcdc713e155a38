"""Adapters of latent attention, output gates, mixers with states, output layers and routers."""

from functools import cache

import pytest
import torch

from megatron.config.adapters import is_adapter_parameter
from megatron.errors import ConfigError
from megatron.inference.load import open_existing
from megatron.models.adapters import count_adapters
from megatron.parallel.layout import Layout
from megatron.parallel.quantized import PackedWeight
from megatron.planner.memory import estimate_memory
from tests.distributed import runner_of
from tests.training.toy import build_toy, fingerprint, losses_and_norms_of, train_toy

_ALIKE = """
    --hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --eval-iters 0 --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --train-iters 4 --lr 3e-2
"""
NETWORKS = {
    "latent": f"""{_ALIKE} --num-layers 2 --multi-latent-attention --q-lora-rank 24
        --kv-lora-rank 20 --qk-head-dim 12 --qk-pos-emb-head-dim 6 --v-head-dim 14 --qk-layernorm
        --position-embedding-type rope""",
    "delta": f"""{_ALIKE} --num-layers 2 --experimental-attention-variant gated_delta_net
        --linear-attention-freq 2 --linear-conv-kernel-dim 3 --linear-key-head-dim 5
        --linear-value-head-dim 7 --linear-num-key-heads 4 --linear-num-value-heads 8
        --attention-output-gate --group-query-attention --num-query-groups 2 --qk-layernorm
        --position-embedding-type rope --num-experts 4 --moe-router-topk 2""",
    "mamba": f"""{_ALIKE} --num-layers 4 --hybrid-layer-pattern M*-M --mamba-state-dim 6
        --mamba-head-dim 8 --mamba-num-groups 2 --position-embedding-type none""",
}
_EVERY = "--lora-rank 4 --lora-alpha 8 --lora-target-modules all-linear output_layer"
ADAPTERS = {
    "latent": f"{_EVERY} --use-dora",
    "delta": f"{_EVERY} router",
    "mamba": f"{_EVERY} --use-rslora",
}
# The adapted parts of each layer.
_MLP = {"mlp.up.gate", "mlp.up.up", "mlp.down.weight"}
_OUTPUT = "attention.output.weight"
_FULL = {"attention.qkv.query", "attention.qkv.key", "attention.qkv.value", _OUTPUT}
_MIXTURE = {"mlp.router.weight", "mlp.experts.up.weight", "mlp.experts.down.weight"}
_LATENT = {
    f"attention.{name}.weight"
    for name in ("query_down", "query_up", "latent_down", "latent_up", "output")
}
_DELTA = {"attention.input.qkvz", "attention.input.ba", _OUTPUT}
_MAMBA = {"attention.input.weight", _OUTPUT}
PARTS = {
    "latent": [_LATENT | _MLP, _LATENT | _MLP],
    "delta": [_DELTA | _MIXTURE, _FULL | _MIXTURE],
    "mamba": [_MAMBA, _FULL, _MLP, _MAMBA],
}


@cache
def _whole(network):
    return train_toy(Layout.single(), f"{NETWORKS[network]} {ADAPTERS[network]}".split())


def _adapted(run):
    return {n.removesuffix(".a") for n, _ in run.named_parameters() if n.endswith(".a")}


@pytest.mark.parametrize("network", NETWORKS)
def test_every_linear_layer_has_an_adapter_and_only_adapters_are_trained(network):
    begun = build_toy(Layout.single(), f"{NETWORKS[network]} {ADAPTERS[network]}".split())
    before = {name: p.detach().clone() for name, p in begun.named_parameters()}
    recorder, run = _whole(network)
    plain, _ = train_toy(Layout.single(), NETWORKS[network].split())
    assert recorder.values("lm loss")[0] == pytest.approx(plain.values("lm loss")[0], rel=1e-6)
    expected = {"output.adapter.weight"}
    for layer, parts in enumerate(PARTS[network]):
        split = (part.rpartition(".") for part in parts)
        expected |= {f"layers.{layer}.{site}.adapter.{name}" for site, _, name in split}
    assert _adapted(run) == expected
    changed = {n for n, p in run.named_parameters() if not p.equal(before[n])}
    assert changed == {n for n in before if is_adapter_parameter(n)}
    trained = sum(before[name].numel() for name in changed)
    assert count_adapters(run.config.model, run.plan.embedding.vocabulary) == trained
    states = sum(tensor.nbytes for tensor, _ in run.optimizer.named_tensors().values())
    estimate = estimate_memory(run.config, run.plan, run.layout, 1)
    assert estimate.optimizer == pytest.approx(states, rel=1e-3)


def _train_all(layout, flags, networks):
    return [
        losses_and_norms_of(layout, f"{NETWORKS[one]} {ADAPTERS[one]} {flags}") for one in networks
    ]


@pytest.mark.parametrize(
    ("flags", "networks"),
    [
        ("--tensor-model-parallel-size 2", ("latent", "mamba")),
        ("--tensor-model-parallel-size 2 --sequence-parallel", NETWORKS),
        ("--pipeline-model-parallel-size 2", NETWORKS),
        ("--context-parallel-size 2", NETWORKS),
        ("--expert-model-parallel-size 2 --zero-stage 1", ("delta",)),
        ("--zero-stage 3", NETWORKS),
    ],
)
def test_layouts_equal_one_process(flags, networks):
    axes = ("tensor", "context", "pipeline", "expert")
    sizes = {axis: 2 for axis in axes if f"--{axis}" in flags}
    for ours in runner_of(flags)(2, _train_all, flags, tuple(networks), **sizes):
        for network, (losses, norms) in zip(networks, ours, strict=True):
            recorder, _ = _whole(network)
            assert losses == pytest.approx(recorder.values("lm loss"), rel=1e-5), network
            assert norms == pytest.approx(recorder.values("grad-norm"), rel=1e-4), network


@pytest.mark.parametrize("network", NETWORKS)
def test_runs_are_resumed_and_their_adapters_merged(network, tmp_path):
    words = [*NETWORKS[network].split(), *ADAPTERS[network].split()]
    words += ["--save", str(tmp_path), "--save-interval", "2"]
    straight = fingerprint(train_toy(Layout.single(), words)[1])
    _, run = train_toy(Layout.single(), [*words, "--load", str(tmp_path), "--ckpt-step", "2"])
    assert fingerprint(run) == straight
    reader = open_existing(str(tmp_path))
    assert not any(map(is_adapter_parameter, reader.names()))
    tokens = torch.arange(24).view(2, 12)
    model = run.parts[0].eval()
    with torch.no_grad():
        adapted = model(tokens)
        for name, parameter in model.named_parameters():
            if is_adapter_parameter(name):
                parameter.zero_()  # DoRA's magnitudes need the merged rows' lengths
            else:
                parameter.copy_(reader.read(f"model.{name}"))
    for module in model.modules():
        if getattr(module, "adapter", None) is not None:
            module.adapter = None
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), adapted, rtol=0, atol=1e-5)


def test_layers_of_multi_token_prediction_are_frozen():
    words = f"{NETWORKS['latent']} --mtp-num-layers 1 {ADAPTERS['latent']}".split()
    begun = build_toy(Layout.single(), words)
    before = {name: p.detach().clone() for name, p in begun.named_parameters()}
    _, run = train_toy(Layout.single(), words)
    changed = {n for n, p in run.named_parameters() if not p.equal(before[n])}
    assert changed == {n for n in before if is_adapter_parameter(n)}
    assert any(name.startswith("mtp.0.") for name in before)
    assert not any(name.startswith("mtp.0.") for name in changed)


@pytest.mark.parametrize("network", NETWORKS)
def test_frozen_weights_of_every_mixer_are_packed(network):
    sizes = "--kv-lora-rank 64 --q-lora-rank 64 --v-head-dim 16 --linear-value-head-dim 16"
    pairs = (pair for pair in sizes.split(" --") if pair.split()[0].strip("-") in NETWORKS[network])
    packed = "--hidden-size 64 --ffn-hidden-size 128 --bf16 --frozen-weights-dtype nf4"
    more = " ".join(f"--{pair.removeprefix('--')}" for pair in pairs)
    words = f"{NETWORKS[network]} {packed} {more} {ADAPTERS[network]}".split()
    recorder, run = train_toy(Layout.single(), words)
    held = {
        n.removesuffix(".weight") for n, p in run.named_parameters() if isinstance(p, PackedWeight)
    }
    adapted = {name.partition(".adapter")[0] for name in _adapted(run)}
    assert {name for name in adapted - held if "router" not in name} == {"output"}
    losses = recorder.values("lm loss")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("network", "told"),
    [
        ("latent", "--kv-lora-rank 20 is not a multiple of 64"),
        ("delta", "--linear-num-value-heads x --linear-value-head-dim 56 is not a multiple"),
        ("mamba", "--mamba-num-heads x --mamba-head-dim 96 is not a multiple of 64"),
    ],
)
def test_packed_inputs_are_multiples_of_a_block(network, told):
    words = f"{NETWORKS[network]} --lora-rank 2 --frozen-weights-dtype nf4".split()
    words += ["--mamba-num-heads", "12"] * (network == "mamba")
    with pytest.raises(ConfigError, match=told):
        build_toy(Layout.single(), words)


@pytest.mark.parametrize(
    ("network", "targets", "adapted"),
    [
        ("latent", "q_b_proj kv_b_proj", {"query_up.adapter.weight", "latent_up.adapter.weight"}),
        ("latent", "linear_kv_down_proj", {"latent_down.adapter.weight"}),
        ("delta", "in_proj_ba", {"input.adapter.ba"}),
        ("delta", "in_proj", {"input.adapter.ba", "input.adapter.qkvz"}),
        ("delta", "q_proj", {"qkv.adapter.query"}),
        ("mamba", "in_proj mixer.out_proj", {"input.adapter.weight", "output.adapter.weight"}),
    ],
)
def test_names_of_other_programs_select_layers(network, targets, adapted):
    flags = f"{NETWORKS[network]} --lora-rank 2 --lora-target-modules {targets}"
    found = _adapted(build_toy(Layout.single(), flags.split()))
    assert {name.partition(".attention.")[2] for name in found} == adapted


@pytest.mark.parametrize(
    ("targets", "layers"),
    [("out_proj", {0}), ("o_proj", {1}), ("linear_attn.out_proj", {0}), ("self_attn.o_proj", {1})],
)
def test_output_projections_have_the_names_of_their_mixers(targets, layers):
    flags = f"{NETWORKS['delta']} --lora-rank 2 --lora-target-modules {targets}"
    found = _adapted(build_toy(Layout.single(), flags.split()))
    assert found == {f"layers.{layer}.attention.output.adapter.weight" for layer in layers}


def test_output_layer_and_router_are_adapted_only_by_name():
    network = f"{NETWORKS['delta']} --lora-rank 2 --lora-target-modules"
    optional = {"output", "layers.0.mlp.router", "layers.1.mlp.router"}
    for targets, expected in {
        "all-linear": set(),
        "layers.0.mlp *.mlp.* output": set(),
        "q_proj lm_head": {"output"},
        "layers.1.mlp.router": {"layers.1.mlp.router"},
        "gate.weight": {"layers.0.mlp.router", "layers.1.mlp.router"},
    }.items():
        found = _adapted(build_toy(Layout.single(), [*network.split(), *targets.split()]))
        assert {name.partition(".adapter")[0] for name in found} & optional == expected, targets


@pytest.mark.parametrize(
    ("network", "flags", "told"),
    [
        ("delta", "router --use-dora", "--use-dora: adapters of routers do not support this"),
        ("delta", "router --lora-dropout 0.1", "--lora-dropout 0.1: adapters of routers"),
        (
            "latent",
            "lm_head --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
            "output_layer: --cross-entropy-fusion-impl linear never materializes the logits",
        ),
    ],
)
def test_what_these_adapters_do_not_support_is_refused(network, flags, told):
    words = f"{NETWORKS[network]} --lora-rank 2 --lora-target-modules {flags}"
    with pytest.raises(ConfigError, match=told):
        build_toy(Layout.single(), words.split())


def test_an_adapter_of_a_tied_output_layer_is_refused():
    words = NETWORKS["latent"].replace("--untie-embeddings-and-output-weights", "").split()
    with pytest.raises(ConfigError, match="shares its matrix with the word embedding"):
        build_toy(Layout.single(), [*words, "--lora-rank", "2", "--lora-target-modules", "lm_head"])
