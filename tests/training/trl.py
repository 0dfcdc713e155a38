"""A small Llama and conversations, for which TRL's losses were recorded.

    python -m tests.training.trl

runs TRL (the extra [parity]) and writes trl_losses.json next to this file.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.data import chat_parity
from tests.inference.server.live import write_tokenizer

LENGTH, VOCABULARY = 96, 384
LONG = 256  # tokens per row in the styles of chat_parity
HIDDEN, LAYERS, HEADS, INNER = 32, 2, 4, 64
LEARNING_RATE, STEPS = 2e-3, 20
FEW, MANY = 24, 1000
RECORDED = Path(__file__).with_name("trl_losses.json")
# `STEPS` updates on `FEW` conversations, or one update on `MANY` in a style of chat_parity.
RECORDINGS = ("few, separate", "few, packed", *(f"{n}, packed" for n in chat_parity.STYLES))
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}"
    "{{ m.content }}<|endoftext|>{% endgeneration %}{% else %}<|{{ m.role }}|>{{ m.content }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_WORDS = "Hello world one two three four five six seven eight nine ten stop here".split()


def write_model(folder: Path) -> None:
    """Write a Llama in Hugging Face format, with its tokenizer and template."""
    write_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>", "pad_token": "<|system|>"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    _write_weights(folder, VOCABULARY, LENGTH)


def write_styled(folder: Path, style: str) -> None:
    """Write the Llama with a tokenizer and a template of chat_parity."""
    kind = chat_parity.STYLES[style].kind
    merges = json.loads(chat_parity.RECORD.read_text())["merges"][kind]
    chat_parity.write_tokenizer(folder, kind, merges)
    settings = {**chat_parity.SPECIAL, "pad_token": chat_parity.SPECIAL["eos_token"]}
    settings["chat_template"] = chat_parity.STYLES[style].marked
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    pipeline = json.loads((folder / "tokenizer.json").read_text())
    added = [token["id"] for token in pipeline["added_tokens"]]
    _write_weights(folder, max(*pipeline["model"]["vocab"].values(), *added) + 1, LONG)


def _write_weights(folder: Path, vocabulary: int, positions: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    draws = np.random.RandomState(1)
    half = HIDDEN // 2
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        part = f"model.layers.{layer}"
        shapes |= {
            f"{part}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{part}.self_attn.k_proj.weight": (half, HIDDEN),
            f"{part}.self_attn.v_proj.weight": (half, HIDDEN),
            f"{part}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{part}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{part}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{part}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{part}.input_layernorm.weight": (HIDDEN,),
            f"{part}.post_attention_layernorm.weight": (HIDDEN,),
        }
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocabulary, HIDDEN)}
    weights = {
        name: (draws.randn(*shape) * 0.1 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_conversations(path: Path, count: int) -> None:
    """Write conversations of one to three questions."""
    draws = random.Random(count)

    def text() -> str:
        return " ".join(draws.choices(_WORDS, k=draws.randint(1, 5)))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            turns = draws.randint(1, 3)
            messages = [
                {"role": role, "content": text()}
                for _ in range(turns)
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def record(which: str, folder: Path) -> list[float]:
    """Return TRL's loss in each update, which trains on every conversation.

    Args:
        which: One of the `RECORDINGS`.
        folder: An empty folder.
    """
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl import SFTConfig, SFTTrainer

    name, _, packing = which.rpartition(", ")
    if name == "few":
        rows, steps, length = FEW, STEPS, LENGTH
        write_model(folder)
    else:
        rows, steps, length = MANY, 1, LONG
        write_styled(folder, name)
    write_conversations(folder / f"{rows}.jsonl", rows)
    losses: list[float] = []

    class Recording(SFTTrainer):
        def training_step(self, *given: Any, **more: Any) -> Any:
            loss = super().training_step(*given, **more)
            losses[-1] += float(loss)
            return loss

        def get_batch_samples(self, *given: Any, **more: Any) -> Any:
            losses.append(0.0)
            return super().get_batch_samples(*given, **more)

    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=rows,  # at least the number of rows, all of which count
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        max_length=length,
        packing=packing == "packed",
        assistant_only_loss=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        dataset_num_proc=None,
        disable_tqdm=True,
    )
    trainer = Recording(
        model=model,
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(folder / f"{rows}.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    assert len(trainer.train_dataset) <= rows
    trainer.train()
    return losses[:steps]


def main() -> None:
    """Record the losses."""
    found: dict[str, list[float]] = {}
    for which in RECORDINGS:
        with tempfile.TemporaryDirectory() as folder:
            found[which] = record(which, Path(folder))
    RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
