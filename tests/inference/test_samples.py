"""tools/generate_samples_gpt.py: prompts in, JSON lines out, resuming where it was stopped."""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.errors import DataError, StorageError
from megatron.inference.messages import Add
from megatron.inference.request import EngineLimits, Finished
from megatron.inference.samples import SampleFile, SampleInbox, read_prompts
from megatron.inference.sharing import GeneratedText, SharedPrompts
from tests.checkpoint.huggingface.models import CASES, POSITIONS, VOCAB, tensors_of, write_folder
from tests.inference.toy import expected_greedy, greedy
from tests.launch import run_ranks
from tests.repository import ROOT
from tests.tools.test_checkpoint_util import convert, write_word_tokenizer
from tools import generate_samples_gpt

END = VOCAB - 1  # of a document
PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3, 5], [8]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama whose tokens are the words w0, w1, ..."""
    folder = tmp_path_factory.mktemp("samples")
    case = CASES["llama"]
    write_folder(folder / "original", case.config, tensors_of(case))
    write_word_tokenizer(folder / "original", case.config["vocab_size"])
    assert convert("llama2_hf", "native", folder / "original", folder / "native") == 0
    return folder / "native"


def run(model: Path, *words: object) -> int:
    return generate_samples_gpt.main(["--load", str(model), *map(str, words)])


def words_of(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_of_prompts_is_answered_in_its_order(model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("".join(words_of(prompt) + "\n" for prompt in PROMPTS))
    files = ("--sample-input-file", source, "--sample-output-file", target)
    assert run(model, *files, "--greedy", "--out-seq-length", 6, "--recompute") == 0
    for prompt, sample in zip(PROMPTS, read(target), strict=True):
        answer = expected_greedy("llama", prompt, 6)
        finished = END in answer
        answer = answer[: answer.index(END)] if finished else answer
        assert sample["prompt"] == words_of(prompt)
        assert sample["text"].split() == words_of(answer).split()
        assert (sample["length"], sample["finished"]) == (len(answer), finished)
    assert {sample["finished"] for sample in read(target)} == {True, False}


def test_stopped_in_the_middle_it_continues_and_writes_the_same(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "samples.jsonl"
    warm = ("--num-samples", 5, "--out-seq-length", 8, "--temperature", 1.5, "--top_k", 30)
    assert run(model, *warm, "--genfile", target) == 0
    whole = target.read_bytes()
    assert len({sample["text"] for sample in read(target)}) == 5
    target.write_bytes(whole[: whole.index(b"\n") + 20])  # one line and part of the next
    assert run(model, *warm, "--genfile", target) == 0
    assert target.read_bytes() == whole
    ends = [line for line in capsys.readouterr().out.splitlines() if "written" in line]
    assert ends == [f"{target}: {n} samples written, 5 in all" for n in (5, 4)]


def test_a_file_of_samples_that_were_drawn_differently_is_not_continued(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "samples.jsonl"
    few = ("--genfile", target, "--out-seq-length", 3)
    assert run(model, *few, "--num-samples", 1, "--temperature", 1.5, "--seed", 7) == 0
    content = target.read_bytes()
    assert run(model, *few, "--num-samples", 2, "--temperature", 0.5, "--top_k", 5) == 8
    said = capsys.readouterr().err
    for name, here, there in (("temperature", 0.5, 1.5), ("top_k", 5, 0), ("seed", 1234, 7)):
        assert f"--{name} was {there}, now {here}" in said
    assert "--top_p" not in said.split("different settings")[1]
    assert "name another file, or remove this one" in said
    assert run(model, *few, "--num-samples", 2, "--greedy") == 8
    assert "--seed was 7, now not used" in capsys.readouterr().err
    assert target.read_bytes() == content
    target.with_name("samples.jsonl.settings.json").unlink()
    assert run(model, *few, "--num-samples", 2, "--greedy") == 0
    assert (
        "cannot check whether the existing samples were drawn with the same settings"
        in capsys.readouterr().out
    )
    assert len(read(target)) == 2


def test_settings_are_kept_beside_files_only(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "nowhere"
    target.symlink_to("/dev/null")
    assert run(model, "--genfile", target, "--out-seq-length", 2, "--num-samples", 1) == 0
    assert list(tmp_path.iterdir()) == [target]


def test_the_choices_are_reported_apart_from_the_samples(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = ("--recompute", "--lazy-mpu-init", "yes")  # still to do: two notes
    assert run(model, "--prompt", "w3 w1", "--out-seq-length", 2, "--top_k", 1, *nothing) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("w3 w1")
    assert "note:" not in captured.out
    assert "note: --recompute has no effect" in captured.err
    assert "note: --lazy-mpu-init" in captured.err
    rows = dict(line.strip().split("  ", 1) for line in captured.err.splitlines() if "  " in line)
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["answers"].startswith("--out-seq-length 2, --temperature 1.0, --top_k 1")
    assert rows["device"].startswith("CPU, torch ")
    assert rows["precision"] == "float32 weights"
    assert rows["window"].endswith(" tokens, for a prompt and its answer together")
    assert rows["attention"].startswith("new tokens: plain PyTorch (no fused kernels)")
    assert rows["CUDA graphs"] == "off (not available on cpu)"
    assert re.search(r"^[12] tokens in [\d.]+ s: [\d,]+ tokens/s$", captured.err, re.MULTILINE)
    tokens, blocks = (int(rows["cache"].split()[i].replace(",", "")) for i in (0, 2))
    assert tokens == 16 * blocks
    assert rows["layout"]


@pytest.mark.parametrize("content", ["a\nb", "b", '{"text": 1}'])
def test_a_last_line_of_something_else_is_left_alone_too(tmp_path: Path, content: str) -> None:
    target = tmp_path / "prompts.txt"
    target.write_text(content)
    with pytest.raises(StorageError, match="is not a sample"):
        SampleFile(target)
    assert target.read_text() == content


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "a", "text": "x"}\n{"prompt": "c", "te',  # samples for other prompts
        '{"prompt": "d"}\n{"prompt": "b"}',
        '{"prompt": "a"}',  # prompts
        '{"prompt": "a", "text": "x"}\n{"prompt": "b", "text": "y"}\n{"prompt": "c", "text": "z',
    ],
)
def test_the_last_line_of_other_samples_or_prompts_is_kept(tmp_path: Path, content: str) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(content)
    prompts = ["a", "b"]
    if content.count("\n") < 2:
        with pytest.raises(StorageError, match="is for a different prompt: name another file, or"):
            SampleFile(target).remaining(prompts)
    else:
        assert SampleFile(target).remaining(prompts) == []
    assert target.read_text() == content


@pytest.mark.parametrize(
    "rest", ["", "{", '{"prompt": "\u00e9", "t', '{"prompt": "\u00e9", "text": "y"}']
)
def test_an_incomplete_last_line_is_removed_with_the_next_sample(tmp_path: Path, rest: str) -> None:
    target, whole = tmp_path / "out.jsonl", '{"prompt": "a", "text": "x"}\n'
    target.write_text(whole + rest)
    with closing(SampleFile(target)) as samples:
        assert samples.remaining(["a", "\u00e9"]) == ["\u00e9"]
        samples.keep_settings({})
        assert target.read_text() == whole + rest
        samples.write(GeneratedText("\u00e9", "z", 1, finished=True))
    lines = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    assert lines == ["x", "z"]


def test_prompts_are_not_continued_as_samples(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "w1"}\n')
    words = ["--sample-input-file", source, "--sample-output-file", source]
    assert run(model, *words) == 9
    assert f"--sample-output-file {source} is also the input: give" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this device")
def test_a_device_is_not_read() -> None:
    with (
        pytest.raises(StorageError, match="/dev/full"),
        closing(SampleFile(Path("/dev/full"))) as samples,
    ):
        samples.write(GeneratedText("a", "b", 1, finished=True))


@pytest.mark.parametrize("flag", ["--genfile", "--sample-output-file"])
def test_a_file_that_cannot_be_written_is_reported_before_the_model_is_loaded(
    model: Path, tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    (tmp_path / "prompts.txt").write_text("w1\n")
    monkeypatch.setattr("megatron.inference.samples.load_gpt", None)
    source = ["--sample-input-file", tmp_path / "prompts.txt"]
    words = source if flag == "--sample-output-file" else ["--num-samples", "1"]
    below_a_file, in_no_folder = tmp_path / "prompts.txt" / "out", tmp_path / "missing" / "out"
    for target, remedy in (
        (below_a_file, "give another path"),
        (in_no_folder, "create the folder, or give another path"),
    ):
        assert run(model, *words, flag, target) == 8
        said = capsys.readouterr().err
        assert said.startswith(f"error: {flag} {target} cannot be written ({target}: ")
        assert said.endswith(f"): {remedy}\n")


def test_a_file_of_something_else_is_left_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "prompts.txt.out"
    source.write_text("w1\n")
    for content, said in (
        ('{"prompt": "w2", "text": ""}\n', "line 1 is for a different prompt"),
        ("my notes\n", "line 1 is not a sample"),
        ('{"prompt": "w1"}\n{"prompt": "w1"}\n', "has 2 samples, but only 1 are requested"),
    ):
        target.write_text(content)
        assert run(model, "--sample-input-file", source) == 8
        assert said in capsys.readouterr().err
        assert target.read_text() == content


def test_half_a_surrogate_pair_is_no_prompt(tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "w1"}\n{"prompt": "\\ud800"}\n')
    with pytest.raises(DataError, match="line 2 is not an object with"):
        read_prompts(source)


def test_a_prompt_without_an_answer_does_not_stop_the_others(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "w1 " * POSITIONS}, {"text": ""}, {"text": "w3"}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(model, "--sample-input-file", source, "--greedy", "--out-seq-length", 2) == 1
    long, empty, good = read(Path(f"{source}.out"))
    assert f"{POSITIONS} positions" in long["error"]
    assert "empty" in empty["error"]
    assert good["length"] == 2
    assert "error" not in good
    assert "2 prompts got no answer" in capsys.readouterr().err
    assert run(model, "--sample-input-file", source, "--greedy", "--out-seq-length", 2) == 1
    captured = capsys.readouterr()
    assert "2 prompts got no answer" in captured.err  # again, though no sample is missing
    assert captured.out.splitlines()[-1].endswith("0 samples written, 3 in all")


def test_others_are_ready_when_requests_of_a_batch_finish(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = []

    class Inbox(SampleInbox):
        def __init__(self, *given: Any, max_in_progress: int, **named: Any) -> None:
            most.append(max_in_progress)
            super().__init__(*given, max_in_progress=max_in_progress, **named)

    monkeypatch.setattr("megatron.inference.samples.SampleInbox", Inbox)
    assert run(model, "--prompt", "w1", "--out-seq-length", 1, "--max-batch-size", 3) == 0
    assert most == [6]


def test_a_cache_shorter_than_the_model_bounds_answers() -> None:
    """A request that the engine refuses anyway is an error, not an empty answer."""
    texts: dict[int, GeneratedText] = {}
    tokenizer: Any = SimpleNamespace(eod=0, tokenize_unterminated=lambda text: [1] * len(text))
    limits = EngineLimits(vocab_size=9, max_length=100, cache_tokens=10, max_beams=1)
    prompts = iter([(0, "x" * 4), (1, "x" * 10)])
    inbox = SampleInbox(
        prompts, tokenizer, greedy(99), limits, texts.__setitem__, max_in_progress=4
    )
    (add,) = inbox.poll(0.0)
    assert isinstance(add, Add)
    assert add.request.sampling.max_new_tokens == 6
    assert [*texts] == [1]
    inbox.send([Finished("0", "refused", "no room")])
    assert [texts[index].prompt for index in (0, 1)] == ["x" * 4, "x" * 10]
    assert texts[0].error == "no room"
    assert "the cache's 10 positions" in texts[1].error


def test_several_texts_for_one_prompt_are_printed(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "--prompt", "w3 w1", "--num-samples", 2, "--out-seq-length", 4) == 0
    _, first, heading, second = capsys.readouterr().out.splitlines()
    assert heading == "----- sample 2"
    assert first.startswith("w3 w1")
    assert second.startswith("w3 w1")
    assert first != second


def test_mistakes_are_named_together(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--top_p", 2, "--max-batch-size", 0)
    assert run(model, *wrong, "--genfile", "x", "--prompt", "a") == 9
    said = capsys.readouterr().err
    assert "--max-batch-size 0: must be at least 1" in said
    assert "--top_p 2: must be at most 1" in said
    assert "--genfile is for texts without a prompt" in said
    assert run(model, "--num-samples", 10**18, "--genfile", "x", "--max-batch-size", 10**6) == 9
    said = capsys.readouterr().err
    assert f"--num-samples {10**18}: must be at most 10000000" in said
    assert "--max-batch-size 1000000: must be at most 65536" in said
    assert run(model) == 9
    assert "nothing to write: give --prompt TEXT" in capsys.readouterr().err


def test_prompts_of_realtoxicityprompts_are_read_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    records = [{"prompt": {"text": "w1 w2", "toxicity": 0.1}, "challenging": True}, {"text": "w3"}]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_prompts(source) == ["w1 w2", "w3"]
    source.write_text('{"prompt": {"toxicity": 0.1}}\n')
    with pytest.raises(DataError, match="line 1 is not an object with"):
        read_prompts(source)


def test_a_file_of_prompts_that_cannot_be_read_is_named_with_the_remedy(tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    with pytest.raises(DataError, match=r"prompts\.txt cannot be read: No such .*: give a file"):
        read_prompts(source)
    source.write_bytes(b"w1\r\nw2\n\xff\n")
    with pytest.raises(DataError, match=r"prompts\.txt: line 3 is not UTF-8 text: fix the line"):
        read_prompts(source)
    source.write_bytes(b"w1\r\nw2\n")
    assert read_prompts(source) == ["w1", "w2"]


def test_several_samples_for_each_prompt_of_a_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("w1 w5\nw8\n")
    flags = ("--sample-input-file", source, "--sample-output-file", target, "--out-seq-length", 6)
    assert run(model, *flags, "--samples-per-prompt", 3, "--num-samples", 5) == 0
    found = read(target)
    assert [sample["prompt"] for sample in found] == ["w1 w5"] * 3 + ["w8"] * 2
    assert len({sample["text"] for sample in found}) == 5
    assert run(model, *flags, "--num-samples", 3) == 9
    assert "has prompts for 2 texts" in capsys.readouterr().err
    assert run(model, "--num-samples", 2, "--samples-per-prompt", 3) == 9
    assert "is for --sample-input-file: use --num-samples" in capsys.readouterr().err


def test_copies_of_the_model_share_the_work_and_write_the_same(model: Path, tmp_path: Path) -> None:
    """A single process may have written the beginning, and a copy may be split over two."""
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    flags = ("--load", model, "--num-samples", 9, "--out-seq-length", 8, "--max-batch-size", 1)
    assert generate_samples_gpt.main([*map(str, flags), "--genfile", str(alone)]) == 0
    lines = alone.read_bytes().splitlines(keepends=True)
    shared.write_bytes(b"".join(lines[:2]) + lines[2][:20])
    settings = Path(f"{alone}.settings.json").read_bytes()
    Path(f"{shared}.settings.json").write_bytes(settings)
    script = str(ROOT / "tools" / "generate_samples_gpt.py")
    words = [script, *map(str, flags), "--genfile", str(shared)]
    done = run_ranks(words, dict(os.environ), 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{shared}: 7 samples written, 9 in all" in done.stdout
    assert shared.read_bytes() == alone.read_bytes()
    shared.unlink()
    done = run_ranks([*words, "--tensor-model-parallel-size", "2"], dict(os.environ), 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared.read_bytes() == alone.read_bytes()


def test_texts_of_other_copies_are_written_in_the_order_of_the_prompts() -> None:
    store, written = HashStore(), []
    prompts = ["a", "b", "c", "d", "e"]
    first = SharedPrompts(store, prompts, 1, written.append)
    second = SharedPrompts(store, prompts)
    mine, others = first.claim(), second.claim()
    assert next(others) == (1, "b")
    assert next(mine) == (2, "c")
    assert next(others) == (3, "d")
    assert next(mine) == (4, "e")
    first.put(4, GeneratedText("e", "x", 1, finished=True))
    first.put(2, GeneratedText("c", "", 0, finished=False, error="too long"))
    assert not written
    for index, prompt in ((3, "d"), (1, "b")):
        second.put(index, GeneratedText(prompt, "x", 1, finished=True))
    first.finish()
    assert [text.prompt for text in written] == ["b", "c", "d", "e"]
    assert first.failed == 1
    assert not any(store.check([f"text/{index}"]) for index in range(5)), "the store stays small"
    assert not [*mine, *others]
    with pytest.raises(DataError, match="found 3 prompts, and rank 0 found 5"):
        SharedPrompts(store, prompts[:3])
