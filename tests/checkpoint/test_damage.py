"""Damaged checkpoints are refused before anything is read from them; an older one is used."""

import random
import re
import shutil

import pytest
import torch

from megatron.checkpoint import plan
from megatron.checkpoint.find import CheckpointFolder
from megatron.checkpoint.inspection import summarize
from megatron.checkpoint.loading import open_checkpoint, open_folder
from megatron.checkpoint.manifest import MANIFEST, ManifestError, _sign, parse
from megatron.checkpoint.reader import NativeReader
from megatron.checkpoint.shard import Placement, parse_header, plan_shard
from megatron.errors import CheckpointError
from tests.checkpoint.states import assert_loads, make_state, save_state

SHARD = "rank_00000.safetensors"


def _flip(data, rng):
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _zero(data, rng):
    start = rng.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))


def _cut(data, rng):
    del data[rng.randrange(len(data)) :]


def _extend(data, rng):
    data += bytes(rng.randrange(1, 20))


@pytest.mark.parametrize("damage", [_flip, _zero, _cut, _extend])
def test_random_damage_is_refused_and_the_older_one_used(tmp_path, capsys, damage):
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2, make_state(2))
    rng, refused = random.Random(damage.__name__), 0
    for trial in range(40):
        file = path / (SHARD if trial % 2 else MANIFEST)
        original = file.read_bytes()
        data = bytearray(original)
        damage(data, rng)
        if data == original:
            continue
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=file.name):
            open_folder(CheckpointFolder("native", 2, path))
        assert assert_loads(tmp_path, [1]) == 1
        refused += 1
        file.write_bytes(original)
    assert refused > 20
    assert capsys.readouterr().err.count("using iter_0000001 instead") == refused
    assert assert_loads(tmp_path, [2]) == 2


def test_a_shard_of_another_iteration_is_refused(tmp_path):
    first, second = save_state(tmp_path, 1), save_state(tmp_path, 2)
    shutil.copy(first / SHARD, second / SHARD)  # same names, shapes and size
    assert assert_loads(tmp_path, [1]) == 1


def test_a_folder_under_another_iterations_name_is_refused(tmp_path):
    save_state(tmp_path, 1)
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000009")
    with pytest.raises(CheckpointError, match="for iteration 1"):
        open_checkpoint(tmp_path)


def test_a_missing_or_linked_shard_is_refused(tmp_path):
    path = save_state(tmp_path, 1)
    outside = tmp_path / "outside"
    (path / SHARD).rename(outside)
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(tmp_path)
    (path / SHARD).symlink_to(outside)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)


def test_when_all_are_damaged_each_is_named(tmp_path):
    for iteration in (1, 2):
        (save_state(tmp_path, iteration) / SHARD).write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"(?s)iter_0000002 is not used: .*\n  .*iter_0000001 is not used: "
    ):
        open_checkpoint(tmp_path)


def test_without_verification_sizes_still_count(tmp_path):
    path = save_state(tmp_path, 1)
    data = bytearray((path / SHARD).read_bytes())
    data[-1] ^= 1
    (path / SHARD).write_bytes(data)
    assert open_checkpoint(tmp_path, verify=False).iteration == 1
    (path / SHARD).write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="instead of"):
        open_checkpoint(tmp_path, verify=False)


def _body(path):
    import json

    body = json.loads((path / MANIFEST).read_bytes())
    del body["sha256"]
    return body


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.update(version=2), "format version 2; this program reads version 1"),
        (lambda b: b["files"].update({"../x": b["files"].pop(SHARD)}), "not a valid shard name"),
        (lambda b: b["tensors"].pop("random"), "bytes, but its header and tensors have"),
        (lambda b: b["tensors"]["random"].update(shape=[38]), "do not cover"),
        (lambda b: b["tensors"]["random"].update(dtype="OBJECT"), "unknown type"),
        (lambda b: b["tensors"]["random"]["pieces"][0].update(start=1 << 60), "lies outside"),
        (lambda b: b["tensors"]["random"]["pieces"][0].update(bytes=-1), "greater than"),
        (lambda b: b["tensors"]["random"]["pieces"][0].update(file="y"), "does not list"),
        (lambda b: b.update(iteration="1"), "iteration: .* valid integer"),
        (lambda b: b.pop("iteration"), "iteration: .* valid integer"),
        (lambda b: b.update(iteration=1.0), "iteration: .* valid integer"),
        (lambda b: b.update(iteration=10**400), "iteration: "),
        (lambda b: b["tensors"]["random"]["pieces"][0].update(start=True), "start: .* integer"),
        (lambda b: b["tensors"]["random"]["pieces"][0].update(bytes=1e3), "bytes: .* integer"),
        (lambda b: b["files"][SHARD].update(bytes="9"), "bytes: .* valid integer"),
        (lambda b: b.update(iteration=True), "iteration: .* valid integer"),
        (lambda b: b.update(meta=[]), "meta: Input should be an object"),
        (lambda b: b["layout"].update(world=1.5), "layout.world: .* valid integer"),
        (lambda b: b["tensors"].update(random=None), "tensors.random: Input"),
        (lambda b: b["tensors"]["random"].update(shape=[-1]), "shape.0: .* greater than"),
        (lambda b: b["tensors"]["random"].update(shape=[1 << 64]), "shape.0: .* less than"),
        (lambda b: b["tensors"]["random"].update(shape=[1] * 64), "shape: .* at most 8 items"),
        (lambda b: b["tensors"]["random"]["pieces"].append({}), "pieces.1.file: Field required"),
        (lambda b: b.update(format="zip"), "not a manifest"),
    ],
)
def test_a_well_signed_manifest_must_still_make_sense(tmp_path, change, message):
    body = _body(save_state(tmp_path, 1))
    change(body)
    with pytest.raises(ManifestError, match=message):
        parse(_sign(body))


@pytest.mark.parametrize(
    ("old", "new"),
    [(b": ", b":"), (b'"meta"', rb'"\u006deta"'), (b"}\n", b"}"), (b"}\n", b"}\n\n")],
)
def test_a_manifest_with_the_same_values_in_other_bytes_is_refused(tmp_path, old, new):
    """Damage may turn a byte into another one that JSON reads alike, such as `e` into `E`."""
    data = (save_state(tmp_path, 1) / MANIFEST).read_bytes()
    parse(data)
    assert old in data
    with pytest.raises(ManifestError, match="its digest does not match its content"):
        parse(data.replace(old, new))


@pytest.mark.parametrize(
    "number",
    ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "[" * 50_000 + "]" * 50_000],
    ids=lambda text: text[:9],
)
def test_a_value_that_json_lacks_does_not_stop_the_fallback(tmp_path, capsys, number):
    save_state(tmp_path, 1)
    manifest = save_state(tmp_path, 2) / MANIFEST
    manifest.write_text(manifest.read_text().replace('"meta": {', f'"meta": {{"x": {number}, '))
    assert assert_loads(tmp_path, [1]) == 1
    assert "iter_0000002 is not used: manifest.json: damaged: not JSON" in capsys.readouterr().err


def test_any_error_while_a_checkpoint_is_opened_leads_to_the_next(tmp_path, capsys, monkeypatch):
    for iteration in (1, 2):
        save_state(tmp_path, iteration)
    verify = NativeReader.verify

    def fails(error, reader, *share):
        if reader.iteration == 2:
            raise error
        verify(reader, *share)

    monkeypatch.setattr(NativeReader, "verify", lambda *args: fails(KeyError("x"), *args))
    assert assert_loads(tmp_path, [1]) == 1
    assert "not a native checkpoint: KeyError: 'x'" in capsys.readouterr().err
    monkeypatch.setattr(NativeReader, "verify", lambda *args: fails(MemoryError(), *args))
    with pytest.raises(MemoryError):  # a fault of the machine, not of the file
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\x00" * 99, b"[" * 100_000])
def test_what_is_not_json_is_refused(data):
    with pytest.raises(ManifestError):
        parse(data)


FORGED = "model.layers.0.mlp.up.weight"
LIKE_IT = "optimizer.layers.0.mlp.up.weight.exp_avg"  # the same number of bytes, in another file


def _exchange(tensors):
    """Swap two entries: each then names the other's file, or its place in the same file."""
    for field in ("file", "start", "sha256"):
        one, other = tensors[FORGED]["pieces"][0], tensors[LIKE_IT]["pieces"][0]
        one[field], other[field] = other[field], one[field]


def _turn(tensors):
    tensors[FORGED]["shape"] = tensors[FORGED]["pieces"][0]["shape"] = [8, 32]


@pytest.mark.parametrize("large", [1 << 30, 64], ids=["one file", "several files"])
@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (
            _exchange,
            r"rank_00000(_\d)?.safetensors: contains .* where manifest.json says F32 .* at",
        ),
        (
            lambda t: t.update({"model.a": t.pop(FORGED)}),
            r"no tensor with this name where .*: model.a",
        ),
        (
            lambda t: t[FORGED].update(dtype="I32"),
            r"contains F32 \[32, 8\] at .* says I32 \[32, 8\]",
        ),
        (_turn, r"contains F32 \[32, 8\] at byte \d+ where manifest.json says F32 \[8, 32\]"),
        (lambda t: t.pop("empty"), "contains empty, which manifest.json does not list"),
    ],
)
def test_a_forged_manifest_must_say_what_its_files_hold(
    tmp_path, capsys, monkeypatch, forge, message, large
):
    monkeypatch.setattr(plan, "_LARGE", large)  # bytes in a file; larger shares have several
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2, make_state(2))
    body = _body(path)
    forge(body["tensors"])
    (path / MANIFEST).write_bytes(_sign(body))
    with pytest.raises(CheckpointError, match=message):
        open_folder(CheckpointFolder("native", 2, path))
    assert assert_loads(tmp_path, [1]) == 1  # before any tensor was read
    lines, sound = summarize(tmp_path, verify=True, details=False)
    assert not sound
    assert "iter_0000002  native  cannot be used: rank_00000" in lines[1]


def test_a_header_gives_each_tensor_one_place():
    tensors = {"a": torch.ones(6), "b": torch.ones(2, 3).half(), "c": torch.ones(0, 4)}
    header, places = plan_shard(tensors, metadata={"format": "pt"})
    assert parse_header(header) == places
    text = (  # the widest types first
        '{"__metadata__":{"format":"pt"},'
        '"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},'
        '"c":{"dtype":"F32","shape":[0,4],"data_offsets":[24,24]},'
        '"b":{"dtype":"F16","shape":[2,3],"data_offsets":[24,36]}}'
    )
    size = -(-len(text) // 8) * 8
    assert header == size.to_bytes(8, "little") + text.encode() + b" " * (size - len(text))
    assert places["b"] == Placement("F16", (2, 3), 8 + size + 24, 12)
    for wrong in (header[:7], header[:-1], header + b" "):
        with pytest.raises(ValueError, match="not a safetensors header: its length differs"):
            parse_header(wrong)
    for old, new in (
        (b"[6]", b"[true]"),
        (b"[0,24]", b"[0.0,24]"),
        (b"[0,24]", b"[25,24]"),
        (b"[0,24]", b"[-1,24]"),
        (b"[2,3]", b"[2,-3]"),
        (b'"F16"', b"16"),
    ):
        changed = header[8:].replace(old, new)
        with pytest.raises(ValueError, match="not a safetensors header: "):
            parse_header(len(changed).to_bytes(8, "little") + changed)
    # Readers differ about which of the two counts.
    with pytest.raises(ValueError, match="a name occurs twice"):
        parse_header(header.replace(b'"b":{', b'"a":{'))
    for text in (b"", b"[]", b"[" * 100_000, b'{"a":7}', b'{"a":{"dtype":"F32","shape":[]}}'):
        with pytest.raises(ValueError, match="header|Expecting"):
            parse_header(bytes(8) + text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("config"), "meta.config: Field required"),
        (lambda m: m.update(config=[]), "meta.config: Input should be"),
        (lambda m: m.update(config={"model": None}), "meta.config.model: Input should be"),
        (lambda m: m.update(config={"model": {"num_layers": "x"}}), "model.num_layers"),
        (lambda m: m.update(iteration="1"), "meta.iteration: .* valid integer"),
        (lambda m: m.update(iteration=1), "meta.iteration is 1, but 2"),
        (lambda m: m.update(consumed_train_samples=-1), "meta.consumed_train_samples: .* greater"),
        (lambda m: m.update(rng={"seed": True}), "meta.rng.seed: .* valid integer"),
        (lambda m: m.update(rng=[1]), "meta.rng: "),
        (lambda m: m.update(schedule="cosine"), "meta.schedule: "),
        (lambda m: m.update(schedule={"max_lr": "0.1"}), "meta.schedule.max_lr: .* valid number"),
        (lambda m: m.update(schedule={"num_steps": 1 << 70}), "meta.schedule.num_steps: .* less"),
        (lambda m: m.update(optimizer={"step": 1}), "meta.optimizer.loss_scale: Field required"),
        (lambda m: m.update(optimizer={"step": 1, "loss_scale": {}}), "meta.schedule is missing"),
        (lambda m: m.update(schedule={"num_steps": None}), "meta.schedule.num_steps: .* number"),
        (
            lambda m: m.update(schedule={"max_lr": 0.1}, optimizer={"step": 1, "loss_scale": {}}),
            "meta.schedule .*no num_steps",
        ),
        (
            lambda m: m.update(schedule={"num_steps": 4, "lr_decay_style": "polynomial"}),
            "meta.schedule.lr_decay_style is 'polynomial', not one of constant, linear",
        ),
        (
            lambda m: m.update(schedule={"num_steps": 4, "wd_incr_style": "x"}),
            "meta.schedule.wd_incr_style is 'x', not one of ",
        ),
        (lambda m: m.update(notices="x"), "meta.notices: "),
        (lambda m: m.update(legacy_args={"data_path": 1}), "meta.legacy_args.data_path"),
    ],
)
def test_meta_data_of_another_type_does_not_stop_the_fallback(tmp_path, capsys, change, message):
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2)
    body = _body(path)
    change(body["meta"])
    (path / MANIFEST).write_bytes(_sign(body))
    assert assert_loads(tmp_path, [1]) == 1
    assert re.search(f"iter_0000002 is not used: .*{message}", capsys.readouterr().err)
