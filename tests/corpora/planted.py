"""A test corpus made from a seed, with planted near-duplicates, overlaps and foreign pages.

`score` compares what the pipeline finds with what was planted.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
from pyarrow import parquet

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

_NOUNS = """river mountain teacher garden winter letter market bridge captain village question
harbor window forest doctor painter kitchen station journey library evening promise memory soldier
island neighbor machine blanket festival mirror engine orchard sailor lantern valley cousin meadow
saddle factory museum shepherd thunder basket curtain pebble wagon chimney feather candle
tailor""".split()
_ADJECTIVES = """quiet ancient narrow golden bitter gentle hollow crooked distant curious clever
stubborn fragile patient sudden heavy brilliant careless humble restless silver wooden frozen
ordinary enormous peculiar cheerful ragged secret splendid""".split()
_VERBS = """followed remembered carried painted discovered repaired forgot crossed described
welcomed watched borrowed promised guarded measured abandoned answered collected imagined polished
visited explained trusted buried hid sold admired chased counted wrote""".split()
_LINKS = """because although while until after before whenever and but so since unless""".split()
_PLACES = """near the old mill|behind the church|at the edge of town|under a pale sky|beside the
road|across the bay|in the early morning|without a single word|on the other side|for many
years|with great care|to the end of the street""".replace("\n", " ").split("|")

# Sentences of eight languages, from which foreign pages are drawn.
_FOREIGN = {
    "fr": """Le marché du village ouvre très tôt le matin. Les enfants jouent dans la cour de
l'école. Nous avons traversé la rivière sur un vieux pont de pierre. Il ne savait pas encore ce que
l'avenir lui réservait. La pluie tombait doucement sur les toits de la ville. Elle écrivait chaque
soir une longue lettre à sa sœur. Personne ne voulait croire cette histoire étrange.""",
    "de": """Der Markt im Dorf öffnet sehr früh am Morgen. Die Kinder spielen auf dem Hof der
Schule. Wir sind über eine alte steinerne Brücke gegangen. Er wusste noch nicht, was die Zukunft
bringen würde. Der Regen fiel leise auf die Dächer der Stadt. Sie schrieb ihrer Schwester jeden
Abend einen langen Brief. Niemand wollte diese seltsame Geschichte glauben.""",
    "es": """El mercado del pueblo abre muy temprano por la mañana. Los niños juegan en el patio de
la escuela. Cruzamos el río por un viejo puente de piedra. Él todavía no sabía lo que le esperaba.
La lluvia caía suavemente sobre los tejados de la ciudad. Ella escribía cada noche una larga carta a
su hermana. Nadie quería creer aquella extraña historia.""",
    "it": """Il mercato del paese apre molto presto la mattina. I bambini giocano nel cortile della
scuola. Abbiamo attraversato il fiume su un vecchio ponte di pietra. Non sapeva ancora che cosa gli
riservasse il futuro. La pioggia cadeva piano sui tetti della città. Ogni sera lei scriveva una
lunga lettera a sua sorella. Nessuno voleva credere a quella strana storia.""",
    "ru": """Рынок в деревне открывается очень рано утром. Дети играют во дворе школы. Мы перешли
реку по старому каменному мосту. Он ещё не знал, что его ждёт впереди. Дождь тихо падал на крыши
города. Каждый вечер она писала длинное письмо своей сестре. Никто не хотел верить этой странной
истории.""",
    "pl": """Targ we wsi otwiera się bardzo wcześnie rano. Dzieci bawią się na dziedzińcu szkoły.
Przeszliśmy przez rzekę po starym kamiennym moście. Jeszcze nie wiedział, co przyniesie przyszłość.
Deszcz cicho padał na dachy miasta. Co wieczór pisała długi list do swojej siostry. Nikt nie chciał
wierzyć w tę dziwną historię.""",
    "nl": """De markt in het dorp gaat heel vroeg in de ochtend open. De kinderen spelen op het
plein van de school. Wij staken de rivier over via een oude stenen brug. Hij wist nog niet wat de
toekomst zou brengen. De regen viel zachtjes op de daken van de stad. Elke avond schreef zij een
lange brief aan haar zus. Niemand wilde dit vreemde verhaal geloven.""",
    "zh": """村里的市场很早就开门了。孩子们在学校的院子里玩耍。我们走过一座古老的石桥。他还不知道
将来会怎样。雨轻轻地落在城市的屋顶上。她每天晚上都给姐姐写一封长信。没有人愿意相信这个奇怪的故事。""",
}
_BOILERPLATE = (
    "Home News Sports Weather Contact us. Subscribe to our newsletter and never miss a story.",
    "All rights reserved. Reproduction of this page without written permission is not allowed.",
    "You are reading the archive of our daily column, which appears here every weekday at noon.",
    "Share this page with your friends or leave a comment in the box below the article.",
)


class Sizes(NamedTuple):
    """How many of each kind to plant."""

    documents: int
    duplicates: int
    overlaps: int
    foreign: int


FULL = Sizes(20_000, 1_000, 500, 300)
SMALL = Sizes(500, 40, 20, 15)


@dataclass(frozen=True)
class Planted:
    """A corpus, and what was planted in it.

    Attributes:
        folder: The input of the pipeline.
        tasks: The task files.
        texts: The text of each document by its name.
        duplicates: The names of the near-duplicates, not of the first document of each group.
        overlaps: The names of the documents with a part of a task.
        foreign: The names of the foreign pages.
        groups: The number of the group of each document, -1 for foreign pages.
    """

    folder: Path
    tasks: list[Path]
    texts: dict[str, str]
    duplicates: set[str]
    overlaps: set[str]
    foreign: set[str]
    groups: dict[str, int]


def sentences(generator: random.Random) -> Iterator[str]:
    """Yield English sentences from templates, without end."""
    pick = generator.choice
    while True:
        clauses = [
            f"the {pick(_ADJECTIVES)} {pick(_NOUNS)} {pick(_VERBS)} the {pick(_NOUNS)} of the "
            f"{pick(_ADJECTIVES)} {pick(_NOUNS)} {pick(_PLACES)}"
            for _ in range(generator.randrange(1, 3))
        ]
        yield f" {pick(_LINKS)} ".join(clauses).capitalize() + "."


def template_documents(generator: random.Random, count: int) -> Iterator[str]:
    source = sentences(generator)
    for _ in range(count):
        lines = [next(source) for _ in range(generator.randrange(10, 30))]
        yield "\n\n".join(" ".join(lines[i : i + 5]) for i in range(0, len(lines), 5))


def novel_documents(generator: random.Random, count: int) -> Iterator[str]:
    """Yield runs of paragraphs from 100 novels, at least 120 words each, without overlap."""
    runs = []
    with tarfile.open(SHARED / "corpus" / "en" / "100_english_novels.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None:
                continue
            text = re.sub(r"\r\n?", "\n", file.read().decode("utf-8", "replace"))
            text = re.sub(r"[^\n -~]", " ", text)  # the files have mixed encodings
            words: list[str] = []
            for line in text.split("\n"):
                words += line.split()
                if len(words) >= generator.randrange(120, 500) and line.rstrip().endswith("."):
                    runs.append(" ".join(words))
                    words = []
    generator.shuffle(runs)
    assert len(runs) >= count
    yield from runs[:count]


def _split(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def _replace_words(text: str, generator: random.Random) -> str:
    """Replace every thirtieth word."""
    words = text.split(" ")
    for place in generator.sample(range(len(words)), max(1, len(words) // 30)):
        words[place] = generator.choice(_NOUNS)
    return " ".join(words)


def _move_sentences(text: str, generator: random.Random) -> str:
    parts = _split(text)
    for _ in range(max(1, len(parts) // 10)):
        parts.insert(generator.randrange(len(parts)), parts.pop(generator.randrange(len(parts))))
    return " ".join(parts)


def _add_boilerplate(text: str, generator: random.Random) -> str:
    first, last = generator.sample(_BOILERPLATE, 2)
    return f"{first}\n\n{text}\n\n{last}"


def _cut_end(text: str, generator: random.Random) -> str:
    return text[: int(len(text) * generator.uniform(0.85, 0.95))]


def _reformat(text: str, generator: random.Random) -> str:
    return "\n".join(_split(text.upper().replace(",", " -")))


_CHANGES: list[Callable[[str, random.Random], str]] = [
    _replace_words,
    _move_sentences,
    _add_boilerplate,
    _cut_end,
    _reformat,
]


def _with_overlap(text: str, passage: str, generator: random.Random) -> str:
    words = passage.split()
    if len(words) > 20:
        length = generator.randrange(16, min(60, len(words)))
        begin = generator.randrange(len(words) - length)
        words = words[begin : begin + length]
    passage = " ".join(words)
    if generator.random() < 0.3:
        passage = passage.upper().replace(",", ";")
    parts = _split(text)
    parts.insert(generator.randrange(len(parts) + 1), passage + ".")
    return " ".join(parts)


def _foreign(generator: random.Random, shared: bool) -> str:
    language = generator.choice([*_FOREIGN, *(("tr", "zh-novel") if shared else ())])
    if language in _FOREIGN:
        mark = "。" if language == "zh" else ". "
        parts = [part.strip() for part in _FOREIGN[language].replace("\n", " ").split(mark.strip())]
        return mark.join(generator.choices([part for part in parts if part], k=20)) + mark.strip()
    name = "tr/nutuk.txt.xz" if language == "tr" else "zh/journey-to-the-west.txt.xz"
    text = lzma.decompress((SHARED / "corpus" / name).read_bytes()).decode()
    begin = generator.randrange(len(text) - 3000)
    return text[begin : begin + generator.randrange(600, 3000)]


def plant(folder: Path, sizes: Sizes, seed: int, *, shared: bool) -> Planted:
    """Write a corpus in six formats, and its task files.

    Args:
        folder: A new folder.
        sizes: How much to plant.
        seed: The seed of everything.
        shared: Whether to use the novels and tasks in ../shared/data instead of templates.
    """
    generator = random.Random(seed)
    originals = sizes.documents - sizes.duplicates - sizes.foreign
    documents = novel_documents if shared else template_documents
    texts = list(documents(generator, originals))
    tasks, passages = _tasks(folder, generator, shared)
    kinds = ["overlap"] * sizes.overlaps + ["plain"] * (originals - sizes.overlaps)
    records = []  # (text, kind, group)
    for number, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        passage = generator.choice(passages)
        whole = _with_overlap(text, passage, generator) if kind == "overlap" else text
        records.append((whole, kind, number))
    # Copies of pages without overlaps; a few pages have several. Some pages share a header only.
    for number in range(sizes.duplicates):
        group = generator.randrange(sizes.overlaps, originals)
        copy = _CHANGES[number % len(_CHANGES)](texts[group], generator)
        records.append((copy, "copy", group))
    for number in range(0, originals, 10):
        text, kind, group = records[number]
        records[number] = (f"{_BOILERPLATE[0]}\n\n{text}", kind, group)
    records += [(_foreign(generator, shared), "foreign", -1) for _ in range(sizes.foreign)]
    generator.shuffle(records)
    named = {f"doc-{number:05d}": record for number, record in enumerate(records)}
    seen: set[int] = set()
    duplicates = set()
    for name, (_, _, group) in _written_order(named):
        if group in seen:
            duplicates.add(name)
        seen |= {group} - {-1}
    _write(folder / "crawl", [(name, text) for name, (text, _, _) in named.items()])
    return Planted(
        folder / "crawl",
        tasks,
        {name: text for name, (text, _, _) in named.items()},
        duplicates,
        {name for name, (_, kind, _) in named.items() if kind == "overlap"},
        {name for name, (_, kind, _) in named.items() if kind == "foreign"},
        {name: group for name, (_, _, group) in named.items()},
    )


def _tasks(folder: Path, generator: random.Random, shared: bool) -> tuple[list[Path], list[str]]:
    folder.mkdir(parents=True)
    if shared:
        files = [
            SHARED / "eval" / "lambada" / "lambada_test.jsonl",
            SHARED / "eval" / "nq" / "NQ-open.dev.jsonl",
        ]
        lambada = [json.loads(line)["text"] for line in files[0].open(encoding="utf-8")]
        questions = [json.loads(line)["question"] for line in files[1].open(encoding="utf-8")]
        long = [text for text in lambada if len(re.findall(r"\w+", text)) > 25]
        return files, long + [text for text in questions if len(re.findall(r"\w+", text)) >= 8]
    source = sentences(random.Random(generator.random()))
    passages = [" ".join(next(source) for _ in range(4)) for _ in range(50)]
    questions = [f"Who {generator.choice(_VERBS)} the {' '.join(generator.sample(_NOUNS, 6))}?"]
    file = folder / "task.jsonl"
    lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate(passages + questions)]
    file.write_text("\n".join(lines))
    return [file], passages + questions


_FILES = ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.warc.gz", "f.wet.gz")


def _written_order(named: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the documents in the order of the input: file by file."""
    items = list(named.items())
    return [item for number in range(len(_FILES)) for item in items[number :: len(_FILES)]]


def _write(folder: Path, records: list[tuple[str, str]]) -> None:
    folder.mkdir()
    portions = [records[number :: len(_FILES)] for number in range(len(_FILES))]
    lines = [
        "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in portion).encode()
        for portion in portions
    ]
    (folder / _FILES[0]).write_bytes(lines[0])
    (folder / _FILES[1]).write_bytes(gzip.compress(lines[1], 1, mtime=0))
    with pyarrow.CompressedOutputStream(str(folder / _FILES[2]), "zstd") as packed:
        packed.write(lines[2])
    names, texts = zip(*portions[3], strict=True)
    table = pyarrow.table({"id": list(names), "text": list(texts)})
    parquet.write_table(table, folder / _FILES[3], row_group_size=100)
    pages = b"".join(gzip.compress(_warc(name, text), 1, mtime=0) for name, text in portions[4])
    (folder / _FILES[4]).write_bytes(pages)
    pages = b"".join(
        gzip.compress(_record("conversion", name, "text/plain", text.encode()), 1, mtime=0)
        for name, text in portions[5]
    )
    (folder / _FILES[5]).write_bytes(pages)


def _record(kind: str, name: str, content: str, body: bytes) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: {name}\r\n"
    head += f"WARC-Target-URI: http://www.example.org/{name}\r\nContent-Type: {content}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%s\r\n\r\n" % (len(body), body)


def _warc(name: str, text: str) -> bytes:
    paragraphs = "".join(f"<p>{escape(part)}</p>\n" for part in text.split("\n\n"))
    html = f"""<!DOCTYPE html><html><head><title>{name}</title></head><body>
<nav><ul><li><a href="/">Home</a></li><li><a href="/about">About us</a></li></ul></nav>
<main><article>{paragraphs}</article></main>
<footer>Copyright 2024. Imprint. Privacy policy.</footer></body></html>""".encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
    return _record("response", name, "application/http; msgtype=response", head + html)


class Score(NamedTuple):
    """How well the planted documents were found."""

    precision: float
    recall: float


def score(planted: Planted, output: Path) -> dict[str, Score]:
    """Compare what a pipeline has removed or cut with what was planted."""
    dropped: dict[str, set[str]] = {}
    for file in sorted((output / "dropped").glob("*/*.jsonl")):
        for line in file.read_bytes().splitlines():
            record = json.loads(line)
            dropped.setdefault(record["step"], set()).add(record["id"])
    found = {
        "near-duplicates": (dropped.get("duplicates", set()), planted.duplicates),
        "task overlaps": (dropped.get("tasks", set()), planted.overlaps),
        "foreign pages": (dropped.get("language", set()), planted.foreign),
    }
    return {
        name: Score(len(one & true) / max(len(one), 1), len(one & true) / len(true))
        for name, (one, true) in found.items()
    }
