"""T5 imported from `transformers`, in every layout, and exported unchanged."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron.checkpoint.entries import model_state
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.reader import PaddedReader, restore
from megatron.config.data import DataConfig
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, narrow
from megatron.config.stages import parts_of_stage, plan_model
from megatron.config.yaml_file import from_dict
from megatron.data.datasets import DataRequest
from megatron.data.loader import collate
from megatron.data.t5 import build_t5_datasets
from megatron.device import Device
from megatron.errors import CheckpointError
from megatron.models.build import build_model, run_context
from megatron.models.t5 import T5Model
from megatron.parallel.layout import Layout
from megatron.tools import fill_in, preprocess_data
from megatron.tools.checkpoint import util
from megatron.training.pretrain import main
from pretrain_t5 import T5Recipe
from tests.checkpoint.states import same_files
from tests.distributed import run_distributed
from tests.tokenizer.t5 import SIZE, WORDS, t5_tokenizer, write_t5_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LENGTH, DECODER, VOCAB = 40, 12, 71
FORMS = {
    "1.0": {"tie_word_embeddings": True},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


def save(form: str, folder: Path, *, own_head: bool = False, **changes):
    """Save a random model, including its norms, to a folder; return the model."""
    config = transformers.T5Config(
        **{
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "relative_attention_num_buckets": 16,
            "relative_attention_max_distance": 30,
            **FORMS[form],
            **changes,
        }
    )
    torch.manual_seed(1)
    model = transformers.T5ForConditionalGeneration(config).eval()
    if own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32) * 0.2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Matrices are changed less: scores are not scaled, so rounding errors grow with them.
            size = 0.3 if "norm" in name or "bias" in name else 0.02
            parameter.add_(torch.randn_like(parameter) * size)
    model.save_pretrained(folder)
    return model


def convert(loader: str, saver: str, load: Path, out: Path, *words: str) -> int:
    ends = ["--model-type", "T5", "--load-dir", str(load), "--save-dir", str(out)]
    return util.main([*ends, "--loader", loader, "--saver", saver, *words])


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_it_comes_in_verified_and_goes_out_as_it_was(form, own_head, tmp_path, capsys):
    save(form, tmp_path / "a", own_head=own_head)
    assert ("lm_head.weight" in load_file(tmp_path / "a" / "model.safetensors")) == own_head
    assert convert("hf", "native", tmp_path / "a", tmp_path / "b", "--verify") == 0
    assert convert("native", "hf", tmp_path / "b", tmp_path / "c", "--verify") == 0
    assert capsys.readouterr().out.count("--verify: logits differ by at most") == 2
    assert same_files(tmp_path / "a", tmp_path / "c")
    assert convert("native", "megatron", tmp_path / "b", tmp_path / "d") == 4
    said = capsys.readouterr().err
    assert said.startswith("error: --position-embedding-type relative, --")
    assert "Megatron-LM 23.08 does not support it" in said


def test_types_stay_and_another_network_is_written_anew(tmp_path):
    """Tensors stay bf16. Without the original config.json, an equivalent one is written."""
    save("1.1", tmp_path / "fp32").bfloat16().save_pretrained(tmp_path / "a")
    assert convert("hf", "native", tmp_path / "a", tmp_path / "b") == 0
    (tmp_path / "b" / "huggingface" / "config.json").unlink()
    assert convert("native", "hf", tmp_path / "b", tmp_path / "c") == 0
    weights = "model.safetensors"
    assert (tmp_path / "a" / weights).read_bytes() == (tmp_path / "c" / weights).read_bytes()
    one, other = (transformers.T5Config.from_pretrained(tmp_path / name) for name in "ac")
    differing = {k for k, v in one.to_dict().items() if other.to_dict().get(k) != v}
    assert differing <= {"architectures", "eos_token_id", "_name_or_path"}


def test_its_pieces_go_out_under_the_name_that_transformers_looks_for(tmp_path):
    import sentencepiece as library

    save("1.1", tmp_path / "a")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(["to be or not to be", "that is the question"] * 20),
        model_prefix=str(tmp_path / "my"),
        vocab_size=24,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = tmp_path / "my.model"
    flags = ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(pieces)]
    assert convert("hf", "native", tmp_path / "a", tmp_path / "b") == 0
    assert convert("native", "hf", tmp_path / "b", tmp_path / "c", *flags) == 0
    assert (tmp_path / "c" / "spiece.model").read_bytes() == pieces.read_bytes()
    assert not (tmp_path / "c" / "tokenizer.model").exists()


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens of encoder and decoder, and a mask of what is not padding in the encoder."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[1, 29:] = False
    return tokens, torch.randint(VOCAB, (2, DECODER), generator=generator), padding


@torch.no_grad()
def _ours(layout: Layout, folder: Path, split: int | None) -> torch.Tensor | None:
    """Return this rank's part of the logits."""
    reader = HFReader(folder)
    config = narrow(resolve(from_dict(reader.meta["config"], str(folder)), 1), ModelRun)
    stages = layout.pipeline.size
    parallel = replace(
        config.parallel,
        pipeline_model_parallel_size=stages,
        pipeline_model_parallel_split_rank=split,
        pipeline_model_parallel_layout=None if split or stages == 1 else "Et|ttttL",
    )
    plan = plan_model(config.model, parallel)
    (part,) = parts_of_stage(plan, layout.pipeline.rank, stages)
    rows = -(-VOCAB // layout.tensor.size) * layout.tensor.size
    model = build_model(
        T5Model, config, run_context(config, layout, Device.cpu()), rows, part
    ).eval()
    restore(PaddedReader(reader, rows=rows, entries=VOCAB), model_state([model]))
    hidden = None
    if not part.embedding:
        hidden = torch.empty(LENGTH + DECODER, 2, config.model.hidden_size)
        dist.recv(hidden, src=0)
    out = model(*inputs(), hidden=hidden)
    if part.head:
        return out
    dist.send(out, dst=1)
    return None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("sizes", "split"),
    [({}, None), ({"tensor": 2}, None), ({"pipeline": 2}, None), ({"pipeline": 2}, 1)],
)
def test_logits_are_the_model_s_in_every_layout(form, sizes, split, tmp_path):
    model = save(form, tmp_path, own_head=form == "1.1")
    tokens, decoder, padding = inputs()
    with torch.no_grad():
        expected = model(tokens, attention_mask=padding, decoder_input_ids=decoder).logits
    by_rank = [_ours(Layout.single(), tmp_path, None)]
    if sizes:
        by_rank = run_distributed(2, _ours, tmp_path, split, **sizes)
    found = torch.cat([one for one in by_rank if one is not None], dim=-1)[..., :VOCAB]
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "tanh"}, 'feed_forward_proj "tanh": supported: relu'),
        ({"dense_act_fn": "silu"}, 'dense_act_fn "silu": only "gelu_new" is supported'),
        ({"relative_attention_num_buckets": 7}, "relative_attention_num_buckets 7: expected an"),
        ({"relative_attention_max_distance": 8}, "twice the max_distance 8"),
        (
            {"num_decoder_layers": 2},
            "decoder.block.2.layer.0.SelfAttention.k.weight does not exist",
        ),
    ],
)
def test_what_our_t5_lacks_is_refused(change, message, tmp_path):
    save("1.1", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        HFReader(tmp_path)


def test_old_files_name_the_words_several_times(tmp_path):
    """They also have a bias between decoder and encoder, and further keys without effect."""
    save("1.0", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    copies = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}
    tensors |= {name: tensors[words].clone() for name, words in copies.items()}
    tensors["lm_head.weight"] = tensors["shared.weight"].clone()
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[unused] = torch.randn(16, 4)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "tie_word_embeddings"):
        del config[name]
    config |= {"n_positions": 512, "output_past": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = from_dict(HFReader(tmp_path).meta["config"], "a").model
    assert model.scale_decoder_outputs
    assert not model.untie_embeddings_and_output_weights
    tensors["encoder.embed_tokens.weight"][0] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"encoder.embed_tokens.weight differs"):
        HFReader(tmp_path)


TRAINING = """
    --finetune --use-checkpoint-args --seq-length 24 --decoder-seq-length 12 --micro-batch-size 2
    --train-iters 1 --lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer
    --vocab-size 70 --num-workers 0 --log-interval 1 --eval-iters 0 --save-interval 1
    --no-exit-signal-handler
""".split()


@pytest.mark.parametrize("length", [24, 600])
def test_training_continues_from_the_folder_itself(length, tmp_path, capsys):
    """The export has the original config.json. Positions are unlimited: 600 tokens work too."""
    model = save("1.1", tmp_path / "a", own_head=True)
    places = ["--load", str(tmp_path / "a"), "--save", str(tmp_path / "b")]
    assert main(T5Recipe(), [*TRAINING, *places, "--seq-length", str(length)]) == 0
    assert "lm loss" in capsys.readouterr().out
    words = ["--hf-files", str(tmp_path / "a"), "--verify"]
    assert convert("native", "hf", tmp_path / "b", tmp_path / "c", *words) == 0
    assert "--verify: logits differ by at most" in capsys.readouterr().out
    one, other = ((tmp_path / name / "config.json").read_bytes() for name in "ac")
    assert one == other
    trained = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "c")
    for name, before in model.state_dict().items():
        change = (trained.state_dict()[name] - before).abs().max()
        assert 0 < change <= 1.1e-3, name  # one step of Adam


CORPUS = """
    --finetune --use-checkpoint-args --seq-length 24 --decoder-seq-length 12 --micro-batch-size 4
    --train-iters 1 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0 --num-workers 0
    --log-interval 1 --eval-iters 0 --save-interval 1 --split 1 --no-exit-signal-handler
    --tokenizer-type HuggingFaceTokenizer
""".split()


def test_a_corpus_in_its_own_tokens_has_the_loss_of_transformers(tmp_path, capsys):
    """From text to a model that fills in spans, with its own sentinels and its own loss.

    The loss of `transformers` prepends the decoder's start token itself.
    """
    assert SIZE == VOCAB  # no padded vocabulary entries in the softmax
    model = save("1.1", tmp_path / "a", own_head=True, decoder_start_token_id=0)
    flags = ["--tokenizer-model", str(write_t5_tokenizer(tmp_path / "a"))]
    chance = random.Random(0)
    with (tmp_path / "text.jsonl").open("w") as file:
        for _ in range(20):
            sentences = [chance.choices([f"w{i}" for i in range(WORDS)], k=9) for _ in range(5)]
            file.write(json.dumps({"text": [" ".join(words) for words in sentences]}) + "\n")
    words = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "text")]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", *flags, "--workers", "1"]
    assert preprocess_data.main(words) == 0
    data = ["--data-path", str(tmp_path / "text_text_document")]
    places = ["--load", str(tmp_path / "a"), "--save", str(tmp_path / "b")]
    divisible = ["--make-vocab-size-divisible-by", str(VOCAB)]
    assert main(T5Recipe(), [*CORPUS, *flags, *data, *places, *divisible]) == 0
    (loss,) = re.findall(r"lm loss: (\S+)", capsys.readouterr().out)

    dataset = build_t5_datasets(
        DataRequest(
            DataConfig(seq_length=16, data_path=(data[1],), split="1"), 1234, samples=(4, 0, 0)
        ),
        encoder_seq_length=24,
        decoder_seq_length=12,
        tokenizer=t5_tokenizer(tmp_path / "a"),
    ).train
    batch = collate([dataset[i] for i in range(4)])
    labels = batch["labels"].masked_fill(batch["labels"] < 0, -100)
    with torch.no_grad():
        expected = model(batch["text_enc"], attention_mask=batch["enc_mask"], labels=labels).loss
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)

    text = ["--text", "w1 [MASK] w2 w3 [MASK]"]
    for folder in ("a", "b"):  # for Hugging Face, and for training
        assert fill_in.main(["--load", str(tmp_path / folder), *text]) == 0
        assert re.search(r"  w1 <.*w\d.*> w2 w3 <.*w\d.*>", capsys.readouterr().out)
