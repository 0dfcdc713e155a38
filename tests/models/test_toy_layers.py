"""A mixer and an MLP from outside the package: one module each and one line in a table."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.checkpoint.entries import model_state
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.reader import restore
from megatron.config.stages import ModelPart
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.load import load_gpt
from megatron.models.arithmetic import (
    count_parameters,
    count_part_matrices,
    count_part_parameters,
    flops_per_token,
)
from megatron.models.block import MIXERS, MLPS, Block
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.gpt import GPTModel
from megatron.models.plans import PLANS
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from megatron.planner.memory import largest_process
from megatron.planner.pipeline_balance import Costs, Pipeline
from megatron.tools.checkpoint import util
from megatron.training.pretrain import main
from pretrain_gpt import GPTRecipe
from tests.checkpoint.states import save
from tests.models.own_layers import own_plan
from tests.models.small import SEQUENCE, batch, config, plan
from tests.models.toy_mixer import RunningMean, RunningMeanPlan
from tests.models.toy_mlp import Square, SquarePlan
from tests.training.toy import TOY, build_toy

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    monkeypatch.setitem(MIXERS, "running_mean", RunningMean)
    monkeypatch.setitem(MLPS, "square", Square)


def toy_plan(network=None):
    """Return four layers: the default, a toy mixer, a toy MLP, and a wider MLP."""
    whole = plan(config(num_layers=4, **NO_DROPOUT) if network is None else network)
    usual = whole.layers[0]
    shared = {"hidden": whole.hidden, "init": usual.mixer.init}
    mixed = replace(usual, mixer=RunningMeanPlan(width=24, **shared))
    square = replace(usual, mlp=SquarePlan(**shared))
    wide = replace(usual, mlp=replace(usual.mlp, inner=48, activation="swiglu", gated=True))
    return replace(whole, layers=(usual, mixed, square, wide))


def toy_model(part=None, layout=None, device="cpu", seed=1):
    context = BuildContext(layout or Layout.single(), torch.device(device))
    model = GPTModel(toy_plan(), context, part)
    if device == "cpu":
        initialize(model.named_parameters(), seed)
    return model


def train(model, steps):
    tokens, labels = batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens, labels=labels).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_layers_of_several_kinds_train():
    losses = train(toy_model(), 20)
    assert losses[-1] < 0.5 * losses[0]


def test_no_layer_looks_ahead():
    model = toy_model().eval()
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7:], before[:, 7:])


def test_their_parameters_are_counted_as_they_are_built():
    held = sum(parameter.numel() for parameter in toy_model(device="meta").parameters())
    assert count_parameters(toy_plan()) == held
    parts = (ModelPart(range(2), True, False), ModelPart(range(2, 4), False, True))
    for part in parts:
        model = toy_model(part, Layout.at(0, 2, tensor=2), device="meta")
        counted = count_part_parameters(toy_plan(), part, WeightSplit(tensor=2))
        assert counted == sum(parameter.numel() for parameter in model.parameters())
    usual, mixed = 4 * 16 * 16 + 2 * 16 * 32, 3 * 24 * 16 + 2 * 16 * 32
    assert count_part_matrices(toy_plan(), parts[0], WeightSplit()) == usual + mixed


def test_their_operations_are_those_that_pytorch_counts():
    model, (tokens, _) = toy_model().eval(), batch()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens[:1])
    # PyTorch counts neither half of the attention matrix here: the fused form is one operation.
    scores = sum(Block.flops(layer, SEQUENCE).scores for layer in toy_plan().layers) / 3
    counted = counter.get_total_flops()
    ours = flops_per_token(toy_plan(), SEQUENCE) * SEQUENCE / 3
    assert ours - scores <= counted <= ours + scores


def test_a_checkpoint_holds_them(tmp_path):
    trained = toy_model()
    train(trained, 3)
    save(tmp_path, 3, model_state([trained]), {}, Layout.single())
    other = toy_model(seed=2)
    restore(open_checkpoint(tmp_path), model_state([other]), prefixes=("model.",))
    for (name, mine), theirs in zip(other.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert "layers.1.attention.scale" in dict(other.named_parameters())


def test_memory_and_balance_read_each_layer():
    run = build_toy(Layout.single(), ["--num-layers", "4"])
    toys = toy_plan(run.config.model)
    small = largest_process(run.config, plan(run.config.model), 1)
    assert largest_process(run.config, toys, 1).parameters == 4 * count_parameters(toys)
    assert small.activations != largest_process(run.config, toys, 1).activations
    micro = MicroBatch(sequences=2, length=16)
    assert len({Block.activation_bytes(layer, micro) for layer in toys.layers}) == 4
    costs = Costs.of(run.config, toys)
    assert len(set(costs.layers)) == 4
    first, last = costs.part_times((1, 3))
    assert first == costs.layers[0]
    assert last == pytest.approx(tuple(map(sum, zip(*costs.layers[1:], costs.head, strict=True))))
    assert sum(Pipeline("1f1b", 2, 1, 8).best(costs)) == 4


def test_a_plan_can_be_printed_and_compared():
    assert "RunningMeanPlan(kind='running_mean'" in str(toy_plan())
    assert len({toy_plan(), toy_plan(), plan(config(num_layers=4, **NO_DROPOUT))}) == 2


def test_a_script_trains_its_own_layers_and_other_programs_refuse_them(
    tmp_path, monkeypatch, capsys
):
    """`docs/tour.md` names `own_layers.py`, which makes the same two changes."""
    words = [*TOY, "--no-exit-signal-handler", "--save", str(tmp_path), "--save-interval", "2"]
    words += ["--load", str(tmp_path), "--eval-iters", "0", "--train-iters", "4"]
    with monkeypatch.context() as patch:
        patch.setitem(PLANS, "gpt", own_plan)
        assert main(GPTRecipe(), [*words, "--exit-interval", "2"]) == 0
        assert main(GPTRecipe(), words) == 0
        assert "iteration        4/" in capsys.readouterr().out
        loaded = load_gpt(str(tmp_path), Device.cpu())
        with pytest.raises(ConfigError, match=r"layer 0 \(running_mean\) keeps neither keys"):
            build_engine(loaded, Device.cpu(), EngineOptions())
    words = ["--model-type", "GPT", "--loader", "native", "--saver", "hf"]
    words += ["--load-dir", str(tmp_path), "--save-dir", str(tmp_path / "exported")]
    assert util.main(words) == CheckpointError.exit_code
    assert "attention.output.bias is missing, but its config" in capsys.readouterr().err
