"""The parts of the lm-evaluation-harness backend that can be tested without that package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron.config import RunConfig
from megatron.device import Device
from megatron.parallel.layout import Layout
from megatron.tasks import harness
from tests.config.command import parse

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
