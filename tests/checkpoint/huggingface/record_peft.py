"""Record PEFT's results and files for `test_peft`.

    python -m tests.checkpoint.huggingface.record_peft tests/checkpoint/huggingface/peft

The packages are those of the extra [parity], in the versions that `peft/record.json` names.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder

KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "some": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
}
# "all-linear" would select the modules of older versions of transformers, with different ranks.
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MIXTURES = {
    "mixtral": {
        "target_modules": _ATTENTION,
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "qwen3_moe": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
}
# Models of `models.CASES`, from which `written_base` writes the same folders anywhere. PEFT refuses
# `out_proj` of Mamba-2.
FAMILIES = {
    "deepseek_v3": (
        "deepseek v3",
        {
            "target_modules": [
                *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "lm_head"),
            ],
            "target_parameters": ["gate.weight"],
        },
    ),
    "deepseek_v2": (
        "deepseek v2, greedy",
        {"target_modules": ["q_proj", "kv_b_proj"], "use_dora": True},
    ),
    "qwen3_next": (
        "qwen3 next",
        {
            "target_modules": ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"],
            "use_rslora": True,
        },
    ),
    "nemotron_h": (
        "nemotron h",
        {"target_modules": ["in_proj", "q_proj", "lm_head"], "use_dora": True},
    ),
    "cohere2": ("cohere 2", {"target_modules": ["q_proj", "k_proj"], "use_dora": True}),
}
VOCAB = 32
# Kernels of grouped products need wider experts.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def main(out: Path) -> None:
    """Write tiny models, an adapter of each kind, and the logits and gradients of each."""
    import peft
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }
    write_base(transformers.LlamaConfig(**sizes), out / "base")
    tokens = torch.randint(0, VOCAB, (2, 12))
    experts = {"num_experts_per_tok": 2, "output_router_logits": False}
    mixtral = transformers.MixtralConfig(**sizes, **experts, num_local_experts=4)
    write_base(mixtral, out / "base_mixtral")
    experts |= {"moe_intermediate_size": 20, "head_dim": 4, "norm_topk_prob": True}
    qwen = transformers.Qwen3MoeConfig(**sizes, **experts, num_experts=4)
    write_base(qwen, out / "base_qwen3_moe")
    versions = {"peft": peft.__version__, "transformers": transformers.__version__}
    record = {"versions": versions, "tokens": tokens.tolist()}
    families = {kind: options for kind, (_, options) in FAMILIES.items()}
    for kind, options in (KINDS | MIXTURES | families).items():
        torch.manual_seed(1)
        folder = out / (f"base_{kind}" if kind in MIXTURES else "base")
        if kind in FAMILIES:
            folder = written_base(kind, Path(tempfile.mkdtemp()))
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, **EAGER).float()
        settings = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, **settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
                if "magnitude" in name:
                    parameter.mul_(1.2)
        model.save_pretrained(out / kind)
        file = out / kind / "adapter_config.json"
        saved = json.loads(file.read_text())
        saved["base_model_name_or_path"] = None  # a path on this machine
        file.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")
        (out / kind / "README.md").unlink()
        record[kind] = computed(model, tokens)
    (out / "record.json").write_text(json.dumps(record) + "\n")


def computed(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, Any]:
    """Return a model's loss, and some of its logits and gradients, by PEFT's names."""
    logits = model(input_ids=tokens).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {
        name.replace(".default", ""): parameter.grad.flatten()[:: parameter.numel() // 8].tolist()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss.item(), "logits": logits[:, ::4].tolist(), "gradients": gradients}


def written_base(kind: str, folder: Path) -> Path:
    """Write the base model of an adapter among `FAMILIES`."""
    case = CASES[FAMILIES[kind][0]]
    return write_folder(folder, case.config, tensors_of(case))


def write_base(config: Any, folder: Path) -> None:
    """Write a model with random weights, of a configuration of transformers."""
    import transformers

    base = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)  # so that attention is far from uniform
    base.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
