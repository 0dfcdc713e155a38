"""Record what TRL's trainers compute, for test_trl.py.

Run it with the extra [parity] installed: python -m tests.finetuning.record_trl
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.data.preferences import FittedAnswers
from tests.checkpoint.huggingface.models import CASES, HIDDEN, VOCAB, Tensors, tensors_of
from tests.checkpoint.huggingface.models import write_folder as write_files
from tests.finetuning.toy_pairs import rows_of_one_pair, toy_answers, toy_pairs

RECORD = Path(__file__).with_name("trl.json")
STEPS, BATCH, LR = 20, 4, 1e-3
VOCABULARY = VOCAB - 1  # the last token pads batches, and no answer contains it
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}
Log = dict[str, list[float | None]]


class Training(NamedTuple):
    """Training with one of TRL's trainers.

    Attributes:
        trainer: The beginning of the trainer's name.
        options: The trainer's options for its loss.
        words: The equivalent of our flags, after `--preference-loss`.
        adapter: Whether an adapter is trained, or all weights.
    """

    trainer: str
    options: dict[str, Any]
    words: str
    adapter: bool = False


_DPO = {"loss_type": "sigmoid"}
# DPOTrainer's "sigmoid" ignores label_smoothing. With a single pair, the losses of AOT are those of
# conservative DPO.
_CDPO = {"loss_type": "aot_unpaired", "label_smoothing": 0.1}
_CDPO |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": BATCH}
_REWARD = {"center_rewards_coefficient": 0.01}
_CENTERED = "bradley-terry --center-rewards-coefficient 0.01"
TRAININGS = {
    "dpo": Training("DPO", _DPO, "dpo"),
    "cdpo": Training("DPO", _CDPO, "dpo --preference-label-smoothing 0.1"),
    "ipo": Training("DPO", {"loss_type": "ipo"}, "ipo"),
    "hinge": Training("DPO", {"loss_type": "hinge"}, "hinge"),
    "robust": Training(
        "DPO",
        {"loss_type": "robust", "label_smoothing": 0.1},
        "robust --preference-label-smoothing 0.1",
    ),
    "simpo": Training(
        "CPO",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5},
        "simpo --preference-beta 2",
    ),
    "orpo": Training("ORPO", {"beta": 0.1}, "orpo"),
    "kto": Training(
        "KTO",
        {"beta": 0.3, "undesirable_weight": 1.5},
        f"kto --preference-beta 0.3 --kto-undesirable-weight 1.5 --micro-batch-size {BATCH}",
    ),
    "reward": Training("Reward", _REWARD, _CENTERED),
    "dpo, adapter": Training("DPO", _DPO, "dpo", adapter=True),
    "reward, adapter": Training("Reward", _REWARD, _CENTERED, adapter=True),
}


_OPTIONS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "max_grad_norm": 1.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "remove_unused_columns": False,
    "disable_tqdm": True,
}


def main() -> None:
    """Write the record."""
    found = {name: record(training) for name, training in TRAININGS.items()}
    RECORD.write_text(json.dumps(found) + "\n")


def first_adapter(shapes: Mapping[str, Sequence[int]]) -> Tensors:
    """Return an adapter to start from, which changes nothing yet, by PEFT's names.

    The head of a reward model, if there is one, is random.
    """
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.zeros(shapes[name])
        if "lora_B" in name
        else torch.rand(shapes[name], generator=generator) - 0.5
        for name in sorted(shapes)
    }


def write_model(folder: Path, *, rewards: bool) -> Path:
    """Write the tiny Llama, which scores tokens or answers."""
    case = CASES["llama"]
    config, tensors = case.config, tensors_of(case)
    if rewards:
        del tensors["lm_head.weight"]
        tensors["score.weight"] = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(3))
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        config = {**config, "architectures": ["LlamaForSequenceClassification"], **labels}
    return write_files(folder, config, tensors)


def record(training: Training) -> dict[str, Any]:
    """Train the tiny Llama, and return the log and, if there is one, the adapter's shapes."""
    import peft
    import transformers
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl.experimental import cpo, orpo

    rewards = training.trainer == "Reward"
    words = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
        pad_token=f"t{VOCABULARY}",
        eos_token="t1",
    )
    module = {"CPO": cpo, "ORPO": orpo}.get(training.trainer, trl)
    model_class = "AutoModelForSequenceClassification" if rewards else "AutoModelForCausalLM"
    config = None
    if training.adapter:
        head = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if rewards else {}
        config = peft.LoraConfig(**LORA, target_modules="all-linear", **head)
    options = {**_OPTIONS, **training.options}
    log: Log = {}
    shapes: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"), rewards=rewards)
        # In fp32, the rounding of KTOTrainer alone changes its numbers by 3e-5.
        loaded = getattr(transformers, model_class).from_pretrained(model, dtype=torch.float64)
        trainer = _recorded(getattr(module, f"{training.trainer}Trainer"), log)(
            loaded,
            args=getattr(module, f"{training.trainer}Config")(output_dir=folder, **options),
            train_dataset=Dataset.from_list(_EXAMPLES.get(training.trainer, _pairs)()),
            processing_class=tokenizer,
            peft_config=config,
        )
        if training.adapter:
            held = peft.get_peft_model_state_dict(trainer.model)
            shapes |= {name: list(tensor.shape) for name, tensor in held.items()}
            peft.set_peft_model_state_dict(trainer.model, first_adapter(shapes))
        trainer.train()
    padded = {name: (values + [None] * STEPS)[:STEPS] for name, values in log.items()}
    return {"log": padded, "adapter": shapes}


def _recorded(trainer: type, log: Log) -> type:
    """Return a trainer that is given token ids in order, and writes its numbers to a log."""

    losses: list[float] = []  # over an update's micro-batches

    class Recorded(trainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def tokenize_row(self, row: Any) -> Any:  # CPO's and ORPO's
            return row

        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def concatenated_forward(self, *args: Any) -> Any:
            """Replace ORPO's likelihood, whose mean is over the tokens of prompts too."""
            found = super().concatenated_forward(*args)
            return (*found[:4], -found[0].mean()) if trainer.__name__ == "ORPOTrainer" else found

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

        def log(self, logs: Any, *args: Any) -> None:
            stored = getattr(self, "_stored_metrics", None)
            found = (self._metrics if stored is None else stored)["train"]
            if "grad_norm" in logs:
                now = {"loss": losses, "grad-norm": [float(logs["grad_norm"])]}
                for name in sorted(found.keys() & _NAMES.get(trainer.__name__, _DPO_NAMES)):
                    now[_RENAMED.get(name, name)] = found[name]
                for name, values in now.items():
                    known = log.setdefault(name, [])
                    # KTO has no numbers for a kind of answer that is missing from a batch.
                    known += [None] * (self.state.global_step - 1 - len(known))
                    known.append(float(f"{sum(values) / len(values):.9g}"))
                losses.clear()
            super().log(logs, *args)

    return Recorded


_OF_ANSWERS = {f"{name}/{kind}" for name in ("rewards", "logps") for kind in ("chosen", "rejected")}
_OF_PAIRS = {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"}
_DPO_NAMES = _OF_ANSWERS | _OF_PAIRS
_NAMES = {
    "CPOTrainer": _OF_PAIRS,  # its log-probabilities are means over tokens
    "ORPOTrainer": _OF_PAIRS,
    "KTOTrainer": {"kl", "rewards/margins", *_OF_ANSWERS},
    "RewardTrainer": {"mean_reward", "accuracy", "margin"},
}
_RENAMED = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}


def _pairs() -> list[dict[str, Any]]:
    """Return the pairs in the order of training, for DPOTrainer."""
    pairs = toy_pairs(VOCABULARY)
    found = []
    for number in rows_of_one_pair(pairs, STEPS * BATCH):
        chosen, rejected = pairs[2 * number], pairs[2 * number + 1]
        prompt = int((~chosen[1]).sum())
        found.append(
            {
                "prompt_ids": chosen[0][:prompt].tolist(),
                "chosen_ids": chosen[0][prompt:].tolist(),
                "rejected_ids": rejected[0][prompt:].tolist(),
            }
        )
    return found


def _whole_pairs() -> list[dict[str, Any]]:
    """Return the pairs for RewardTrainer, in which the prompt is part of an answer."""
    kinds = ("chosen_ids", "rejected_ids")
    return [{kind: pair["prompt_ids"] + pair[kind] for kind in kinds} for pair in _pairs()]


def _labeled_pairs() -> list[dict[str, Any]]:
    """Return the pairs for CPOTrainer and ORPOTrainer."""
    found = []
    for pair in _pairs():
        prompt = pair["prompt_ids"]
        row: dict[str, Any] = {
            "prompt_input_ids": prompt,
            "prompt_attention_mask": [1] * len(prompt),
        }
        for kind in ("chosen", "rejected"):
            answer = pair[f"{kind}_ids"]
            row[f"{kind}_input_ids"] = prompt + answer
            row[f"{kind}_attention_mask"] = [1] * len(prompt + answer)
            row[f"{kind}_labels"] = [-100] * len(prompt) + answer
        found.append(row)
    return found


def _single_answers() -> list[dict[str, Any]]:
    """Return the answers in the order of training, for KTOTrainer.

    The answers to other prompts are chosen by us. TRL takes them from the same batch.
    """
    answers = toy_answers(VOCABULARY)
    count = len(answers)
    prompts = [int((~answers[i][1][1:]).sum()) + 1 for i in range(count)]
    return [
        {
            "prompt_ids": answers[i][0][: prompts[i]].tolist(),
            "completion_ids": answers[i][0][prompts[i] :].tolist(),
            "KL_completion_ids": answers[other][0][prompts[other] :].tolist(),
            "label": bool(answers[i][1][0]),
        }
        for i in rows_of_one_pair(answers, STEPS * BATCH, FittedAnswers)
        for other in [(i + count // 2) % count]
    ]


_EXAMPLES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "CPO": _labeled_pairs,
    "ORPO": _labeled_pairs,
    "KTO": _single_answers,
    "Reward": _whole_pairs,
}


if __name__ == "__main__":
    main()
