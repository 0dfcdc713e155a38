"""Multi-stage dialogue prompting: Megatron-LM's prompts and F1, at toy size."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from nltk.tokenize.punkt import PunktSentenceTokenizer

from megatron.device import Device
from megatron.errors import ConfigError, DataError, StorageError, UserError
from megatron.inference.load import load_gpt
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.tasks import dialogue
from megatron.tasks.main import main
from tests.distributed import as_given, run_distributed
from tests.tasks.toy import save_toy

# Three turns for the toy's NullTokenizer, whose words are numbers.
_INPUT = "1 2\t3 4 [SEP] 5 6\tknown\tanswer\n7\t8\tit\tis\n1 2\t5 6\t\t\n"
_EXAMPLES = {"1 2 5 6": [" a b ", "c"], "7 8": ["d"]}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "input.txt").write_text(_INPUT)
    lines = [{key: value} for key, value in _EXAMPLES.items()]
    (tmp_path / "knowledge.json").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    (tmp_path / "responses.txt").write_text("one \n two\nthree\n")
    return tmp_path


def _words(folder, kind, name, *more):
    words = ["--task", "MSDP-PROMPT", "--prompt-type", kind, "--prompt-file", str(folder / name)]
    return [*words, "--sample-input-file", str(folder / "input.txt"), *more]


@torch.no_grad()
def _next(model, tokens):
    return int(model(torch.tensor([tokens]))[0, -1, :101].argmax())


def _prompts(*words):
    parsed = dialogue.parse(
        "MSDP-PROMPT", [*words, "--api-prompt", "--megatron-api-url", "http://x"], 1
    )
    return dialogue.read_prompts(parsed.extra[1])


def test_prompts_for_knowledge_are_megatron_s(files):
    assert _prompts(*_words(files, "knowledge", "knowledge.json")) == [
        "a b \nc \n( 5 6 ) 1 2 =>",
        "d \n( 8 ) 7 =>",
        "a b \nc \n( 5 6 ) 1 2 =>",
    ]


def test_prompts_for_responses_are_megatron_s(files, monkeypatch):
    monkeypatch.setattr(dialogue, "installed_punkt", lambda language: PunktSentenceTokenizer())
    (files / "input.txt").write_text(
        "Tea\tHi! [SEP] Hello! [SEP] I don't know. You?\tTea (green), 2.5 cups.\n"
    )
    words = _words(files, "response", "responses.txt", "--num-prompt-examples", "2")
    assert _prompts(*words) == [
        "one \ntwo \nTopic: Tea. User says: I do n't know . You ? "
        "We know that: Tea ( green ) , 2.5 cups . System replies:"
    ]


def test_responses_need_punkt(files, monkeypatch):
    monkeypatch.setattr(dialogue, "installed_punkt", lambda language: None)
    with pytest.raises(ConfigError, match="nltk.downloader punkt_tab"):
        _prompts(*_words(files, "response", "responses.txt"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("input.txt", "7\t8\n7\n", "input.txt, line 2: 1 tab-separated columns"),
        ("input.txt", "9\t8\n", 'no examples for "9 8": add them'),
        ("knowledge.json", "{}\n", "knowledge.json, line 1: not of the form"),
        ("knowledge.json", '{"a": "b"}\n', "line 1: not of the form"),
        ("knowledge.json", '{"7 8": ["d", 3]}\n', "line 1: not of the form"),
        ("knowledge.json", '{"7 8": ["d"]}\n{"a', "line 2: not JSON"),
    ],
)
def test_broken_files_are_reported_by_line(files, name, text, said):
    (files / name).write_text(text)
    with pytest.raises(DataError, match=said):
        _prompts(*_words(files, "knowledge", "knowledge.json"))


def test_a_file_that_is_not_text_is_named_with_its_flag(files):
    for name, flag in (("input.txt", "--sample-input-file"), ("knowledge.json", "--prompt-file")):
        before = (files / name).read_bytes()
        (files / name).write_bytes(b"\xff")
        said = rf"{flag} .*{name}: cannot be read as UTF-8 text.*: convert the file"
        with pytest.raises(DataError, match=said):
            _prompts(*_words(files, "knowledge", "knowledge.json"))
        (files / name).write_bytes(before)


def _prompt(layout, words):
    parsed = dialogue.parse("MSDP-PROMPT", words, layout.world.size)
    dialogue.prompt(parsed, Device.cpu(), as_given(layout, parsed.config))


def _numbers_only(prompts):
    """Return a stand-in for `read_prompts` whose prompts the NullTokenizer can read."""
    return lambda own: prompts


_NUMBERS = ["11 3 5", "7 8 99 2", "4"]


def _prompt_numbers(layout, words):
    dialogue.read_prompts = _numbers_only(_NUMBERS)
    _prompt(layout, words)


def test_the_model_writes_its_most_likely_tokens_in_any_layout(files, monkeypatch, capsys):
    folder = save_toy(str(files / "model"))
    words = _words(files, "knowledge", "knowledge.json", "--load", folder)
    words += ["--out-seq-length", "3", "--sample-output-file"]
    monkeypatch.setattr(dialogue, "read_prompts", _numbers_only(_NUMBERS))
    _prompt(Layout.single(), [*words, str(files / "one.txt")])
    model = load_gpt(folder, Device.cpu()).model
    expected = []
    for one in _NUMBERS:
        tokens = [int(word) for word in one.split()]
        for _ in range(3):
            tokens.append(_next(model, tokens))
        expected.append(" ".join(map(str, tokens[-3:])))
    assert (files / "one.txt").read_text().splitlines() == expected
    assert "WARNING" not in capsys.readouterr().out
    run_distributed(2, _prompt_numbers, [*words, str(files / "two.txt")])
    assert (files / "two.txt").read_text() == (files / "one.txt").read_text()
    # The few tokens of a step are not split over tensor ranks.
    split = [*words, str(files / "split.txt"), "--tensor-model-parallel-size", "2"]
    run_distributed(2, _prompt_numbers, [*split, "--sequence-parallel"], tensor=2)
    assert (files / "split.txt").read_text() == (files / "one.txt").read_text()
    # Lines left by an interrupted run are kept.
    line = {"prompt": _NUMBERS[0], "text": "kept", "length": 1, "finished": True}
    (files / "rest.txt.part.jsonl").write_text(f"{json.dumps(line)}\n")
    run_distributed(2, _prompt_numbers, [*words, str(files / "rest.txt")])
    assert (files / "rest.txt").read_text().splitlines() == ["kept", *expected[1:]]
    monkeypatch.setattr(dialogue, "read_prompts", _numbers_only([" ".join("1" * 14)]))
    _prompt(Layout.single(), [*words, str(files / "long.txt")])
    assert "WARNING: 1 of 1 prompts are cut at the beginning" in capsys.readouterr().out


def test_a_model_s_lines_are_continued_only_with_the_same_settings(files, monkeypatch):
    words = _words(files, "knowledge", "knowledge.json", "--load", save_toy(str(files / "model")))
    monkeypatch.setattr(dialogue, "read_prompts", _numbers_only(_NUMBERS))
    output, part = files / "input.txt.out", files / "input.txt.out.part.jsonl"

    lines = iter([["kept"]])
    with monkeypatch.context() as patched:
        patched.setattr(dialogue, "_PROGRESS_INTERVAL", 1)
        patched.setattr(dialogue.Generator, "generate", lambda *_: next(lines))
        with pytest.raises(StopIteration):
            _prompt(Layout.single(), [*words, "--out-seq-length", "3"])
    with pytest.raises(StorageError, match="--out-seq-length was 3, now 4"):
        _prompt(Layout.single(), [*words, "--out-seq-length", "4"])
    line = {"prompt": "another", "text": "x", "length": 1, "finished": True}
    part.write_text(f"{json.dumps(line)}\n")
    with pytest.raises(StorageError, match="line 1 is for a different prompt"):
        _prompt(Layout.single(), [*words, "--out-seq-length", "3"])
    output.write_text("mine")
    with pytest.raises(ConfigError, match="input.txt.out already exists"):
        dialogue.run("MSDP-PROMPT", words, Launch())
    with pytest.raises(ConfigError, match="new/out.txt: the folder does not exist: create it"):
        dialogue.run(
            "MSDP-PROMPT", [*words, "--sample-output-file", str(files / "new/out.txt")], Launch()
        )
    assert output.read_text() == "mine"


class _Api(BaseHTTPRequestHandler):
    """Megatron-LM's API: it repeats the prompt, then writes two lines."""

    def do_PUT(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked.keys() == {"prompts", "tokens_to_generate", "top_k"}
        assert asked["top_k"] == 1  # the most likely tokens
        (text,) = asked["prompts"]
        answer = {"text": [f"{text} so\r{asked['tokens_to_generate']} \nand on"]}
        strange = {"/other": {"texts": []}, "/number": {"text": [5]}, "/half": {"text": ["\ud800"]}}
        answer = strange.get(self.path, answer)
        self.send_response(400 if self.path == "/refuse" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def api():
    server = HTTPServer(("127.0.0.1", 0), _Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_writes_without_a_model(files, api):
    words = _words(files, "knowledge", "knowledge.json", "--api-prompt", "--megatron-api-url", api)
    words += ["--num-layers", "24", "--hidden-size", "1024", "--fp16"]  # as in Megatron's example
    assert dialogue.run("MSDP-PROMPT", words, Launch()) == 0
    assert (files / "input.txt.out").read_text() == "so 100\n" * 3
    with pytest.raises(ConfigError, match="already exists"):
        dialogue.run("MSDP-PROMPT", words, Launch())


def test_an_interrupted_server_s_work_is_continued(files, monkeypatch):
    words = _words(files, "knowledge", "knowledge.json", "--api-prompt", "--megatron-api-url", "x")
    asked = []

    def ask(url, length, text):
        if len(asked) == 2:
            asked.append("the end")
            raise UserError("it went away")
        asked.append(text)
        return f"line {len(asked)}"

    monkeypatch.setattr(dialogue, "ask_server", ask)
    with pytest.raises(UserError, match="it went away"):
        dialogue.run("MSDP-PROMPT", words, Launch())
    assert not (files / "input.txt.out").exists()
    part = files / "input.txt.out.part.jsonl"
    part.write_bytes(part.read_bytes() + b'{"prompt": "a b \\nc \\n( 5')
    with pytest.raises(StorageError, match="--out-seq-length was 100, now 5"):
        dialogue.run("MSDP-PROMPT", [*words, "--out-seq-length", "5"], Launch())
    dialogue.run("MSDP-PROMPT", words, Launch())
    assert asked[3:] == ["a b \nc \n( 5 6 ) 1 2 =>"]
    assert (files / "input.txt.out").read_text() == "line 1\nline 2\nline 4\n"
    assert not list(files.glob("*.part*"))


def test_lines_of_other_dialogues_are_not_continued(files, api):
    words = _words(files, "knowledge", "knowledge.json", "--api-prompt", "--megatron-api-url", api)
    part = files / "input.txt.out.part.jsonl"
    part.write_text('{"prompt": "another", "text": "x", "length": 1, "finished": true}\n')
    with pytest.raises(StorageError, match=r"part\.jsonl: line 1 is for a different prompt"):
        dialogue.run("MSDP-PROMPT", words, Launch())
    prompt = json.dumps(_prompts(*_words(files, "knowledge", "knowledge.json"))[0])
    part.write_text(f'{{"prompt": {prompt}, "text": 5, "length": 1, "finished": true}}\n')
    with pytest.raises(DataError, match=r"part\.jsonl: line 1 has no text: remove the file"):
        dialogue.run("MSDP-PROMPT", words, Launch())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/refuse", "the server refuses"),
        *((path, "its response is not") for path in ("/other", "/number", "/half")),
    ],
)
def test_what_a_server_says_is_checked(api, path, said):
    with pytest.raises(UserError, match=said):
        dialogue.ask_server(api + path, 5, "a")


def test_a_server_that_is_not_there():
    with pytest.raises(UserError, match="give the URL of a running server"):
        dialogue.ask_server("http://127.0.0.1:9", 5, "a")


def test_f1_is_megatron_s(tmp_path, capfd):
    """Compare with the numbers of Megatron-LM 23.08's tasks/msdp/evaluate.py for these lines."""
    guesses = ["The cat sat, on a mat!", "", "it's blue <|endoftext|>", "no", "x", "a dog a dog"]
    answers = ["A cat on the mat.", "something", "It is blue", "no_passages_used", "", "dog; dog"]
    for name, lines in (("guess", guesses), ("answer", answers)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    words = ["--task", "MSDP-EVAL-F1", "--guess-file", str(tmp_path / "guess")]
    words += ["--answer-file", str(tmp_path / "answer"), "--results", str(tmp_path / "f1.json")]
    assert main([*words, "--num-layers", "24", "--micro-batch-size", "4"]) == 0
    assert "Precision: 0.6042; recall: 0.6667; f1: 0.6310" in capfd.readouterr().out
    written = json.loads((tmp_path / "f1.json").read_text())
    assert written["results"]["pairs"] == 4
    (tmp_path / "guess").write_text("a\n")
    assert main([*words, "--overwrite"]) == DataError.exit_code
    assert "give two files with the same number" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        ("MSDP-PROMPT", "--api-prompt", "--task MSDP-PROMPT needs --prompt-type"),
        ("MSDP-PROMPT", "--api-prompt --guess-file x", "--guess-file belongs to MSDP-EVAL-F1"),
        ("MSDP-PROMPT", "--api-prompt", "--api-prompt and --megatron-api-url: give both"),
        ("MSDP-EVAL-F1", "--guess-file x", "--task MSDP-EVAL-F1 needs --answer-file"),
        ("MSDP-EVAL-F1", "--guess-file x", "--guess-file x: no such file"),
        ("MSDP-EVAL-F1", "--overwrite", "--overwrite without --results: there is no file"),
        ("MSDP-EVAL-F1", "--valid-data x", "--valid-data: --guess-file names the data"),
        ("MSDP-PROMPT", "--api-prompt --valid-data x", "--valid-data: --sample-input-file names"),
        ("MSDP-PROMPT", "--api-prompt --results x", "--results: MSDP-PROMPT has no metrics"),
        ("MSDP-EVAL-F1", "--out-seq-length 5", "--out-seq-length belongs to MSDP-PROMPT"),
        ("MSDP-EVAL-F1", "--lm-eval-limit 5", "--lm-eval-limit belongs to LM_EVAL"),
    ],
)
def test_mistakes_are_reported_by_flag(task, words, said):
    with pytest.raises(ConfigError) as caught:
        dialogue.parse(task, words.split(), 1)
    assert [line for line in caught.value.problems if line.startswith(said)]


@pytest.mark.parametrize(
    ("kind", "more", "noted"),
    [
        ("knowledge", ["--num-prompt-examples", "3"], True),
        ("knowledge", [], False),
        ("response", ["--num-prompt-examples", "3"], False),
    ],
)
def test_a_number_of_examples_without_effect_is_noted(
    files, monkeypatch, capsys, kind, more, noted
):
    monkeypatch.setattr(dialogue, "read_prompts", lambda _: ["a"])
    monkeypatch.setattr(dialogue, "ask_server", lambda *_: "b")
    name = "knowledge.json" if kind == "knowledge" else "responses.txt"
    words = _words(files, kind, name, "--api-prompt", "--megatron-api-url", "x", *more)
    assert dialogue.run("MSDP-PROMPT", words, Launch()) == 0
    assert ("--num-prompt-examples 3 has no effect" in capsys.readouterr().out) == noted


def test_answers_longer_than_the_window_leave_a_token_for_the_prompt(files, monkeypatch, capsys):
    """The window of the model has 16 tokens."""
    folder = save_toy(str(files / "model"))
    words = _words(files, "knowledge", "knowledge.json", "--load", folder)
    words += ["--out-seq-length", "20", "--sample-output-file", str(files / "out.txt")]
    monkeypatch.setattr(dialogue, "read_prompts", lambda _: ["7", "7 8"])
    _prompt(Layout.single(), words)
    said = capsys.readouterr().out
    assert "WARNING: 1 of 2 prompts are cut at the beginning" in said
    assert "> batch 1 of 1\n" in said
    assert [len(line.split()) for line in (files / "out.txt").read_text().splitlines()] == [15, 15]
