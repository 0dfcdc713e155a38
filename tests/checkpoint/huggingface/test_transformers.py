"""Comparison with `transformers` itself, if it is installed."""

from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.entries import model_state
from megatron.checkpoint.huggingface.families import families
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.huggingface.settings import Settings
from megatron.checkpoint.reader import restore
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, narrow
from megatron.config.yaml_file import from_dict
from megatron.device import Device
from megatron.errors import CheckpointError
from megatron.inference.build import EngineOptions
from megatron.inference.request import Request
from megatron.models.build import build_model, run_context
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from megatron.tools.checkpoint.verify import verify
from tests.checkpoint.huggingface.deepseek import V2, V3, YARN
from tests.checkpoint.huggingface.models import CASES, logits, tensors_of, write_folder
from tests.checkpoint.huggingface.test_logits import TOKENS
from tests.inference.toy import drain, greedy, tokens_of, toy_engine

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def config_of(name: str) -> dict[str, object]:
    """Return a family's config; StableLM, without a reference model, is Llama's with changes."""
    if name != "stablelm":
        return CASES[name].config
    biased = dict.fromkeys(("use_qkv_bias", "use_parallel_residual"), True)
    return {**CASES["llama"].config, "model_type": "stablelm", "rms_norm_eps": None, **biased}


def attention_of(name: str) -> str:
    """Return the attention form to use: eager in transformers 5 adds Falcon's biases twice."""
    return "sdpa" if name == "falcon with alibi" else "eager"


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_what_our_second_model_computes(name: str, tmp_path: Path) -> None:
    """This justifies the tests that use only our reference models."""
    case = CASES[name]
    folder = write_folder(tmp_path / "original", case.config, tensors_of(case))
    eager = {"attn_implementation": attention_of(name), "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **eager)
    with torch.no_grad():
        found = model.eval()(TOKENS).logits
    expected = logits(case, tensors_of(case), TOKENS).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "mixtral",
        "qwen2 mixture",
        "qwen3 mixture",
        "qwen3 next",
        "olmoe",
        "gemma",
        "gemma 2",
        "gemma 3",
        "gpt-oss",
        "llama 4",
        "llama 4, rotating",
        "neox",
        "gpt-j",
        "cohere",
        "cohere plus",
        "cohere 2",
        "bloom",
        "falcon",
        "falcon, new",
        "falcon with alibi",
        "olmo 2",
        "olmo 3",
        "phi 3",
        "phi 3 with longrope",
        "stablelm",
        "deepseek v2",
        "deepseek v3",
        "deepseek v3 with yarn",
        "mamba 2",
        "nemotron h",
        "nemotron h mixture",
        "falcon h1",
        "falcon h1 with a norm",
        "gpt2",
    ],
)
def test_a_random_model_comes_in_verified_and_goes_out_as_it_was(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.AutoConfig.for_model(
        **{k: deepcopy(value) for k, value in config_of(name).items() if value is not None}
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "original")
    ends = ["--model-type", "GPT", "--load-dir", str(tmp_path / "original")]
    words = ["--loader", "hf", "--saver", "native", "--save-dir", str(tmp_path / "native")]
    assert util.main([*ends, *words, "--verify"]) == 0
    ends = ["--model-type", "GPT", "--load-dir", str(tmp_path / "native")]
    words = ["--loader", "native", "--saver", "hf", "--save-dir", str(tmp_path / "exported")]
    assert util.main([*ends, *words, "--verify"]) == 0
    assert capsys.readouterr().out.count("--verify: logits differ by at most") == 2
    for file in (tmp_path / "original").iterdir():
        assert (tmp_path / "exported" / file.name).read_bytes() == file.read_bytes(), file.name
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    state = exported.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


# Keys that every published file has, and whose defaults in `transformers` are those of one model.
_ALWAYS_GIVEN = {"original_max_position_embeddings", "q_lora_rank"}


@pytest.mark.parametrize("name", CASES)
def test_keys_that_a_file_lacks_have_the_values_of_transformers(name: str) -> None:
    config = CASES[name].config
    family = families()[config["model_type"]]

    def read(values: dict[str, Any]) -> Any:
        return family.read(Settings(deepcopy(values), "config.json")).model

    for key in config.keys() - {"model_type", *_ALWAYS_GIVEN}:
        rest = {other: value for other, value in config.items() if other != key}
        with suppress(CheckpointError):  # some keys are required here, or their default is refused
            found = read(rest)
            theirs = transformers.AutoConfig.for_model(**deepcopy(rest)).to_dict()
            if key in theirs:  # otherwise, it is a key of other versions
                assert read({**rest, key: theirs[key]}) == found, key


_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA: dict[str, object] = {
    "head_dim": 10,
    "layer_types": _SLIDING,
    "query_pre_attn_scalar": 13,
    "sliding_window": 7,
}
_PARTLY: dict[str, object] = {"rope_type": "default", "rope_theta": 900.0}
# long_factor applies beyond 30 tokens, which the loss's texts and generated texts exceed.
_LONG_ROPE: dict[str, object] = {
    "hidden_size": 48,
    "original_max_position_embeddings": 30,
    "pad_token_id": 0,
    "rope_parameters": {
        "long_factor": [1.5, 3.25, 6.0],
        "partial_rotary_factor": 0.75,
        "rope_theta": 900.0,
        "rope_type": "longrope",
        "short_factor": [1.0, 1.2, 1.7],
    },
}
_WITHOUT = {"intermediate_size": None, "num_key_value_heads": None}
DENSE: dict[str, dict[str, object]] = {
    "bloom": {**_WITHOUT, "max_position_embeddings": None},
    "falcon": {**_WITHOUT, "ffn_hidden_size": 23},
    "falcon, new": {**_WITHOUT, "new_decoder_architecture": True, "num_kv_heads": 3},
    "falcon, new, one norm": {
        **_WITHOUT,
        "ffn_hidden_size": 31,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
    },
    "falcon with alibi": {
        **_WITHOUT,
        **dict.fromkeys(("alibi", "bias"), True),
        **dict.fromkeys(("multi_query", "parallel_attn"), False),
    },
    "cohere": {"hidden_size": 48, "logit_scale": 0.3, "rope_parameters": _PARTLY},
    "cohere, plus": {
        "hidden_size": 48,
        "logit_scale": 0.3,
        "rope_parameters": _PARTLY,
        "use_qk_norm": True,
    },
    "cohere2": {
        "hidden_size": 48,
        "layer_types": _SLIDING,
        "logit_scale": 0.3,
        "rope_parameters": _PARTLY,
        "sliding_window": 7,
        "tie_word_embeddings": False,
    },
    "gptj": {
        "hidden_size": 60,
        "intermediate_size": None,
        "n_inner": 23,
        "num_key_value_heads": None,
        "rotary_dim": 6,
    },
    "gpt_neox": {
        "hidden_size": 48,
        "num_key_value_heads": None,
        "rope_parameters": {**_PARTLY, "partial_rotary_factor": 0.25},
    },
    "olmo2": {},
    "olmo3": {
        "layer_types": _SLIDING,
        "rope_parameters": {
            "full_attention": {**YARN, "mscale": None, "mscale_all_dim": None, "rope_theta": 900.0},
            "sliding_attention": _PARTLY,
        },
        "sliding_window": 7,
    },
    "phi3": {
        "hidden_size": 48,
        "pad_token_id": 0,
        "rope_parameters": {**_PARTLY, "partial_rotary_factor": 0.75},
        "sliding_window": 7,
    },
    "mamba2": {
        "chunk_size": 8,
        "expand": 2,
        "head_dim": 24,
        "n_groups": 3,
        "num_heads": 3,
        "state_size": 5,
        **dict.fromkeys(
            ("intermediate_size", "max_position_embeddings", "num_attention_heads"), None
        ),
        "num_key_value_heads": None,
    },
    "llama, dynamic": {
        "max_position_embeddings": 18,  # texts have up to 57 tokens
        "rope_parameters": {**_PARTLY, "factor": 3.5, "rope_type": "dynamic"},
    },
    "phi3, longrope": _LONG_ROPE,
    "phi3, longrope, short": {**_LONG_ROPE, "original_max_position_embeddings": 60},
    "stablelm": {"hidden_size": 48, "use_qkv_bias": True},
    "stablelm, parallel": {
        "hidden_size": 48,
        "rope_parameters": {**_PARTLY, "partial_rotary_factor": 0.5},
        "use_parallel_residual": True,
    },
    "falcon_h1": {
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.6,
        "embedding_multiplier": 3.5,
        "head_dim": 10,
        "key_multiplier": 0.4,
        "lm_head_multiplier": 0.3,
        "mamba_chunk_size": 8,
        "mamba_d_ssm": 42,
        "mamba_d_state": 9,
        "mamba_n_groups": 3,
        "mamba_n_heads": 6,
        "mlp_multipliers": [0.7, 1.3],
        "ssm_in_multiplier": 1.2,
        "ssm_multipliers": [0.9, 1.1, 0.6, 1.4, 0.5],
        "ssm_out_multiplier": 0.75,
    },
    "gemma": {"head_dim": 10},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
    "gemma3_text": {
        **_GEMMA,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
    },
}
MIXTURES: dict[str, dict[str, object]] = {
    "nemotron_h": {
        "chunk_size": 8,
        "head_dim": 10,
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "mlp",
            "linear_attention",
        ],
        "mamba_head_dim": 7,
        "mamba_num_heads": 6,
        "moe_intermediate_size": 13,
        "moe_shared_expert_intermediate_size": 11,
        "n_groups": 3,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 5,
        "routed_scaling_factor": 1.75,
        "ssm_state_size": 9,
        "time_step_min": 1e-7,  # transformers clamps steps that are too short, but only in prompts
    },
    "gpt_oss": {
        "head_dim": 10,
        "layer_types": _SLIDING,
        "num_experts_per_tok": 2,
        "num_local_experts": 5,
        "rope_parameters": {**YARN, "rope_theta": 1000.0, "mscale": None, "mscale_all_dim": None},
        "sliding_window": 7,
        "swiglu_limit": 1.5,
    },
    "llama4_text": {
        "attention_chunk_size": 7,
        "attn_scale": 0.6,
        "floor_scale": 9,
        "head_dim": 10,
        "intermediate_size_mlp": 37,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1],
        "num_local_experts": 5,
        # The scaling of Llama 4 Scout, in a context that is long enough for it to matter.
        "rope_parameters": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "rope_type": "llama3",
        },
    },
    "llama4_text, chunks of blocks": {
        "attention_chunk_size": 16,
        "floor_scale": 3,
        "head_dim": 12,
        "intermediate_size_mlp": 37,
        "no_rope_layers": [0, 1, 1],
        "num_local_experts": 5,
        "use_qk_norm": False,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "decoder_sparse_step": 2,
        "moe_intermediate_size": 13,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 19,
    },
    "qwen3_moe": {
        "head_dim": 10,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 17,
        "norm_topk_prob": True,
        "num_experts": 9,
        "num_experts_per_tok": 4,
    },
    "qwen3_next": {
        "head_dim": 10,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 5,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_value_head_dim": 7,
        "moe_intermediate_size": 13,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "rope_parameters": {**_PARTLY, "partial_rotary_factor": 0.4},
        "shared_expert_intermediate_size": 19,
    },
    "deepseek_v2": {
        **V2,
        "first_k_dense_replace": 2,
        "n_routed_experts": 12,
        "num_key_value_heads": 6,
        "rope_parameters": {**YARN, "rope_theta": 1000.0},
    },
    "deepseek_v3": {
        **V3,
        "num_experts_per_tok": 5,
        "num_key_value_heads": 6,
        "rope_parameters": {**YARN, "rope_theta": 1000.0},
    },
    "olmoe": {"norm_topk_prob": True, "num_experts": 7, "num_experts_per_tok": 3},
}
SIZES = {
    "hidden_size": 36,
    "initializer_range": 0.3,
    "intermediate_size": 23,
    "max_position_embeddings": 64,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 3,
    "vocab_size": 101,
}


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_loss_and_generated_text_match_transformers(name: str, tmp_path: Path) -> None:
    """Random models with odd sizes, as `transformers` creates and saves them."""
    torch.manual_seed(5)
    own = deepcopy(DENSE[name] if name in DENSE else MIXTURES[name])
    eager = {} if name in DENSE else {"experts_implementation": "eager"}
    kind = name.replace(",", "").split()[0]
    config = transformers.AutoConfig.for_model(kind, **eager, **{**SIZES, **own})
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention_of(name)
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:  # their initial zeros and ones would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(101, (3, 41), generator=torch.Generator().manual_seed(2))
    prompts = [tuple(row[: 5 + index].tolist()) for index, row in enumerate(tokens)]
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens).loss
        texts = [
            theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                eos_token_id=None,
                max_new_tokens=50,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    reader = HFReader(tmp_path)
    run = narrow(resolve(from_dict(reader.meta["config"], "a"), 1), ModelRun)
    context = run_context(run, Layout.single(), Device.cpu())
    model = build_model(GPTModel, run, context, reader.vocab).eval()
    restore(reader, model_state([model]), prefixes=("model.",))
    with torch.no_grad():
        # All tokens are read, because dynamic NTK depends on the length.
        found = model(tokens, labels=tokens.roll(-1, 1))[:, :-1].mean()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    engine = toy_engine(tmp_path, EngineOptions(max_sequences=4, max_step_tokens=64))
    asked = [Request(str(i), prompt, greedy(50)) for i, prompt in enumerate(prompts)]
    events = drain(engine, asked)
    assert [tokens_of(events[str(i)]) for i in range(len(prompts))] == texts


def test_verify_detects_another_model(tmp_path: Path) -> None:
    case = CASES["llama"]
    folder = write_folder(tmp_path / "a", case.config, tensors_of(case))
    other = write_folder(tmp_path / "b", case.config, tensors_of(case, seed=1))
    reader = HFReader(folder)
    config = narrow(resolve(from_dict(reader.meta["config"], "a"), 1), ModelRun)
    assert "differ by at most" in verify(reader, config, folder, tolerance=1e-5)
    with pytest.raises(CheckpointError, match="more than 1e-05 of the largest"):
        verify(reader, config, other, tolerance=1e-5)
