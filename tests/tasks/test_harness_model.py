"""The parts of the lm-evaluation-harness backend that can be tested without that package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron.config import RunConfig
from megatron.config.tasks import HarnessConfig
from megatron.device import Device
from megatron.errors import UserError
from megatron.inference.request import Finished, Token
from megatron.parallel.layout import Layout
from megatron.tasks import harness
from megatron.tasks.harness import GenerationRequest, cut_at
from tests.config.command import parse
from tests.distributed import run_distributed

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


def test_single_tokens_are_not_split_over_tensor_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--tensor-model-parallel-size 2 --sequence-parallel"
    config = parse(words, world_size=2).config
    assert config.parallel.sequence_parallel
    config = replace(config, checkpoint=replace(config.checkpoint, load="folder"))
    loaded: list[RunConfig] = []

    def load(*_: object, config: RunConfig) -> None:
        loaded.append(config)
        raise LookupError

    monkeypatch.setattr(harness, "load_gpt", load)
    parsed = SimpleNamespace(config=config, extra=(None, None))
    with pytest.raises(LookupError):
        harness.evaluate(parsed, Device.cpu(), Layout.single())  # type: ignore[arg-type]
    assert not loaded[0].parallel.sequence_parallel


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


@pytest.mark.parametrize(("given", "limit"), [(None, None), (0.5, 0.5), (1.0, 1), (20.0, 20)])
def test_a_limit_is_a_share_or_a_number_of_samples(
    given: float | None, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def evaluate(**arguments: Any) -> dict[str, Any]:
        asked.append(arguments["limit"])
        return {"results": {}}

    manager = SimpleNamespace(match_tasks=lambda names: names)
    modules = {
        "lm_eval": {"simple_evaluate": evaluate},
        "lm_eval.tasks": {"TaskManager": lambda **_: manager},
    }
    for name, content in modules.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(content)
        monkeypatch.setitem(sys.modules, name, stand_in)
    harness._run_harness(None, HarnessConfig(lm_eval_tasks=("a",), lm_eval_limit=given))  # type: ignore[arg-type]
    assert [(one, type(one)) for one in asked] == [(limit, type(limit))]
