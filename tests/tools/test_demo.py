"""The kinds of `make demo`: their flags are compatible."""

import json

import pytest

from megatron.config.parser import parse_config
from megatron.models.arithmetic import flops_per_token
from megatron.models.plans import model_plan
from megatron.tools import demo
from megatron.tools.demo_kinds import KINDS, VOCAB_SIZE


def _config(name):
    kind = KINDS[name]
    rest = "--micro-batch-size 4 --train-iters 1 --mock-data --tokenizer-type NullTokenizer"
    words = [*kind.training_flags, *rest.split(), "--vocab-size", str(VOCAB_SIZE)]
    architecture = kind.script.removeprefix("pretrain_").removesuffix(".py")
    return parse_config(words, world_size=2, architecture=architecture).config


@pytest.mark.parametrize("name", KINDS)
def test_the_flags_of_a_kind_fit_together(name):
    assert _config(name).model.hidden_size == 128
    assert KINDS[name].make_argument == ("" if name == "gpt" else f" MODEL={name}")


def test_the_mixture_computes_as_much_for_a_token_as_the_gpt():
    dense, mixture = (
        flops_per_token(model_plan(config.model, VOCAB_SIZE), config.data.seq_length)
        for config in (_config("gpt"), _config("moe"))
    )
    assert dense < mixture < 1.01 * dense  # the routers


def test_tests_of_the_standard_library_are_left_out_at_any_depth(tmp_path, monkeypatch, capsys):
    library = tmp_path / "lib"
    kept = {"a.py": "a = 1", "pkg/b.py": "b = 2\n\nc = 3", "pkg/deep/test.py": "d = 4"}
    left_out = ("test/x.py", "pkg/tests/x.py", "pkg/deep/test/y/x.py", "_sysconfigdata_x.py")
    for name, text in {**kept, **dict.fromkeys(left_out, "x = 0")}.items():
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (library / "old.py").write_bytes(b"# \xff")
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda _: str(library))
    for in_lines in (False, True):
        demo.write_standard_library(tmp_path / "out.jsonl", in_lines=in_lines)
        found = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").open()]
        expected = [[s for s in t.split("\n") if s] if in_lines else t for t in kept.values()]
        assert sorted(found) == sorted(expected)
    for i in range(9):
        (library / f"m{i}.py").write_text("m" * 20_000 + f"{i}")
    demo.write_standard_library(tmp_path / "out.jsonl", in_lines=False)
    said = f"wrote {tmp_path}/out.jsonl: 12 modules of {library}, 0.2 MB\n"
    assert capsys.readouterr().out.endswith(said)
    order = [json.loads(line)["text"][-1] for line in (tmp_path / "out.jsonl").open()]
    assert "".join(order) == "127335481064"  # the same in every run


@pytest.mark.parametrize("loss", [2.0, 6.0])
def test_the_report_says_where_things_are(loss, tmp_path, capsys):
    validation = demo.Validation(entropy=5.0, bytes_per_token=2.0, texts=["a"])
    demo.report(KINDS["gpt"], tmp_path, validation, loss, 61.0)
    told = capsys.readouterr().out
    assert f"validation loss  {loss:.3f} nats per token" in told
    assert f"Checkpoint     {tmp_path}/checkpoints\n" in told
    assert f"--load {tmp_path}/checkpoints\n" in told
    assert ("Train it longer" in told) == (loss > validation.entropy)
