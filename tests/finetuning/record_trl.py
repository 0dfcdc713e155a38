"""Record what TRL computes, for test_trl.py.

Run it with TRL 1.16 and PEFT 0.21 installed: python -m tests.finetuning.record_trl
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.finetuning.toy_pairs import rows_of_one_pair, toy_pairs

RECORD = Path(__file__).with_name("trl.json")
STEPS, BATCH, LR = 20, 4, 1e-3
DPO: dict[str, dict[str, Any]] = {
    "dpo": {"loss_type": "sigmoid"},
    "ipo": {"loss_type": "ipo"},
    "hinge": {"loss_type": "hinge"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.1},
}
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}


def main() -> None:
    """Write the record."""
    record: dict[str, Any] = {"losses": losses_of_random_pairs()}
    for name, options in DPO.items():
        record[name] = train(STEPS if name == "dpo" else 3, options)
    record["adapter"] = {}
    record["lora"] = train(STEPS, DPO["dpo"], record["adapter"])
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def first_adapter(shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return an adapter to start from, which changes nothing yet, by PEFT's names."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.rand(shapes[name], generator=generator) - 0.5
        if "lora_A" in name
        else torch.zeros(shapes[name])
        for name in sorted(shapes)
    }


def train(
    steps: int, options: dict[str, Any], adapter: dict[str, list[int]] | None = None
) -> dict[str, list[float]]:
    """Train the tiny Llama with DPOTrainer on the toy's pairs, and return its log.

    Args:
        steps: Number of updates.
        options: What the loss is.
        adapter: If given, an adapter is trained, and this gets the shapes of its tensors by name.
    """
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    case = CASES["llama"]
    found: dict[str, list[float]] = {}

    class Recorded(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            found.setdefault("loss", []).append(loss.item())
            return loss

        def log(self, logs: Any, *args: Any) -> None:
            for name, values in self._metrics["train"].items():
                if name.startswith(("rewards/", "logps/")):
                    found.setdefault(name, []).append(values[-1])
            if "grad_norm" in logs:
                found.setdefault("grad-norm", []).append(float(logs["grad_norm"]))
            super().log(logs, *args)

    pairs = toy_pairs(case.config["vocab_size"])
    examples = []
    for number in rows_of_one_pair(pairs, STEPS * BATCH):
        chosen, rejected = pairs[2 * number], pairs[2 * number + 1]
        prompt = int((~chosen[1]).sum())
        examples.append(
            {
                "prompt_ids": chosen[0][:prompt].tolist(),
                "chosen_ids": chosen[0][prompt:].tolist(),
                "rejected_ids": rejected[0][prompt:].tolist(),
            }
        )
    words = {f"t{i}": i for i in range(case.config["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
        pad_token="t0",
        eos_token="t1",
    )
    with tempfile.TemporaryDirectory() as folder:
        model = write_folder(Path(folder, "model"), case.config, tensors_of(case))
        trainer = Recorded(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            args=DPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=BATCH,
                learning_rate=LR,
                lr_scheduler_type="constant",
                logging_steps=1,
                max_grad_norm=1.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to="none",
                remove_unused_columns=False,
                disable_tqdm=True,
                **options,
            ),
            train_dataset=Dataset.from_list(examples),
            processing_class=tokenizer,
            peft_config=None
            if adapter is None
            else LoraConfig(**LORA, target_modules="all-linear"),
        )
        if adapter is not None:
            held = get_peft_model_state_dict(trainer.model)
            adapter.update({name: list(tensor.shape) for name, tensor in held.items()})
            set_peft_model_state_dict(trainer.model, first_adapter(adapter))
        trainer.train()
    return {name: values[:steps] for name, values in found.items()}


def losses_of_random_pairs() -> dict[str, Any]:
    """Return what TRL's CPOTrainer and ORPOTrainer make of random log-probabilities."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    generator = torch.Generator().manual_seed(1)
    chosen, rejected = -3 * torch.rand(2, 8, generator=generator) - 0.01
    accelerator = SimpleNamespace(device="cpu")
    given = {"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.1, "alpha": 0.0}
    cpo = SimpleNamespace(loss_type="simpo", accelerator=accelerator, **given)
    simpo, *rewards = CPOTrainer.cpo_loss(cpo, chosen, rejected)
    orpo = SimpleNamespace(beta=0.1, accelerator=accelerator)
    ratios, *_ = ORPOTrainer.odds_ratio_loss(orpo, chosen, rejected)
    return {
        "chosen": chosen.tolist(),
        "rejected": rejected.tolist(),
        "simpo": simpo.tolist(),
        "simpo rewards": [each.tolist() for each in rewards],
        # The trainer adds the mean negative log-likelihood of the chosen answers.
        "orpo": (-chosen - ratios).tolist(),
    }


if __name__ == "__main__":
    main()
