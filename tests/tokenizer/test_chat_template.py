"""Chat templates: rendered as in transformers, with nothing that a template must not do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from jinja2.defaults import DEFAULT_FILTERS

from megatron.errors import ConfigError, DataError
from megatron.tokenizer import Tokenizer, chat_template
from megatron.tokenizer.chat_template import (
    TRAINING_DATE,
    Chat,
    ChatTemplate,
    added_tokens,
    encode,
    find_template,
    special_tokens,
    trained_text,
)
from tests.inference.server.live import write_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '  Hello <&> "東京"\n'},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And?"},
]
TEMPLATES = {
    "marked turns": (
        "{% for message in messages %}\n"
        "    {{- '<|' + message['role'] + '|>' + message.content | trim + eos_token }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "system folded into the first turn": (
        "{%- if messages[0]['role'] == 'system' -%}\n"
        "{%- set system, rest = messages[0]['content'], messages[1:] -%}\n"
        "{%- else -%}{%- set system, rest = '', messages -%}{%- endif -%}\n"
        "{{ bos_token }}{%- for m in rest -%}\n"
        "{%- if loop.first and system -%}[{{ system }}]{%- endif -%}\n"
        "({{ m['role'] }}: {{ m['content'] | trim }})\n{%- endfor -%}"
    ),
    "control of loops, JSON, tests": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% if tools is not none and tools is defined %}T{% endif %}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}"
    ),
    "what is trained on is marked": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "indented blocks": (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n    {{ m.content }}\n  {% endif %}\n"
        "{% endfor %}"
    ),
    "the day": "{{ strftime_now('%Y') }}{{ messages | length }}",
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, tokenizer_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    expected = theirs.apply_chat_template(
        MESSAGES, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.render(MESSAGES) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
    ],
)
def test_nothing_comes_of_what_a_template_may_not_do(source: str) -> None:
    assert _rendered(source) is None


def test_the_largest_product_that_a_template_may_compute() -> None:
    """A product of 4096 bits takes hardly any time."""
    half = "2 ** 2047"  # 2048 bits
    assert _rendered(f"{{{{ ({half}) * ({half}) }}}}") == str(2**4094)
    for source in (f"{half} * 2 * ({half})", "2 ** 2049", "10 ** (10 ** 10)"):
        assert _rendered(f"{{{{ {source} }}}}") is None


def _rendered(source: str) -> str | None:
    """Render a template; return `None` if the request is refused or the text is empty."""
    try:
        return ChatTemplate(source, {}).render(MESSAGES) or None
    except DataError as error:
        refusal = "the model's chat template refuses the messages: "
        return None if str(error).startswith(refusal) else str(error)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'ab' * 5 }}", "ab" * 5),
        ("{{ 5 * 'ab' }}", "ab" * 5),
        ("{{ 'ab' * 6 }}", None),
        ("{{ 6 * 'ab' }}", None),
        ("{{ ([0] * 11) | length }}", None),
        ("{{ ('x' * -9) ~ 'y' }}", "y"),
        ("{{ 2 ** 9 }}", "512"),
        ("{{ 2.5 ** 2 }}", "6.25"),
        ("{{ 4 * 0.5 }}", "2.0"),
        ("{% for i in range(10) %}x{% endfor %}", "x" * 10),
        ("{% for i in range(11) %}x{% endfor %}", None),
    ],
)
def test_the_longest_text_that_a_template_may_write(
    source: str, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_MAX_TEXT", 10)
    assert _rendered(source) == text


def test_a_string_of_64_mebi_characters_is_the_longest() -> None:
    assert _rendered("{{ ('x' * 67108864) | length }}") == "67108864"
    assert _rendered("{{ ('x' * 67108865) | length }}") is None


def test_the_marks_of_a_template_are_those_of_its_last_text() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% generation %}!{% endgeneration %}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.has_marks
    assert not ChatTemplate("{{ messages }}", {}).has_marks
    messages = [{"role": "assistant", "content": text} for text in ("one", "two")]
    for _ in range(2):  # nothing remains of an earlier text
        assert template.render_marked(messages) == ("one!two!", [(3, 4), (7, 8)])


def test_a_template_is_at_most_a_mebibyte(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("x" * (1 << 20))
    assert find_template(str(path), None) == "x" * (1 << 20)
    path.write_text("x" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="--chat-template .*chat.jinja is larger than 1,048,576"):
        find_template(str(path), None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a\n{% if %}", ": the chat template has an error on line 2"),
        (b"\na\n\xff", ":3: not UTF-8 \\(byte 3\\)"),
    ],
)
def test_a_file_that_is_no_template_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--chat-template {path}{said}"):
        find_template(str(path), None)


@pytest.mark.parametrize(
    ("settings", "template", "special", "added"),
    [
        ([], None, {}, []),
        ({"chat_template": [{"name": "tool_use", "template": "T"}, 3]}, None, {}, []),
        ({"chat_template": 3, "eos_token": 4, "pad_token": {}}, None, {}, []),
        ({"unk_token": "<u>", "bos_token": {"content": "<b>"}}, None,
         {"unk_token": "<u>", "bos_token": "<b>"}, []),
        ({"added_tokens_decoder": {"7": {"content": "<x>"}, "8": 1, "9": {}}}, None, {}, ["<x>"]),
        ({"added_tokens_decoder": ["<x>"]}, None, {}, []),
    ],
)  # fmt: skip
def test_settings_of_any_kind_are_read(
    settings: object, template: str | None, special: dict, added: list[str], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert find_template(None, str(tmp_path)) == template
    assert special_tokens(str(tmp_path)) == special
    assert added_tokens(str(tmp_path)) == added


def test_a_broken_template_is_named() -> None:
    with pytest.raises(ConfigError, match="error on line 2.*--chat-template"):
        ChatTemplate("a\n{% if %}", {})


def test_templates_are_found_where_tokenizers_have_them(tmp_path: Path) -> None:
    model = str(tmp_path / "tokenizer.json")
    assert find_template(None, None) is None
    assert find_template(None, model) is None
    assert find_template(None, str(tmp_path / ("x" * 300))) is None
    settings = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    settings.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "<e>"}}))
    assert find_template(None, model) == "D"
    assert special_tokens(str(tmp_path)) == {"eos_token": "<e>"}
    settings.write_text(json.dumps({"chat_template": "C"}))
    assert find_template(None, str(tmp_path)) == "C"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert find_template(None, model) == "J"
    (tmp_path / "mine").write_text("M")
    assert find_template(str(tmp_path / "mine"), model) == "M"
    settings.write_text("{")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="not JSON"):
        find_template(None, model)


_TURNS = [
    {"role": role, "content": f"{role[0]}{i}"} for i in range(3) for role in ("user", "assistant")
]
_PLAIN = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
_MARKED = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("source", [_PLAIN, _MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize(
    ("options", "last_only", "trained"),
    [
        ({}, False, ["a0;", "a1;", "a2;"]),
        ({}, True, ["a2;"]),
        ({"untrained": frozenset({1})}, False, ["a0;", "a2;"]),
        ({"untrained": frozenset({2})}, True, []),
        ({"untrained": frozenset({0, 1, 2})}, False, []),
    ],
)
def test_the_turns_that_are_trained_on(
    source: str, options: dict, last_only: bool, trained: list[str]
) -> None:
    chat = Chat(_TURNS, **options)
    text, spans = trained_text(ChatTemplate(source, {}), chat, last_only=last_only)
    assert text == "<u>u0;<a>a0;<u>u1;<a>a1;<u>u2;<a>a2;"
    assert [text[start:end] for start, end in spans] == trained


@pytest.mark.parametrize("source", [_PLAIN, _MARKED], ids=["plain", "marked"])
def test_a_user_may_have_the_last_word(source: str) -> None:
    text, spans = trained_text(ChatTemplate(source, {}), Chat(_TURNS[:3]))
    assert text == "<u>u0;<a>a0;<u>u1;"
    assert [text[start:end] for start, end in spans] == ["a0;"]


@pytest.mark.parametrize(
    ("spans", "trained"),
    [
        ([(2, 5)], [1, 2, 3]),  # with the space that belongs to a token, and every byte of one
        ([(4, 5)], [2, 3]),
        ([(1, 1), (5, 5)], []),
        ([(0, 1), (5, 6)], [0, 4]),
        ([(0, 6)], [0, 1, 2, 3, 4]),
    ],
)
def test_tokens_with_any_character_in_a_span_are_trained_on(
    spans: list[tuple[int, int]], trained: list[int]
) -> None:
    """The second token's span lacks its space; the next two are bytes of one character."""
    bounds = np.array([[0, 2], [3, 4], [4, 5], [4, 5], [5, 6]])
    tokenizer = SimpleNamespace(tokenize_spans=lambda _: ([7, 8, 9, 10, 11], bounds))
    ids, is_trained = encode(cast(Tokenizer, tokenizer), "ab cé!", spans)
    assert ids.tolist() == [7, 8, 9, 10, 11]
    assert is_trained.nonzero()[0].tolist() == trained


def test_the_day_of_training_is_llama_3_s() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, TRAINING_DATE)
    assert template.render([]) == "26 Jul 2024"


def test_everything_after_a_prompt_is_trained_on() -> None:
    text, spans = trained_text(ChatTemplate(_PLAIN, {}), Chat(_TURNS, prompt=3))
    assert [text[start:end] for start, end in spans] == ["a1;<u>u2;<a>a2;"]


def test_a_template_that_writes_messages_differently_later_is_refused() -> None:
    counting = "{{ messages | length }}" + _PLAIN
    with pytest.raises(DataError, match=r"writes the messages before message 2 differently"):
        trained_text(ChatTemplate(counting, {}), Chat(_TURNS))
    with pytest.raises(DataError, match=r"writes the prompt differently .*--last-turn-only"):
        trained_text(ChatTemplate(counting, {}), Chat(_TURNS, prompt=1))
    merged = _MARKED.replace("{% for m in messages %}", "{% for m in messages[:2] %}")
    with pytest.raises(DataError, match=r"marks 1 spans .* assistant has 3 turns"):
        trained_text(ChatTemplate(merged, {}), Chat(_TURNS), last_only=True)


# The reasoning before an answer is only written if the answer is the last message.
_REASONING = (
    "{% for m in messages %}<{{ m.role[0] }}>"
    "{% if m.role == 'assistant' and loop.last %}(thought)\n{% endif %}{{ m.content }};"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_answers_whose_reasoning_is_dropped_later_are_trained_on() -> None:
    text, spans = trained_text(ChatTemplate(_REASONING, {}), Chat(_TURNS))
    assert text == "<u>u0;<a>a0;<u>u1;<a>a1;<u>u2;<a>(thought)\na2;"
    assert [text[start:end] for start, end in spans] == ["a0;", "a1;", "(thought)\na2;"]
    silent = [turn | {"content": ""} if turn["content"] == "a0" else turn for turn in _TURNS]
    with pytest.raises(DataError, match="writes message 2 differently when more messages follow"):
        trained_text(ChatTemplate(_REASONING, {}), Chat(silent))


def test_a_template_computes_nothing_before_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja's optimizer would apply filters to constants, such as `'a' | center(3000000000)`."""
    computed: list[str] = []

    def upper(text: str) -> str:
        computed.append(text)
        return text.upper()

    monkeypatch.setitem(DEFAULT_FILTERS, "upper", upper)
    for source in ("{{ 'a' | upper }}", "{% set x = 'a' | upper %}{{ x }}"):
        template = ChatTemplate(source, {})
        assert computed == []
        assert template.render([]) == "A"
        assert computed.pop() == "a"
