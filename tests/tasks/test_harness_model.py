"""The parts of the lm-evaluation-harness backend that can be tested without that package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.tasks import HarnessConfig
from megatron.device import Device
from megatron.errors import ConfigError, DataError, UserError
from megatron.inference.load import load_gpt
from megatron.inference.request import Finished, Token
from megatron.parallel.layout import Layout
from megatron.tasks import harness
from megatron.tasks.harness import GenerationRequest, cut_at
from tests.distributed import run_distributed
from tests.tasks.toy import save_toy

_MODEL = "megatron.tasks.harness_model"
_NAMES = {
    "lm_eval": [],
    "lm_eval.api": [],
    "lm_eval.api.instance": ["Instance"],
    "lm_eval.api.model": ["TemplateLM"],
    "lm_eval.models": [],
    "lm_eval.models.utils": ["normalize_gen_kwargs"],
    "lm_eval.utils": ["get_rolling_token_windows", "make_disjoint_window"],
}


@pytest.fixture
def model_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """Return `HarnessModel`, with stand-ins for the harness's classes and functions."""
    for module, names in _NAMES.items():
        stand_in = ModuleType(module)
        for name in names:
            setattr(stand_in, name, type(name, (), {}))
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.delitem(sys.modules, _MODEL, raising=False)
    from megatron.tasks.harness_model import HarnessModel

    yield HarnessModel
    del sys.modules[_MODEL]


class _Text:
    """A tokenizer whose ids are code points. `start` begins every text."""

    eod = 7

    def __init__(self, start: list[int]) -> None:
        self._start = start

    def tokenize_unterminated(self, text: str) -> list[int]:
        return [*self._start, *map(ord, text)]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(("start", "prefix"), [([], 7), ([5], 5), ([5, 6], 5)])
def test_what_precedes_a_text_without_context(
    model_class: type, start: list[int], prefix: int
) -> None:
    config = SimpleNamespace(data=SimpleNamespace(seq_length=4))
    asked: list[list[object]] = []

    class Workers:
        def call(self, _: str, samples: list[list[object]]) -> list[tuple[float, bool]]:
            asked.extend(samples)
            return [(-1.5, True)] * len(samples)

    model = model_class(SimpleNamespace(tokenizer=_Text(start), config=config), Workers())
    assert (model.prefix_token_id, model.eot_token_id) == (prefix, 7)
    assert model.tok_encode("ab") == [*start, 97, 98]
    assert model.tok_encode("ab", add_special_tokens=False) == [97, 98]
    assert model._loglikelihood_tokens([("", [], [1, 2]), ("", [3], [1])]) == [(-1.5, True)] * 2
    assert asked == [[[prefix, 1, 2], 2], [[3, 1], 1]]


class _Workers:
    """Workers that record what they are asked."""

    def __init__(self, *answers: object) -> None:
        self.asked: list[object] = []
        self._answers = list(answers)

    def call(self, _: str, asked: list[object]) -> list[object]:
        self.asked = asked
        return self._answers


def _model(model_class: type, workers: _Workers, **stand_ins: object) -> Any:
    """Return a model whose module uses these functions instead of the harness's."""
    vars(sys.modules[_MODEL]).update(stand_ins)
    config = SimpleNamespace(data=SimpleNamespace(seq_length=4))
    return model_class(SimpleNamespace(tokenizer=_Text([]), config=config), workers)


def test_tokens_are_sampled_only_if_the_task_says_how(model_class: type) -> None:
    workers = _Workers("x", 5)
    settings = {"until": ["."], "max_gen_toks": 3}
    model = _model(model_class, workers, normalize_gen_kwargs=lambda given: settings | given)
    sampling = {"temperature": 0.5, "top_k": 4, "top_p": 0.9}
    requests = [SimpleNamespace(args=args) for args in (("ab", {}), ("", sampling))]
    assert model.generate_until(requests) == ["x", "5"]
    asked = {"max_new_tokens": 3, "until": ["."]}
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 0.0}
    assert workers.asked == [
        {"prompt": [97, 98], **asked, **greedy},
        {"prompt": [7], **asked, **sampling},
    ]


def test_the_windows_of_a_text_are_scored_together(model_class: type) -> None:
    workers = _Workers((-1.0, True), (-2.0, True), (-4.0, False))

    def windows(tokens: list[int], prefix: int, size: int, context: int) -> list[object]:
        assert (prefix, size, context) == (7, 4, 1)
        starts = range(0, len(tokens), 4)
        return [([prefix, *tokens][i : i + 1], tokens[i : i + 4]) for i in starts]

    model = _model(
        model_class,
        workers,
        get_rolling_token_windows=windows,
        make_disjoint_window=lambda window: window,
    )
    requests = [SimpleNamespace(args=(text,)) for text in ("abcde", "f")]
    assert model.loglikelihood_rolling(requests) == [-3.0, -4.0]
    assert workers.asked == [[[7, 97, 98, 99, 100], 4], [[100, 101], 1], [[7, 102], 1]]


@pytest.mark.parametrize(
    ("ends", "cut"),
    [(["c", "e"], "ab"), (["e", "c"], "ab"), (["ab"], ""), (["x", "d"], "abc"), (["x", ""], None)],
)
def test_an_answer_ends_at_the_first_stop_sequence(ends: list[str], cut: str | None) -> None:
    assert cut_at("abcde", ends) == cut


@pytest.mark.parametrize(
    ("tokens", "reason", "text"),
    [
        ("ab\a", "stop", "ab"),  # code point 7, the token that ends a text
        ("abc", "length", "abc"),
        ("a.b", "length", "a"),
        ("", "length", ""),
    ],
)
def test_an_answer_ends_before_its_end_token_or_stop_sequence(
    tokens: str, reason: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [Token("0", ord(character)) for character in tokens]
    engine = _Engine([*events, Finished("0", reason)])
    request = GenerationRequest([1, 2, 3, 4, 5], 2, until=["."])
    assert _generator(engine, monkeypatch).generate([request]) == [text]
    assert engine.cancelled == (["0"] if "." in tokens else [])
    (added,) = engine.added
    assert added.prompt == (4, 5)  # a window of 4 also holds the two new tokens
    assert added.sampling.stop_tokens == (7,)


def test_a_request_that_fails_ends_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _Engine([Finished("0", "error", "the cache is too small")])
    with pytest.raises(UserError, match="the cache is too small"):
        _generator(engine, monkeypatch).generate([GenerationRequest([1], 2)])


class _Engine:
    """An engine that returns given events."""

    def __init__(self, events: list[Token | Finished]) -> None:
        self._events = events
        self.added: list[Any] = []
        self.cancelled: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._events)

    def add(self, request: Any) -> None:
        self.added.append(request)

    def step(self) -> list[Token | Finished]:
        events, self._events = self._events, []
        return events

    def cancel(self, request: str) -> None:
        self.cancelled.append(request)


def _generator(engine: _Engine, monkeypatch: pytest.MonkeyPatch) -> harness.Generator:
    monkeypatch.setattr(harness, "build_engine", lambda *_, **__: engine)
    config = SimpleNamespace(data=SimpleNamespace(seq_length=4))
    loaded: Any = SimpleNamespace(layout=Layout.single(), tokenizer=_Text([]), config=config)
    return harness.Generator(loaded, Device.cpu())


def _dispatch(layout: Layout) -> list[Any]:
    called: list[Any] = []

    def double(argument: Any) -> Any:
        called.append(argument)
        return 2 * argument

    workers = harness.Workers(layout.world, {"double": double})
    if layout.world.rank:
        workers.serve()
    else:
        assert [workers.call("double", argument) for argument in (3, "a")] == [6, "aa"]
        workers.end()
    return called


def test_all_ranks_run_what_the_first_one_calls_until_it_ends() -> None:
    assert run_distributed(2, _dispatch) == [[3, "a"], [3, "a"]]


def _run(
    monkeypatch: pytest.MonkeyPatch, config: HarnessConfig, known: Sequence[str] = ("a",)
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run a stand-in for the harness, which reads the files of "a" alone or of all known tasks.

    Returns:
        The arguments with which tasks were read, and with which the harness was run.
    """
    read: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []

    def manager(**arguments: Any) -> Any:
        read.append(arguments)
        found = known if arguments.get("include_defaults", True) else ("a",)
        return SimpleNamespace(match_tasks=lambda names: [n for n in names if n in found])

    def evaluate(**arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        if "offline" in arguments["tasks"]:
            raise OSError("no network")
        return {"results": {}}

    modules = {
        "lm_eval": {"simple_evaluate": evaluate},
        "lm_eval.tasks": {"TaskManager": manager},
    }
    for name, content in modules.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(content)
        monkeypatch.setitem(sys.modules, name, stand_in)
    assert harness._run_harness(None, config) == {"results": {}}  # type: ignore[arg-type]
    return read, asked


@pytest.mark.parametrize(("given", "limit"), [(None, None), (0.5, 0.5), (1.0, 1), (20.0, 20)])
def test_a_limit_is_a_share_or_a_number_of_samples(
    given: float | None, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = HarnessConfig(lm_eval_tasks=("a",), lm_eval_limit=given)
    _, asked = _run(monkeypatch, config)
    assert [(one["limit"], type(one["limit"])) for one in asked] == [(limit, type(limit))]


def test_the_harness_s_own_tasks_are_read_only_if_they_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = {"include_path": "own", "include_defaults": False}
    (tmp_path / "task.yaml").touch()
    names: tuple[str, ...] = ("a", str(tmp_path / "task.yaml"))
    config = HarnessConfig(lm_eval_tasks=names, lm_eval_include_path="own", lm_eval_num_fewshot=0)
    read, (asked,) = _run(monkeypatch, config)
    assert read == [own]
    assert (asked["tasks"], asked["num_fewshot"], asked["log_samples"]) == ([*names], 0, False)
    known = ("a", "b", "offline")
    config = HarnessConfig(lm_eval_tasks=("a", "b"), lm_eval_include_path="own")
    assert _run(monkeypatch, config, known)[0] == [own, {"include_path": "own"}]
    with pytest.raises(ConfigError, match="--lm-eval-tasks c d: the harness has no such task"):
        _run(monkeypatch, HarnessConfig(lm_eval_tasks=("a", "c", "d")), known)
    with pytest.raises(DataError, match="--lm-eval-tasks offline: .* cannot be read: no network"):
        _run(monkeypatch, HarnessConfig(lm_eval_tasks=("offline",)), known)


def test_an_evaluation_without_the_harness(
    model_class: type,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A stand-in asks for scores and a text, and returns values of each kind."""
    folder = save_toy(str(tmp_path / "model"))
    model: Any = load_gpt(folder, Device.cpu()).model
    with torch.no_grad():
        scores = model(torch.tensor([[3, 5]]))[0, :, :101].log_softmax(-1)
    best = scores.argmax(-1).tolist()

    def evaluate(asked: Any, _: HarnessConfig) -> dict[str, Any]:
        assert asked._loglikelihood_tokens([("", [3], [5, 7]), ("", [3, 5], [best[1]])]) == [
            (pytest.approx((scores[0, 5] + scores[1, 7]).item(), rel=1e-5), False),
            (pytest.approx(scores[1].max().item(), rel=1e-5), True),
        ]
        requests = [{"prompt": [3, 5], "max_new_tokens": 1}]
        assert asked._workers.call("generate", requests) == [str(best[1])]
        assert asked._workers.call("generate", [*requests, *requests]) == 2 * [str(best[1])]
        values = {"acc,none": 0.5, "acc_stderr,none": 1, "em,strict": 2, "alias": "x", "n": 3}
        return {"results": {"toy": {**values, "flag,none": True}}, "versions": {"toy": 1}}

    monkeypatch.setattr(harness, "_run_harness", evaluate)
    monkeypatch.setattr(harness, "importlib", _finder(found=True))
    words = ["--load", folder, "--lm-eval-tasks", "toy", "--tensor-model-parallel-size", "1"]
    parsed = harness.parse("LM_EVAL", words, 1)
    expected = {"toy acc": 0.5, "toy acc_stderr": 1, "toy em (strict)": 2}
    assert harness.evaluate(parsed, Device.cpu(), Layout.single()) == expected
    assert "> batch 1 of 1\n" in capsys.readouterr().out
    (path,) = (tmp_path / "model" / "evaluation").iterdir()
    written = json.loads(path.read_text())
    assert written["tasks"] == {"versions": {"toy": 1}, "n-shot": None, "n-samples": None}
    assert written["options"]["lm_eval_tasks"] == ["toy"]


def _finder(*, found: bool) -> Any:
    find_spec = {"lm_eval": "found" if found else None}.__getitem__
    return SimpleNamespace(util=SimpleNamespace(find_spec=find_spec))


def test_mistakes_are_reported_by_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = "--valid-data x --lm-eval-limit 0 --lm-eval-num-fewshot -1 --overwrite".split()
    told = [
        "--load is required",
        "--task LM_EVAL needs --lm-eval-tasks: give names of tasks, or task files",
        f"--lm-eval-include-path {tmp_path}/no: no such folder: fix the path",
        "--lm-eval-num-fewshot -1: must be at least 0",
        "--lm-eval-limit 0: must be above 0",
        "--valid-data: the tasks of --lm-eval-tasks name their own data: drop the flag",
        "--overwrite without --results: there is no file to replace: drop --overwrite",
        harness._INSTALL,
    ]
    monkeypatch.setattr(harness, "importlib", _finder(found=False))
    with pytest.raises(ConfigError) as caught:
        harness.parse("LM_EVAL", [*words, "--lm-eval-include-path", str(tmp_path / "no")], 1)
    assert [line[: len(own)] for line, own in zip(caught.value.problems, told, strict=True)] == told
    monkeypatch.setattr(harness, "importlib", _finder(found=True))
    words = "--lm-eval-tasks a --lm-eval-limit 0.1 --lm-eval-num-fewshot 0".split()
    with pytest.raises(ConfigError) as caught:
        harness.parse("LM_EVAL", [*words, "--lm-eval-include-path", str(tmp_path)], 1)
    assert len(caught.value.problems) == 1  # --load
