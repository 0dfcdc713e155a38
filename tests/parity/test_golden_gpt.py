"""Held against Megatron-LM 23.08: `gpt_fp32` goes on from iteration 20 as the original did."""

import json

import pytest

from megatron.training.pretrain import main
from pretrain_gpt import GPTRecipe

LOSS, GRAD_NORM = 1e-4, 2e-3  # relative tolerances


def _arguments(data, cache, metrics, load):
    return f"""
        --num-layers 4 --hidden-size 64 --num-attention-heads 4
        --seq-length 128 --max-position-embeddings 128
        --micro-batch-size 4 --global-batch-size 16 --train-iters 40
        --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 40
        --lr-warmup-fraction 0.1 --attention-dropout 0 --hidden-dropout 0
        --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
        --no-gradient-accumulation-fusion --no-async-tensor-model-parallel-allreduce
        --no-persist-layer-norm
        --data-path {data}/gpt_text_document --split 949,50,1 --data-cache-path {cache}
        --tokenizer-type GPT2BPETokenizer --num-workers 0
        --vocab-file {data}/gpt2-tiny-vocab.json --merge-file {data}/gpt2-tiny-merges.txt
        --eval-interval 20 --eval-iters 5 --log-interval 1
        --metrics-jsonl {metrics} --load {load}
    """.split()


@pytest.fixture(scope="module")
def continued(golden, tmp_path_factory):
    """Our iterations 21 to 40: metrics, the folder of the index cache, and the recording."""
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(golden)  # the cache's file names hash the data path as spelt
        code = main(
            GPTRecipe(), _arguments("data", folder / "cache", folder / "m.jsonl", "gpt_fp32/ckpt")
        )
    assert code == 0
    records = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    recording = json.loads((golden / "gpt_fp32" / "run.json").read_text())
    return records, folder / "cache", recording


def test_training_goes_on_as_the_original(continued):
    records, _, recording = continued
    ours = {r["iteration"]: r for r in records if "lm loss" in r}
    assert sorted(ours) == list(range(21, 41))
    for theirs in recording["train"][20:]:
        mine = ours[theirs["iteration"]]
        assert mine["lm loss"] == pytest.approx(theirs["lm loss"], rel=LOSS)
        assert mine["grad-norm"] == pytest.approx(theirs["grad norm"], rel=GRAD_NORM)
        assert mine["consumed samples"] == theirs["consumed samples"]
        assert f"{mine['learning-rate']:.3E}" == f"{theirs['learning rate']:.3E}"


def test_evaluation_gives_the_recorded_losses(continued):
    records, _, recording = continued
    ours = [r["lm loss validation"] for r in records if "lm loss validation" in r]
    theirs = [v["lm loss"] for v in recording["validation"] if v["iteration"] == 40]
    assert ours == pytest.approx(theirs, rel=LOSS)


def test_index_cache_is_the_original_byte_for_byte(continued, golden):
    """File names hash the data path as it was spelt in the recorded run, so .dsc texts pair up."""
    _, cache, _ = continued
    ours = {path.read_text(): path for path in cache.glob("*.dsc")}
    recorded = sorted((golden / "gpt_fp32" / "index-cache").glob("*.dsc"))
    assert len(recorded) == 2
    for theirs in recorded:
        mine = ours[theirs.read_text()]
        for kind in ("doc_idx", "sample_idx", "shuffle_idx"):
            name = f"{{}}_{kind}.npy"
            original = theirs.with_name(name.format(theirs.stem)).read_bytes()
            assert mine.with_name(name.format(mine.stem)).read_bytes() == original
