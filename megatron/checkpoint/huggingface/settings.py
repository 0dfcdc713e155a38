"""Read config.json key by key. Unknown keys are refused, not ignored.

A key that this program does not know may change the network (another kind of attention, a
quantization, a file of Python code), and the weights would then be misinterpreted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.trust import open_trusted
from megatron.errors import CheckpointError

MAX_BYTES = 1 << 20  # limit for a config.json; real ones have a few thousand bytes
# Larger than in any real model, but small enough to compute with.
MAX_VALUE = 1 << 24
MAX_LAYERS = 1 << 14
MAX_HEADS = 1 << 16  # also the largest head size

# These keys describe how the network was trained, loaded or used, but not what it computes.
_HARMLESS = frozenset(
    """
    _commit_hash _name_or_path _num_labels architectures attn_implementation bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_range is_decoder
    is_encoder_decoder is_llama_config keys_to_ignore_at_inference label2id length_penalty
    max_length max_sequence_length min_length n_ctx neftune_noise_alpha no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_past output_router_logits output_scores pad_token_id
    pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type predict_special_tokens prefix pretraining_tp problem_type remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef
    router_jitter_noise sep_token_id summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p use_bfloat16 use_cache
    """.split()
)


def read_json(
    path: Path, *, max_bytes: int = MAX_BYTES, allow_foreign: bool = False
) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: The file, or a link to it.
        max_bytes: Largest size of the file.
        allow_foreign: Accept a file owned by another user.

    Raises:
        CheckpointError: The file is missing, too large, or not a JSON object; or it belongs to
            another user, or is world-writable.
    """
    try:
        with open_trusted(path, allow_foreign=allow_foreign, follows=True) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes:,} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


class Settings:
    """The keys of a config.json, whose types are checked when they are read.

    Methods that read a value raise `CheckpointError` if it has the wrong type or is out of range,
    or if it is missing and has no default. At the end, `refuse_unread_keys` refuses keys that no
    method has read, unless they are known to be harmless.

    Attributes:
        values: The file's object, or a nested object in it, without keys that are null, which count
            as absent.
        path: The file, followed by the path of the nested object if there is one, for messages.
    """

    def __init__(self, values: Mapping[str, Any], path: Path | str) -> None:
        """Create settings from an object in a file.

        Args:
            values: The object.
            path: The file, followed by the path of a nested object, for messages.
        """
        self.values = {key: value for key, value in values.items() if value is not None}
        self.path = path
        self._keys = frozenset(values)
        self._read_keys: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether the file has the key, even if its value is null."""
        return key in self._keys

    def size(self, key: str, default: int | None = None, max_value: int = MAX_VALUE) -> int:
        """Read an integer from 1 to `max_value`."""
        value = self._get(key, default)
        if type(value) is not int or not 0 < value <= max_value:
            raise self.error(key, f"expected an integer from 1 to {max_value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a finite number above 0."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.error(key, "expected a number above 0")
        return float(value)

    def fraction(self, key: str, default: float) -> float:
        """Read a number that is at least 0 and below 1."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise self.error(key, "expected a number in [0, 1)")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Read a boolean."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.error(key, "expected true or false")
        return value

    def choice(self, key: str, choices: Mapping[str, Any], default: str | None = None) -> Any:
        """Read a string that is a key of `choices`, and return the corresponding value."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, f"supported: {', '.join(choices)}")
        return choices[value]

    def strings(self, key: str) -> list[str]:
        """Read a list of strings, or return an empty list if the key is absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(word) is str for word in value):
            raise self.error(key, "expected a list of strings")
        return value

    def indices(self, key: str, end: int) -> list[int]:
        """Read a list of integers in [0, `end`), or return an empty list if the key is absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < end for i in value):
            raise self.error(key, f"expected a list of integers in [0, {end})")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Read a list of `count` numbers above 0 and below `MAX_VALUE`. There is no default."""
        value = self._get(key, None)
        fits = isinstance(value, list) and len(value) == count
        if not fits or not all(
            type(number) in (int, float) and 0 < number < MAX_VALUE for number in value
        ):
            raise self.error(key, f"expected a list of {count} numbers above 0")
        return tuple(map(float, value))

    def section(self, key: str) -> Settings:
        """Read a nested object, or return an empty one if the key is absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "expected an object")
        return Settings(value, f"{self.path}: {key}")

    def must_be(self, key: str, expected: Any) -> None:
        """Check that a key is absent or has this value.

        Raises:
            CheckpointError: The key has a different value, which our networks do not support.
        """
        if self._get(key, expected) != expected:
            raise self.error(key, f"only {json.dumps(expected)} is supported")

    def ignore(self, *keys: str) -> None:
        """Accept any values of keys that do not change what the network computes."""
        self._read_keys.update(keys)

    def refuse_unread_keys(self) -> None:
        """Check that every key that may affect the network has been read.

        Raises:
            CheckpointError: Some of these keys have not been read. The message names all of them.
        """
        unread = sorted(self.values.keys() - self._read_keys - _HARMLESS)
        if unread:
            raise CheckpointError(
                f"{self.path}: {', '.join(unread)}: not supported, and may change the network: if "
                "you know that it does not, convert a copy of the folder without it"
            )

    def error(self, key: str, problem: str) -> CheckpointError:
        """Return an error that names the key and its value."""
        text = json.dumps(self.values.get(key))
        return CheckpointError(f"{self.path}: {key} {text[:80]}: {problem}")

    def _get(self, key: str, default: Any) -> Any:
        self._read_keys.add(key)
        return self.values.get(key, default)


def harmless(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of a config.json that do not depend on the network.

    They are kept when a config.json is rewritten for a different network.
    """
    return {key: value for key, value in values.items() if key in _HARMLESS}
