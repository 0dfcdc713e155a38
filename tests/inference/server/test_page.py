"""The page in a real browser, by keyboard, by mouse and on a phone; it loads nothing external."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.inference.request import NeighborPassage
from tests.inference.server.chromium import Page, chromium
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.live import Live, make_settings, running
from tests.repository import ROOT

PAGE = ROOT / "megatron" / "inference" / "server" / "page"
TEXT = "Hello, world! One two"
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
DESKTOP = {"width": 1180, "height": 760}
PHONE = {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def quick(tokenizer_folder: Path) -> Iterator[Live]:
    engine = FakeEngine()
    with running(engine, make_settings(tokenizer_folder, engine, chat_template=CHAT)) as live:
        yield live


def _open(page: Page, live: Live, **window: int) -> None:
    page.problems.clear()
    page.requests.clear()
    page.open(live.url, **window)
    page.wait("document.getElementById('model').textContent === 'test'")
    page.wait("document.activeElement.id === 'input'")  # otherwise typed text is lost


def _text(selector: str) -> str:
    return f"document.querySelector({selector!r}).textContent"


def _done(page: Page) -> None:
    page.wait("document.getElementById('stop').hidden && !document.querySelector('.writing')")


def test_a_text_is_continued_by_keyboard_alone(page: Page, quick: Live) -> None:
    _open(page, quick, **DESKTOP)
    assert page.ask("document.activeElement.id") == "input"
    page.write(TEXT)
    page.press("Enter", ctrl=True)
    _done(page)
    assert page.ask(_text("#output")).startswith(TEXT * 3)
    assert re.match(r"100 tokens · [\d.]+ tokens/s · first after", page.ask(_text("#status")))
    page.ask("document.getElementById('output').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    chosen, rows = _text(".chosen"), "document.querySelectorAll('#tip tr').length"
    assert page.ask(chosen) == ","
    assert page.ask(rows) >= 5
    page.press("Escape")
    assert page.ask("document.getElementById('tip').hidden")
    assert not page.problems
    assert {url.partition(quick.url)[0] for url in page.requests} == {""}


def test_pointing_at_a_token_tells_how_likely_it_was(page: Page, quick: Live) -> None:
    _open(page, quick, **DESKTOP)
    page.write(TEXT)
    page.press("Enter", ctrl=True)
    _done(page)
    page.hover(".answer span:nth-child(2)")
    page.wait("!document.getElementById('tip').hidden")
    assert "%" in page.ask(_text("#tip .taken"))


def test_the_text_is_copied_or_selected(page: Page, quick: Live) -> None:
    _open(page, quick, **DESKTOP)
    page.write(TEXT)
    page.press("Enter", ctrl=True)
    _done(page)
    text = page.ask(_text("#output"))
    press = "document.getElementById('copy').click()"
    page.ask("void (navigator.clipboard.writeText = async (text) => { window.copied = text; })")
    page.ask(press)
    page.wait("document.getElementById('status').textContent === 'Copied.'")
    assert page.ask("window.copied") == text
    # As on a page without clipboard permission.
    page.ask("void (navigator.clipboard.writeText = async () => { throw new Error('no'); })")
    page.ask(press)
    page.wait("document.getElementById('status').textContent.startsWith('Selected')")
    assert page.ask("getSelection().toString()") == text


def test_settings_reach_the_server_and_stay(page: Page, quick: Live) -> None:
    _open(page, quick, **DESKTOP)
    for name, value in {"temperature": 0.5, "top_k": 7, "max_tokens": 3, "seed": 11}.items():
        page.ask(
            "(e => e.dispatchEvent(new Event('input', {bubbles: true})))"
            f"(Object.assign(document.getElementById('{name}'), {{value: {value}}}))"
        )
    page.write(TEXT)
    page.press("Enter", ctrl=True)
    _done(page)
    sampling = quick.engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 11)
    assert sampling.max_new_tokens == 3
    _open(page, quick, **DESKTOP)
    assert page.ask("document.getElementById('top_k').value") == "7"
    page.ask("localStorage.clear()")


def test_a_chat_goes_back_and_forth(page: Page, quick: Live) -> None:
    _open(page, quick, **DESKTOP)
    page.ask("document.querySelector('[value=chat]').click()")
    for message in ("Hello", "world"):
        page.ask("document.getElementById('input').focus()")
        page.write(message)
        page.press("Enter")
        _done(page)
    assert page.ask("document.querySelectorAll('.turn').length") == 4
    assert page.ask("document.querySelectorAll('.turn.user')[1].textContent") == "world"
    prompts = [len(request.prompt) for request in quick.engine.seen[-2:]]
    assert prompts[1] > prompts[0] + 90  # earlier messages are included
    page.ask("document.getElementById('clear').click()")
    assert page.ask("document.querySelectorAll('.turn').length") == 0
    assert not page.problems


@pytest.mark.parametrize("mode", ["complete", "chat"])
def test_the_passages_that_a_retro_has_read_are_below_its_answer(
    page: Page, tokenizer_folder: Path, mode: str
) -> None:
    engine = FakeEngine()
    texts = ("one <b>bold</b> passage", "another\npassage")
    engine.passages = tuple(NeighborPassage(i, 0, 283 + i, text) for i, text in enumerate(texts))
    settings = make_settings(tokenizer_folder, engine, chat_template=CHAT, retrieves=True)
    with running(engine, settings) as live:
        _open(page, live, **DESKTOP)
        page.ask(f"document.querySelector('[value={mode}]').click()")
        assert page.ask("document.getElementById('passages').hidden")
        for _ in range(2):  # the second answer's replace the first's
            page.ask("document.getElementById('input').focus()")
            page.write(TEXT)
            page.press("Enter", ctrl=True)
            _done(page)
            assert page.ask(_text("#passages summary")) == "The model has read 2 passages"
            quotes = (
                "[...document.querySelectorAll('#passages blockquote')].map(e => e.textContent)"
            )
            assert page.ask(quotes) == list(texts)
            source = page.ask(_text("#passages li:last-child b"))
            assert source == "For chunk 2, from document 284 of corpus 0"
            assert "passage" not in page.ask(_text("#output"))
        page.ask("document.getElementById('clear').click()")
        assert page.ask("document.getElementById('passages').hidden")
        assert not page.problems


def test_escape_stops_and_frees_the_engine(page: Page, tokenizer_folder: Path) -> None:
    engine = FakeEngine(seconds=0.1)
    with running(engine, make_settings(tokenizer_folder, engine, chat_template=CHAT)) as live:
        _open(page, live, **DESKTOP)
        page.write(TEXT)
        page.press("Enter", ctrl=True)
        page.wait("document.querySelectorAll('.answer span').length > 3")
        page.press("Escape")
        _done(page)
        assert "stopped" in page.ask(_text("#status"))
        end = time.monotonic() + 60
        while engine.has_work and time.monotonic() < end:
            time.sleep(0.01)
        assert not engine.has_work
        assert engine.stats.new_tokens < 100  # of the whole answer
        assert not page.problems


def test_a_phone_shows_everything_without_scrolling_sideways(page: Page, quick: Live) -> None:
    _open(page, quick, **PHONE)
    page.write("x" * 200)
    page.ask("document.getElementById('send').click()")
    _done(page)
    assert page.ask("document.documentElement.scrollWidth") <= PHONE["width"]
    small = page.ask(
        "[...document.querySelectorAll('.actions button')].filter(b => !b.hidden)"
        ".filter(b => b.getBoundingClientRect().height < 40).length"
    )
    assert small == 0  # large enough for a thumb


def test_every_control_has_a_name(page: Page, quick: Live) -> None:
    _open(page, quick, **DESKTOP)
    nameless = page.ask(
        "[...document.querySelectorAll('input, textarea, select, button')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim())).map(e => e.outerHTML)"
    )
    assert nameless == []


def test_a_model_is_chosen_where_there_are_several(page: Page, tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    settings = make_settings(tokenizer_folder, engine, adapters=("sql", "rhymes"))
    with running(engine, settings) as live:
        _open(page, live, **DESKTOP)
        assert page.ask("document.getElementById('served-control').checkVisibility()")
        names = page.ask("[...document.getElementById('served').options].map(each => each.value)")
        assert names == ["test", "sql", "rhymes"]
        for adapter, name in ((0, None), (2, "rhymes"), (0, "test")):
            if name is not None:
                page.ask(
                    "(served => { served.value = '" + name + "';"
                    "served.dispatchEvent(new Event('change', {bubbles: true})) })"
                    "(document.getElementById('served'))"
                )
                assert page.ask(_text("#model")) == name
            page.ask("document.getElementById('input').value = 'Hi'")
            page.ask("document.getElementById('send').click()")
            _done(page)
            page.wait(f"{_text('#status')}.includes('·')")
            assert engine.seen[-1].adapter == adapter


def test_a_server_with_a_token_asks_for_it(page: Page, tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    token = "0123456789abcdef"
    with running(engine, make_settings(tokenizer_folder, engine, token=token)) as live:
        page.open(live.url, **DESKTOP)
        page.wait("!document.getElementById('notice').hidden")
        assert "access token" in page.ask(_text("#notice"))
        page.ask("document.getElementById('token').focus()")
        page.write(token)
        page.press("Tab")
        page.wait("document.getElementById('model').textContent === 'test'")
        assert page.ask("document.getElementById('notice').hidden")
        page.ask("sessionStorage.clear()")


def test_the_page_names_no_other_place_and_no_inline_code() -> None:
    for file in sorted(PAGE.iterdir()):
        text = file.read_text(encoding="utf-8")
        outside = set(re.findall(r"https?://[^\s\"'<)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not outside, file.name
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\bon\w+=|style=|<script(?! type=\"module\" src=)", html)


@pytest.mark.parametrize("path", ["/", "/index.html"])
def test_the_page_is_served_with_a_strict_policy(live: Live, path: str) -> None:
    answer = live.client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_continue_resumes_from_the_text_so_far(page: Page, quick: Live) -> None:
    _open(page, quick, **DESKTOP)
    assert page.ask("document.getElementById('continue').disabled")
    page.ask("document.getElementById('max_tokens').value = 5")
    page.write(TEXT)
    page.press("Enter", ctrl=True)
    _done(page)
    first, seen = page.ask(_text("#output")), len(quick.engine.seen)
    assert len(first) > len(TEXT)
    page.ask("document.getElementById('continue').click()")
    _done(page)
    assert len(quick.engine.seen) == seen + 1
    second = page.ask(_text("#output"))
    assert second.startswith(first)
    assert len(second) > len(first)
    ids = quick.engine.seen[-1].prompt
    assert len(ids) > len(quick.engine.seen[-2].prompt)  # the first answer is part of the prompt
    # The first answer's tokens can still be hovered over.
    assert page.ask("document.querySelectorAll('.answer').length") == 2
    page.ask("document.getElementById('again').click()")
    _done(page)
    assert quick.engine.seen[-1].prompt == ids  # another continuation of the same text
    assert page.ask(_text("#output")).startswith(first)
    assert page.ask("document.querySelectorAll('.answer').length") == 2
    page.press("Enter", ctrl=True)  # a new text, from the prompt alone
    _done(page)
    assert page.ask(_text("#output")) == first
    assert page.ask("document.querySelectorAll('.answer').length") == 1
    assert not page.problems


def test_a_prompt_that_is_too_long_is_reported_with_both_numbers(page: Page, quick: Live) -> None:
    _open(page, quick, **DESKTOP)
    page.write("x" * 250)
    page.press("Enter", ctrl=True)
    _done(page)
    told = page.ask(_text("#status"))
    assert re.search(r"The prompt has \d+ tokens and Max new tokens is 100", told)
    assert "the model's 256" in told
    assert "max_tokens" not in told
    page.ask("document.getElementById('max_tokens').value = 1.5")
    page.press("Enter", ctrl=True)
    _done(page)
    assert page.ask(_text("#status")) == "Max new tokens: give an integer."


def test_a_server_that_is_gone_is_reported_with_a_remedy(
    page: Page, tokenizer_folder: Path
) -> None:
    engine = FakeEngine()
    with running(engine, make_settings(tokenizer_folder, engine)) as live:
        _open(page, live, **DESKTOP)
    page.write(TEXT)
    page.press("Enter", ctrl=True)
    _done(page)
    told = page.ask(_text("#status"))
    assert told.startswith("The server cannot be reached. Check that it is running")
    assert "Failed to fetch" not in page.ask("document.body.textContent")


def test_why_there_is_no_chat_is_in_plain_sight(page: Page, tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    with running(engine, make_settings(tokenizer_folder, engine, chat_template=None)) as live:
        _open(page, live, **DESKTOP)
        reason = "document.getElementById('no-chat')"
        page.wait(f"!{reason}.hidden")
        assert "this model has no chat template" in page.ask(_text("#no-chat"))
        assert page.ask(f"{reason}.getBoundingClientRect().height") > 10
        assert page.ask("document.querySelector('[value=chat]').disabled")
    engine = FakeEngine()
    with running(engine, make_settings(tokenizer_folder, engine, chat_template=CHAT)) as live:
        _open(page, live, **DESKTOP)
        assert page.ask("document.getElementById('no-chat').hidden")


def test_the_labels_are_those_of_the_field(page: Page, quick: Live) -> None:
    _open(page, quick, **DESKTOP)
    labels = page.ask("[...document.querySelectorAll('label')].map(e => e.textContent.trim())")
    for label in ("Prompt", "Max new tokens", "Stop sequences", "Temperature", "Top-p", "Top-k"):
        assert label in labels
    assert page.ask("document.getElementById('output').dataset.empty") == (
        "Generated text appears here."
    )
