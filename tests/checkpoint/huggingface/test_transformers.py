"""The same against `transformers` itself, where it is installed."""

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.huggingface.reader import HFReader
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, narrow
from megatron.config.yaml_file import from_dict
from megatron.errors import CheckpointError
from tests.checkpoint.huggingface.models import CASES, logits, tensors_of, write_folder
from tests.checkpoint.huggingface.test_logits import TOKENS
from tools.checkpoint import util
from tools.checkpoint.verify import verify

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_what_our_second_model_computes(name: str, tmp_path: Path) -> None:
    """So the tests that run without it stand for it."""
    case = CASES[name]
    folder = write_folder(tmp_path / "original", case.config, tensors_of(case))
    eager = dict.fromkeys(("attn_implementation", "experts_implementation"), "eager")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **eager)
    with torch.no_grad():
        found = model.eval()(TOKENS).logits
    expected = logits(case, tensors_of(case), TOKENS).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2 mixture", "qwen3 mixture", "gpt2"],
)
def test_a_random_model_comes_in_verified_and_goes_out_as_it_was(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.AutoConfig.for_model(
        **{key: value for key, value in CASES[name].config.items() if value is not None}
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


def test_verify_finds_another_model_out(tmp_path: Path) -> None:
    case = CASES["llama"]
    folder = write_folder(tmp_path / "a", case.config, tensors_of(case))
    other = write_folder(tmp_path / "b", case.config, tensors_of(case, seed=1))
    reader = HFReader(folder)
    config = narrow(resolve(from_dict(reader.meta["config"], "a"), 1), ModelRun)
    assert "differ by at most" in verify(reader, config, folder, tolerance=1e-5)
    with pytest.raises(CheckpointError, match="more than 1e-05 of it"):
        verify(reader, config, other, tolerance=1e-5)
