"""Models of this package as a backend of EleutherAI's lm-evaluation-harness.

The harness runs on rank 0 and supports only a single process. All processes together compute the
results that it requests from the model. The harness reads its datasets from the sources that its
task files name, which may be local files or the network.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.entries import Json
from megatron.checkpoint.exchange import JsonExchange
from megatron.config import ParsedRun
from megatron.config.tasks import HarnessConfig, TaskConfig
from megatron.device import Device
from megatron.errors import ConfigError, DataError, UserError
from megatron.inference.build import EngineOptions, build_engine, replica_ranks
from megatron.inference.load import Loaded, load_gpt
from megatron.inference.request import Event, Finished, Request, Sampling, Token
from megatron.inference.score import Sample, Scorer
from megatron.parallel.layout import Axis, Layout
from megatron.processes.launch import Launch
from megatron.tasks.evaluation import parse_evaluation, print_start, publish, run_evaluation
from megatron.tasks.results import Metrics, TaskProgress
from megatron.tasks.texts import find_mistakes

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

_INSTALL = "--task LM_EVAL needs the package lm-eval: pip install -e '.[eval]'"


def parse(task: str, arguments: list[str], world_size: int) -> ParsedRun:
    """Parse and check a command line, which overrides the settings of the checkpoint.

    Raises:
        ConfigError: One or more flags are wrong. The message names all of them.
        CheckpointError: --load does not name a checkpoint of a GPT.
    """

    def check(options: TaskConfig, task_options: HarnessConfig) -> Iterator[str]:
        if not task_options.lm_eval_tasks:
            yield "--task LM_EVAL needs --lm-eval-tasks: give names of tasks, or task files"
        folder = task_options.lm_eval_include_path
        if folder and not Path(folder).is_dir():
            yield f"--lm-eval-include-path {folder}: no such folder: fix the path"
        if task_options.lm_eval_num_fewshot is not None and task_options.lm_eval_num_fewshot < 0:
            yield f"--lm-eval-num-fewshot {task_options.lm_eval_num_fewshot}: must be at least 0"
        if task_options.lm_eval_limit is not None and task_options.lm_eval_limit <= 0:
            yield f"--lm-eval-limit {task_options.lm_eval_limit:g}: must be above 0"
        if options.valid_data:
            yield "--valid-data: the tasks of --lm-eval-tasks name their own data: drop the flag"
        yield from find_mistakes(replace(options, valid_data=None))
        if importlib.util.find_spec("lm_eval") is None:
            yield _INSTALL

    return parse_evaluation(
        task,
        arguments,
        world_size=world_size,
        options=HarnessConfig,
        check=check,
        unread=["parallel.sequence_parallel"],
    )


def run(task: str, arguments: list[str], launch: Launch) -> int:
    """Evaluate, and return the exit code. Collective.

    Raises:
        UserError: A flag, the checkpoint or a task file is invalid.
    """
    parsed = parse(task, arguments, launch.world_size)
    return run_evaluation(parsed, launch, partial(evaluate, parsed))


def evaluate(parsed: ParsedRun, device: Device, layout: Layout) -> Metrics | None:
    """Load the model, run the harness, report, and return the metrics on rank 0. Collective.

    Raises:
        UserError: The checkpoint or the data is invalid, or a task is unknown.
    """
    config = parsed.config
    options, task_options = parsed.extra
    folder = config.checkpoint.load
    assert folder is not None
    loaded = load_gpt(folder, device, layout, config=config)
    print_start("LM_EVAL", loaded, device, " ".join(task_options.lm_eval_tasks))
    backend = Backend(loaded, device, config.training.micro_batch_size, config.logging.log_interval)
    workers = Workers(layout.world, {"score": backend.score, "generate": backend.generate})
    if layout.world.rank:
        workers.serve()
        return None
    from megatron.tasks.harness_model import HarnessModel

    results = _run_harness(HarnessModel(loaded, workers), task_options)
    workers.end()
    metrics = _metrics(results)
    publish(
        "LM_EVAL",
        loaded,
        options,
        metrics,
        {
            "options": asdict(task_options),
            "tasks": {key: results.get(key) for key in ("versions", "n-shot", "n-samples")},
        },
    )
    return metrics


class Backend:
    """The work that all processes do for the harness. Every method is collective."""

    def __init__(self, loaded: Loaded, device: Device, micro_batch: int, log_interval: int) -> None:
        """Create the scorer. The generator, which needs a KV cache, is created on first use."""
        self._loaded = loaded
        self._device = device
        self._scorer = Scorer(loaded, device, micro_batch)
        self._generator: Generator | None = None
        self._log_interval = log_interval

    def score(self, samples: list[list[Any]]) -> list[list[Any]]:
        """Return [log-probability, is greedy] for each [tokens, number of final tokens to score].

        "Is greedy" means that all scored tokens are the model's most likely ones.
        """
        is_first = self._loaded.layout.world.rank == 0
        scores = self._scorer.score(
            [Sample(tokens, scored) for tokens, scored in samples],
            TaskProgress(enabled=is_first, log_interval=self._log_interval),
        )
        return [[score.log_probability, score.is_greedy] for score in scores]

    def generate(self, requests: list[dict[str, Any]]) -> list[str]:
        """Return the generated text for each request, given as fields of `GenerationRequest`."""
        if self._generator is None:
            self._generator = Generator(self._loaded, self._device)
        return self._generator.generate([GenerationRequest(**fields) for fields in requests])


def _run_harness(model: LM, task_options: HarnessConfig) -> dict[str, Any]:
    """Run the harness, and return the result of `simple_evaluate`.

    Raises:
        ConfigError: A requested task does not exist.
        DataError: The data of a task cannot be read.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = list(task_options.lm_eval_tasks or ())
    manager = TaskManager(include_path=task_options.lm_eval_include_path, include_defaults=False)
    if _unknown(names, manager):
        # Read the harness's own tasks only if needed, because reading their thousands of files
        # takes many seconds.
        manager = TaskManager(include_path=task_options.lm_eval_include_path)
    unknown = _unknown(names, manager)
    if unknown:
        raise ConfigError(
            f"--lm-eval-tasks {' '.join(unknown)}: the harness has no such task, and there is no "
            "such file: `lm_eval ls tasks` lists its tasks; --lm-eval-include-path adds a folder"
        )
    limit = task_options.lm_eval_limit
    try:
        result = lm_eval.simple_evaluate(
            model=model,
            tasks=names,
            num_fewshot=task_options.lm_eval_num_fewshot,
            limit=int(limit) if limit is not None and limit >= 1 else limit,
            task_manager=manager,
            log_samples=False,
        )
    except OSError as error:  # from files or the network
        raise DataError(
            f"--lm-eval-tasks {' '.join(names)}: the data of these tasks cannot be read: {error}: "
            "without a network, give task files with local data"
        ) from error
    assert result is not None, "rank 0 receives the results"
    return dict(result)


def _unknown(names: Sequence[str], manager: TaskManager) -> list[str]:
    return [name for name in names if not manager.match_tasks([name]) and not Path(name).is_file()]


def _metrics(results: Mapping[str, Any]) -> Metrics:
    """Return each value as "TASK METRIC", and its standard error as "TASK METRIC_stderr"."""
    metrics: Metrics = {}
    for task, task_metrics in results["results"].items():
        for key, value in task_metrics.items():
            name, _, filtered = key.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and filtered:
                label = name if filtered == "none" else f"{name} ({filtered})"
                metrics[f"{task} {label}"] = value
    return metrics


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and the settings for its continuation.

    Attributes:
        prompt: The token ids of the prompt. Its start is dropped if prompt and new tokens do not
            fit in the window.
        max_new_tokens: The maximum number of tokens to generate.
        until: Stop sequences, which are not part of the answer.
        temperature: The sampling temperature. 0 always selects the most likely token.
        top_k: Sample from the k most likely tokens. 0 disables the limit.
        top_p: Sample from the most likely tokens with this total probability. 0 disables the limit.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    until: Sequence[str] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0


class Generator:
    """A text generator that divides prompts among the data-parallel replicas of a model.

    All processes of the layout must construct it and call `generate` together.
    """

    def __init__(self, loaded: Loaded, device: Device) -> None:
        """Build an engine for this replica of the model. Collective."""
        self._world = loaded.layout.world
        self._data = loaded.layout.data
        self._is_copy_leader = loaded.layout.tensor.is_first and loaded.layout.pipeline.is_first
        self._tokenizer = loaded.tokenizer
        self._window = loaded.config.data.seq_length
        self._engine = build_engine(
            loaded, device, EngineOptions(max_sequences=64), replica=replica_ranks(loaded.layout)
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Return one text per request, in order, on every process. Collective.

        Raises:
            UserError: A request cannot be answered.
        """
        indices = range(self._data.rank, len(requests), self._data.size)
        texts = self._answer({str(i): requests[i] for i in indices})
        texts_by_index: dict[str, str] = {}
        for texts_part in JsonExchange(self._world).gather(texts if self._is_copy_leader else {}):
            texts_by_index |= texts_part
        return [texts_by_index[str(i)] for i in range(len(requests))]

    def _answer(self, requests: dict[str, GenerationRequest]) -> dict[str, str]:
        for name, request in requests.items():
            self._engine.add(self._request(name, request))
        answers: dict[str, list[int]] = {name: [] for name in requests}
        texts: dict[str, str] = {}
        while self._engine.has_work:
            for event in self._engine.step():
                if event.request not in texts:
                    self._handle_event(
                        event, requests[event.request], answers[event.request], texts
                    )
        return texts

    def _handle_event(
        self, event: Event, request: GenerationRequest, answer: list[int], texts: dict[str, str]
    ) -> None:
        """Add a token to its answer, or a finished answer to `texts`."""
        if isinstance(event, Token):
            answer.append(event.token)
            text = cut_at(self._tokenizer.detokenize(answer), request.until)
            if text is not None:
                texts[event.request] = text
                self._engine.cancel(event.request)
        elif isinstance(event, Finished):
            if event.reason == "error":
                raise UserError(event.message)
            if answer and answer[-1] == self._tokenizer.eod:
                answer.pop()
            texts[event.request] = self._tokenizer.detokenize(answer)

    def _request(self, name: str, request: GenerationRequest) -> Request:
        max_new_tokens = min(request.max_new_tokens, self._window - 1)
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            stop_tokens=(self._tokenizer.eod,),
        )
        return Request(name, tuple(request.prompt[max_new_tokens - self._window :]), sampling)


def cut_at(text: str, ends: Sequence[str]) -> str | None:
    """Return `text` up to the first occurrence of any of `ends`, or `None` if none occurs."""
    positions = [position for end in ends if end and (position := text.find(end)) >= 0]
    return text[: min(positions)] if positions else None


Function = Callable[[Json], Json]
_END = "end"


class Workers:
    """A dispatcher of calls from rank 0 to all ranks, for libraries written for one process.

    Args:
        world: The axis of all ranks.
        functions: The functions by name. All ranks run a function together, with the same result.
    """

    def __init__(self, world: Axis, functions: Mapping[str, Function]) -> None:
        """Store the functions that can be called."""
        self._exchange = JsonExchange(world)
        self._functions = functions

    def call(self, name: str, argument: Json) -> Json:
        """Call a function on all ranks, and return its result. Only rank 0 calls this method."""
        self._exchange.on_main(lambda: [name, argument])
        return self._functions[name](argument)

    def serve(self) -> None:
        """Run the functions that rank 0 calls, until it calls `end`. The other ranks call this."""
        while True:
            name, argument = self._exchange.on_main(lambda: None)
            if name == _END:
                return
            self._functions[name](argument)

    def end(self) -> None:
        """Make `serve` return on the other ranks. Only rank 0 calls this method."""
        self._exchange.on_main(lambda: [_END, None])
