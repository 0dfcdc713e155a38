"""Multi-stage dialogue prompting (MSDP): a GPT continues examples, and F1 measures the results.

In the first stage, the GPT writes knowledge about the topic of a dialogue. In the second stage, it
writes a response to the user that makes use of this knowledge. Prompts, files and metrics are the
same as in Megatron-LM's tasks/msdp.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from megatron import __version__
from megatron.checkpoint.exchange import JsonExchange
from megatron.command import print_line
from megatron.config import ParsedRun, Program, parse_config
from megatron.config.run import RunOptions, with_values
from megatron.config.tasks import DialogueConfig, TaskConfig
from megatron.data.json_lines import read_objects
from megatron.data.preprocess import installed_punkt
from megatron.data.text_input import load_line
from megatron.device import Device
from megatron.durable import expect_no_file, replace_file, writing_to
from megatron.errors import EXIT_OK, ConfigError, DataError, UserError
from megatron.inference.load import load_gpt
from megatron.inference.samples import DrawSettings, SampleFile
from megatron.inference.sharing import GeneratedText
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.processes.process import processes, show_notices
from megatron.tasks.evaluation import parse_evaluation, say_start
from megatron.tasks.harness import Generator, TextToWrite
from megatron.tasks.results import (
    Numbers,
    TaskProgress,
    check_results,
    format_number,
    format_table,
    report_results,
)
from megatron.tasks.table import PROGRAM, flags_elsewhere
from megatron.tasks.texts import find_missing, read_text

_MEASURING = ("guess_file", "answer_file")
_PROMPTING = ("prompt_type", "prompt_file", "sample_input_file")  # required
_EXAMPLES = DialogueConfig().num_prompt_examples
_TURN_ENDS = " [SEP] "
_PROGRESS_INTERVAL = 256  # prompts between two progress messages, for each copy of the model
_API_SECONDS = 600
_PUNCTUATION = re.compile(r'[!"#$%&()*+,-./:;<=>?@\[\]\\^`{|}~_\']')
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# A network that passes all checks, for commands that load no model.
_NO_MODEL = {
    **dict.fromkeys(("model.num_layers", "model.hidden_size", "model.num_attention_heads"), 1),
    **dict.fromkeys(("training.micro_batch_size", "training.train_iters", "data.seq_length"), 1),
    "schedule.lr": 0.0,
}


def run(task: str, arguments: list[str], launch: Launch) -> int:
    """Generate texts or evaluate them, and return the exit code. Collective.

    Raises:
        UserError: A flag, the checkpoint or a file is invalid.
    """
    parsed = parse(task, arguments, launch.world_size)
    options, own = parsed.extra
    notices = list(parsed.notices)
    if own.prompt_type == "knowledge" and own.num_prompt_examples != _EXAMPLES:
        notices.append(
            f"--num-prompt-examples {own.num_prompt_examples} has no effect: --prompt-file has "
            "the examples for each dialogue"
        )
    show_notices(notices, launch)
    if task == "MSDP-PROMPT" and not own.api_prompt:
        if launch.rank == 0:  # find mistakes before any other work
            _begin_output(options, own)
        with processes(parsed.config, launch) as (device, layout):
            prompt(parsed, device, layout)
    elif launch.rank == 0 and task == "MSDP-PROMPT":
        _begin_output(options, own)
        prompts, url = read_prompts(own), own.megatron_api_url or ""
        with closing(_open_part(own)) as part:
            part.rest(prompts)  # find mistakes
            part.keep_settings({"--out-seq-length": own.out_seq_length})
            for one in prompts[part.done :]:
                _write(part, one, ask_server(url, own.out_seq_length, one))
        _write_lines(own)
    elif launch.rank == 0:
        measure(options, own)
    return EXIT_OK


def parse(
    task: str,
    arguments: list[str],
    world_size: int,
    find_start: Callable[[Mapping[str, Any]], RunOptions] | None = None,
) -> ParsedRun:
    """Parse and check the command line, as in `parse_evaluation`. Only prompting loads a model.

    Raises:
        UserError: A flag or the checkpoint is invalid.
    """
    check = partial(_mistakes, task)
    if task == "MSDP-PROMPT" and "--api-prompt" not in arguments:
        return parse_evaluation(
            task,
            arguments,
            world_size=world_size,
            options=DialogueConfig,
            check=check,
            find_start=find_start,
            unread=["training.micro_batch_size"],
        )
    program = Program(
        name=PROGRAM,
        extra=(TaskConfig, DialogueConfig),
        find_start=lambda given: with_values(RunOptions(), _NO_MODEL),
        rules=(),
        reads=lambda given: (),
        check_extra=check,
        elsewhere=flags_elsewhere(task),
    )
    return parse_config(arguments, world_size=world_size, program=program)


def _mistakes(task: str, options: TaskConfig, own: DialogueConfig) -> Iterator[str]:
    prompts = task == "MSDP-PROMPT"
    for name in _PROMPTING if prompts else _MEASURING:
        if getattr(own, name) is None:
            yield f"--task {task} needs {_flag(name)}: give a file or value"
    other = "MSDP-EVAL-F1" if prompts else "MSDP-PROMPT"
    for field in fields(own):
        is_ours = prompts != (field.name in _MEASURING)
        if not is_ours and getattr(own, field.name) != field.default:
            yield f"{_flag(field.name)} belongs to {other}, but this is {task}: drop it"
    for name in ("prompt_file", "sample_input_file", *_MEASURING):
        path = getattr(own, name)
        yield from find_missing(_flag(name), [path] if path else None)
    if prompts and own.api_prompt != (own.megatron_api_url is not None):
        yield "--api-prompt and --megatron-api-url: give both, or neither to load a model"
    if options.valid_data:
        name = "sample_input_file" if prompts else "guess_file"
        yield f"--valid-data: {_flag(name)} names the data of {task}: drop --valid-data"
    if prompts and options.results is not None:
        yield "--results: MSDP-PROMPT measures nothing: drop --results, or use --sample-output-file"
    if not prompts and options.overwrite and options.results is None:
        yield "--overwrite without --results: there is no file to replace: drop --overwrite"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def prompt(parsed: ParsedRun, device: Device, layout: Layout) -> None:
    """Load the model and write a line for each dialogue. Collective."""
    _, own = parsed.extra
    if layout.world.rank == 0:
        with closing(_open_part(own)) as part:  # before loading the model, to find mistakes
            _prompt(parsed, device, layout, part)
        _write_lines(own)
    else:
        _prompt(parsed, device, layout, None)


def _prompt(parsed: ParsedRun, device: Device, layout: Layout, part: SampleFile | None) -> None:
    """Continue the prompts without a line in the partial output, which only rank 0 opens."""
    _, own = parsed.extra
    prompts = read_prompts(own)
    if part is not None:
        part.rest(prompts)  # find mistakes before loading the model
    config = parsed.config
    folder = config.checkpoint.load
    assert folder is not None
    loaded = load_gpt(folder, device, layout, config=config)
    say_start("MSDP-PROMPT", loaded, device, f"{own.sample_input_file}: {len(prompts):,} dialogues")
    if part is not None:
        model = str(Path(folder).resolve())
        settings: DrawSettings = {"--load": model, "iteration": loaded.iteration}
        settings["--out-seq-length"] = own.out_seq_length
        settings["--seq-length"] = config.data.seq_length
        part.keep_settings(settings)
    left = prompts[JsonExchange(layout.world).gather(part.done if part else 0)[0] :]
    requests = [
        TextToWrite(loaded.tokenizer.tokenize_open(one), own.out_seq_length, until=("\n",))
        for one in left
    ]
    room = config.data.seq_length - min(own.out_seq_length, config.data.seq_length - 1)
    cut = sum(len(request.prompt) > room for request in requests)
    if cut and layout.world.rank == 0:
        print_line(
            f"WARNING: {cut:,} of {len(left):,} prompts are cut at the beginning: they do not fit "
            f"into a window of {config.data.seq_length} with {own.out_seq_length} new tokens: "
            "give fewer examples"
        )
    generator = Generator(loaded, device)
    progress = TaskProgress(shown=layout.world.rank == 0, log_interval=1)
    step = _PROGRESS_INTERVAL * layout.data.size
    for first in range(0, len(requests), step):
        texts = generator.generate(requests[first : first + step])
        if part is not None:
            for one, text in zip(left[first : first + step], texts, strict=True):
                _write(part, one, _line(text))
        progress(first // step + 1, -(-len(requests) // step))


def _line(text: str) -> str:
    """Return the text up to the first line feed, without characters that may end a line."""
    return text.partition("\n")[0].replace("\r", " ").strip()


def _output_path(own: DialogueConfig) -> Path:
    return Path(own.sample_output_file or f"{own.sample_input_file}.out")


def _begin_output(options: TaskConfig, own: DialogueConfig) -> None:
    """Check that the prompts can be read and that the output can be written."""
    path = _output_path(own)
    expect_no_file("--sample-output-file", [path], overwrite=options.overwrite)
    if not path.parent.is_dir():
        raise ConfigError(f"--sample-output-file {path}: the folder does not exist: create it")
    read_prompts(own)


def _open_part(own: DialogueConfig) -> SampleFile:
    """Open the partial output, which an interrupted run leaves behind: prompts and their lines."""
    path = _output_path(own)
    part = SampleFile(path.with_name(f"{path.name}.part.jsonl"))
    if part.done:
        print_line(f"{part.path}: {part.done:,} lines already exist; continuing with the rest")
    return part


def _write(part: SampleFile, prompt: str, line: str) -> None:
    part.write(GeneratedText(prompt, line, len(line.split()), finished=True))


def _write_lines(own: DialogueConfig) -> None:
    """Write the output from the partial output (`_open_part`), which is then removed.

    Raises:
        DataError: A line of the partial output has no text.
    """
    path = _output_path(own)
    part = path.with_name(f"{path.name}.part.jsonl")
    lines = [line.fields.get("text") for line in read_objects(part, "--sample-output-file")]
    for number, line in enumerate(lines, 1):
        if not isinstance(line, str):
            raise DataError(f"{part}: line {number} has no text: remove the file and start again")
    with writing_to("--sample-output-file", path):
        replace_file(path, "".join(f"{line}\n" for line in lines).encode())
        part.unlink()
        part.with_name(f"{part.name}.settings.json").unlink(missing_ok=True)
    print_line(f"{len(lines):,} lines written to {path}")


def read_prompts(own: DialogueConfig) -> list[str]:
    """Return the prompt for each dialogue: examples, and the beginning of one to complete.

    Raises:
        ConfigError: NLTK's Punkt, which response prompts need, is not installed.
        DataError: A file cannot be read, or a line is incomplete. The message names the line.
    """
    assert own.prompt_file is not None
    assert own.sample_input_file is not None
    if own.prompt_type == "knowledge":
        examples = _examples_by_key(own.prompt_file)
        write = partial(_knowledge_prompt, examples, own.prompt_file)
        columns = 2
    else:
        lines = _lines("--prompt-file", own.prompt_file)[: own.num_prompt_examples]
        write = partial(_response_prompt, _joined(lines), word_splitter())
        columns = 3
    prompts = []
    for number, line in enumerate(_lines("--sample-input-file", own.sample_input_file), 1):
        where = f"--sample-input-file {own.sample_input_file}, line {number}"
        cells = line.strip().split("\t")
        if len(cells) < columns:
            raise DataError(
                f"{where}: {len(cells)} tab-separated columns, but --prompt-type "
                f"{own.prompt_type} needs {columns}: fix the line"
            )
        prompts.append(write(where, cells))
    return prompts


def _lines(flag: str, path: str) -> list[str]:
    """Return the lines of a file, without line endings."""
    text = read_text(path, flag)
    return text.removesuffix("\n").split("\n") if text else []


def _joined(examples: Sequence[str]) -> str:
    return "".join(f"{example.strip()} \n" for example in examples)


def _examples_by_key(path: str) -> dict[str, str]:
    """Return the examples by "TOPIC LAST_TURN". If a key occurs twice, the first one counts."""
    found: dict[str, str] = {}
    for number, line in enumerate(_lines("--prompt-file", path), 1):
        where = f"--prompt-file {path}, line {number}"
        try:
            entry = load_line(line.encode())
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}: fix the line") from None
        key, examples = next(iter(entry.items())) if entry and isinstance(entry, dict) else ("", 0)
        if not isinstance(examples, list) or not all(isinstance(one, str) for one in examples):
            raise DataError(
                f'{where}: not of the form {{"TOPIC LAST_TURN": ["example", ...]}}: fix the line'
            )
        found.setdefault(key, _joined(examples))
    return found


def _knowledge_prompt(
    examples: Mapping[str, str], path: str, where: str, cells: Sequence[str]
) -> str:
    topic, turn = cells[0], cells[1].split(_TURN_ENDS)[-1]
    key = f"{topic} {turn}"
    if key not in examples:
        raise DataError(f'{where}: --prompt-file {path} has no examples for "{key}": add them')
    return f"{examples[key]}( {turn} ) {topic} =>"


def _response_prompt(
    examples: str, split: Callable[[str], list[str]], where: str, cells: Sequence[str]
) -> str:
    turn, knowledge = (
        " ".join(split(text)).strip() for text in (cells[1].split(_TURN_ENDS)[-1], cells[2])
    )
    return (
        f"{examples}Topic: {cells[0]}. User says: {turn} We know that: {knowledge} System replies:"
    )


def word_splitter() -> Callable[[str], list[str]]:
    """Return NLTK's `word_tokenize` for English, which also separates punctuation.

    Raises:
        ConfigError: The data of Punkt, which detects the ends of sentences, is not installed.
    """
    from nltk.tokenize import NLTKWordTokenizer

    punkt = installed_punkt("english")
    if punkt is None:
        raise ConfigError(
            "--prompt-type response splits text into words with NLTK, which needs Punkt: run "
            "`python -m nltk.downloader punkt_tab`"
        )
    words = NLTKWordTokenizer()
    return lambda text: [word for one in punkt.tokenize(text) for word in words.tokenize(one)]


def ask_server(url: str, length: int, text: str) -> str:
    """Return the continuation of `text` by a text generation server, up to the end of the line.

    Args:
        url: The URL of Megatron-LM's API.
        length: The maximum number of tokens.
        text: The prompt.

    Raises:
        UserError: The server cannot be reached, or refuses the request.
    """
    body = {"prompts": [text], "tokens_to_generate": length, "top_k": 1}
    try:
        request = urllib.request.Request(
            url,
            json.dumps(body).encode(),
            {"Content-Type": "application/json; charset=UTF-8"},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=_API_SECONDS) as response:
            answer = json.load(response)["text"][0]
            if not isinstance(answer, str):
                raise TypeError(f"a text is {answer!r:.100}")
            answer.encode()  # half a surrogate pair cannot be written
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:500]
        raise UserError(
            f"--megatron-api-url {url}: the server refuses the request: {said or error}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise UserError(
            f"--megatron-api-url {url}: {error}: give the URL of a running server"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"--megatron-api-url {url}: not a URL, or its response is not in the format of "
            f"Megatron-LM's API ({error}): give a URL such as http://localhost:5000/api"
        ) from error
    return _line(answer[len(text) :])


def measure(options: TaskConfig, own: DialogueConfig) -> Numbers:
    """Print Megatron-LM's line and a table, write --results if given, and return the metrics.

    Raises:
        DataError: The files cannot be read or do not match.
    """
    assert own.guess_file is not None
    assert own.answer_file is not None
    check_results(options, [own.guess_file, own.answer_file])
    guesses = [
        line.strip().replace("<|endoftext|>", "") for line in _lines("--guess-file", own.guess_file)
    ]
    answers = [line.strip() for line in _lines("--answer-file", own.answer_file)]
    if len(guesses) != len(answers):
        raise DataError(
            f"--guess-file {own.guess_file} has {len(guesses):,} lines, but --answer-file "
            f"{own.answer_file} has {len(answers):,}: give two files with the same number of lines"
        )
    pairs = [
        pair
        for pair in zip(guesses, answers, strict=True)
        if pair[1] not in ("", "no_passages_used")
    ]
    if not pairs:
        raise DataError(f"--answer-file {own.answer_file}: no line has an answer: give another")
    scores = [f1_score(*pair) for pair in pairs]
    means = [sum(column) / len(pairs) for column in zip(*scores, strict=True)]
    numbers: Numbers = dict(zip(("precision", "recall", "f1"), means, strict=True))
    print_line("Precision: {:.4f}; recall: {:.4f}; f1: {:.4f}".format(*means))
    numbers["pairs"] = len(pairs)
    rows = [(name, format_number(value)) for name, value in numbers.items()]
    print_line(format_table(("MSDP-EVAL-F1", ""), rows))
    if options.results is not None:
        content = {
            "task": "MSDP-EVAL-F1",
            "results": numbers,
            "data": [own.guess_file, own.answer_file],
            "version": __version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        report_results(Path(options.results), content)
    return numbers


def f1_score(guess: str, answer: str) -> tuple[float, float, float]:
    """Return precision, recall and F1 of the words in two texts.

    As in ParlAI, words are compared in lower case, without punctuation and articles.
    """
    guessed, expected = (Counter(_words(text)) for text in (guess, answer))
    same = (guessed & expected).total()
    if not same:
        return 0.0, 0.0, 0.0
    precision, recall = same / guessed.total(), same / expected.total()
    return precision, recall, 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", _PUNCTUATION.sub(" ", text.lower())).split()
