"""Adapters match PEFT's results and its files.

`peft/` holds what `record_peft` wrote with PEFT itself.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from megatron.checkpoint.huggingface.families import families
from megatron.checkpoint.huggingface.peft import peft_names, stored_adapter
from megatron.checkpoint.huggingface.peft_reader import network_with
from megatron.checkpoint.huggingface.peft_slices import join
from megatron.checkpoint.huggingface.settings import Settings
from megatron.config.parser import Program
from megatron.device import Device
from megatron.errors import EXIT_OK, CheckpointError
from megatron.inference.adapters import add_to, open_adapters
from megatron.inference.load import load_gpt, parse_generation
from megatron.models.adapters import adapted_layers
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from megatron.training.pretrain import main
from pretrain_gpt import GPTRecipe
from tests.checkpoint.huggingface.models import CASES, VOCAB, tensors_of, write_folder
from tests.checkpoint.huggingface.record_peft import EAGER, FAMILIES, computed, written_base
from tests.distributed import run_distributed
from tests.training.toy import build_toy, losses_of, train_toy

HERE = Path(__file__).parent / "peft"
RECORD = json.loads((HERE / "record.json").read_text())
TOKENS = torch.tensor(RECORD["tokens"])
KINDS = {
    "lora": "",
    "rslora": "--use-rslora",
    "dora": "--use-dora",
    "some": "--lora-target-modules q_proj v_proj up_proj",
    "mixtral": "--lora-target-modules *.attention experts.up experts.down",
    "qwen3_moe": "--lora-target-modules q_proj gate_up_proj",
    "deepseek_v3": """--lora-target-modules q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj
        lm_head gate.weight""",
    "deepseek_v2": "--lora-target-modules q_proj kv_b_proj --use-dora",
    "qwen3_next": """--lora-target-modules q_proj in_proj_qkvz in_proj_ba out_proj
        --use-rslora""",
    "nemotron_h": "--lora-target-modules in_proj q_proj lm_head --use-dora",
    "cohere2": "--lora-target-modules q_proj k_proj --use-dora",
}
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"
MIXTURES = {
    "mixtral": f"{_EXPERTS} --rotary-base 1000000 --norm-epsilon 1e-5",
    "qwen3_moe": f"{_EXPERTS} --moe-ffn-hidden-size 20 --kv-channels 4 --qk-layernorm",
}
NETWORK = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --swiglu
    --group-query-attention --num-query-groups 2 --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 16 --seq-length 12
    --vocab-size 31
"""


# The word embedding of these models has two rows of padding here, which their files lack.
_FROM_FILES = """
    --use-checkpoint-args --seq-length 12 --hidden-dropout 0 --attention-dropout 0
    --vocab-size 69 --make-vocab-size-divisible-by 8
"""
_BASES = {}


@pytest.fixture(scope="module", autouse=True)
def _bases(tmp_path_factory):
    for kind in FAMILIES:
        _BASES[kind] = written_base(kind, tmp_path_factory.mktemp(kind))


def _base(kind):
    return _BASES.get(kind) or HERE / (f"base_{kind}" if kind in MIXTURES else "base")


def _network(kind):
    return _FROM_FILES if kind in FAMILIES else f"{NETWORK} {MIXTURES.get(kind, '')}"


def _rows(kind):
    """Return the number of rows of the word embedding in the base model's files."""
    return len(RECORD[kind]["logits"][0][0])


def _words(kind, more=""):
    return f"""{_network(kind)} --load {_base(kind)} --finetune --load-adapter {HERE / kind}
        --lora-rank 4 --lora-alpha 8 {KINDS[kind]} --train-iters 1 {more}""".split()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients_are_pefts(kind):
    run = build_toy(Layout.single(), _words(kind))
    logits = run.parts[0](TOKENS)[..., : _rows(kind)]
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    expected = RECORD[kind]
    torch.testing.assert_close(logits[:, ::4], torch.tensor(expected["logits"]), rtol=0, atol=1e-5)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    gradients = {f"model.{n}": p.grad for n, p in run.named_parameters() if p.requires_grad}
    rows = run.plan.embedding.vocabulary
    layers = adapted_layers(run.config.model, rows)
    family = families()[kind if kind in MIXTURES or kind in FAMILIES else "llama"]
    names = peft_names(run.config.model, layers, family, rows)
    assert gradients.keys() == names.keys()
    for ours, tensor in names.items():
        key = tensor.name if tensor.name.endswith(".weight") else f"{tensor.name}.weight"
        adapter_kind, own_slice = ours.rpartition(".")[2], tensor.adapter_slice
        gradient = stored_adapter(gradients[ours], adapter_kind)
        if own_slice is not None and own_slice.is_rearranged:
            gradient = join(adapter_kind, {own_slice: gradient}, None)
        found = (gradient[: _rows(kind)] if "lm_head" in key else gradient).flatten()
        wanted = torch.tensor(expected["gradients"][key])
        torch.testing.assert_close(found[:: found.numel() // 8], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_is_what_peft_computes(kind):
    peft = pytest.importorskip("peft", reason="needs the extra [parity]")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(_base(kind), **EAGER)
    model = peft.PeftModel.from_pretrained(base, HERE / kind, is_trainable=True)
    found, expected = computed(model, TOKENS), RECORD[kind]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    torch.testing.assert_close(*(torch.tensor(one["logits"]) for one in (found, expected)))
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, theirs in expected["gradients"].items():
        assert found["gradients"][name] == pytest.approx(theirs, rel=1e-5, abs=1e-6), name


def test_an_output_layer_that_files_repeat_has_the_name_of_the_models_own():
    family = families()["deepseek_v3"]
    model = family.read(Settings(CASES["deepseek v3"].config, "config.json")).model
    model = replace(
        model, mtp_num_layers=1, lora_rank=2, lora_target_modules=("lm_head", "kv_b_proj")
    )
    names = {
        tensor.name for tensor in peft_names(model, adapted_layers(model, 70), family, 70).values()
    }
    modules = {"lm_head", *(f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(2))}
    assert names == {
        f"base_model.model.{module}.lora_{kind}.weight" for module in modules for kind in "AB"
    }


@pytest.mark.parametrize("kind", ["lora", "dora", "mixtral", "deepseek_v3", "qwen3_next"])
def test_every_rank_loads_its_part(kind):
    flags = _words(kind, more="--train-iters 3")
    (losses,) = run_distributed(1, losses_of, flags)
    split = [*flags, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    for ours in run_distributed(2, losses_of, split, tensor=2):
        assert ours == pytest.approx(losses, rel=1e-5)


def _convert(saver, source, target, *more):
    words = f"--model-type GPT --loader native --saver {saver} --load-dir {source}".split()
    assert util.main([*words, "--save-dir", str(target), *more]) == 0


@pytest.fixture(params=KINDS)
def trained(request, tmp_path):
    """Return a kind, and a checkpoint of its adapter after an update at learning rate 0."""
    flags = ["--save", str(tmp_path / "native"), "--save-interval", "1"]
    train_toy(Layout.single(), [*_words(request.param), *flags])
    return request.param, tmp_path / "native"


def test_an_adapter_comes_out_as_it_went_in(trained, tmp_path):
    kind, checkpoint = trained
    _convert("peft", checkpoint, tmp_path / "peft", "--true-vocab-size", str(_rows(kind)))
    ours = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    theirs = load_file(HERE / kind / "adapter_model.safetensors")
    theirs.pop("base_model.model.lm_head.base_layer.weight", None)  # the base model has it
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    original = json.loads((HERE / kind / "adapter_config.json").read_text())
    both = written, original
    for key in written.keys() - {"target_modules", "target_parameters"}:
        assert written[key] == original[key], key
    for key, count in (("target_modules", 1), ("target_parameters", 2)):
        ends = ({tuple(name.split(".")[-count:]) for name in said[key] or ()} for said in both)
        assert next(ends) == next(ends), key


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_magnitudes_are_merged_into_weights_of_16_bits(precision, tmp_path):
    more = f"{precision} --initial-loss-scale 16 --lr 0.1 --save {tmp_path} --save-interval 1"
    words = f"--lora-rank 2 --use-dora --train-iters 1 --eval-iters 0 {more}".split()
    _, run = train_toy(Layout.single(), words)
    served = load_gpt(str(tmp_path), Device.cpu(), row_by_row=False)
    with torch.no_grad():
        expected, found = run.parts[0].eval()(TOKENS), served.model(TOKENS)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found[..., :100], expected[..., :100], rtol=0, atol=0.02)


def test_merged_weights_compute_the_same(trained, tmp_path):
    kind, checkpoint = trained
    served = load_gpt(str(checkpoint), Device.cpu(), row_by_row=False)
    assert not any("adapter" in name for name, _ in served.model.named_parameters())
    _convert("hf", checkpoint, tmp_path / "hf")
    flags = f"{_network(kind)} --load {tmp_path / 'hf'} --finetune --train-iters 1"
    exported = build_toy(Layout.single(), flags.split())
    wanted = torch.tensor(RECORD[kind]["logits"])
    for model in (served.model, exported.parts[0]):
        with torch.no_grad():
            found = model(TOKENS)[:, ::4, : _rows(kind)]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_peft_loads_ours(trained, tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra [parity]")
    transformers = pytest.importorskip("transformers")
    kind, checkpoint = trained
    vocabulary = ("--true-vocab-size", str(_rows(kind)))
    _convert("peft", checkpoint, tmp_path / "peft", *vocabulary)
    _convert("hf", checkpoint, tmp_path / "hf", *vocabulary)
    wanted = torch.tensor(RECORD[kind]["logits"])
    model_class = transformers.AutoModelForCausalLM
    base = model_class.from_pretrained(_base(kind), **EAGER)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    merged = model_class.from_pretrained(tmp_path / "hf", **EAGER)
    for model in (adapted, merged):
        with torch.no_grad():
            found = model.eval()(TOKENS).logits[:, ::4]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def _words_for(base, target, more, vocab=VOCAB):
    words = f"""--load {base} --use-checkpoint-args --finetune --tokenizer-type NullTokenizer
        --vocab-size {vocab - 1} --make-vocab-size-divisible-by 1 --seq-length 12
        --micro-batch-size 1 --global-batch-size 1 --mock-data --train-iters 1 --eval-iters 0
        --num-workers 0 --no-exit-signal-handler --attention-dropout 0 --hidden-dropout 0
        --save-interval 1 --clip-grad 0 --lora-rank 2 --save {target} {more}"""
    return words.split()


def _train(base, target, more, vocab=VOCAB):
    assert main(GPTRecipe(), _words_for(base, target, more, vocab)) == EXIT_OK
    return target


def _delta(adapter, module):
    """Return B A of a module, or of each expert of a mixture, [experts, out, in]."""
    a, b = (adapter[f"{module}.lora_{factor}.weight"] for factor in "AB")
    if "experts" not in module:
        return b @ a
    return torch.einsum("ore,eri->eoi", b.view(len(b), 2, -1), a.view(-1, 2, a.shape[1]))


def _weight_of(module):
    """Return the name of the weight that a module's adapter changes."""
    name = module.removeprefix("base_model.model.")
    if "experts" not in name:
        return f"{name}.weight"
    inner = ".base_layer"
    return f"{name.removesuffix(inner)}.{'gate_up' if name.endswith(inner) else 'down'}_proj"


# Modules of `transformers` that compute several of our projections, or order rows differently.
FUSED = {
    "phi 3": "--lora-target-modules all-linear --use-dora",
    "neox": "--lora-target-modules all-linear --use-dora",
    "gpt-j": "--lora-target-modules all-linear --use-dora",
    "cohere": "--lora-target-modules linear_qkv",
    "gpt2": "--lora-target-modules all-linear --use-dora",
    "gpt-oss": "--lora-target-modules linear_qkv experts.up experts.down",
}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("qwen3", "--lora-target-modules all-linear --use-dora"),
        ("gemma 2", "--lora-target-modules q_proj mlp.down --use-dora"),
        ("phi 3", "--lora-target-modules q_proj v_proj mlp.up.up --use-dora"),
        ("phi 3", "--use-rslora --lora-target-modules all-linear"),
        *FUSED.items(),
    ],
)
def test_an_adapter_adds_to_every_family_what_merging_adds(name, flags, tmp_path):
    case = CASES[name]
    vocab = case.config["vocab_size"]
    base = write_folder(tmp_path / "base", case.config, tensors_of(case))
    native = _train(base, tmp_path / "run", f"{flags} --lr 0.1", vocab)
    _convert("peft", native, tmp_path / "peft")
    _convert("hf", native, tmp_path / "hf")
    adapter = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    before, after = (load_file(tmp_path / kind / "model.safetensors") for kind in ("base", "hf"))
    modules = {key.removesuffix(".lora_A.weight") for key in adapter if "lora_A" in key}
    assert modules
    changed = {key for key, tensor in before.items() if not tensor.equal(after[key])}
    assert changed == {_weight_of(module) for module in modules}
    for module in modules:
        weight, merged = (held[_weight_of(module)] for held in (before, after))
        if name == "gpt2" or "experts" in module:
            weight, merged = weight.mT, merged.mT
        wanted = weight + _delta(adapter, module) * (2**0.5 if "rslora" in flags else 1)
        if "dora" in flags:
            magnitude = adapter[f"{module}.lora_magnitude_vector"]
            wanted *= (magnitude / wanted.norm(dim=1))[:, None]
        torch.testing.assert_close(merged, wanted, rtol=1e-5, atol=1e-6)
    more = f"{flags} --lr 0 --load-adapter {tmp_path / 'peft'}"
    _convert("peft", _train(base, tmp_path / "again", more, vocab), tmp_path / "back")
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert back.keys() == adapter.keys()
    assert all(back[key].equal(adapter[key]) for key in adapter)


@pytest.fixture
def fused(tmp_path):
    """Return a Phi-3 and a file of rank 2 on its fused modules, as PEFT writes it."""
    case = CASES["phi 3"]
    base = write_folder(tmp_path / "base", case.config, tensors_of(case))
    sizes = {"self_attn.qkv_proj": 64, "mlp.gate_up_proj": 96}
    tensors = {}
    for layer in range(2):
        for module, outputs in sizes.items():
            for factor, shape in (("A", (2, 32)), ("B", (outputs, 2))):
                key = f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight"
                tensors[key] = torch.randn(shape, generator=torch.Generator().manual_seed(layer))
    (tmp_path / "own").mkdir()
    save_file(tensors, tmp_path / "own" / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["qkv_proj"]}
    (tmp_path / "own" / "adapter_config.json").write_text(json.dumps(said))
    return base, tmp_path / "own", tensors


_WHOLE = "--lora-alpha 6 --lora-target-modules linear_qkv mlp.up"


def test_a_module_s_own_adapter_is_shared_by_its_projections(fused, tmp_path):
    base, own, tensors = fused
    native = _train(base, tmp_path / "run", f"{_WHOLE} --lr 0 --load-adapter {own}")
    _convert("hf", native, tmp_path / "hf")
    before, after = (load_file(tmp_path / kind / "model.safetensors") for kind in ("base", "hf"))
    for module in {key.partition(".lora_")[0] for key in tensors}:
        weight, merged = (held[_weight_of(module)] for held in (before, after))
        torch.testing.assert_close(merged, weight + 3 * _delta(tensors, module))
    served = load_gpt(str(native), Device.cpu(), row_by_row=False).model
    flags = "--tokenizer-type NullTokenizer --vocab-size 69".split()
    config = parse_generation(["--load", str(base), *flags], 1, Program(name="serve")).config
    loaded = load_gpt(str(base), Device.cpu(), config=config)
    loaded = add_to(loaded, open_adapters([f"mine={own}"], config), Device.cpu())
    loaded.adapters.of_tokens = torch.ones(12, dtype=torch.int64)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(tokens), served(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "said", "told"),
    [
        ("--lora-alpha 6 --lora-target-modules q_proj mlp.up", {}, "qkv_proj.lora_B.weight adapts"),
        ("--lora-alpha 6", {}, "down_proj.lora_A.weight is missing"),
        (
            _WHOLE,
            {"alpha_pattern": {"qkv_proj": 3}},
            "give model.layers.0.self_attn.qkv_proj rank 2 and scale 1.5, which is not supported",
        ),
        (_WHOLE, {"rank_pattern": {"(a|aa)+b": 3}}, "rank_pattern .* is not supported"),
        (_WHOLE, {"fan_in_fan_out": True}, "fan_in_fan_out True is not supported for this net"),
    ],
)
def test_what_a_module_s_adapter_cannot_be_split_into(flags, said, told, fused, tmp_path, capsys):
    base, own, _ = fused
    settings = own / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **said}))
    words = _words_for(base, tmp_path / "run", f"{flags} --lr 0 --load-adapter {own}")
    assert main(GPTRecipe(), words) != EXIT_OK
    assert re.search(told, capsys.readouterr().err)


def test_a_projection_of_a_higher_rank_is_refused(fused, tmp_path, capsys):
    base, own, tensors = fused
    settings, file = own / "adapter_config.json", own / "adapter_model.safetensors"
    wide = {"rank_pattern": {"qkv_proj": 4}, "alpha_pattern": {"qkv_proj": 12}}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **wide}))
    for key in tensors:
        if "qkv_proj" in key:
            tensors[key] = torch.cat([tensors[key]] * 2, dim=int("lora_B" in key))
    save_file(tensors, file)
    words = _words_for(base, tmp_path / "run", f"{_WHOLE} --lr 0 --load-adapter {own}")
    assert main(GPTRecipe(), words) != EXIT_OK
    assert "has more than rank 2: merge the adapter" in capsys.readouterr().err


@pytest.mark.parametrize("name", FUSED)
def test_peft_and_we_compute_the_same_with_fused_modules(name, tmp_path):
    """PEFT loads our file, and we load the file of an adapter that PEFT made."""
    peft = pytest.importorskip("peft", reason="needs the extra [parity]")
    transformers = pytest.importorskip("transformers")
    case, flags, tokens = CASES[name], FUSED[name], torch.arange(12)[None] * 5
    vocab = case.config["vocab_size"]
    base = write_folder(tmp_path / "base", case.config, tensors_of(case))
    native = _train(base, tmp_path / "run", f"{flags} --lr 0.1", vocab)
    _convert("peft", native, tmp_path / "peft")

    def theirs():
        options = {"attn_implementation": "eager", "pad_token_id": 0}
        return transformers.AutoModelForCausalLM.from_pretrained(base, **options).eval()

    def check(adapted, folder):
        served = load_gpt(str(folder), Device.cpu(), row_by_row=False).model
        with torch.no_grad():
            found, plain = adapted.eval()(tokens).logits, theirs()(tokens).logits
            wanted = served(tokens)[..., :vocab]
        assert (wanted - plain).abs().max() > 0.1
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)

    check(peft.PeftModel.from_pretrained(theirs(), tmp_path / "peft"), native)
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    kept = ("target_modules", "target_parameters", "use_dora", "task_type")
    settings = peft.LoraConfig(r=2, lora_alpha=2, **{key: said[key] for key in kept})
    own = peft.get_peft_model(theirs(), settings)
    with torch.no_grad():
        for key, parameter in own.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0, 0.1)
            if "magnitude" in key:
                parameter.mul_(1.1)
    own.save_pretrained(tmp_path / "own")
    more = f"{flags} --lr 0 --load-adapter {tmp_path / 'own'}"
    check(own, _train(base, tmp_path / "again", more, vocab))


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(HERE / "some", tmp_path / "some")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--lora-rank 8", "r is 4, but 8 here: give --lora-rank 4 --lora-alpha 8 --lora-target"),
        ("--lora-alpha 4", "lora_alpha is 8, but 4.0 here"),
        ("--use-dora", "use_dora is False, but True here"),
        (
            "--lora-target-modules q_proj",
            "does not belong to this network's adapters: give --lora-ra",
        ),
        ("--lora-target-modules q_proj k_proj v_proj up_proj", "k_proj.lora_A.weight is missing"),
    ],
)
def test_other_adapters_than_the_files_are_refused(flags, told):
    with pytest.raises(CheckpointError, match=told):
        build_toy(Layout.single(), [*_words("some"), *flags.split()])


@pytest.mark.parametrize(
    "said",
    [
        {"target_modules": r".*layers\.1\..*(q|up)_proj|.*v_proj"},
        {"target_modules": ["q_proj", "v_proj", "up_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "v_proj", "up_proj"], "exclude_modules": ".*0.*[qp]_proj"},
    ],
)
def test_the_flags_for_an_adapter_whose_settings_do_not_list_its_modules(said, copy):
    settings, file = copy / "adapter_config.json", copy / "adapter_model.safetensors"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **said}))
    tensors = load_file(file)
    left_out = re.compile(r"layers\.0\..*(q|up)_proj")
    save_file({key: held for key, held in tensors.items() if not left_out.search(key)}, file)
    words = [*_words("some"), "--load-adapter", str(copy)]
    with pytest.raises(CheckpointError, match="up_proj.lora_A.weight is missing") as raised:
        build_toy(Layout.single(), words)
    flags = re.search(r"give (.*), and the network", str(raised.value))[1].split()
    assert {"layers.1.self_attn.q_proj", "layers.1.mlp.up_proj", "v_proj"} < {*flags}
    build_toy(Layout.single(), [*words, *flags])


def test_a_rank_that_only_a_pattern_gives_is_named(copy):
    settings, file = copy / "adapter_config.json", copy / "adapter_model.safetensors"
    ranks = {"rank_pattern": {"v_proj": 6}}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **ranks}))
    tensors = load_file(file)
    for key in tensors:
        if "v_proj" in key:
            wide = [tensors[key]] * 2
            tensors[key] = torch.cat(wide, dim=int("lora_B" in key)).narrow(
                int("lora_B" in key), 0, 6
            )
    save_file({key: held.contiguous() for key, held in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=r"rank_pattern \{'v_proj': 6\} .*merge the adapter"):
        build_toy(Layout.single(), [*_words("some"), "--load-adapter", str(copy)])


@pytest.mark.parametrize(
    ("key", "value"), [("peft_type", "LOHA"), ("bias", "all"), ("rank_pattern", {"q_proj": 8})]
)
def test_what_pefts_settings_ask_for_besides_is_refused(copy, key, value):
    said = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**said, key: value}))
    with pytest.raises(CheckpointError, match=f"{key} .* is not supported"):
        build_toy(Layout.single(), [*_words("some"), "--load-adapter", str(copy)])


def test_an_adapter_of_another_base_is_refused(copy, tmp_path):
    wide = f"{NETWORK} --hidden-size 32 --kv-channels 4 --train-iters 1"
    train_toy(Layout.single(), f"{wide} --save {tmp_path} --save-interval 1".split())
    adapter = f"--load {tmp_path} --finetune --lora-rank 4 --lora-alpha 8 {KINDS['some']}"
    with pytest.raises(CheckpointError, match=r"has shape \[4, 16\], but it is \[4, 32\] here"):
        build_toy(Layout.single(), f"{wide} {adapter} --load-adapter {copy}".split())


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="contains no adapter"):
        build_toy(Layout.single(), [*_words("some"), "--load-adapter", str(tmp_path)])


def _network_with(folder, said):
    (folder / "adapter_config.json").write_text(json.dumps(said))
    model = families()["llama"].read(Settings(CASES["llama"].config, "config.json")).model
    adapted, experts = network_with(folder, model)
    names = ("lora_rank", "lora_alpha", "lora_target_modules", "use_rslora", "use_dora")
    return *(getattr(adapted, name) for name in names), experts


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (8, 8.0, ("all-linear",), False, False, ())),
        (
            {"r": 1, "lora_alpha": 0.5, "use_rslora": True, "use_dora": True, "bias": None},
            (1, 0.5, ("all-linear",), True, True, ()),
        ),
        (
            {"target_modules": ["q_proj", "model.lm_head"], "target_parameters": ["a.gate.weight"]},
            (8, 8.0, ("all-linear", "lm_head", "router"), False, False, ("a.gate.weight",)),
        ),
        (
            {"target_parameters": ["experts.up"], "rank_pattern": {"a.b": 3}, "lora_bias": False},
            (8, 8.0, ("all-linear",), False, False, ("experts.up",)),
        ),
    ],
)
def test_the_network_of_an_adapter_s_settings(said, expected, tmp_path):
    assert _network_with(tmp_path, said) == expected


@pytest.mark.parametrize(
    ("said", "told"),
    [
        *(({"r": r}, f"r is {r}, not a positive integer") for r in (0, True, 2.0, "8")),
        *(
            ({"lora_alpha": alpha}, f"lora_alpha is {alpha}, not a positive number")
            for alpha in (0, -1.5, True, float("inf"), float("nan"))
        ),
        ({"use_dora": True, "target_parameters": ["x"]}, "use_dora with target_parameters is not"),
        *(
            ({key: value}, f"{key} .* is not supported: merge the adapter with peft's merge_and_un")
            for key, value in {
                "peft_type": "LOHA",
                "bias": "all",
                "lora_bias": True,
                "trainable_token_indices": [1],
                "layer_replication": [[0, 1]],
                "alora_invocation_tokens": [1],
                "use_qalora": True,
                "use_bdlora": {"a": 1},
                "arrow_config": {"a": 1},
                "rank_pattern": {"a|b": 1},
                "alpha_pattern": {"a": 0},
                "modules_to_save": "classifier",
            }.items()
        ),
        ({"rank_pattern": ["a"]}, "rank_pattern .* is not supported"),
        ({"target_modules": [3]}, r"target_modules \[3\] is not a list of names: correct it"),
        ({"target_modules": {"q_proj": 1}}, "target_modules .* is not a list of names"),
        ({"alpha_pattern": {"a": "1"}}, "alpha_pattern .* is not supported"),
        ({"modules_to_save": ["score"]}, "a reward model's adapter is for --preference-loss brad"),
    ],
)
def test_settings_of_an_adapter_that_are_not_supported(said, told, tmp_path):
    with pytest.raises(CheckpointError, match=told):
        _network_with(tmp_path, said)
