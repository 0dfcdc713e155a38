"""Bad input for finetuning: each kind ends the command with one line that says what to do where.

`finetune.py` runs as a user runs it. It must not train, hang, show a traceback or execute code in a
file. More kinds for records and templates are in tests/data/test_conversations.py and
tests/tokenizer/test_chat_template.py.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from finetune import FinetuningRecipe, choose
from megatron.config.finetuning import finetuning_args
from megatron.training.pretrain import main
from tests.checkpoint.huggingface.test_peft import HERE as PEFT
from tests.checkpoint.huggingface.test_peft import NETWORK
from tests.checkpoint.legacy.test_malicious import MARK, Calls
from tests.inference.server.live import write_tokenizer

FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2
    --tokenizer-type HuggingFaceTokenizer --num-workers 0 --log-interval 1 --eval-iters 0
    --hidden-dropout 0 --attention-dropout 0 --train-iters 2 --no-exit-signal-handler""".split()

Build = Callable[[Path], list[str]]

TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there."}]
GOOD = json.dumps({"messages": TURNS})
PAIR = {"prompt": "a b", "chosen": "yes", "rejected": "no"}
DPO = ("--preference-loss", "dpo")


def data(content: bytes | str, name: str = "chats.jsonl", *more: str) -> Build:
    """Return flags that name a file with this content."""

    def build(folder: Path) -> list[str]:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["--train-data-path", str(path), *more]

    return build


def second(record: Any, *more: str) -> Build:
    """Return flags that name a file whose second line is this record, given as data or text."""
    text = record if isinstance(record, str) else json.dumps(record)
    return data(f"{GOOD}\n{text}\n", "chats.jsonl", *more)


def said(*turns: str, **more: Any) -> dict[str, Any]:
    """Return a record of turns, each written as `role: content`."""
    pairs = [turn.split(": ", 1) for turn in turns]
    return {"messages": [{"role": role, "content": text} for role, text in pairs], **more}


def beside(content: bytes | str, name: str, flag: str, *more: str, record: Any = None) -> Build:
    """Return flags that name a valid file, and another file with this content."""

    def build(folder: Path) -> list[str]:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        lines = GOOD if record is None else json.dumps(record)
        return [*data(lines)(folder), flag, str(path), *more]

    return build


def template(text: bytes | str) -> Build:
    return beside(text, "chat.jinja", "--chat-template")


def settings(**changes: Any) -> Build:
    """Return flags that name a tokenizer with modified settings."""

    def build(folder: Path) -> list[str]:
        write_tokenizer(folder)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return [*data(GOOD)(folder), "--tokenizer-model", str(folder)]

    return build


def adapter(change: Callable[[Path], Any], *more: str) -> Build:
    """Return flags that name a modified PEFT adapter."""

    def build(folder: Path) -> list[str]:
        copy = shutil.copytree(PEFT / "lora", folder / "adapter")
        change(copy)
        words = f"{NETWORK} --load {PEFT / 'base'} --finetune --load-adapter {copy} --no-sft"
        words += " --lora-rank 4 --lora-alpha 8 --mock-data --tokenizer-type NullTokenizer"
        return [*words.split(), *more]

    return build


def configured(**changes: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def written(name: str, content: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(content(path.read_bytes() if path.exists() else b""))

    return change


def pickled_instead(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(PICKLE)


def of_another_base(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name: each.repeat(1, 2) for name, each in load_file(path).items()}, path)


def directory(flag: str) -> Build:
    return lambda folder: [*data(GOOD)(folder), flag, str(folder)]


def logits(content: str) -> Build:
    def build(folder: Path) -> list[str]:
        (folder / "logits").mkdir()
        (folder / "logits" / "logits.json").write_text(content)
        return [*data(GOOD)(folder), "--logits-load-dir", str(folder / "logits")]

    return build


def blend(*words: str) -> Build:
    def build(folder: Path) -> list[str]:
        flag, path = data(GOOD)(folder)
        return [flag, *(path if word == "FILE" else word for word in words)]

    return build


PICKLE = pickle.dumps(Calls(os.system, f"touch {MARK}"))
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SHELL = "{{ cycler.__init__.__globals__.os.system('touch %s') }}"
NESTED = "[" * 10**5 + "]" * 10**5
# The input, and what the line says: where, the problem, and the remedy.
BAD: dict[str, tuple[Build, str]] = {
    # The file
    "no file": (lambda f: ["--train-data-path", f"{f}/no.jsonl"], "no.jsonl: no such.*check the p"),
    "a folder": (lambda f: ["--train-data-path", str(f)], "contains no file.*give another folder"),
    "empty": (data(b""), "chats.jsonl: the file is empty: give"),
    "blank lines": (data(b"\n \n\n"), "chats.jsonl: 0 records.*give other data"),
    "binary": (data(bytes(range(256)) * 9), "chats.jsonl:1: .*--skip-bad-lines"),
    "zeros": (data(bytes(999)), "chats.jsonl:1: broken JSON.*--skip-bad-lines"),
    "UTF-16": (data(GOOD.encode("utf-16")), r"chats.jsonl:1: bad UTF-8 \(byte 0.*--skip-bad"),
    "gzip without its suffix": (data(gzip.compress(GOOD.encode())), "chats.jsonl:1: bad UTF-8"),
    "half a gzip": (
        data(gzip.compress(GOOD.encode())[:40], "chats.jsonl.gz"),
        "chats.jsonl.gz: unreadable or truncated.*copy the file again",
    ),
    "broken parquet": (data(b"PAR1 PAR1", "a.parquet"), "a.parquet: not a readable.*copy it again"),
    "a pickle": (data(PICKLE, "a.pkl"), "a.pkl: unknown suffix.*rename the file"),
    "a text": (
        data("Hello\n", "a.txt"),
        "a.txt: conversations must be JSON lines.*write one JSON obj",
    ),
    # Lines
    "half a line": (second(GOOD[:-9]), "chats.jsonl:2: broken JSON.*character 8.*--skip-bad-lines"),
    "a list": (data(f"[{GOOD}]"), "chats.jsonl:1: expected a JSON object, found a list: write one"),
    "indented JSON": (data(json.dumps({"a": 1}, indent=1)), "chats.jsonl:1: broken JSON"),
    "deep nesting": (second(f'{{"messages": {NESTED}}}'), "chats.jsonl:2: .*nested too deeply"),
    "a long number": (
        second('{"text": 1' + "0" * 5000 + "}"),
        ":2: a number of more than 4,300 di",
    ),
    "half a letter": (second('{"text": "\\ud800"}'), ":2: .*surrogate.*--skip-bad-lines"),
    "a key twice": (
        second('{"text": "a", "text": "b"}'),
        ":2: the key 'text' occurs twice.*remove",
    ),
    "a long line": (
        second({"text": "word " * 10**5}),
        ":2: the example has .*--seq-length.*--trun",
    ),
    # Records
    "no known keys": (second({"a": 1}), "chats.jsonl:2: no known format.*write"),
    "roles out of order": (
        second(said("user: a", "user: b", "assistant: c")),
        ":2: message 2: rol",
    ),
    "an empty turn": (second(said("user: a", "assistant: ")), ":2: .*message 2 .*is empty: write"),
    "an unknown role": (second(said("robot: a")), ":2: .*unknown role 'robot': give one of"),
    "no answer": (second(said("user: a")), ":2: no turn of the assistant: add an answer"),
    "tools of another shape": (
        second({**said("user: a", "assistant: b"), "tools": {"a": 1}}),
        ":2",
    ),
    "a pair among answers": (second(PAIR), ":2: a preference record, but .*give other data"),
    "an answer among pairs": (second(said("user: a", "assistant: b"), *DPO), ":1: a messages reco"),
    "answers without a prompt": (
        data(json.dumps({"chosen": TURNS[1], "rejected": TURNS[1]}), "a.jsonl", *DPO),
        ":1: .*no prompt: write it in 'messages'",
    ),
    "mixed pairs": (
        data(json.dumps({**PAIR, "chosen": TURNS}), "a.jsonl", *DPO),
        ":1: .*same type",
    ),
    "long pairs": (
        data(json.dumps({**PAIR, "chosen": "y " * 99}), "a.jsonl", *DPO),
        ":1: .*--trun",
    ),
    # Templates
    "no template": (directory("--chat-template"), "--chat-template .*Is a directory.*give another"),
    "a binary template": (template(b"a\n\xff"), r"chat.jinja:2: not UTF-8 .*convert the file"),
    "a mistake in a template": (template("a\n{% if %}"), "chat.jinja: .*line 2.*--chat-template"),
    "a nested template": (template("{{ " + "(" * 5000 + ")" * 5000), "chat.jinja: .*too deeply"),
    "a template that loops": (template(LOOP), "chats.jsonl:1: .*may loop forever.*--chat-template"),
    "a template that raises": (template("{{ raise_exception('no') }}"), "chats.jsonl:1: .*: no"),
    "a template that recurs": (
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        "recurs",
    ),
    "a template that includes": (
        template("{% include '/etc/passwd' %}"),
        "chats.jsonl:1: .*loader",
    ),
    "a template with a shell": (template(SHELL % MARK), "chats.jsonl:1: .*'__init__'.*is unsafe"),
    "a template of classes": (template("{{ ''.__class__.__mro__ }}"), "chats.jsonl:1: .*is unsafe"),
    "a template that formats": (
        template("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}"),
        "chats.jsonl:1: .*is unsafe",
    ),
    "a template that multiplies": (template("{{ 'x' * 10**9 }}"), "chats.jsonl:1: .*more than 67,"),
    "a template that pads": (template("{{ 'x'.ljust(10**10) }}"), ":1: .*too much memory.*skip"),
    "a huge range": (template("{{ range(10**12) | list }}"), "chats.jsonl:1: .*Range too big"),
    "a template without answers": (template("Hello"), "no examples are left: .*--chat-template"),
    # Tokenizers
    "an end that is no token": (
        settings(eos_token="<end>", chat_template="{{ eos_token }}"),
        "special token '<end>', which .*splits into several tokens: give",
    ),
    "an added token that is none": (
        settings(added_tokens_decoder={"9": {"content": "<|x|>"}}, chat_template="<|x|>"),
        r"special token '<\|x\|>'.*give the template's own",
    ),
    "an id outside the vocabulary": (
        data(
            '{"text": "1 99"}', "a.jsonl", *"--tokenizer-type NullTokenizer --vocab-size 9".split()
        ),
        r"a.jsonl:1: token id 99 is outside the vocabulary \(0 to 9\): change the text",
    ),
    # Blends
    "a negative weight": (blend("-1", "FILE", "1", "FILE"), "'-1' must be a weight above 0: give"),
    "weights that are no numbers": (blend("nan", "FILE", "1", "FILE"), "'nan' must be a weight"),
    "a weight without a file": (blend("1", "FILE", "1"), "has 3 words: give one prefix, or pairs"),
    # Preferences and distillation
    "a folder for the reference": (
        lambda f: [*data(json.dumps(PAIR))(f), *DPO, "--reference-log-probs", str(f)],
        "--reference-log-probs .*it is not replaced: name another file",
    ),
    "no teacher": (directory("--teacher-load"), "--teacher-load .*no checkpoint in this folder"),
    "no logits": (directory("--logits-load-dir"), "--logits-load-dir .*: .*give a folder that"),
    "broken logits": (logits("{"), "logits.json is damaged .*write it again"),
    "logits of another shape": (logits("[1]"), "logits.json is damaged .*write it again"),
    "binary prompts": (
        beside(b"a\n\xff\n", "p.txt", "--sample-prompts"),
        "p.txt: line 2 .*convert",
    ),
    # Adapters
    "no adapter": (adapter(shutil.rmtree), "--load-adapter .* does not exist: give a folder"),
    "an adapter's pickle": (
        adapter(pickled_instead),
        "adapter_model.bin is a pickle.*save_pretrained",
    ),
    "another rank": (adapter(configured(r=8)), "adapter_config.json: r is 8, .*give --lora-rank 8"),
    "other targets": (
        adapter(lambda _: None, "--lora-target-modules", "q_proj"),
        "adapter_model.safetensors: .*does not belong to this network's adapters: give "
        "--lora-rank 4",
    ),
    "another kind of adapter": (
        adapter(configured(peft_type="LOHA")),
        "peft_type LOHA is not supp",
    ),
    "an adapter with an output layer": (
        adapter(configured(modules_to_save=["lm_head"])),
        r"adapter_config.json: modules_to_save \['lm_head'\] is not supported: merge the adapter",
    ),
    "a reward model's adapter": (
        adapter(configured(modules_to_save=["classifier", "score"])),
        "adapter_config.json: modules_to_save .*for --preference-loss bradley-terry",
    ),
    "broken settings": (
        adapter(written("adapter_config.json", lambda b: b[:-9])),
        "adapter_config",
    ),
    "half an adapter": (
        adapter(written("adapter_model.safetensors", lambda b: b[:-99])),
        "adapter_model.safetensors: ",
    ),
    "a huge header": (
        adapter(written("adapter_model.safetensors", lambda b: b"\xff" * 7 + b"\0" + b[8:])),
        "adapter_model.safetensors: ",
    ),
    "an adapter of another base": (
        adapter(of_another_base),
        r"adapter_model.safetensors: .*has shape \[4, 32\].*load that network with --load",
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(found)
    return found


def _run(words: list[str], tokenizer: Path) -> int:
    given = [*FLAGS, "--tokenizer-model", str(tokenizer), *words]
    return main(FinetuningRecipe(), finetuning_args(given), choose=choose)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_line(
    name: str,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megatron.data.conversations._RENDER_SECONDS", 0.5)
    build, message = BAD[name]
    code = _run(build(tmp_path), tokenizer)
    out, err = capfd.readouterr()
    assert code > 1, out
    (line,) = [each for each in err.splitlines() if each and not each.startswith("note: ")]
    assert line.startswith("error: ")
    assert re.search(message, line), line
    assert "Traceback" not in out
    assert "consumed samples" not in out
    assert not Path(MARK).exists()


def test_as_many_kinds_as_promised() -> None:
    assert len(BAD) >= 30
