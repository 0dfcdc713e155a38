"""muP: initial weights, rates and factors of the plan, in every layout and after loading."""

import math

import pytest
import torch

from megatron.checkpoint.huggingface.families import family_for
from megatron.device import Device
from megatron.errors import CheckpointError
from megatron.inference.load import load_gpt
from megatron.models.plans import model_plan
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import spec_of
from tests.config.command import parse, problems
from tests.distributed import run_sharing_memory
from tests.training.toy import build_toy, train_toy

PLAIN = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --clip-grad 0".split()
MUP = "--use-mup --mup-base-hidden-size 8".split()  # a quarter of the toy's width
UNTIED = "--untie-embeddings-and-output-weights"


def _losses(layout, flags):
    return train_toy(layout, [*PLAIN, *flags])[0].values("lm loss")


def test_initial_weights_and_rates():
    plain = build_toy(Layout.single(), [*PLAIN, UNTIED])
    run = build_toy(Layout.single(), [*PLAIN, *MUP, UNTIED])
    before = dict(plain.named_parameters())
    rules = {w.name: own.group.rule for own in run.optimizer._groups for w in own.weights}
    hidden = {n for n, p in run.named_parameters() if p.ndim > 1 and n.startswith("layers.")}
    assert len(hidden) == 8
    for name, p in run.named_parameters():
        ratio = 4 if name in hidden else 1
        torch.testing.assert_close(p, before[name] / math.sqrt(ratio))
        assert rules[name].rate == 1 / ratio
        assert rules[name].eps == 1e-8 / ratio
        assert spec_of(p).init.rate == 1 / ratio


def test_an_update_has_its_rate():
    """At the first step, AdamW moves every weight by its learning rate."""
    words = [*PLAIN, *MUP, UNTIED, *"--lr-decay-style constant --lr-warmup-fraction 0".split()]
    words += "--weight-decay 0 --train-iters 1 --adam-eps 1e-30".split()
    run = build_toy(Layout.single(), words)
    before = {name: p.detach().clone() for name, p in run.named_parameters()}
    _, run = train_toy(Layout.single(), words)
    for name in ("layers.0.mlp.up.weight", "layers.1.attention.qkv.weight", "output.weight"):
        moved = (dict(run.named_parameters())[name] - before[name]).abs().max().item()
        assert moved == pytest.approx(1e-2 / (1 if name == "output.weight" else 4), rel=1e-3)


def test_factors_of_the_plan():
    def plan(*flags):
        return model_plan(parse(*flags).config.model, 128)

    mup = plan("--use-mup --mup-base-hidden-size 16")  # the width is 64, a head has 16 channels
    assert mup.layers[0].mixer.scale == 1 / 16
    assert mup.head("output").scale == 1 / 4
    assert mup.embedding.scale is None
    chosen = plan(
        "--use-mup --mup-base-hidden-size 16 --mup-base-head-dim 4 --mup-attn-scale-power 0.5 "
        "--mup-output-mult 3 --mup-embedding-mult 2 --position-embedding-type rope"
    )
    assert chosen.layers[0].mixer.scale == 2 / 4
    assert chosen.head("output").scale == 3
    assert chosen.embedding.scale == 2
    assert plan("--use-mup").head("output").scale == 1
    both = plan("--use-mup --mup-base-hidden-size 16 --logit-scale 3")
    assert both.head("output").scale == 3 / 4
    assert plan().layers[0].mixer.scale is None
    assert plan().head("output").scale is None


def test_at_the_base_width_only_attention_differs():
    usual = "--use-mup --mup-attn-scale-power 0.5".split()
    assert _losses(Layout.single(), usual) == pytest.approx(_losses(Layout.single(), []), rel=1e-6)
    assert _losses(Layout.single(), ["--use-mup"]) != _losses(Layout.single(), [])


LAYOUTS = [
    ("--zero-stage 1", {}),
    ("--zero-stage 3", {}),
    ("--tensor-model-parallel-size 2 --sequence-parallel", {"tensor": 2}),
    ("--pipeline-model-parallel-size 2", {"pipeline": 2}),
    ("--context-parallel-size 2 --cp-comm-type a2a", {"context": 2}),
]


def test_layouts_train_alike():
    experts = "--num-experts 4 --moe-router-topk 2".split()
    for more in ([], [UNTIED, *experts]):
        expected = _losses(Layout.single(), [*MUP, *more])
        for flags, sizes in LAYOUTS:
            if more and "context" in sizes:
                continue
            (*_, ours) = run_sharing_memory(2, _losses, [*MUP, *more, *flags.split()], **sizes)
            assert ours == pytest.approx(expected, rel=1e-4), flags


def test_checkpoints_and_generation(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    expected = _losses(Layout.single(), MUP)
    first = _losses(Layout.single(), [*MUP, *save, "--exit-interval", "3"])
    load = ["--load", str(tmp_path)]
    assert first + _losses(Layout.single(), [*MUP, *load]) == expected
    with pytest.raises(CheckpointError, match="--use-mup is off here and on in the checkpoint"):
        build_toy(Layout.single(), [*PLAIN, *load])
    run = build_toy(Layout.single(), [*PLAIN, *MUP, *load])
    loaded = load_gpt(str(tmp_path), Device.cpu())
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        ours = run.parts[0].eval()(tokens)
        theirs = loaded.model(tokens)[..., : ours.shape[-1]]
    torch.testing.assert_close(theirs, ours)


def test_no_family_of_hugging_face_has_it():
    flags = "--use-mup --position-embedding-type rope --normalization RMSNorm --swiglu"
    model = parse(f"{flags} --disable-bias-linear {UNTIED}").config.model
    with pytest.raises(CheckpointError, match="use_mup is True, but"):
        family_for(model, 128, "llama")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--mup-base-hidden-size 8", "--mup-base-hidden-size 8 requires --use-mup"),
        ("--use-mup --optimizer sgd", "--use-mup with --optimizer sgd: its learning rates would"),
        ("--use-mup --optimizer muon", "--use-mup with --muon-scale-mode spectral: its updates"),
        (
            "--use-mup --init-method-xavier-uniform",
            "--use-mup with --init-method-xavier-uniform: it sets its own standard",
        ),
        ("--use-mup --softmax-scale 0.1", "--use-mup with --softmax-scale 0.1: muP has its own"),
        (
            "--use-mup --save x --save-interval 1 --ckpt-format torch_dist",
            "--use-mup with --ckpt-format torch_dist: its files do not contain",
        ),
        (
            "--use-mup --mup-embedding-mult 2",
            "--use-mup with --mup-embedding-mult 2: it multiplies words, but not",
        ),
        ("--mup-width-mult 2", "--mup-width-mult 2: it follows from --hidden-size"),
    ],
)
def test_refusals(flags, problem):
    found = problems(flags)
    assert any(line.startswith(problem) for line in found), found
