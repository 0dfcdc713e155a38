"""Retro's training: resuming, saving in other formats, and a GPT that becomes a Retro model."""

import json
import shutil

import h5py
import pytest
import torch

from megatron.config.retro import is_retriever_parameter
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.models.retro import RetroModel
from megatron.parallel.layout import Layout
from tests.config.command import parse, problems
from tests.distributed import run_distributed
from tests.retro.corpus import EOD, VOCAB, random_documents, write_dataset
from tests.training.toy import FLAGS_BY_KIND, TOY, build_toy, fingerprint, train_toy
from tools.benchmark_retro_training import make_folder

CHUNK = 4
ITERATIONS = 6
QUIET = (
    "--hidden-dropout 0 --attention-dropout 0 --retro-encoder-hidden-dropout 0 "
    "--retro-encoder-attention-dropout 0"
)


def toy_workdir(folder):
    """Create the working folder for the toy Retro's training in `folder`."""
    documents = [[*document.tolist(), EOD] for document in random_documents(60)]
    prefix = write_dataset(folder / "corpus", documents)
    base = [word for word in TOY if word != "--mock-data"]
    flags = [*base, *FLAGS_BY_KIND["retro"], "--data-path", prefix, "--no-exit-signal-handler"]
    make_folder(folder / "work", folder / "corpus", flags, ITERATIONS, VOCAB + 1, CHUNK)
    return str(folder / "work")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return toy_workdir(tmp_path_factory.mktemp("retro"))


def words(workdir, *more):
    return ["--retro-workdir", workdir, *(word for part in more for word in part.split())]


def _train(layout, *arguments):
    recorder, run = train_toy(layout, words(*arguments), "retro")
    return recorder.values("lm loss"), fingerprint(run)


def test_a_resumed_run_is_the_uninterrupted_one(workdir, tmp_path):
    losses, state = _train(Layout.single(), workdir)
    assert len(losses) == ITERATIONS
    assert losses[-1] < losses[0]
    _train(Layout.single(), workdir, f"--exit-interval 3 --save-interval 3 --save {tmp_path}")
    rest, resumed = _train(Layout.single(), workdir, f"--load {tmp_path}")
    assert rest == losses[3:]
    assert resumed == state


def test_positions_are_reset_in_neighbors_too(workdir, monkeypatch):
    """As in Megatron-LM 23.08: every end-of-document token restarts them."""
    embed, seen = RetroModel.embed, {}

    def spy(self, tokens, positions, *rest, site="embedding"):
        seen[site] = tokens, positions
        return embed(self, tokens, positions, *rest, site=site)

    monkeypatch.setattr(RetroModel, "embed", spy)
    train_toy(Layout.single(), words(workdir, "--exit-interval 1 --reset-position-ids"), "retro")
    tokens, positions = seen["neighbor embedding"]
    expected = torch.zeros_like(tokens)
    for column in range(1, tokens.shape[1]):
        ended = tokens[:, column - 1] == EOD
        expected[:, column] = (expected[:, column - 1] + 1).where(~ended, 0)
    assert torch.equal(positions, expected)
    assert (positions[:, -1] < tokens.shape[1] - 1).any()  # some neighbors contain ends


@pytest.mark.parametrize("form", ["native", "legacy"])
def test_checkpoints_load_in_another_layout(workdir, tmp_path, form):
    losses, _ = _train(Layout.single(), workdir, QUIET)
    save = f"--exit-interval 3 --save-interval 3 --save {tmp_path} --ckpt-format {form}"
    split = "--tensor-model-parallel-size 2 --sequence-parallel"
    run_distributed(2, _train, workdir, QUIET, save, split, tensor=2)
    rest, _ = _train(Layout.single(), workdir, QUIET, f"--load {tmp_path}")
    assert rest == pytest.approx(losses[3:], rel=1e-5)


@pytest.fixture
def gpt(workdir, tmp_path):
    """Return the checkpoints of a GPT with the Retro model's layers, and its weights."""
    flags = "--num-layers 6 --train-iters 2 --save-interval 2"
    _, run = train_toy(Layout.single(), f"{flags} --save {tmp_path / 'gpt'}".split())
    return tmp_path / "gpt", {name: p.detach().clone() for name, p in run.named_parameters()}


def test_a_gpt_becomes_a_retro(workdir, gpt, tmp_path):
    folder, weights = gpt
    finetune = f"--load {folder} --finetune --retro-add-retriever"
    run = build_toy(Layout.single(), words(workdir, finetune), "retro")
    here = dict(run.named_parameters())
    assert {name for name in here if not is_retriever_parameter(name)} == weights.keys()
    assert all(torch.equal(here[name], weights[name]) for name in weights)
    recorder, run = train_toy(Layout.single(), words(workdir, finetune), "retro")
    assert recorder.values("lm loss")[-1] < recorder.values("lm loss")[0]
    trained = dict(run.named_parameters())
    assert not torch.equal(trained["layers.0.mlp.up.weight"], weights["layers.0.mlp.up.weight"])


def _frozen(layout, *arguments):
    _, run = train_toy(layout, words(*arguments), "retro")
    return {name: p.detach() for name, p in run.named_parameters()}


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer --recompute-activations"])
def test_a_frozen_gpt_keeps_its_weights(workdir, gpt, tmp_path, flags):
    folder, weights = gpt
    start = f"--load {folder} --finetune --retro-add-retriever --retro-freeze-gpt {flags}"
    whole = _frozen(Layout.single(), workdir, start)
    first = build_toy(Layout.single(), words(workdir, start), "retro")
    for name, begun in first.named_parameters():
        assert torch.equal(whole[name], begun) != is_retriever_parameter(name), name
    # A run that is stopped and resumed on two processes gives the same weights.
    save = f"{start} --save {tmp_path / 'retro'} --exit-interval 3 --save-interval 3"
    run_distributed(2, _frozen, workdir, save)
    resumed = _frozen(
        Layout.single(), workdir, f"--load {tmp_path / 'retro'} --retro-freeze-gpt {flags}"
    )
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-5, atol=1e-6)


def _frozen_losses(layout, *arguments):
    recorder, _ = train_toy(layout, words(*arguments), "retro")
    return recorder.values("lm loss")


def test_a_frozen_gpt_in_shards(workdir, gpt):
    start = f"--load {gpt[0]} --finetune --retro-add-retriever --retro-freeze-gpt {QUIET}"
    losses = _frozen_losses(Layout.single(), workdir, start)
    for ours in run_distributed(2, _frozen_losses, workdir, f"{start} --zero-stage 3"):
        assert ours == pytest.approx(losses, rel=1e-5)


def _refusal(layout, *arguments):
    with pytest.raises(ConfigError) as error:
        build_toy(layout, words(*arguments), "retro")
    return str(error.value)


def test_a_frozen_stage_is_refused(workdir):
    start = "--retro-freeze-gpt --pipeline-model-parallel-size 2"
    for told in run_distributed(2, _refusal, workdir, start, pipeline=2):
        assert told.startswith("--retro-freeze-gpt: all weights of a pipeline stage are frozen")


def test_a_gpt_is_no_retro_without_the_flag(workdir, gpt):
    folder, _ = gpt
    with pytest.raises(CheckpointError, match="architecture"):
        build_toy(Layout.single(), words(workdir, f"--load {folder} --finetune"), "retro")


def test_other_lengths_of_the_run_are_refused(workdir):
    with pytest.raises(DataError, match="no neighbors for the .* samples of the train split"):
        build_toy(Layout.single(), words(workdir, "--train-iters 60"), "retro")


@pytest.mark.parametrize("number", [-2, 10**6])
def test_neighbors_that_do_not_exist_are_refused_before_training(workdir, tmp_path, number):
    copy = shutil.copytree(workdir, tmp_path / "work")
    (path,) = copy.glob("query/train_*/*.hdf5")
    with h5py.File(path, "r+") as file:
        file["neighbors"][-1, 0] = number
    with pytest.raises(DataError, match="query-pretraining-neighbors again"):
        build_toy(Layout.single(), words(str(copy)), "retro")


@pytest.mark.parametrize(("name", "shown"), [("data", "data of"), ("gpt_tokenizer", "tokenizer")])
def test_another_content_of_the_same_name_is_refused(workdir, tmp_path, name, shown):
    copy = shutil.copytree(workdir, tmp_path / "work")
    told = json.loads((copy / "args.json").read_text())
    (copy / "args.json").write_text(json.dumps({**told, "retro_made_from": {name: "0" * 64}}))
    with pytest.raises(DataError, match=f"the {shown}.* has changed since"):
        build_toy(Layout.single(), words(str(copy)), "retro")


@pytest.mark.parametrize("text", ["{", "[]", '{"retro_gpt_chunk_length": -4}'])
def test_damaged_arguments_are_refused_alone(tmp_path, text):
    (tmp_path / "args.json").write_text(text)
    base = (f"--retro-workdir {tmp_path}", "--num-layers 6")
    lines = problems(*base, without=["--mock-data", "--seq-length"], architecture="retro")
    assert all(line.startswith("--retro-workdir") for line in lines), lines


def test_samples_are_repeated_by_the_cyclic_loader_only(workdir):
    base = (f"--retro-workdir {workdir}", "--num-layers 6 --seq-length 16")
    repeat = "--retro-cyclic-train-iters 3"
    options = {"without": ["--mock-data"], "architecture": "retro"}
    (line,) = problems(*base, repeat, **options)
    assert line.startswith(f"{repeat} requires --dataloader-type cyclic")
    assert parse(*base, repeat, "--dataloader-type cyclic", **options)


def test_a_cyclic_run_repeats_the_samples_and_keeps_the_schedule(workdir, tmp_path):
    """Losses continue after --train-iters with the smallest learning rate, also when resumed."""
    flags = (QUIET, "--dataloader-type cyclic --retro-cyclic-train-iters 9 --eval-iters 0")
    recorder, run = train_toy(Layout.single(), words(workdir, *flags), "retro")
    assert (run.progress.iteration, run.progress.consumed_samples) == (9, 36)
    losses, rates = recorder.values("lm loss"), recorder.values("learning-rate")
    assert 24 <= len(run.datasets.train) < 36
    assert rates[ITERATIONS - 1 :] == pytest.approx([1e-3] * 4)
    assert rates[ITERATIONS - 2] > 1.5e-3
    save = f"--exit-interval 7 --save-interval 7 --save {tmp_path}"
    _train(Layout.single(), workdir, *flags, save)
    rest, resumed = _train(Layout.single(), workdir, *flags, f"--load {tmp_path}")
    assert rest == losses[7:]
    assert resumed == fingerprint(run)


def test_a_folder_of_other_data_is_refused(workdir):
    base = (f"--retro-workdir {workdir}", "--num-layers 6 --seq-length 16")
    options = {"without": ["--mock-data"], "architecture": "retro"}
    (line,) = problems(*base, "--data-path another", **options)
    assert line.startswith("--data-path another: --retro-workdir")
    (line,) = problems(*base, "--seq-length 32", **options)
    assert line.startswith("--seq-length 32: --retro-workdir")
    (line,) = problems(*base, "--num-layers 5", **options)
    assert "number 6" in line


def test_without_a_working_folder_only_the_folder_is_asked_for():
    options = {"without": ["--mock-data"], "architecture": "retro"}
    (line,) = problems("--num-layers 6", **options)
    assert line.startswith("--retro-workdir is required")
