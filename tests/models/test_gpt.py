"""GPT on one process: every knob trains, the math of the switches, recomputation."""

import math

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.kernels.library import LibraryChoice
from megatron.kernels.segments import Segments
from megatron.models.gpt import GPTModel
from megatron.models.recompute import RecomputePlan
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import spec_of
from tests.models.small import (
    BATCH,
    LLAMA,
    SEQUENCE,
    VOCAB,
    batch,
    config,
    gpt,
    loss_and_gradients,
    new_context,
    plan,
)

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
KNOBS = {
    "default": {},
    "llama": LLAMA,
    "rope": {"position_embedding_type": "rope"},
    "rope half": {"position_embedding_type": "rope", "rotary_percent": 0.5},
    "rope base": {"position_embedding_type": "rope", "rotary_base": 500.0},
    "rope stretched": {
        "position_embedding_type": "rope",
        "rotary_seq_len_interpolation_factor": 2,
    },
    "alibi": {"position_embedding_type": "alibi"},
    "scaled alibi": {"position_embedding_type": "alibi", "scale_alibi": True},
    "embedding norm": {"embed_layernorm": True},
    "parallel": {"parallel_residual": True},
    "parallel with one norm": {"parallel_residual": True, "shared_parallel_norm": True},
    "no positions": {"position_embedding_type": "none"},
    "rms norm": {"normalization": "RMSNorm"},
    "layernorm 1p": {"apply_layernorm_1p": True},
    "residual after norm": {"apply_residual_connection_post_layernorm": True},
    "erf gelu": {"bias_gelu_fusion": False},
    "openai gelu": {"openai_gelu": True, "bias_gelu_fusion": False},
    "squared relu": {"squared_relu": True},
    "swiglu": {"swiglu": True},
    "groups": {"group_query_attention": True, "num_query_groups": 2},
    "one group": {"group_query_attention": True, "num_query_groups": 1},
    "untied": {"untie_embeddings_and_output_weights": True},
    "no bias": {"add_bias_linear": False},
    "qkv bias": {"add_bias_linear": False, "add_qkv_bias": True},
    "qk norm": {"qk_layernorm": True},
    "qk rms norm": {"qk_layernorm": True, "normalization": "RMSNorm"},
    "qk norm of projections": {"qk_layernorm": True, "qk_layernorm_scope": "projection"},
    "wide heads": {"kv_channels": 10},
    "plain attention": {"masked_softmax_fusion": False},
    "xavier": {"init_method_xavier_uniform": True},
}
# Other ways to compute the default: fused GeLU already is the tanh form.
SAME_FUNCTION = {"plain attention", "openai gelu"}


@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_trains(knob):
    model = gpt(KNOBS[knob])
    tokens, labels = batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses = []
    for _ in range(30):
        loss = model(tokens, labels=labels).mean()
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("knob", sorted(KNOBS.keys() - SAME_FUNCTION - {"default"}))
def test_every_knob_changes_the_network(knob):
    def trained(flags):
        """Leave the initial weights, where many switches make no difference yet."""
        model = gpt(flags).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3).add_(0.1)
            return model(batch()[0])

    assert not torch.allclose(trained(KNOBS[knob]), trained({}), atol=1e-4)


@pytest.mark.parametrize("flags", [{}, LLAMA], ids=["gpt2", "llama"])
def test_first_loss_is_that_of_a_random_guess(flags):
    tokens, labels = batch()
    loss = gpt(flags).eval()(tokens, labels=labels)
    assert loss.shape == (BATCH, SEQUENCE)
    assert loss.dtype == torch.float32
    assert loss.mean().item() == pytest.approx(math.log(VOCAB), abs=0.05)


def test_loss_is_the_cross_entropy_of_the_logits():
    model = gpt().eval()
    tokens, labels = batch()
    logits = model(tokens)
    assert logits.shape == (BATCH, SEQUENCE, VOCAB)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    torch.testing.assert_close(model(tokens, labels=labels).flatten(), expected)


@pytest.mark.parametrize("flags", [{}, LLAMA], ids=["gpt2", "llama"])
def test_no_look_ahead(flags):
    model = gpt(flags).eval()
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_mask_and_position_ids_keep_documents_apart():
    """Two documents in one sample, kept apart, give the same losses as each one alone."""
    model = gpt().eval()
    tokens, _ = batch()
    cut = 5
    positions = torch.cat((torch.arange(cut), torch.arange(SEQUENCE - cut))).expand_as(tokens)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    mask[cut:, :cut] = False
    together = model(tokens, positions, mask=mask[None, None])
    torch.testing.assert_close(together[:, :cut], model(tokens[:, :cut]))
    torch.testing.assert_close(together[:, cut:], model(tokens[:, cut:]))


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("flags", [NO_DROPOUT, {**LLAMA, **NO_DROPOUT}], ids=["gpt2", "llama"])
def test_samples_with_documents_may_run_as_one_row(flags, resets):
    """GPUs run samples this way; positions, learned or rotary, are those of each sample."""
    model = gpt(flags)
    tokens, labels = batch()
    ends = torch.tensor([0, 5, SEQUENCE, *(SEQUENCE + torch.tensor([7, SEQUENCE]))])
    segments = Segments.of(ends, tokens[:2])
    weights = torch.rand(2, SEQUENCE)
    places = torch.arange(2 * SEQUENCE)
    starts = ends[torch.searchsorted(ends[1:], places, right=True)]
    positions = (places - starts).view(2, -1) if resets else None
    results = []
    for model.packs_samples in (False, True):
        model.zero_grad()
        loss = model(tokens[:2], positions, labels[:2], segments, loss_mask=weights)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*results)


def test_dropout_follows_the_generator_and_ends_in_evaluation():
    model = gpt()
    first, _ = loss_and_gradients(model, seed=3)
    again, _ = loss_and_gradients(model, seed=3)
    other, _ = loss_and_gradients(model, seed=4)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    model.eval()
    assert torch.equal(loss_and_gradients(model, seed=3)[0], loss_and_gradients(model, seed=4)[0])


def test_dropout_places():
    """Dropping all hidden states makes the final norm's output 0; dropping attention does not."""
    nothing_hidden = gpt({"hidden_dropout": 1.0, "attention_dropout": 0.0})
    assert (nothing_hidden(batch()[0]) == 0).all()
    no_attention = gpt({"hidden_dropout": 0.0, "attention_dropout": 1.0})
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 0] += 1
    # Each position now attends only to itself.
    assert torch.equal(no_attention(tokens)[:, 1:], no_attention(changed)[:, 1:])
    assert not torch.equal(no_attention(tokens)[:, 0], no_attention(changed)[:, 0])


@pytest.mark.parametrize("after_norm", [False, True])
def test_dropout_leaves_the_rest_of_a_block_as_it_is(after_norm):
    """Biases that the dropout kernel takes over from the layers are still added."""
    flags = {**NO_DROPOUT, "apply_residual_connection_post_layernorm": after_norm}
    models = [gpt(flags), gpt({**flags, "hidden_dropout": 1e-9})]  # small enough to drop nothing
    for model in models:
        torch.manual_seed(8)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    expected, found = (loss_and_gradients(model) for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected, found = (model.eval()(batch()[0]) for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_plain_and_fused_attention_agree():
    fused = loss_and_gradients(gpt(NO_DROPOUT))
    plain = loss_and_gradients(gpt({**NO_DROPOUT, "masked_softmax_fusion": False}))
    torch.testing.assert_close(plain, fused, rtol=1e-5, atol=1e-6)


def test_kernels_are_those_of_the_device_it_runs_on(monkeypatch):
    """Parameters may still be without memory, on "meta"."""
    library = object()
    asked = []

    def find(device):
        asked.append(device.type)
        return LibraryChoice(library, "a test's")

    monkeypatch.setattr("megatron.parallel.build.find_library", find)
    context = new_context(config(), parameter_device=torch.device("meta"))
    model = GPTModel(plan(config()), context)
    assert asked == ["cpu"]
    assert all(parameter.is_meta for parameter in model.parameters())
    block = model.layers["0"]
    for form in (model.final_norm.add_norm, block.mlp.activation, block.attention.split_rotate):
        assert form.args[0] is library


def test_tied_output_shares_the_word_embedding():
    tied, untied = gpt(), gpt({"untie_embeddings_and_output_weights": True})
    assert set(dict(untied.named_parameters())) - set(dict(tied.named_parameters())) == {
        "output.weight"
    }
    with torch.no_grad():
        untied.output.weight.copy_(untied.embedding.word.weight)
    torch.testing.assert_close(tied.eval()(batch()[0]), untied.eval()(batch()[0]))
    _, one = loss_and_gradients(tied)
    _, two = loss_and_gradients(untied)
    torch.testing.assert_close(
        one["embedding.word.weight"], two["embedding.word.weight"] + two["output.weight"]
    )


def test_parameter_names():
    names = [name for name, _ in gpt({"num_layers": 1}).named_parameters()]
    layer = [
        f"layers.0.{part}.{kind}"
        for part in (
            "attention_norm",
            "attention.qkv",
            "attention.output",
            "mlp_norm",
            "mlp.up",
            "mlp.down",
        )
        for kind in ("weight", "bias")
    ]
    tables = ["embedding.word.weight", "embedding.position.weight"]
    assert names == [*tables, *layer, "final_norm.weight", "final_norm.bias"]
    assert list(gpt({"num_layers": 1}).state_dict()) == names


def test_rotary_table_is_not_saved():
    assert set(gpt(LLAMA).state_dict()) == {name for name, _ in gpt(LLAMA).named_parameters()}


def test_initial_standard_deviations():
    flags = {"num_layers": 8, "hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 256}
    model = gpt({**flags, "untie_embeddings_and_output_weights": True, "init_method_std": 0.5})
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            expected = float(name.endswith("norm.weight"))
            assert (parameter == expected).all(), name
            continue
        ends_in_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        expected = 0.5 / 4 if ends_in_residual else 0.5
        slack = 5 / math.sqrt(2 * parameter.numel())
        assert parameter.std().item() == pytest.approx(expected, rel=slack), name


def test_layernorm_1p_starts_at_zero():
    model = gpt({"apply_layernorm_1p": True})
    assert (model.final_norm.weight == 0).all()
    torch.testing.assert_close(model.eval()(batch()[0]), gpt().eval()(batch()[0]))


def test_xavier_bounds_follow_the_whole_matrix():
    weight = gpt({"init_method_xavier_uniform": True}).layers["0"].mlp.up.weight
    bound = math.sqrt(6 / (16 + 32))
    assert 0.9 * bound < weight.abs().max().item() <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flags", [{}, LLAMA], ids=["gpt2", "llama"])
def test_16_bit_model_is_near_fp32(dtype, flags):
    flags = {**flags, **NO_DROPOUT}
    loss, grads = loss_and_gradients(gpt(flags))
    rough, rough_grads = loss_and_gradients(gpt(flags, dtype=dtype))
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, loss, rtol=0.01, atol=0.02)
    for name, grad in rough_grads.items():
        assert grad.dtype == dtype
        error = (grad.float() - grads[name]).norm() / grads[name].norm().clamp(min=1e-4)
        assert error < 0.1, name


@pytest.mark.parametrize(
    "precision",
    [
        {"fp32_residual_connection": True},
        {"embedding_weights_in_fp32": True},
        {"fp16_lm_cross_entropy": True},
        {"attention_softmax_in_fp32": True, "apply_query_key_layer_scaling": False},
        {"apply_query_key_layer_scaling": False},
    ],
    ids=lambda precision: next(iter(precision)),
)
def test_precision_switches_train_in_16_bits(precision):
    flags = {**NO_DROPOUT, "masked_softmax_fusion": False}
    expected, _ = loss_and_gradients(gpt(flags))
    loss, grads = loss_and_gradients(gpt(flags, precision, dtype=torch.float16))
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0.02)
    assert all(grad.isfinite().all() for grad in grads.values())


def test_fp32_residual_stream():
    kinds = []
    model = gpt(NO_DROPOUT, {"fp32_residual_connection": True}, dtype=torch.bfloat16)
    model.layers["1"].register_forward_hook(lambda _m, _i, out: kinds.append(out.join().dtype))
    model.layers["1"].mlp.register_forward_hook(lambda _m, _i, out: kinds.append(out.dtype))
    model(batch()[0])
    assert kinds == [torch.bfloat16, torch.float32]


PLANS = [
    RecomputePlan("selective"),
    RecomputePlan("full", "uniform", 1),
    RecomputePlan("full", "uniform", 2),
    RecomputePlan("full", "block", 2),
    RecomputePlan("full", "block", 9),
]


PARTS = [
    RecomputePlan("selective", modules=("layernorm",)),
    RecomputePlan("selective", modules=("mlp",)),
    RecomputePlan("selective", modules=("core_attn", "layernorm", "mlp")),
]


@pytest.mark.parametrize("plan", [*PLANS, *PARTS], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_recomputation_gives_the_same_bits(plan, fused):
    flags = {"masked_softmax_fusion": fused}  # dropout stays on
    expected = loss_and_gradients(gpt(flags))
    torch.testing.assert_close(
        loss_and_gradients(gpt(flags, recompute=plan)), expected, rtol=0, atol=0
    )


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_recomputation_runs_the_forward_twice(plan):
    model = gpt(recompute=plan)
    calls = {"layers": 0, "cores": 0}

    def count(kind, function):
        def counted(*args, **options):
            calls[kind] += 1
            return function(*args, **options)

        return counted

    for block in model.layers.values():
        block.register_forward_pre_hook(lambda *_: calls.update(layers=calls["layers"] + 1))
        block.attention.core.attend = count("cores", block.attention.core.attend)
    loss_and_gradients(model)
    again = {"full": 3 if plan.method == "uniform" else min(3, plan.num_layers)}
    layers = 3 + again.get(plan.granularity, 0)  # selective: none
    cores = 3 + again.get(plan.granularity, 3)
    assert calls == {"layers": layers, "cores": cores}


def test_builds_on_the_meta_device():
    from megatron.models.gpt import GPTModel

    layout = Layout.at(1, 2, tensor=2)
    network, numbers = config(**LLAMA), PrecisionConfig(bf16=True)
    context = new_context(network, numbers, layout, device="meta", dtype=torch.bfloat16)
    model = GPTModel(plan(network), context)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta, name
        assert parameter.dtype == torch.bfloat16, name
        assert parameter.numel() <= math.prod(spec_of(parameter).global_shape)
