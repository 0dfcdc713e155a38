"""Record a thousand conversations as TRL turns them into ids and labels.

    python -m tests.data.chat_parity tests/data/chat_parity.json

writes the record anew, with the extra [parity]: TRL's SFTTrainer prepares each data set, and its
`input_ids` and `labels` are kept for the first conversations and as digests for all.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COUNT = 1000
KEPT = 4  # examples of each data set that are recorded in full
RECORD = Path(__file__).with_name("chat_parity.json")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
_CONTROL = (
    *SPECIAL.values(),
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
)
_WORDS = (
    'the a model answers question river Zürich 東京 naïve 42 3.14 co-operate don\'t "quoted" <b> & '
    "& {json: 1} line\nbreak tab\tstop emoji 🙂 émigré x*y=z ``` print('hi') 日本語 straße Ω≈ç "
    "http://a.b/c?d=e ALLCAPS camelCase snake_case 1,000,000 -7 ... ?! ; : </s> <|im_end|>"
).split(" ")
_EDGES = ("", "", "", "", "\n", " ", "\n\n", "  ")


FORMS = ("messages", "completion", "strings", "preference")


class Style(NamedTuple):
    """A chat template that marks what is trained, and the kind of its tokenizer."""

    marked: str
    kind: str

    @property
    def plain(self) -> str:
        """Return the template without `{% generation %}`."""
        unmarked = self.marked.replace("{% generation %}", "")
        return unmarked.replace("{% endgeneration %}", "")


STYLES = {
    "ChatML, as of Qwen": Style(
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}"
        "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\\n' }}"
        "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "byte level",
    ),
    "Llama 3": Style(
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}"
        "{% endgeneration %}{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        "byte level",
    ),
    "Mistral": Style(
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}"
        "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}"
        "{% endif %}{{ bos_token }}{% for m in turns %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}{% else %}"
        "{% generation %}{{ ' ' + m.content | trim + eos_token }}{% endgeneration %}"
        "{% endif %}{% endfor %}",
        "metaspace",
    ),
}


def conversations() -> Iterator[list[dict[str, str]]]:
    """Yield the messages of the conversations, the same ones on every call."""
    draw = random.Random(25)

    def text(most: int) -> str:
        words = " ".join(draw.choice(_WORDS) for _ in range(draw.randint(1, most)))
        return draw.choice(_EDGES) + words + draw.choice(_EDGES)

    for _ in range(COUNT):
        messages = []
        if draw.random() < 0.4:
            messages.append({"role": "system", "content": text(10)})
        for _ in range(draw.randint(1, 4)):
            messages.append({"role": "user", "content": text(10)})
            messages.append({"role": "assistant", "content": text(20)})
        yield messages


def records(form: str) -> list[dict[str, Any]]:
    """Return the records of the conversations in one of the `FORMS`."""
    found: list[dict[str, Any]] = []
    for each in conversations():
        prompt, answer = each[:-1], each[-1:]
        if form == "messages":
            found.append({"messages": each})
        elif form == "completion":
            found.append({"prompt": prompt, "completion": answer})
        elif form == "strings":
            found.append({"prompt": prompt[-1]["content"], "completion": answer[0]["content"]})
        else:
            other = [{"role": "assistant", "content": prompt[-1]["content"]}]
            found.append({"prompt": prompt, "chosen": answer, "rejected": other})
    return found


def digests(examples: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> list[str]:
    """Return a digest of the ids and masks of each hundred examples."""
    found = []
    for first in range(0, len(examples), 100):
        plain = [(list(map(int, i)), list(map(int, on))) for i, on in examples[first : first + 100]]
        found.append(hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16])
    return found


def write_tokenizer(folder: Path, kind: str, merges: Sequence[Sequence[str]]) -> None:
    """Write a tokenizer with the merges: byte-level like GPT-2's, or with pieces like Llama 2's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if kind == "byte level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        pipeline = Tokenizer(models.BPE(*_entries(alphabet, merges)))
        pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        pipeline.decoder = decoders.ByteLevel()
    else:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        letters = sorted({letter for pair in merges for entry in pair for letter in entry})
        entries = _entries([*alphabet, *letters], merges)
        pipeline = Tokenizer(models.BPE(*entries, byte_fallback=True, fuse_unk=True))
        pipeline.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    pipeline.add_special_tokens([AddedToken(each, normalized=False) for each in _CONTROL])
    pipeline.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))


def _entries(
    alphabet: Sequence[str], merges: Sequence[Sequence[str]]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    entries = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    return {entry: number for number, entry in enumerate(entries)}, [(a, b) for a, b in merges]


def _train_merges(kind: str) -> list[list[str]]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    pipeline = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.pre_tokenizer = byte_level if kind == "byte level" else pre_tokenizers.Metaspace()
    texts = [message["content"] for each in conversations() for message in each]
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    pipeline.train_from_iterator(texts[:1000], trainer)
    return [list(pair) for pair in json.loads(pipeline.to_str())["model"]["merges"]]


def prepared_by_trl(folder: Path, template: str, form: str) -> list[tuple[list[int], list[bool]]]:
    """Return the ids of the records in one of the `FORMS`, and which of them are trained."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="</s>", **SPECIAL
    )
    tokenizer.chat_template = template
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=1, **sizes)
    common = {"output_dir": str(folder / "trl"), "max_length": None, "report_to": "none"}
    common |= {"use_cpu": True, "bf16": False}
    given = {"train_dataset": Dataset.from_list(records(form)), "processing_class": tokenizer}
    model = LlamaForCausalLM(config)
    if form == "preference":
        reference = LlamaForCausalLM(config)
        pairs = DPOTrainer(model, reference, DPOConfig(**common), **given).train_dataset
        return [
            (pair["prompt_ids"] + ids, [False] * len(pair["prompt_ids"]) + [True] * len(ids))
            for pair in pairs
            for ids in (pair["chosen_ids"], pair["rejected_ids"])
        ]
    options = SFTConfig(assistant_only_loss=form == "messages", **common)
    trainer = SFTTrainer(model, options, **given)
    return [
        (each["input_ids"], [label != -100 for label in each["labels"]])
        for each in trainer.train_dataset
    ]


def main() -> None:
    """Write the record."""
    import tempfile

    found: dict[str, Any] = {"merges": {}, "styles": {}}
    for name, style in STYLES.items():
        merges = found["merges"].setdefault(style.kind, _train_merges(style.kind))
        with tempfile.TemporaryDirectory() as place:
            write_tokenizer(Path(place), style.kind, merges)
            for form in FORMS:
                template = style.marked if form == "messages" else style.plain
                examples = prepared_by_trl(Path(place), template, form)
                kept = [
                    {"ids": ids, "trained": [int(on) for on in trained]}
                    for ids, trained in examples[:KEPT]
                ]
                of_style = found["styles"].setdefault(name, {})
                of_style[form] = {"digests": digests(examples), "first": kept}
    Path(sys.argv[1]).write_text(json.dumps(found, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
