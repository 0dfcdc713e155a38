"""Show what neighbors contribute: `make demo MODEL=retro`.

The documents repeat passages of each other, so a retrieved passage shows how a text continues. A
small BERT embeds chunks of the documents, and tools/retro/main.py finds the neighbors of each
chunk. Then a Retro model and a GPT with at least as many parameters train on the same number of
tokens. At each evaluation, the Retro model also predicts the validation samples with neighbors of
other chunks.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from megatron.durable import replace_file
from megatron.environment import share_cores
from megatron.errors import DataError
from megatron.extras import packages_of
from megatron.tools.demo import run_step
from megatron.tools.plot_loss import read_validation

ITERATIONS = 500
_SEED = 1234
_WORDS, _PASSAGE, _QUOTES = 128, 64, 3  # different words; words per passage; quotes per document
_CHUNK, _LENGTH, _BATCH = 8, 128, 8
_SHARE = 20  # one in this many documents is for validation
_EVALUATIONS, _EVAL_ITERS = 4, 20
# Random words have no grammar, so recognizing chunks with the same words needs little training.
_BERT = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 16 --train-iters 100 --eval-interval 100 "
    "--eval-iters 4 --lr 3e-3 --min-lr 1e-4 --lr-warmup-fraction 0.05 --init-method-std 0.06 "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0 --log-interval 50"
)
# With a smaller init, the attention to neighbors stays uniform for most of the run.
_BOTH = (
    f"--hidden-size 64 --num-attention-heads 4 --max-position-embeddings {_LENGTH} "
    f"--micro-batch-size {_BATCH} --attention-dropout 0 --hidden-dropout 0 --lr 3e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 "
    f"--clip-grad 1.0 --init-method-std 0.12 --seed {_SEED} --num-workers 0"
)
# The Retro model has 490,880 parameters and the GPT 507,328, with the tokenizer trained here.
_RETRO = (
    "--num-layers 6 --retro-encoder-layers 2 --retro-encoder-hidden-dropout 0 "
    "--retro-encoder-attention-dropout 0 --retro-eval-shuffled"
)
_GPT = f"--num-layers 9 --seq-length {_LENGTH}"


def num_documents(iterations: int) -> int:
    """Return the number of documents for about one epoch of training."""
    length = _PASSAGE * (1 + _QUOTES)
    return max(2 * _SHARE, iterations * _BATCH * _LENGTH // length)


def write_corpus(path: Path, documents: int) -> None:
    """Write documents that consist of made-up words and repeat each other's passages.

    Each document consists of its own passage and three passages of training documents, in random
    order. The last twentieth of the documents is for validation. Each word is a token, and a
    passage ends where a chunk ends.

    Args:
        path: The file to write.
        documents: The number of documents.
    """
    rng = random.Random(_SEED)
    unique_words: dict[str, None] = {}
    while len(unique_words) < _WORDS:
        syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
        unique_words["".join(syllables)] = None
    words = list(unique_words)
    frequencies = [1 / (rank + 10) for rank in range(_WORDS)]
    passages = [rng.choices(words, frequencies, k=_PASSAGE) for _ in range(documents)]
    training = documents - documents // _SHARE
    lines = []
    for document in range(documents):
        quoted = [i for i in rng.sample(range(training), _QUOTES + 1) if i != document][:_QUOTES]
        document_passages = [passages[document], *(passages[i] for i in quoted)]
        rng.shuffle(document_passages)
        text = " ".join(word for passage in document_passages for word in passage)
        # The end-of-document token replaces the last word. With the leading space, the first word
        # is tokenized like the others.
        record = {
            "text": " " + text.rpartition(" ")[0],
            "sentences": [" ".join(passage_words) for passage_words in document_passages],
        }
        lines.append(json.dumps(record).encode() + b"\n")
    replace_file(path, b"".join(lines))
    print(f"wrote {path}: {documents} documents of {_PASSAGE * (1 + _QUOTES)} words")


def steps(out: Path, iterations: int) -> list[tuple[str, str]]:
    """Return the title and the command of every step."""
    documents = num_documents(iterations)
    held_out = documents // _SHARE
    split = f"{documents - held_out},{held_out},0"
    corpus, wordpiece = out / "corpus.jsonl", out / "wordpiece"
    bpe = f"--vocab-file {out}/tokenizer/vocab.json --merge-file {out}/tokenizer/merges.txt"
    gpt = f"--tokenizer-type GPT2BPETokenizer {bpe}"
    bert = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {wordpiece}/vocab.txt"
    chunks = (documents - held_out) * _PASSAGE * (1 + _QUOTES) // _CHUNK
    interval = max(1, iterations // _EVALUATIONS)
    evaluations = f"--eval-interval {interval} --eval-iters {min(_EVAL_ITERS, iterations)}"
    training = f"{_BOTH} {gpt} --train-iters {iterations} {evaluations} --log-interval {interval}"
    return [
        (
            "Train the GPT's tokenizer",
            f"megatron data tokenizer --input {corpus} --vocab-size 2048 "
            f"--output-dir {out}/tokenizer",
        ),
        (
            "Train the tokenizer of the BERT that embeds chunks",
            f"megatron data tokenizer --input {corpus} --kind wordpiece --vocab-size 1024 "
            f"--output-dir {wordpiece}",
        ),
        (
            "Turn the text into the GPT's token ids",
            f"megatron data preprocess --input {corpus} --output-prefix {out}/corpus {gpt} "
            "--append-eod --workers 1",
        ),
        (
            "Turn the text into the BERT's token ids",
            f"megatron data preprocess --input {corpus} --json-keys sentences "
            f"--output-prefix {out}/corpus {bert} --workers 1",
        ),
        (
            "Pretrain a small BERT",
            f"python pretrain_bert.py {_BERT} {bert} --data-path {out}/corpus_sentences_document "
            f"--split {split} --save {out}/bert --save-interval 100",
        ),
        (
            "Find the neighbors of all chunks",
            f"python tools/retro/main.py --retro-tasks build --retro-workdir {out}/workdir "
            f"--load {out}/bert --retro-bert-tokenizer-type BertWordPieceLowerCase "
            f"--retro-bert-vocab-file {wordpiece}/vocab.txt --retro-bert-max-chunk-length 64 "
            f"--retro-gpt-data-path {out}/corpus_text_document --retro-gpt-split {split} "
            f"--retro-gpt-tokenizer-type GPT2BPETokenizer --retro-gpt-seed {_SEED} "
            f"{bpe.replace('--', '--retro-gpt-')} --retro-gpt-seq-length {_LENGTH} "
            f"--retro-gpt-chunk-length {_CHUNK} {evaluations.replace('--', '--retro-gpt-')} "
            f"--train-iters {iterations} --global-batch-size {_BATCH} "
            "--retro-index-str IVF32_HNSW8,Flat --retro-index-nfeats 64 "
            f"--retro-index-ntrain {min(8000, chunks)} "
            "--retro-query-nprobe 8 --retro-query-ef-search 32 "
            "--retro-query-num-neighbors-query 20 --retro-query-num-neighbors-save 2",
        ),
        (
            "Pretrain a Retro model",
            f"python pretrain_retro.py {training} {_RETRO} --retro-workdir {out}/workdir "
            f"--metrics-jsonl {out}/retro.jsonl --save {out}/checkpoints "
            f"--save-interval {iterations}",
        ),
        (
            "Pretrain a GPT of the same size on the same number of tokens",
            f"python pretrain_gpt.py {training} {_GPT} --data-path {out}/corpus_text_document "
            f"--split {split} --metrics-jsonl {out}/gpt.jsonl",
        ),
        (
            "Draw the validation losses",
            f"megatron plot --compare GPT={out}/gpt.jsonl Retro={out}/retro.jsonl "
            f"--output {out}/loss.png --title Validation",
        ),
    ]


def demo(out: Path, iterations: int) -> None:
    """Run all steps and print the three losses.

    Args:
        out: An empty folder for everything that the demo writes.
        iterations: The number of updates of each of the two models, Retro and GPT.

    Raises:
        DataError: The path of the folder contains a space.
        ConfigError: The packages for building an index are not installed.
    """
    if len(str(out).split()) != 1:
        raise DataError(f"--out {out}: choose a path without spaces")
    with packages_of("retro"):
        import faiss  # noqa: F401
        import h5py  # noqa: F401
    start = time.perf_counter()
    share_cores(1)
    print("=== Text: made-up words, in passages that several documents repeat")
    write_corpus(out / "corpus.jsonl", num_documents(iterations))
    for title, command in steps(out, iterations):
        run_step(title, command.split())
    retro, gpt = (read_validation(out / f"{name}.jsonl", "--out") for name in ("retro", "gpt"))
    correct, shuffled = retro["lm loss"], retro["lm loss with shuffled neighbors"]
    print(f"""
=== Result: validation loss in nats per token
Retro                          {correct[-1][1]:.3f}
Retro with shuffled neighbors  {shuffled[-1][1]:.3f}
GPT of the same size           {gpt["lm loss"][-1][1]:.3f}
time                           {time.perf_counter() - start:.0f} s

Loss curves     {out / "loss.png"}
Metrics         {out / "retro.jsonl"}, {out / "gpt.jsonl"}
Working folder  {out / "workdir"}
Checkpoint      {out / "checkpoints"}""")
