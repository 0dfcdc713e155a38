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
from megatron.processes.process import print_notices, processes
from megatron.tasks.evaluation import parse_evaluation, print_start
from megatron.tasks.harness import GenerationRequest, Generator
from megatron.tasks.results import (
    Metrics,
    TaskProgress,
    check_results,
    metrics_table,
    report_results,
)
from megatron.tasks.table import PROGRAM, flags_of_other_tasks
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
    options, task_options = parsed.extra
    notices = list(parsed.notices)
    if task_options.prompt_type == "knowledge" and task_options.num_prompt_examples != _EXAMPLES:
        notices.append(
            f"--num-prompt-examples {task_options.num_prompt_examples} has no effect: "
            "--prompt-file has the examples for each dialogue"
        )
    print_notices(notices, launch)
    if task == "MSDP-PROMPT" and not task_options.api_prompt:
        if launch.rank == 0:  # report errors before any other work
            _check_files(options, task_options)
        with processes(parsed.config, launch) as (device, layout):
            prompt(parsed, device, layout)
    elif launch.rank == 0 and task == "MSDP-PROMPT":
        _check_files(options, task_options)
        prompts, url = read_prompts(task_options), task_options.megatron_api_url or ""
        with closing(_open_partial_output(task_options)) as output:
            output.remaining(prompts)  # fails if earlier lines belong to other prompts
            output.keep_settings({"--out-seq-length": task_options.out_seq_length})
            for text in prompts[output.done :]:
                _write(output, text, ask_server(url, task_options.out_seq_length, text))
        _write_lines(task_options)
    elif launch.rank == 0:
        measure(options, task_options)
    return EXIT_OK


def parse(task: str, arguments: list[str], world_size: int) -> ParsedRun:
    """Parse and check a command line. Only MSDP-PROMPT without --api-prompt loads a model.

    Raises:
        ConfigError: One or more flags are wrong. The message names all of them.
        CheckpointError: --load does not name a checkpoint of a GPT.
    """
    check = partial(_find_mistakes, task)
    if task == "MSDP-PROMPT" and "--api-prompt" not in arguments:
        return parse_evaluation(
            task,
            arguments,
            world_size=world_size,
            options=DialogueConfig,
            check=check,
            unread=["training.micro_batch_size", "parallel.sequence_parallel"],
        )
    program = Program(
        name=PROGRAM,
        extra=(TaskConfig, DialogueConfig),
        find_start=lambda given: with_values(RunOptions(), _NO_MODEL),
        rules=(),
        reads=lambda given: (),
        check_extra=check,
        flags_of_other_tasks=flags_of_other_tasks(task),
    )
    return parse_config(arguments, world_size=world_size, program=program)


def _find_mistakes(task: str, options: TaskConfig, task_options: DialogueConfig) -> Iterator[str]:
    is_prompting = task == "MSDP-PROMPT"
    for name in _PROMPTING if is_prompting else _MEASURING:
        if getattr(task_options, name) is None:
            yield f"--task {task} needs {_flag(name)}: give a file or value"
    other = "MSDP-EVAL-F1" if is_prompting else "MSDP-PROMPT"
    for field in fields(task_options):
        is_used = is_prompting != (field.name in _MEASURING)
        if not is_used and getattr(task_options, field.name) != field.default:
            yield f"{_flag(field.name)} belongs to {other}, but this is {task}: drop it"
    for name in ("prompt_file", "sample_input_file", *_MEASURING):
        path = getattr(task_options, name)
        yield from find_missing(_flag(name), [path] if path else None)
    if is_prompting and task_options.api_prompt != (task_options.megatron_api_url is not None):
        yield "--api-prompt and --megatron-api-url: give both, or neither to load a model"
    if options.valid_data:
        name = "sample_input_file" if is_prompting else "guess_file"
        yield f"--valid-data: {_flag(name)} names the data of {task}: drop --valid-data"
    if is_prompting and options.results is not None:
        yield "--results: MSDP-PROMPT has no metrics: drop --results, or use --sample-output-file"
    if not is_prompting and options.overwrite and options.results is None:
        yield "--overwrite without --results: there is no file to replace: drop --overwrite"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def prompt(parsed: ParsedRun, device: Device, layout: Layout) -> None:
    """Load the model and write a line for each dialogue. Collective."""
    _, task_options = parsed.extra
    if layout.world.rank == 0:
        # Open the output before loading the model, to report errors early.
        with closing(_open_partial_output(task_options)) as output:
            _prompt(parsed, device, layout, output)
        _write_lines(task_options)
    else:
        _prompt(parsed, device, layout, None)


def _prompt(parsed: ParsedRun, device: Device, layout: Layout, output: SampleFile | None) -> None:
    """Continue the prompts that have no line in `output`, which is `None` except on rank 0."""
    _, task_options = parsed.extra
    prompts = read_prompts(task_options)
    if output is not None:
        output.remaining(prompts)  # fails early if earlier lines belong to other prompts
    config = parsed.config
    folder = config.checkpoint.load
    assert folder is not None
    loaded = load_gpt(folder, device, layout, config=config)
    print_start(
        "MSDP-PROMPT",
        loaded,
        device,
        f"{task_options.sample_input_file}: {len(prompts):,} dialogues",
    )
    if output is not None:
        model = str(Path(folder).resolve())
        settings: DrawSettings = {"--load": model, "iteration": loaded.iteration}
        settings["--out-seq-length"] = task_options.out_seq_length
        settings["--seq-length"] = config.data.seq_length
        output.keep_settings(settings)
    remaining = prompts[JsonExchange(layout.world).gather(output.done if output else 0)[0] :]
    requests = [
        GenerationRequest(
            loaded.tokenizer.tokenize_unterminated(text), task_options.out_seq_length, until=("\n",)
        )
        for text in remaining
    ]
    max_prompt = config.data.seq_length - min(
        task_options.out_seq_length, config.data.seq_length - 1
    )
    num_cut = sum(len(request.prompt) > max_prompt for request in requests)
    if num_cut and layout.world.rank == 0:
        print_line(
            f"WARNING: {num_cut:,} of {len(remaining):,} prompts are cut at the beginning: they do "
            f"not fit into a window of {config.data.seq_length} with {task_options.out_seq_length} "
            "new tokens: give fewer examples"
        )
    generator = Generator(loaded, device)
    progress = TaskProgress(enabled=layout.world.rank == 0, log_interval=1)
    step = _PROGRESS_INTERVAL * layout.data.size
    for first in range(0, len(requests), step):
        texts = generator.generate(requests[first : first + step])
        if output is not None:
            for prompt_text, text in zip(remaining[first : first + step], texts, strict=True):
                _write(output, prompt_text, _line(text))
        progress(first // step + 1, -(-len(requests) // step))


def _line(text: str) -> str:
    """Return the first line of a text, stripped, with carriage returns replaced by spaces."""
    return text.partition("\n")[0].replace("\r", " ").strip()


def _output_path(task_options: DialogueConfig) -> Path:
    return Path(task_options.sample_output_file or f"{task_options.sample_input_file}.out")


def _check_files(options: TaskConfig, task_options: DialogueConfig) -> None:
    """Check that the prompts can be read and that the output can be written."""
    path = _output_path(task_options)
    expect_no_file("--sample-output-file", [path], overwrite=options.overwrite)
    if not path.parent.is_dir():
        raise ConfigError(f"--sample-output-file {path}: the folder does not exist: create it")
    read_prompts(task_options)


def _open_partial_output(task_options: DialogueConfig) -> SampleFile:
    """Open the file of prompts and generated lines, which may be left from an interrupted run."""
    path = _output_path(task_options)
    output = SampleFile(path.with_name(f"{path.name}.part.jsonl"))
    if output.done:
        print_line(f"{output.path}: {output.done:,} lines already exist; continuing with the rest")
    return output


def _write(output: SampleFile, prompt: str, line: str) -> None:
    output.write(GeneratedText(prompt, line, len(line.split()), finished=True))


def _write_lines(task_options: DialogueConfig) -> None:
    """Write the final output from the partial output, and then remove the partial output.

    Raises:
        DataError: A line of the partial output has no text.
    """
    path = _output_path(task_options)
    partial_path = path.with_name(f"{path.name}.part.jsonl")
    lines = [line.fields.get("text") for line in read_objects(partial_path, "--sample-output-file")]
    for number, line in enumerate(lines, 1):
        if not isinstance(line, str):
            raise DataError(
                f"{partial_path}: line {number} has no text: remove the file and start again"
            )
    with writing_to("--sample-output-file", path):
        replace_file(path, "".join(f"{line}\n" for line in lines).encode())
        partial_path.unlink()
        partial_path.with_name(f"{partial_path.name}.settings.json").unlink(missing_ok=True)
    print_line(f"{len(lines):,} lines written to {path}")


def read_prompts(task_options: DialogueConfig) -> list[str]:
    """Return a prompt for each dialogue: examples, and then the beginning of one to complete.

    Raises:
        ConfigError: NLTK's Punkt, which response prompts need, is not installed.
        DataError: A file cannot be read, or a line is incomplete. The message names the line.
    """
    assert task_options.prompt_file is not None
    assert task_options.sample_input_file is not None
    if task_options.prompt_type == "knowledge":
        examples = _examples_by_key(task_options.prompt_file)
        build_prompt = partial(_knowledge_prompt, examples, task_options.prompt_file)
        columns = 2
    else:
        lines = _lines("--prompt-file", task_options.prompt_file)[
            : task_options.num_prompt_examples
        ]
        build_prompt = partial(_response_prompt, _joined(lines), word_splitter())
        columns = 3
    prompts = []
    for number, line in enumerate(_lines("--sample-input-file", task_options.sample_input_file), 1):
        where = f"--sample-input-file {task_options.sample_input_file}, line {number}"
        cells = line.strip().split("\t")
        if len(cells) < columns:
            raise DataError(
                f"{where}: {len(cells)} tab-separated columns, but --prompt-type "
                f"{task_options.prompt_type} needs {columns}: fix the line"
            )
        prompts.append(build_prompt(where, cells))
    return prompts


def _lines(flag: str, path: str) -> list[str]:
    """Return the lines of a file, without line endings."""
    text = read_text(path, flag)
    return text.removesuffix("\n").split("\n") if text else []


def _joined(examples: Sequence[str]) -> str:
    return "".join(f"{example.strip()} \n" for example in examples)


def _examples_by_key(path: str) -> dict[str, str]:
    """Return the examples by "TOPIC LAST_TURN". The first occurrence of a key counts."""
    examples_by_key: dict[str, str] = {}
    for number, line in enumerate(_lines("--prompt-file", path), 1):
        where = f"--prompt-file {path}, line {number}"
        try:
            entry = load_line(line.encode())
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}: fix the line") from None
        key, examples = next(iter(entry.items())) if entry and isinstance(entry, dict) else ("", 0)
        if not isinstance(examples, list) or not all(
            isinstance(example, str) for example in examples
        ):
            raise DataError(
                f'{where}: not of the form {{"TOPIC LAST_TURN": ["example", ...]}}: fix the line'
            )
        examples_by_key.setdefault(key, _joined(examples))
    return examples_by_key


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
    """Return a function that splits English into words and punctuation like NLTK's `word_tokenize`.

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
    tokenizer = NLTKWordTokenizer()
    return lambda text: [
        word for sentence in punkt.tokenize(text) for word in tokenizer.tokenize(sentence)
    ]


def ask_server(url: str, length: int, text: str) -> str:
    """Return a text generation server's continuation of `text`, up to the end of the line.

    Args:
        url: The URL of Megatron-LM's API.
        length: The maximum number of new tokens.
        text: The prompt.

    Raises:
        UserError: The server cannot be reached, refuses the request or sends an invalid response.
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
            answer.encode()  # raises for a lone surrogate, which cannot be written
    except urllib.error.HTTPError as error:
        message = error.read().decode(errors="replace")[:500]
        raise UserError(
            f"--megatron-api-url {url}: the server refuses the request: {message or error}"
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


def measure(options: TaskConfig, task_options: DialogueConfig) -> Metrics:
    """Compare generated with expected texts, report the metrics, and return them.

    Lines whose expected text is empty or "no_passages_used" do not count.

    Raises:
        ConfigError: --results names one of the files, or exists and --overwrite is not given.
        DataError: The files cannot be read or do not match, or no line has an expected text.
        StorageError: --results cannot be written.
    """
    assert task_options.guess_file is not None
    assert task_options.answer_file is not None
    check_results(options, [task_options.guess_file, task_options.answer_file])
    guesses = [
        line.strip().replace("<|endoftext|>", "")
        for line in _lines("--guess-file", task_options.guess_file)
    ]
    answers = [line.strip() for line in _lines("--answer-file", task_options.answer_file)]
    if len(guesses) != len(answers):
        raise DataError(
            f"--guess-file {task_options.guess_file} has {len(guesses):,} lines, but --answer-file "
            f"{task_options.answer_file} has {len(answers):,}: give two files with the same number "
            "of lines"
        )
    pairs = [
        pair
        for pair in zip(guesses, answers, strict=True)
        if pair[1] not in ("", "no_passages_used")
    ]
    if not pairs:
        raise DataError(
            f"--answer-file {task_options.answer_file}: no line has an answer: give another"
        )
    scores = [f1_score(*pair) for pair in pairs]
    means = [sum(column) / len(pairs) for column in zip(*scores, strict=True)]
    metrics: Metrics = dict(zip(("precision", "recall", "f1"), means, strict=True))
    print_line("Precision: {:.4f}; recall: {:.4f}; f1: {:.4f}".format(*means))
    metrics["pairs"] = len(pairs)
    print_line(metrics_table("MSDP-EVAL-F1", metrics))
    if options.results is not None:
        content = {
            "task": "MSDP-EVAL-F1",
            "results": metrics,
            "data": [task_options.guess_file, task_options.answer_file],
            "version": __version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        report_results(Path(options.results), content)
    return metrics


def f1_score(guess: str, answer: str) -> tuple[float, float, float]:
    """Return the precision, recall and F1 of the words in `guess` against those in `answer`.

    As in ParlAI, words are compared in lower case, without punctuation and articles.
    """
    guess_words, answer_words = (Counter(_words(text)) for text in (guess, answer))
    common = (guess_words & answer_words).total()
    if not common:
        return 0.0, 0.0, 0.0
    precision, recall = common / guess_words.total(), common / answer_words.total()
    return precision, recall, 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", _PUNCTUATION.sub(" ", text.lower())).split()
