"""Record what PEFT computes and writes, for `test_peft`.

    python -m tests.checkpoint.huggingface.record_peft tests/checkpoint/huggingface/peft

The packages are those that `peft/record.json` names: pip install peft==0.21.0 transformers.
"""

import json
import sys
from pathlib import Path

import peft
import torch
import transformers
from torch.nn.functional import cross_entropy

KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "some": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
}
VOCAB = 32


def main(out: Path) -> None:
    """Write a tiny Llama, an adapter of each kind, and logits and gradients of each."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    base = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)  # so that attention is far from even
    base.save_pretrained(out / "base")
    tokens = torch.randint(0, VOCAB, (2, 12))
    versions = {"peft": peft.__version__, "transformers": transformers.__version__}
    record = {"versions": versions, "tokens": tokens.tolist()}
    for kind, options in KINDS.items():
        torch.manual_seed(1)
        base = transformers.LlamaForCausalLM.from_pretrained(out / "base").float()
        settings = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, **settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
                if "magnitude" in name:
                    parameter.mul_(1.2)
        model.save_pretrained(out / kind)
        (out / kind / "README.md").unlink()
        logits = model(input_ids=tokens).logits
        labels = tokens[:, 1:].flatten()
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels)
        loss.backward()
        gradients = {
            name.replace(".default", ""): parameter.grad.flatten()[:: parameter.numel() // 8]
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        record[kind] = {
            "loss": loss.item(),
            "logits": logits[:, ::4].tolist(),
            "gradients": {name: values.tolist() for name, values in gradients.items()},
        }
    (out / "record.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
