"""Flags of windows and rotary embeddings: which layers have them, and how mistakes are reported."""

import pytest

from megatron.config.attention import SelfAttentionOptions, layer_windows, rotary_layers
from megatron.models.plans import model_plan
from tests.config.command import parse, problems


@pytest.mark.parametrize("size", ["7,0", "7, 0", "(7,0)", "7,-1"])
@pytest.mark.parametrize(
    ("frequency", "expected"),
    [
        (None, [7, 7, 7, 7, 7, 7]),
        ("1", [None] * 6),
        ("3", [7, 7, None, 7, 7, None]),
        ("7", [7] * 6),
        ("([1]*2+[0])*2", [7, 7, None, 7, 7, None]),
        ("[0,1,1,0,1,0]", [None, 7, 7, None, 7, None]),
    ],
)
def test_the_windows_of_layers(size, frequency, expected):
    options = SelfAttentionOptions(window_size=size, window_attn_skip_freq=frequency)
    assert list(layer_windows(options, 6)) == expected


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(None, "11111111"), ("4", "11101110"), ("([0]*3+[1])*2", "11101110"), ("1", "00000000")],
)
def test_the_layers_that_rotate(frequency, expected):
    options = SelfAttentionOptions(no_rope_freq=frequency)
    assert "".join(str(int(one)) for one in rotary_layers(options, 8)) == expected


ROPE = "--position-embedding-type rope"
_EIGHT = "1 1 1 1 1 1 1 1"
LATENT = f"{ROPE} --multi-latent-attention"
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8"
)
YARN = f"{ROPE} --rope-type yarn --yarn-original-max-position-embeddings 64"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            f"{ROPE} --no-rope-freq [1]",
            "--no-rope-freq [1]: it names 1 layer, but the model has 2",
        ),
        ("--no-rope-freq 2", "--no-rope-freq 2 requires --position-embedding-type rope"),
        ("--rope-type yarn", "--rope-type yarn requires --position-embedding-type rope"),
        (f"{ROPE} --mscale 2", "--mscale 2 requires --rope-type yarn"),
        (
            f"{ROPE} --rope-type yarn",
            "--rope-type yarn requires --yarn-original-max-position-embeddings",
        ),
        (
            f"{ROPE} --attention-chunk-size 8 --window-size 7,0",
            "--attention-chunk-size cannot be combined with --window-size 7,0: a layer has either",
        ),
        ("--attention-chunk-size 8", "--attention-chunk-size 8 requires --position-embedding-type"),
        (
            f"{ROPE} --attention-temperature-scale 0.1",
            "--attention-temperature-scale 0.1 requires --no-rope-freq",
        ),
        (
            f"{ROPE} --no-rope-freq 2 --attention-temperature-floor 8",
            "--attention-temperature-floor 8 requires --attention-temperature-scale",
        ),
        (
            f"{ROPE} --qk-l2-norm --qk-layernorm",
            "--qk-l2-norm cannot be combined with --qk-layernorm: both",
        ),
        (
            f"{LATENT} --attention-chunk-size 8",
            "--attention-chunk-size 8: it does not support chunks",
        ),
        (f"{YARN} --use-rope-scaling", "--rope-type yarn with --use-rope-scaling"),
        (
            "--position-embedding-type yarn --use-rope-scaling",
            "--rope-type yarn with --use-rope-scaling",
        ),
        (
            "--position-embedding-type yarn --rope-type rope",
            "--position-embedding-type yarn with --rope-type rope: they contradict each other",
        ),
        (
            "--position-embedding-type yarn --rotary-percent 0.5",
            "--position-embedding-type yarn with --rotary-percent 0.5: Megatron Core's YaRN",
        ),
        (f"{YARN} --yarn-beta-fast 1", "--yarn-beta-fast 1 is not above --yarn-beta-slow 1"),
        (
            f"{ROPE} --rope-type longrope",
            "--rope-type longrope requires --longrope-original-max-position-embeddings",
        ),
        (
            f"{ROPE} --rope-type longrope --longrope-short-factor 1 2",
            "--longrope-short-factor has 2 numbers: --rope-type longrope needs one for every two",
        ),
        (
            f"{ROPE} --rope-type longrope --longrope-original-max-position-embeddings 64 "
            f"--longrope-short-factor {_EIGHT} --longrope-long-factor {_EIGHT} 1",
            "--longrope-long-factor has 9 numbers: --rope-type longrope needs one for every two of "
            "the 16 channels that rotate: give 8",
        ),
        (f"{ROPE} --rope-type longrope --use-rope-scaling", "longrope with --use-rope-scaling"),
        (f"{ROPE} --longrope-long-factor 1", "--longrope-long-factor 1 requires --rope-type long"),
        ("--ckpt-format torch_dist --save a --rope-type longrope", "--rope-type longrope"),
        (
            f"{ROPE} --rope-type dynamic --rotary-scaling-factor 1.5 --seq-length 64 "
            "--max-position-embeddings 42",
            "--max-position-embeddings 42 x --rotary-scaling-factor 1.5 is less than --seq-length "
            "64: use at least 43",
        ),
        (f"{ROPE} --rope-type dynamic --use-rope-scaling", "dynamic with --use-rope-scaling"),
        (f"{ROPE} --rope-type dynamic --kv-channels 2", "only 2 channels rotate"),
        (f"{ROPE} --rotary-scaling-factor 2", "requires --rope-type yarn or dynamic"),
        ("--ckpt-format torch_dist --save a --rope-type dynamic", "--rope-type dynamic"),
        (f"{LATENT} --rope-type proportional", "--rope-type proportional with --multi-latent"),
        (
            f"{ROPE} --rope-type proportional --kv-channels 9",
            "--kv-channels 9: channels of a whole",
        ),
        ("--window-size 7", "--window-size 7: expected the number of earlier tokens and 0"),
        ("--window-size 7,7", "--window-size 7,7: expected"),
        ("--window-size=-1,0", "--window-size -1,0: expected"),
        (
            "--window-size 7,0 --window-attn-skip-freq [1,0,1]",
            "--window-attn-skip-freq [1,0,1]: it names 3 layers, but the model has 2",
        ),
        (
            "--window-size 7,0 --window-attn-skip-freq x",
            "--window-attn-skip-freq x: expected a number, or a pattern such as",
        ),
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq 2 requires --window-size"),
        ("--kv-lora-rank 8", "--kv-lora-rank 8 requires --multi-latent-attention"),
        (
            "--multi-latent-attention --position-embedding-type alibi",
            "--multi-latent-attention requires --position-embedding-type rope, learned_absolute or",
        ),
        (f"{LATENT} --group-query-attention", "cannot be combined with --group-query-attention"),
        (
            f"{LATENT} --disable-bias-linear --add-qkv-bias",
            "cannot be combined with --add-qkv-bias: its projections have no biases",
        ),
        (f"{LATENT} --rotary-percent 0.5", "cannot be combined with --rotary-percent 0.5"),
        (f"{LATENT} --ckpt-format legacy", "cannot be combined with --ckpt-format legacy"),
        (f"{LATENT} --qk-pos-emb-head-dim 7", "--qk-pos-emb-head-dim 7: channels rotate in pairs"),
        (
            f"{LATENT} --attention-output-gate",
            "--attention-output-gate cannot be combined with --multi-latent-attention",
        ),
        (
            "--attention-output-gate --ckpt-format legacy --save a",
            "--attention-output-gate: Megatron-LM 23.08",
        ),
        ("--linear-attention-freq 4", "--linear-attention-freq 4 requires --experimental"),
        ("--linear-key-head-dim 4", "--linear-key-head-dim 4 requires --experimental"),
        (DELTA.replace("--linear-attention-freq 2", ""), "requires --linear-attention-freq"),
        (f"{DELTA} --linear-attention-freq [1]", "--linear-attention-freq [1]: it names 1 layer"),
        (f"{DELTA} --linear-num-value-heads 9", "--linear-num-value-heads 9 is not a multiple of"),
        (f"{DELTA} --hybrid-layer-pattern M-", "cannot be combined with --hybrid-layer-pattern M-"),
        (f"{DELTA} --batch-invariant-mode", "cannot be combined with --batch-invariant-mode"),
        (f"{DELTA} --ckpt-format legacy", "cannot be combined with --ckpt-format legacy"),
        (
            f"{DELTA} --bf16 --fp8-format hybrid --linear-value-head-dim 7",
            "--linear-num-value-heads x --linear-value-head-dim 56 is not a multiple of 16",
        ),
        (
            f"{LATENT} --bf16 --fp8-format hybrid --q-lora-rank 24",
            "--fp8-format hybrid: --q-lora-rank 24 is not a multiple of 16",
        ),
    ],
)
def test_mistakes_are_reported(flags, told):
    assert any(told in line for line in problems(f"--num-layers 2 {flags}")), problems(flags)


def test_heads_of_delta_nets_divide_over_processes():
    flags = f"--num-layers 2 {DELTA} --linear-num-key-heads 2"
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    told = problems(f"{flags} {layout}", world_size=4)
    assert any("--linear-num-key-heads 2 is not divisible by --tensor" in line for line in told)
    assert parse(f"--num-layers 2 {DELTA} {layout}", world_size=4)


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [("4", "11101110"), ("([1]*3+[0])*2", "11101110"), ("1", "00000000"), ("[1]*8", "11111111")],
)
def test_the_layers_with_delta_nets(frequency, expected):
    flags = f"--num-layers 8 {DELTA} --linear-attention-freq {frequency}"
    plan = model_plan(parse(flags).config.model, 1024)
    kinds = [layer.mixer.kind == "gated_delta_net" for layer in plan.layers]
    assert "".join(str(int(kind)) for kind in kinds) == expected


def test_each_layer_learns_a_sink_for_every_head():
    config = parse("--num-layers 2 --softmax-type learnable").config
    plan = model_plan(config.model, 1024)
    assert {layer.mixer.softmax for layer in plan.layers} == {"learnable"}
    told = problems("--num-layers 2 --softmax-type sigmoid")
    assert any("--softmax-type" in line and "off-by-one" in line for line in told), told


def test_a_ring_has_no_bound_of_the_scores():
    flag = "--attn-logit-softcapping 50.0"
    told = problems(f"{flag} --context-parallel-size 2", world_size=2)
    assert any(line.startswith(flag) and "use --cp-comm-type a2a" in line for line in told)
    assert parse(f"{flag} --context-parallel-size 2 --cp-comm-type a2a", world_size=2)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--attn-logit-softcapping 50 --use-flash-attn --bf16",
            "--attn-logit-softcapping 50 with --use-flash-attn: no flash kernel caps",
        ),
        (
            "--final-logit-softcapping 30 --cross-entropy-fusion-impl linear",
            "linear with --final-logit-softcapping 30: its chunks of scores are not bounded",
        ),
        (
            "--norm-placement both --apply-residual-connection-post-layernorm",
            "--norm-placement both with --apply-residual-connection-post-layernorm",
        ),
        (
            "--parallel-residual --norm-placement both",
            "--parallel-residual with --norm-placement both: attention and MLP read the same",
        ),
        (
            "--position-embedding-type alibi --use-flash-attn --bf16",
            "--position-embedding-type alibi with --use-flash-attn: no flash kernel adds biases",
        ),
        ("--scale-alibi", "--scale-alibi requires --position-embedding-type alibi"),
        ("--shared-parallel-norm", "--shared-parallel-norm requires --parallel-residual"),
        (
            "--disable-bias-linear --disable-bias-attention",
            "--disable-bias-attention requires biases, which --disable-bias-linear",
        ),
        (
            "--normalization RMSNorm --disable-layernorm-bias",
            "--disable-layernorm-bias requires --normalization LayerNorm",
        ),
        ("--ckpt-format torch_dist --save a --lm-head-bias", "with --lm-head-bias: Megatron Core"),
        ("--ckpt-format legacy --save a --logit-scale 2", "--logit-scale 2.0: Megatron-LM"),
        (
            "--position-embedding-type rope --mtp-num-layers 1 --embed-layernorm",
            "cannot be combined with --embed-layernorm",
        ),
        (
            "--ckpt-format torch_dist --save a --position-embedding-type alibi",
            "--position-embedding-type alibi",
        ),
        ("--ckpt-format legacy --save a --embed-layernorm", "--embed-layernorm: Megatron-LM"),
        ("--ckpt-format torch_dist --save a --norm-placement after", "--norm-placement after"),
        ("--ckpt-format legacy --save a --scale-embeddings", "--scale-embeddings: Megatron-LM"),
        ("--ckpt-format legacy --save a --softmax-type learnable", "--softmax-type learnable:"),
    ],
)
def test_what_does_not_go_together_is_reported(flags, told):
    assert any(told in line for line in problems(f"--num-layers 2 {flags}")), problems(flags)


def test_latent_vectors_are_always_cached() -> None:
    assert parse(f"{LATENT} --cache-mla-latents").notices == (
        "--cache-mla-latents: generation always caches the latent vectors of latent attention",
    )


@pytest.mark.parametrize(
    ("flags", "rope_type", "original"),
    [
        ("", "rope", None),
        ("--rotary-scaling-factor 40", "yarn", 4096),
        ("--mscale-all-dim 1", "yarn", 4096),
        ("--mscale 0.5", "yarn", 4096),
        ("--rope-type yarn", "yarn", 4096),
        ("--rope-type yarn --yarn-original-max-position-embeddings 64", "yarn", 64),
        ("--rope-type rope", "rope", None),
    ],
)
def test_latent_attention_has_the_rotary_defaults_of_core(flags, rope_type, original):
    model = parse(f"{LATENT} {flags}").config.model
    assert (model.rope_type, model.yarn_original_max_position_embeddings) == (rope_type, original)


@pytest.mark.parametrize("latent", ["", "--multi-latent-attention"])
@pytest.mark.parametrize(("given", "original"), [("", 4096), (YARN.rpartition(" --")[2], 64)])
def test_core_s_positions_of_yarn_are_rope_of_that_type(latent, given, original):
    given = f"--{given}" if given else ""
    numbers = f"--rotary-scaling-factor 8 --mscale 0.5 --yarn-beta-fast 16 {latent}"
    run = parse(f"--position-embedding-type yarn {given} {numbers}").config
    words = f"{ROPE} --rope-type yarn --yarn-original-max-position-embeddings {original}"
    assert run == parse(f"{words} {numbers}").config


@pytest.mark.parametrize(
    ("flags", "positions"),
    [("", "learned_absolute"), ("--position-embedding-type none", "rope"), (ROPE, "rope")],
)
def test_latent_attention_rotates_whatever_the_positions_are(flags, positions):
    model = parse(f"--multi-latent-attention --rotary-base 5 {flags}").config.model
    assert (model.position_embedding_type, model.has_rotary_embeddings) == (positions, True)


def test_the_head_size_of_a_script_of_core_changes_nothing_in_latent_attention():
    run = parse(f"{LATENT} --kv-channels 48")
    assert run.config == parse(LATENT).config
    (notice,) = run.notices
    assert notice.startswith("--kv-channels 48 has no effect with --multi-latent-attention: ")
    assert parse(f"{LATENT} --kv-channels {run.config.model.kv_channels}").notices == ()


def test_the_split_of_experts_changes_nothing_in_a_dense_network():
    run = parse("--expert-tensor-parallel-size 4", world_size=2)
    assert run.config == parse(world_size=2).config
    flag = "--expert-tensor-parallel-size 4"
    assert run.notices == (f"{flag} has no effect without --num-experts",)
