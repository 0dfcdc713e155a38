"""Files for Kubernetes: valid under the real schemas, and with the right meaning for a run.

Kubernetes' own kinds are checked by kubernetes-validate, which has the schemas of every version.
JobSet and PyTorchJob are checked by their own projects' schemas (schemas/), and the job and
pod templates in them by kubernetes-validate again. No cluster runs them here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.submit.descriptions import COMMAND, HOSTILE, job_file

_FLAGS = {
    "plain": (),
    "full": (
        *("--time", "24:00:00", "--cpus-per-node", "96", "--memory-gb", "1000", "--workdir", "/w"),
        *("--volume", "data:/data:ro", "/scratch:/scratch", "--env", "A=1", "NCCL_IB_HCA=mlx5"),
        *("--namespace", "ml", "--queue", "gpus", "--service-account", "me", "--pull-secret", "s"),
        *("--node-selector", "gpu=h100", "--toleration", "a=b:NoSchedule", "c", "d:NoExecute"),
    ),
    "cpu": ("--gpus-per-node", "0", "--silence-minutes", "0", "--toleration", "--restarts", "0"),
}
_KINDS = ("job", "jobset", "pytorchjob", "debug")


def _objects(kind: str, *words: str) -> list[Any]:
    words = ("--image", "a/b:1", "--kubernetes-kind", kind, *words)
    return list(yaml.safe_load_all(job_file("kubernetes", *words)))


def _templates(value: Any) -> list[Any]:
    """Return all templates in an object, outer ones first."""
    if isinstance(value, list):
        return [one for part in value for one in _templates(part)]
    if not isinstance(value, dict):
        return []
    own = [value["template"]] if "template" in value else []
    return own + [one for part in value.values() for one in _templates(part)]


def _pods(objects: list[Any]) -> list[Any]:
    """Return the specifications of all pods."""
    found = [one["spec"] for one in objects if one["kind"] == "Pod"]
    found += [one["spec"] for one in _templates(objects) if "containers" in one["spec"]]
    return found


def _validate(data: Any) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for version in kubernetes.utils.all_versions()[-4:]:
        kubernetes.validate(data, version, strict=True)


@pytest.mark.parametrize("flags", _FLAGS)
@pytest.mark.parametrize("nodes", ["1", "4"])
@pytest.mark.parametrize("kind", _KINDS)
def test_files_pass_their_schemas(kind: str, nodes: str, flags: str) -> None:
    for one in _objects(kind, "--nodes", nodes, *_FLAGS[flags], *COMMAND):
        if one["kind"] in ("JobSet", "PyTorchJob"):
            jsonschema = pytest.importorskip("jsonschema")
            file = Path(__file__).parent / "schemas" / f"{one['kind'].lower()}.json"
            schema = json.loads(file.read_text())
            assert [one["kind"], one["apiVersion"]] == [schema["x-kind"], schema["x-version"]]
            jsonschema.validate(one, schema)
            for template in _templates(one):
                job = {"apiVersion": "batch/v1", "kind": "Job"}
                pod = {"apiVersion": "v1", "kind": "Pod"}
                _validate({**(pod if "containers" in template["spec"] else job), **template})
        else:
            _validate(one)


@pytest.mark.parametrize("wrong", ["podFailurePolicies", "completion"])
def test_the_schemas_refuse_an_unknown_key(wrong: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    (job,) = _objects("job", *COMMAND)
    job["spec"][wrong] = 1
    with pytest.raises(kubernetes.ValidationError):
        _validate(job)
    jsonschema = pytest.importorskip("jsonschema")
    for kind in ("jobset", "pytorchjob"):
        (one,) = _objects(kind, *COMMAND)
        one["spec"][wrong] = 1
        schema = json.loads((Path(__file__).parent / "schemas" / f"{kind}.json").read_text())
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(one, schema)


def _expand(word: str) -> str:
    """Expand a word as Kubernetes does (its third_party/forked/golang/expansion/expand.go)."""
    read = {"$$": "$"}
    return re.sub(
        r"\$\$|\$\([^)]*\)", lambda match: read.get(match.group(), "a variable's value"), word
    )


@pytest.mark.parametrize("kind", ["job", "jobset", "pytorchjob"])
def test_every_word_arrives_as_it_was_given(kind: str) -> None:
    words = [word for value in HOSTILE for word in ("--x", value)]
    flags = [f"V{i}={one}" for i, one in enumerate(HOSTILE) if "\n" not in one]
    for pod in _pods(_objects(kind, "--nodes", "2", "--env", *flags, "--", "train.py", *words)):
        (container,) = pod["containers"]
        assert [_expand(word) for word in container["args"]] == ["train.py", *words]
        variables = {one["name"]: _expand(one["value"]) for one in container["env"]}
        assert all(variables[flag.partition("=")[0]] == flag.partition("=")[2] for flag in flags)


@pytest.mark.parametrize(
    ("kind", "rank", "address"),
    [
        ("job", "$(JOB_COMPLETION_INDEX)", "mine-0.mine"),
        ("jobset", "$(JOB_COMPLETION_INDEX)", "mine-node-0-0.mine"),
        ("pytorchjob", "$(RANK)", "$(MASTER_ADDR)"),
    ],
)
def test_pods_meet_at_the_first_one(kind: str, rank: str, address: str) -> None:
    from torch.distributed.run import parse_args

    objects = _objects(kind, "--name", "mine", "--nodes", "3", *COMMAND)
    for pod in _pods(objects):
        (container,) = pod["containers"]
        assert container["command"][:3] == ["python", "-m", "megatron.processes.torchrun"]
        words = [*container["command"][3:], *container["args"]]
        options = parse_args([word.replace(rank, "0") for word in words])
        assert (options.nnodes, options.nproc_per_node) == ("3", "8")
        assert f"--node-rank={rank}" in words
        assert options.master_addr == address
        assert container["ports"][0]["containerPort"] == options.master_port
        assert [options.training_script, *options.training_script_args] == COMMAND[1:]
    if kind == "job":
        service, job = objects
        assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "mine"
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "mine"}
    if kind == "pytorchjob":
        replicas = objects[0]["spec"]["pytorchReplicaSpecs"]
        assert {name: one["replicas"] for name, one in replicas.items()} == {
            "Master": 1,
            "Worker": 2,
        }


def test_exit_codes_decide_what_a_job_does_next() -> None:
    from megatron import errors

    (job,) = _objects("job", *COMMAND)
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert by_code.pop(errors.EXIT_SAVED_ON_SIGNAL) == "Ignore"
    assert set(by_code.values()) == {"FailJob"}
    # A crash (1), a hang or a wrong result may be the machine's fault, so another pod tries again.
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, errors.UserError)]
    kinds.remove(errors.UserError)
    of_machines = {errors.HangError, errors.SuspiciousResultError, errors.TransientFaultError}
    fatal = {kind.exit_code for kind in kinds} - {kind.exit_code for kind in of_machines}
    assert set(by_code) == fatal - {errors.OutputClosedError.exit_code}


def test_a_debug_pod_has_what_the_job_has() -> None:
    words = (*_FLAGS["full"], *COMMAND)
    (pod,), (job,) = _pods(_objects("debug", *words)), _pods(_objects("job", *words))
    assert pod["volumes"] == job["volumes"]
    ours, theirs = pod["containers"][0], job["containers"][0]
    for key in ("image", "env", "resources", "volumeMounts", "workingDir"):
        assert ours[key] == theirs[key]
    assert _pods(_objects("debug"))  # it needs no command


def test_a_variable_of_the_user_is_there_once() -> None:
    (pod,) = _pods(_objects("job", "--env", "NCCL_DEBUG=INFO", "NO=1", *COMMAND))
    names = [one["name"] for one in pod["containers"][0]["env"]]
    assert names == ["OMP_NUM_THREADS", "NCCL_DEBUG", "NO"]
    assert pod["containers"][0]["env"][1]["value"] == "INFO"


def test_memory_has_the_same_unit_everywhere() -> None:
    """SLURM's G is 2^30 bytes too."""
    words = ("--memory-gb", "1000", "--shared-memory-gb", "9", *COMMAND)
    (pod,) = _pods(_objects("job", *words))
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["memory"] == "1000Gi"
    assert {"medium": "Memory", "sizeLimit": "9Gi"} in [
        volume.get("emptyDir") for volume in pod["volumes"]
    ]
