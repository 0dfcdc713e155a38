"""Real text in three languages through the pipeline, and back from the token ids."""

from __future__ import annotations

import json
import lzma
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("datatrove", reason="needs the extra: pip install -e '.[corpora]'")

from megatron.config.data import TokenizerConfig
from megatron.corpora.plan import CorpusPlan, TokenizeStep, default_steps
from megatron.corpora.run import DATASET, Cluster, build_corpus
from megatron.data.indexed import IndexedDataset
from megatron.tokenizer import build_tokenizer
from tests.corpora.planted import SHARED

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent")
_BOOKS = {"tr": "tr/nutuk.txt.xz", "zh": "zh/journey-to-the-west.txt.xz"}
_OWN, _FOREIGN = 60, 20


def _pages(language: str, count: int) -> list[str]:
    """Return the first pages of a book, about 1,500 characters each."""
    if language == "en":
        with tarfile.open(SHARED / "corpus" / "en" / "100_english_novels.tar.xz") as archive:
            book = next(member for member in archive if member.isfile())
            text = archive.extractfile(book).read().decode()
    else:
        text = lzma.decompress((SHARED / "corpus" / _BOOKS[language]).read_bytes()).decode()
    start = 3_000  # after the title and table of contents
    return [text[start + 1_500 * i : start + 1_500 * (i + 1)] for i in range(count)]


@pytest.mark.parametrize("language", ["en", "tr", "zh"])
def test_a_language_is_kept_and_comes_back_from_its_ids(language: str, tmp_path: Path) -> None:
    foreign = {"en": "tr", "tr": "zh", "zh": "en"}[language]
    with (tmp_path / "pages.jsonl").open("w", encoding="utf-8") as file:
        for kind, count in ((language, _OWN), (foreign, _FOREIGN)):
            for number, text in enumerate(_pages(kind, count)):
                record = {"text": text, "id": f"{kind}-{number}"}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    files = SHARED / "tokenizers" / "gpt2"
    flags = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(files / "gpt2-vocab.json"),
        merge_file=str(files / "gpt2-merges.txt"),
    )
    steps = {**default_steps((language,)), "tokenize": TokenizeStep(flags, append_eod=False)}
    plan = CorpusPlan((str(tmp_path / "pages.jsonl"),), steps)
    build_corpus(plan, tmp_path / "corpus", Cluster(workers=1), overwrite=False)
    texts = [
        json.loads(line)
        for file in sorted((tmp_path / "corpus").glob("text/*"))
        for line in file.open(encoding="utf-8")
    ]
    kept = [record["id"].partition("#")[0] for record in texts]
    own = {name for name in kept if name.startswith(language)}
    assert len(own) >= 0.9 * _OWN  # some pages of classical Chinese are taken for Japanese
    assert not [name for name in kept if name.startswith(foreign)]
    dataset, tokenizer = IndexedDataset(tmp_path / "corpus" / DATASET), build_tokenizer(flags)
    assert len(dataset) == len(texts)
    for number, record in enumerate(texts):
        assert tokenizer.detokenize(dataset.get(number).tolist()) == record["text"]
