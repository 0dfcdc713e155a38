"""Scorers for texts: a Hugging Face classifier or the Perspective API."""

from __future__ import annotations

import argparse
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron.data.json_lines import Setting
from megatron.detoxify.perspective import ENDPOINT, PerspectiveClient, TextRefusedError
from megatron.environment import perspective_api_key
from megatron.errors import ConfigError, DataError
from megatron.extras import packages_of

TOXICITY = "toxicity"
# The attributes that Megatron-LM's script requests.
ATTRIBUTES = (
    *(TOXICITY, "severe_toxicity", "sexually_explicit", "threat", "profanity"),
    "identity_attack",
)
_LABELS = ("toxicity", "toxic")  # common names of the toxicity label
_UNBOUNDED = 1 << 20  # tokenizers without a length limit report a number such as 1e30


class Scored(NamedTuple):
    """The scores of a text.

    Attributes:
        scores: The probabilities by name, including `toxicity`, or `None` if the text has none.
        reason: The reason why the text has no scores, or "".
    """

    scores: dict[str, float] | None
    reason: str = ""


class TextScorer(Protocol):
    """A source of scores."""

    settings: dict[str, Setting]
    """The flags that determine the scores, with their values."""

    def score(self, texts: Iterable[str]) -> Iterator[Scored]:
        """Yield the scores of texts in order, reading a bounded number of texts ahead."""
        ...


class PerspectiveScorer:
    """A scorer that sends concurrent requests to the Perspective API.

    Args:
        client: The client, which limits the rate of requests and retries them.
        workers: The maximum number of concurrent requests.
    """

    def __init__(self, client: PerspectiveClient, workers: int) -> None:
        """Store the client and the number of workers."""
        self._client, self._workers = client, workers
        self.settings: dict[str, Setting] = {
            "--classifier": "perspective",
            "--attributes": " ".join(client.attributes),
            "--language": client.language,
        }

    def score(self, texts: Iterable[str]) -> Iterator[Scored]:
        """Yield the scores of texts in order.

        If the iteration ends early or fails, the client is stopped and cannot be used again.

        Raises:
            ServiceError: The service cannot be used, or all attempts failed.
        """
        pool = ThreadPoolExecutor(self._workers)
        pending: deque[Future[Scored]] = deque()
        try:
            for text in texts:
                pending.append(pool.submit(self._score, text))
                if len(pending) >= 2 * self._workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            self._client.stop()  # end waiting requests immediately
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _score(self, text: str) -> Scored:
        try:
            return Scored(self._client.score(text))
        except TextRefusedError as error:
            return Scored(None, str(error))


class ClassifierScorer:
    """A scorer that runs a Hugging Face text classifier locally.

    Texts are truncated to the classifier's maximum length.
    """

    def __init__(self, model: str, label: str | None, batch_size: int) -> None:
        """Load the classifier.

        Args:
            model: The folder of the model, or its name on the Hugging Face Hub.
            label: The label whose probability is the toxicity, regardless of case. `None` uses
                the label named "toxic" or "toxicity".
            batch_size: The number of texts in a batch.

        Raises:
            ConfigError: Transformers is not installed, or the model has no such label or several.
            DataError: The model cannot be loaded.
        """
        with packages_of("detoxify"):
            import transformers
        from megatron.device import Device

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            network = transformers.AutoModelForSequenceClassification.from_pretrained(
                model, use_safetensors=True
            )
        except Exception as error:  # a damaged folder can cause errors of any type
            raise DataError(
                f"--classifier-model {model} cannot be loaded ({error}): give the folder of a text "
                "classifier with its tokenizer and model.safetensors"
            ) from error
        names = [str(name) for name in network.config.id2label.values()]
        self._label = _find_label(names, label, model)
        max_length = tokenizer.model_max_length
        if max_length > _UNBOUNDED:  # two fewer, because some models skip the first two positions
            max_length = getattr(network.config, "max_position_embeddings", 514) - 2
        self._pipeline: Any = transformers.pipeline(
            "text-classification",
            model=network,
            tokenizer=tokenizer,
            device=Device.pick().torch_device,
            top_k=None,
            truncation=True,
            max_length=max_length,
        )
        self._model, self._batch_size = model, batch_size
        self.settings: dict[str, Setting] = {
            "--classifier": "huggingface",
            "--classifier-model": str(Path(model).resolve()) if Path(model).is_dir() else model,
            "--label": self._label,
        }

    def score(self, texts: Iterable[str]) -> Iterator[Scored]:
        """Yield the scores of texts in order.

        Raises:
            DataError: A score is not finite.
        """
        remaining = iter(texts)
        while batch := list(itertools.islice(remaining, self._batch_size)):
            for label_scores in self._pipeline(batch, batch_size=self._batch_size):
                scores = {str(entry["label"]): float(entry["score"]) for entry in label_scores}
                if not all(map(math.isfinite, scores.values())):
                    raise DataError(
                        f"--classifier-model {self._model} computes scores that are not finite, so "
                        "its weights are damaged: download or save it again"
                    )
                yield Scored({**scores, TOXICITY: scores[self._label]})


def _find_label(names: Sequence[str], label: str | None, model: str) -> str:
    accepted = _LABELS if label is None else (label.lower(),)
    matches = [name for name in names if name.lower() in accepted]
    if len(matches) != 1:
        value = "" if label is None else f" {label}"
        raise ConfigError(
            f"--label{value}: {model} has the labels {', '.join(names)}: give the one whose "
            "probability is the toxicity"
        )
    return matches[0]


def add_scorer_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select and configure the scorer."""
    parser.add_argument(
        "--classifier",
        choices=("huggingface", "perspective"),
        help="scorer to use (default: huggingface with --classifier-model, otherwise perspective)",
    )
    parser.add_argument(
        "--classifier-model",
        metavar="MODEL",
        help="huggingface: folder of a text classifier, or its name on the Hugging Face Hub",
    )
    parser.add_argument(
        "--label",
        help="huggingface: label whose probability is the toxicity (default: toxic or toxicity)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=32,
        help="huggingface: number of texts in a batch (%(default)s)",
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="perspective: file whose only line is the API key (default: the environment variable "
        "PERSPECTIVE_API_KEY)",
    )
    parser.add_argument(
        "--api-url", default=ENDPOINT, help="perspective: URL of the service (%(default)s)"
    )
    parser.add_argument(
        "--attributes",
        nargs="+",
        default=ATTRIBUTES,
        metavar="NAME",
        help=f"perspective: attributes to request ({' '.join(ATTRIBUTES)})",
    )
    parser.add_argument(
        "--language", default="en", help="perspective: language of the texts (%(default)s)"
    )
    parser.add_argument(
        "--requests-per-second",
        type=float,
        default=1.0,
        metavar="N",
        help="perspective: your quota in requests per second; every key allows 1 (%(default)s)",
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=8,
        help="perspective: maximum number of retries of a request (%(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="perspective: seconds to wait for a response (%(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=10,
        help="perspective: number of concurrent requests (%(default)s)",
    )


def build_scorer(options: argparse.Namespace) -> TextScorer:
    """Build the scorer that the flags of `add_scorer_flags` describe.

    Raises:
        ConfigError: A flag or the API key is missing or invalid, or Transformers is not installed.
        DataError: The classifier cannot be loaded.
    """
    kind = options.classifier or ("huggingface" if options.classifier_model else "perspective")
    limits = {"--workers": 1, "--batch-size": 1, "--retries": 0}
    problems = [
        f"{flag} {value}: give {minimum} or more"
        for flag, minimum in limits.items()
        if (value := getattr(options, flag[2:].replace("-", "_"))) < minimum
    ]
    problems += [
        f"{flag} {value:g}: give a number above 0, at most a million"
        for flag in ("--requests-per-second", "--timeout")
        if not 0 < (value := getattr(options, flag[2:].replace("-", "_"))) <= 1e6
    ]
    if kind == "huggingface" and not options.classifier_model:
        problems.append("--classifier huggingface requires --classifier-model: give a folder")
    if kind == "perspective" and options.classifier_model:
        problems.append("--classifier-model needs --classifier huggingface: change or drop one")
    if problems:
        raise ConfigError(problems)
    if kind == "huggingface":
        return ClassifierScorer(options.classifier_model, options.label, options.batch_size)
    attributes = tuple(dict.fromkeys((*map(str.lower, options.attributes), TOXICITY)))
    client = PerspectiveClient(
        _api_key(options.api_key_file),
        options.api_url,
        attributes,
        language=options.language,
        requests_per_second=options.requests_per_second,
        retries=options.retries,
        timeout=options.timeout,
    )
    return PerspectiveScorer(client, options.workers)


def _api_key(path: str | None) -> str:
    """Return the API key from a file or, if `path` is `None`, from the environment.

    Raises:
        ConfigError: The key is missing, or is not a single word of ASCII characters.
    """
    if path is None:
        where, key = "PERSPECTIVE_API_KEY", perspective_api_key() or ""
        if not key:
            raise ConfigError(
                "the Perspective API needs a key: give --api-key-file FILE or set "
                "PERSPECTIVE_API_KEY, or score on this machine with --classifier-model FOLDER"
            )
    else:
        where = f"--api-key-file {path}"
        try:
            key = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read ({error}): give a readable file") from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} is not a valid API key: give a single word")
    return key
