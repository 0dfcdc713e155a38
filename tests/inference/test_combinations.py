"""Random networks with random settings generate the text that plain forward passes predict.

Other tests try each kind of network and each setting alone. To try more combinations:

    python -m tests.inference.test_combinations --count 200 --seed 1
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.config.generation import Speculation
from megatron.config.parser import Program, parse_config
from megatron.config.run import RunConfig
from megatron.device import Device
from megatron.errors import UserError
from megatron.inference import build
from megatron.inference.adapters import add_to, open_adapters
from megatron.inference.build import EngineOptions, build_engine, check_speculation
from megatron.inference.load import Loaded, load_gpt, parse_generation
from megatron.inference.request import (
    Event,
    Finished,
    Prompt,
    Request,
    RequestError,
    Sampling,
    Token,
)
from megatron.inference.sampling import uniform
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from megatron.training.restoring import network_of
from tests.combinations import try_combinations
from tests.distributed import run_sharing_memory, toy_device
from tests.inference.toy import tokens_of
from tests.models.drawn import draw_network
from tests.training.toy import TOY, train_toy

POSITIONS = 40
_CPU = Device.cpu()
_PRECISIONS = ["", "", "", "", "--bf16", "--bf16 --embedding-weights-in-fp32", "--fp16"]
_ADAPTERS = [
    *("", "", "--lora-rank 2", "--lora-rank 3 --use-rslora --lora-alpha 5"),
    "--lora-rank 2 --use-dora --lora-target-modules q_proj v_proj layers.1",
    "--lora-rank 2 --lora-target-modules all-linear",
    "--lora-rank 2 --lora-target-modules attention.output output_layer",
    "--lora-rank 2 --lora-target-modules layers.1 layers.*.mlp",
]
_DRAFTS = [
    *(None, None),
    Speculation(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
    Speculation(method="mtp", num_speculative_tokens=1),
    Speculation(method="mtp", num_speculative_tokens=2),
]
_LAYOUTS: list[dict[str, int]] = [{}, {}, {}, {"tensor": 2}, {"pipeline": 2}]


@dataclass(frozen=True)
class Combination:
    """A network, how it is trained, and how it generates text.

    Attributes:
        flags: Flags of the network and of its training.
        adapter: Flags of an adapter to serve, or "".
        saver: The format of the served model.
        uses_peft: Whether the adapter is served from PEFT's files.
        sizes: Parallel sizes of the engine.
        options: Options of the engine.
        looks_ahead: Whether steps are queued ahead, as on a GPU.
        requests: What is asked for.
        arrivals: The step before which each request arrives.
    """

    flags: list[str]
    adapter: str
    saver: str
    uses_peft: bool
    sizes: dict[str, int]
    options: EngineOptions
    looks_ahead: bool
    requests: list[Request]
    arrivals: list[int]

    def __str__(self) -> str:
        lines = [f"{' '.join(self.flags)}", f"{self.sizes} {self.options} {self.looks_ahead=}"]
        lines.append(f"{self.saver}, adapter {self.adapter} {self.uses_peft=}")
        default = Sampling(max_new_tokens=1)
        for step, request in zip(self.arrivals, self.requests, strict=True):
            given = {k: v for k, v in vars(request.sampling).items() if v != getattr(default, k)}
            text = f"{request.prompt} {given} {request.adapter=}"
            lines.append(f"step {step}, request {request.id}: {text:.300}")
        return "\n  ".join(lines)

    @property
    def tolerance(self) -> float:
        """Return the allowed difference between log probabilities."""
        return 0.2 if {"--bf16", "--fp16"} & set(self.flags) else 2e-3


def combination(seed: int) -> Combination:
    """Draw combinations until the rules of the configuration accept one."""
    rng = random.Random(seed)
    while True:
        flags = f"{draw_network(rng, 'gpt').flags} {rng.choice(_PRECISIONS)}".split()
        is_dynamic = "dynamic" in flags  # its contexts are several times as long
        flags += ["--max-position-embeddings", "16" if is_dynamic else str(POSITIONS)]
        adapter = rng.choice(_ADAPTERS)
        config = _config(flags)
        if config is None or (adapter and _config([*flags, *adapter.split()]) is None):
            continue
        drafts = rng.choice(_DRAFTS)
        try:
            check_speculation(config.model, drafts)
        except UserError:
            continue
        options = EngineOptions(
            max_sequences=rng.choice([1, 2, 3, 8]),
            max_step_tokens=rng.choice([1, 3, 7, 12, 64]),
            cache_tokens=rng.choice([48, 64, 96, 512]),
            block_size=rng.choice([1, 2, 3, 4, 5, 8, 16]),
            speculation=drafts,
        )
        requests = _requests(rng, bool(adapter))
        arrivals = sorted(rng.choice([0, 0, 0, 3, 9]) for _ in requests)
        return Combination(
            flags=flags,
            adapter=adapter,
            saver=rng.choice(["native", "native", "megatron", "torch_dist"]),
            uses_peft=rng.random() < 0.5,
            sizes=rng.choice(_LAYOUTS),
            options=options,
            looks_ahead=rng.random() < 0.5,
            requests=requests,
            arrivals=arrivals,
        )


def _config(flags: Sequence[str]) -> RunConfig | None:
    words = [*TOY, *flags, "--train-iters", "2"]
    try:
        return parse_config(words, world_size=1, read_checkpoint=network_of).config
    except UserError:
        return None


def _requests(rng: random.Random, has_adapter: bool) -> list[Request]:
    """Draw prompts that share beginnings, with greedy choices under several settings."""
    shared = [tuple(rng.randrange(100) for _ in range(24)) for _ in range(2)]
    requests = []
    for number in range(rng.choice([3, 6, 9])):
        prompt = rng.choice(shared)[: rng.randint(0, 24)]
        prompt += tuple(rng.randrange(100) for _ in range(rng.choice([0, 0, 1, 5])))
        prompt = prompt or (7,)
        settings: list[dict[str, Any]] = [
            *({}, {}, {"prompt_logprobs": True, "top_logprobs": 2}),
            {"stop_tokens": tuple(rng.sample(range(100), 20))},
            {"banned_pairs": tuple((i, j) for i in range(100) for j in range(50))},
            {"repetition_penalty": 1.7},
            {"temperature": 0.8, "seed": number},
            {"beam_width": 2},
        ]
        sampling = Sampling(
            max_new_tokens=rng.randint(1, min(12, POSITIONS - len(prompt))),
            **{"temperature": 0, "logprobs": True, **rng.choice(settings)},
        )
        adapter = rng.randrange(2) if has_adapter else 0
        requests.append(Request(str(number), prompt, sampling, adapter))
    return requests


def _generate(layout: Layout, base: str, words: list[str], found: Combination) -> list[Event] | str:
    """Return the events of all requests, or the message of a refusal."""
    sizes = [
        *("--tensor-model-parallel-size", str(layout.tensor.size)),
        *("--pipeline-model-parallel-size", str(layout.pipeline.size)),
    ]
    try:
        world, program = layout.world.size, Program(name="serve")
        config = parse_generation(["--load", base, *sizes], world, program).config
        opened = open_adapters(words, config)
        loaded = add_to(load_gpt(base, _CPU, layout, config=config), opened, _CPU)
        with patch.object(build, "is_asynchronous", lambda device: found.looks_ahead):
            engine = build_engine(loaded, _CPU, found.options)
    except UserError as error:
        return str(error)
    events: list[Event] = []
    waiting = list(zip(found.arrivals, found.requests, strict=True))
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            request = waiting.pop(0)[1]
            try:
                engine.add(request)
            except RequestError as error:
                events.append(Finished(request.id, "refused", str(error)))
        events += engine.step()
        step += 1
    assert engine.stats.blocks_used == 0, "blocks leak"
    return events


def logits_of(loaded: Loaded, request: Request, answer: Sequence[int]) -> Tensor:
    """Return the logits from the end of the prompt on, by plain passes over the whole text."""
    return _all_logits(loaded, request, answer)[len(request.prompt) - 1 :]


def _all_logits(loaded: Loaded, request: Request, answer: Sequence[int]) -> Tensor:
    model: Any = loaded.model
    text, rotation = [*request.prompt, *answer], model.rotation
    kind = loaded.config.model.rope_type

    def as_when_new(positions: Tensor, length: Any = None) -> tuple[Any, ...]:
        lengths = (positions + 1).clamp(min=len(request.prompt))
        return tuple(table(positions, lengths) for table in model.rotary)

    with (
        torch.no_grad(),
        patch.object(model, "rotation", as_when_new if kind == "dynamic" else rotation),
    ):
        if kind == "longrope":  # the divisors depend on the length of the text so far
            ends = range(len(request.prompt), len(text) + 1)
            passes = [model(torch.tensor([text[:end]]))[0] for end in ends]
            logits = torch.cat([passes[0], *(each[-1:] for each in passes[1:])])
        else:
            logits = model(torch.tensor([text]))[0]
    return logits[:, : loaded.tokenizer.vocab_size].float()


def _are_logprobs(
    found: Sequence[float], logits: Tensor, tokens: Sequence[int], tolerance: float
) -> bool:
    rows = zip(logits.log_softmax(-1).tolist(), tokens, strict=False)
    return found == pytest.approx([row[token] for row, token in rows], abs=tolerance)


def _problems_of(
    request: Request, events: Sequence[Event], loaded: Loaded, tolerance: float
) -> Iterator[str]:
    """Yield each problem with an answer."""
    (end,) = (event for event in events if isinstance(event, Finished))
    if end.reason == "refused":
        return  # with a message, when it arrived
    if end.reason not in ("stop", "length"):
        yield f"{end.reason}: {end.message}"
    sampling, answer = request.sampling, tokens_of(events)
    for beam in end.beams:
        logits = logits_of(loaded, request, beam.tokens)
        if not _are_logprobs(beam.logprobs, logits, beam.tokens, tolerance):
            yield f"log probabilities of {beam}"
    if len(end.beams) != (sampling.beam_width if sampling.beam_width > 1 else 0):
        yield f"{len(end.beams)} beams"
    for prompt in (event for event in events if isinstance(event, Prompt)):
        logits = _all_logits(loaded, request, answer)
        if not _are_logprobs(prompt.logprobs, logits, request.prompt[1:], tolerance):
            yield f"log probabilities of the prompt: {prompt.logprobs}"
    tokens = [event for event in events if isinstance(event, Token)]
    logits = logits_of(loaded, request, answer)
    for i, (event, row) in enumerate(zip(tokens, logits, strict=False)):
        problem = _problem_of_token(request, event, row, answer[:i], tolerance)
        if problem:
            yield f"token {i} of {answer}: {problem}"
    stops = [i for i, token in enumerate(answer) if token in sampling.stop_tokens]
    is_whole = len(answer) == sampling.max_new_tokens or bool(end.beams)
    if stops != [len(answer) - 1] * (end.reason == "stop") or not (stops or is_whole):
        yield f"{answer} ends by {end.reason}"


def _problem_of_token(
    request: Request, event: Token, logits: Tensor, before: Sequence[int], tolerance: float
) -> str:
    """Return what is wrong with a token, which follows these tokens of the answer, or ""."""
    sampling, text = request.sampling, [*request.prompt, *before]
    logits = logits.clone()
    logits[[second for first, second in sampling.banned_pairs if first == text[-1]]] = -torch.inf
    assert event.logprob is not None
    if not _are_logprobs([event.logprob], logits[None], [event.token], tolerance):
        return f"its log probability is {event.logprob}"
    if sampling.temperature:
        borders = (logits / sampling.temperature).softmax(-1).cumsum(-1)
        drawn, low = uniform(sampling.seed or 0, len(before)), ([0.0, *borders.tolist()])
        is_right = low[event.token] - tolerance <= drawn <= low[event.token + 1] + tolerance
        return "" if is_right else f"drawn by {drawn}"
    seen = torch.tensor(sorted(set(text)))
    values, penalty = logits[seen], sampling.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    is_best = logits[event.token] >= logits.max() - tolerance * max(1, penalty)
    return "" if is_best else f"expected {int(logits.argmax())}"


def _converted(folder: str, saver: str) -> str:
    """Return the folder in another format, or itself if that format is refused."""
    words = f"--model-type GPT --loader native --saver {saver} --load-dir {folder}".split()
    try:
        if saver != "native":
            list(util.run(util.build_parser().read([*words, "--save-dir", f"{folder} {saver}"])))
            return f"{folder} {saver}"
    except UserError as error:
        print(f"refused: {error}")
    return folder


def problems_of(found: Combination, folder: Path) -> Iterator[str]:
    """Train, generate text, and yield each problem with it."""
    base, tuned = str(folder / "base"), str(folder / "tuned")
    defaults = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --train-iters 2 --lr 0.02"
    words = [*defaults.split(), *"--global-batch-size 1 --save-interval 2".split(), *found.flags]
    train_toy(Layout.single(), [*words, "--save", base])
    folders = [base]
    if found.adapter:
        more = ["--load", base, "--finetune", "--save", tuned, "--lr", "0.1"]
        try:
            train_toy(Layout.single(), [*words, *more, *found.adapter.split()])
        except UserError as error:  # for example, this network has no such layers
            print(f"refused: {error}")
            return
        folders.append(tuned)
    given = _converted(base, found.saver)
    served = []
    if found.adapter:
        served.append(f"tuned={_converted(tuned, 'peft' if found.uses_peft else 'native')}")
    count = 2 if found.sizes else 1
    events = run_sharing_memory(count, _generate, given, served, found, **found.sizes)[-1]
    if isinstance(events, str):
        print(f"refused: {events}")
        return
    models = [load_gpt(each, _CPU, row_by_row=False) for each in folders]
    for request in found.requests:
        own = [event for event in events if event.request == request.id]
        for problem in _problems_of(request, own, models[request.adapter], found.tolerance):
            yield f"request {request.id}: {problem}"


@pytest.mark.skipif(toy_device().is_gpu, reason="compares with results of a CPU")
@pytest.mark.parametrize("seed", range(5))
def test_text_of_random_networks(seed: int, tmp_path: Path) -> None:
    found = combination(seed)
    problems = list(problems_of(found, tmp_path))
    assert not problems, f"{found}\n{problems}"


if __name__ == "__main__":
    sys.exit(try_combinations(__doc__.splitlines()[0], combination, problems_of))
