"""Every command that the documentation shows is executed, or at least parsed."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from tests.documented import Command, all_commands, blocks_of, pages
from tests.launch import run_ranks
from tests.repository import ROOT, command_environment, name, tracked_files

_GRPO = "examples/grpo/grpo.py"
_SERVER = "tools/run_text_generation_server.py"
_SAMPLES = "tools/generate_samples_gpt.py"
_TASKS = "tasks/main.py"
_RETRO = "tools/retro/main.py"
# System commands, of which there is nothing to check here.
_SYSTEM = {"apt-get", "mkdir", "paste", "source", "cd", "python3", "docker", "openssl"}
# Its Python blocks are clients of a server that does not run here.
_CLIENTS = {ROOT / "docs" / "generation.md"}


def _check_make(words: list[str]) -> None:
    subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)


def _check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    files = [ROOT / word for flag, word in zip(words, words[1:], strict=False) if flag == "-r"]
    assert all(file.is_file() for file in files)


def _check_python(words: list[str]) -> None:
    if words[0] == "-":
        return  # a here-document
    if words[0] in ("finetune.py", _GRPO) or Path(words[0]).name.startswith("pretrain_"):
        _check_pretrain(words, world_size=1)
        return
    if words[0] in (_SERVER, _SAMPLES):
        _check_generation(words)
        return
    if words[0] == _TASKS:
        _check_task(words[1:], world_size=1)
        return
    if words[0] == _RETRO:
        _check_retro(words[1:], world_size=1)
        return
    if words[:2] == ["-m", "pytest"]:
        assert (ROOT / words[-1]).exists()
        assert _collects_nothing(*words[:-1])
        return
    if words[0] == "-m":
        module = words[1].replace(".", "/")
        is_package = (ROOT / module).is_dir()
        words = [f"{module}/__main__.py" if is_package else f"{module}.py", *words[2:]]
    done = run_ranks(words, command_environment(), preexec=_leave_after_parsing)
    assert done.returncode == 0, done.stdout


@cache
def _collects_nothing(*words: str) -> bool:
    """Return whether pytest accepts these flags, for a file without tests."""
    words = (*words, name(ROOT / "tests" / "ports.py"), "--collect-only")
    done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
    return done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def _leave_after_parsing() -> None:
    """Let a script run until its arguments are parsed, whatever its parser."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_leave(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(self, *args, **kwargs)
        raise SystemExit(0)

    setattr(argparse.ArgumentParser, "parse_args", parse_and_leave)  # noqa: B010


def _check_generation(words: list[str]) -> None:
    """Check a program that takes other flags from a checkpoint, which does not exist here."""
    from megatron.config.arguments import ToolParser, add_flags, from_values
    from megatron.config.generation import SamplesConfig, ServerConfig, sample_problems
    from megatron.config.run import sections

    own = ServerConfig if words[0] == _SERVER else SamplesConfig
    parser = ToolParser(words[0], None)
    for section in (*sections().values(), own):
        add_flags(parser, section)
    given = parser.read(words[1:])
    if own is SamplesConfig:
        assert not sample_problems(from_values(SamplesConfig, vars(given)))


def _check_curl(words: list[str]) -> None:
    """Check that the text generation server would accept the request."""
    from megatron.inference.server.megatron_api import parse_request

    (url,) = [word for word in words if word.startswith("http://localhost:5000/")]
    if url.endswith("/api"):
        parse_request(json.loads(words[words.index("-d") + 1]))


def _check_lighthouse(words: list[str]) -> None:
    """Check the flags of torchft's program, if it is installed."""
    environment = command_environment()
    program = shutil.which("torchft_lighthouse", path=environment["PATH"])
    if program is None:
        pytest.skip("torchft is not installed")
    done = subprocess.run(
        [program, "--help"], check=False, capture_output=True, text=True, env=environment
    )
    shown = done.stdout + done.stderr
    assert all(word in shown for word in words if word.startswith("--")), shown


def _network(*_: object) -> dict[str, int]:
    """Return what --use-checkpoint-args takes from a checkpoint, which does not exist here."""
    return {"model.num_layers": 2, "model.hidden_size": 32, "model.num_attention_heads": 4}


def _check_task(words: list[str], world_size: int) -> None:
    """Check tasks/main.py without the checkpoint and the data that it names."""
    from dataclasses import replace

    from megatron.config.data import TokenizerConfig
    from megatron.config.model import ModelOptions
    from megatron.config.run import RunOptions
    from megatron.tasks import (
        dialogue,
        evaluation,
        finetune_command,
        harness,
        language_model,
        retrieval,
        towers,
    )
    from megatron.tasks.table import TASKS, find_task

    def start(_given: object, **_: object) -> RunOptions:
        kinds = {"finetuning": "bert", "retrieval": "ict", "towers": "ict"}
        if "--retro-workdir" in words:
            kinds["language model"] = "retro"
        return replace(
            RunOptions(),
            model=ModelOptions(
                architecture=kinds.get(TASKS[task].kind, "gpt"),
                num_layers=6,
                hidden_size=64,
                num_attention_heads=4,
            ),
            tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100),
        )

    if words == ["--help"]:
        return
    task = find_task(words)
    parse = {
        "language model": language_model.parse,
        "harness": harness.parse,
        "dialogue": dialogue.parse,
        "finetuning": finetune_command.parse,
        "retrieval": retrieval.parse,
        "towers": towers.parse,
    }[TASKS[task].kind]
    patch = pytest.MonkeyPatch()
    for module, function in (
        (evaluation, "saved_run"),
        (retrieval, "saved_run"),
        (finetune_command, "_pretrained"),
        (towers, "_start"),
    ):
        patch.setattr(module, function, start)
    try:
        parse(task, words, world_size)
    except ConfigError as error:
        missing = ["no such file", "no such folder", "needs the package lm-eval"]
        missing.append("args.json does not exist: make the folder")
        problems = [one for one in error.problems if not any(word in one for word in missing)]
        assert not problems, problems
    finally:
        patch.undo()


def _check_retro(words: list[str], world_size: int) -> None:
    """Check Retro's preprocessing without the BERT that it names."""
    from megatron.retro import command

    with pytest.MonkeyPatch.context() as patch:
        positions = {"model.max_position_embeddings": 512}
        patch.setattr(command, "_network", lambda _: {**_network(), **positions})
        command.parse(words, world_size)


def _check_pretrain(words: list[str], world_size: int) -> None:
    from examples.grpo.grpo import build_parser
    from megatron.config import Program, parse_config
    from megatron.config.finetuning import finetuning_args

    assert (ROOT / words[0]).is_file()
    if "--retro-workdir" in words:  # the folder is read with the flags
        words[words.index("--retro-workdir") + 1] = str(ROOT / "tests/config/retro_workdir")
    if words[1:] != ["--help"]:
        script = Path(words[0]).stem
        flags = finetuning_args(words[1:]) if script == "finetune" else words[1:]
        if words[0] == _GRPO:
            flags = build_parser().parse_known_args(flags)[1]
        parse_config(
            flags,
            world_size=world_size,
            program=Program(name=words[0]),
            architecture=script.removeprefix("pretrain_") if "pretrain" in script else "gpt",
            read_checkpoint=_network,
        )


def _check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import parse_args

    options = parse_args(words)
    _, _, nodes = options.nnodes.rpartition(":")
    words = [options.training_script, *options.training_script_args]
    if words[0] in (_SERVER, _SAMPLES):
        _check_generation(words)
        return
    if words[0] == _TASKS:
        _check_task(words[1:], int(options.nproc_per_node) * int(nodes))
        return
    if words[0] == _RETRO:
        _check_retro(words[1:], int(options.nproc_per_node) * int(nodes))
        return
    if words[0].startswith("tools/"):
        _check_python(words)
        return
    _check_pretrain(words, int(options.nproc_per_node) * int(nodes))


def _check_deepspeed(words: list[str]) -> None:
    """Check DeepSpeed's launcher, whose options before the script have one value each."""
    script = next(index for index, word in enumerate(words) if word.endswith(".py"))
    options = dict(zip(words[:script:2], words[1:script:2], strict=True))
    assert options.keys() <= {"--num_gpus", "--num_nodes", "--hostfile", "--master_port"}
    nodes, gpus = options.get("--num_nodes", 1), options.get("--num_gpus", 8)
    _check_pretrain(words[script:], int(nodes) * int(gpus))


def _check_megatron(words: list[str]) -> None:
    """Check each command with the flags of the script that does the same."""
    from megatron.cli.main import COMMANDS, DATA, DETOXIFY
    from megatron.cli.pretrain import training_command
    from megatron.tasks.table import TASKS

    command, *rest = words
    if command == "evaluate" or rest and rest[0] in TASKS:
        _check_task(["--task", *rest], world_size=1)
        return
    if command in ("pretrain", "finetune") and not {"--help", "--small"} & set(rest):
        if Path(rest[0]).name == rest[0] and rest[0][:1].isupper():
            network = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 100"
            of_folder = f"{network} --max-position-embeddings 4096 --tokenizer-type NullTokenizer"
            rest = [*of_folder.split(), *rest[1:]]  # for a Hugging Face folder, not present here
        program, script, flags = training_command(rest, finetunes=command == "finetune")
        _check_pretrain([name(script), *flags], int(program[-1]) if len(program) > 1 else 1)
        return
    table = {"data": DATA, "detoxify": DETOXIFY}.get(command)
    entry = table[rest.pop(0)] if table and rest else COMMANDS[command]
    if ":" not in entry.module and rest:
        importlib.import_module(entry.module).build_parser().read(rest)


def _check_tensorboard(words: list[str]) -> None:
    assert words[0] == "--logdir"
    assert shutil.which("tensorboard", path=command_environment()["PATH"])


_CHECKS = {
    "curl": _check_curl,
    "deepspeed": _check_deepspeed,
    "make": _check_make,
    "megatron": _check_megatron,
    "pip": _check_pip,
    "python": _check_python,
    "torchrun": _check_torchrun,
    "tensorboard": _check_tensorboard,
    "torchft_lighthouse": _check_lighthouse,
}


@pytest.mark.parametrize("command", all_commands(), ids=str)
def test_command_of_the_documentation_parses(command: Command, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    words = list(command.args)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)  # variables for an example script
    program = words.pop(0)
    if program in _SYSTEM:
        return
    if program.startswith("examples/"):
        assert (ROOT / program).is_file()  # tests/test_examples.py runs it
        return
    assert program in _CHECKS, f"no check for {program}: add one, so that it stays true"
    _CHECKS[program](words)


def test_guides_and_job_files_name_the_command_that_submits() -> None:
    """The script in tools/ does the same, and only the table of commands mentions it."""
    folders = ("docs", "examples", "megatron/submit/templates")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()]
    texts = {name(file): file.read_bytes() for file in files}
    assert [file for file, text in texts.items() if b"tools/submit.py" in text] == [
        "docs/recipes.md"
    ]


@pytest.mark.parametrize("page", pages(), ids=name)
def test_shell_blocks_are_marked_bash(page: Path) -> None:
    """The tests above would miss an unmarked block."""
    languages = re.findall(r"^```(\w*)\n(?:.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert set(languages) <= {"bash", "text", "json", "yaml", "python"}


@pytest.mark.parametrize(
    "page",
    [page for page in pages() if blocks_of(page, "python") and page not in _CLIENTS],
    ids=name,
)
def test_python_blocks_run(page: Path, monkeypatch) -> None:
    """Run all blocks of a page in order, as a reader would type them."""
    monkeypatch.chdir(ROOT)
    found: dict[str, object] = {}
    for line, text in blocks_of(page, "python"):
        exec(compile("\n" * (line - 1) + text, str(page), "exec"), found)


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_to_files_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if not re.match(r"\w+:", target)]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


def _anchors(page: Path) -> set[str]:
    """Return the possible anchors in links to a page: one per heading, as GitHub generates them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_to_headings_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    missing = [
        f"{target}#{anchor}"
        for target, anchor in links
        if not re.match(r"\w+:", target)
        and anchor not in _anchors(page.parent / target if target else page)
    ]
    assert not missing


def test_the_index_lists_every_page() -> None:
    folder = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#]+\.md)", (folder / "index.md").read_text(encoding="utf-8")))
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*.md")}
    assert files - linked == {"index.md"}


def test_the_page_of_reports_names_every_event() -> None:
    """They are the events that callbacks write to --metrics-jsonl."""
    sources = [file.read_text() for file in (ROOT / "megatron" / "training").rglob("*.py")]
    kinds = {kind for text in sources for kind in re.findall(r'\.event\(run, "([^"]+)"', text)}
    assert len(kinds) > 8
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `event: checkpoint`")]
    named = {name.removeprefix("event: ") for name in re.findall(r"`([^`]+)`", row)}
    assert kinds <= named


def test_modules_that_the_page_of_kernels_names_exist() -> None:
    """The page says which of them replaces which part of Apex and Transformer Engine."""
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/kernels.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    folders = [ROOT, ROOT / "megatron", ROOT / "megatron/kernels"]
    assert not [x for x in named if not any((folder / x).is_file() for folder in folders)]


def test_the_reference_of_the_code_names_what_its_modules_define() -> None:
    """The site leaves out a member that its module does not define, without a warning."""
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    entries = re.findall(r"^::: (\S+)\n.*\n +members: \[(.*)\]$", text, re.MULTILINE)
    assert len(entries) == text.count(":::") > 10
    for module, members in entries:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        for member in members.split(", "):
            assert re.search(rf"^(class|def) {member}\b", source, re.MULTILINE), (module, member)


def test_file_tree_names_what_exists() -> None:
    block = re.search(r"^```text\n(.*?)^```$", (ROOT / "docs/files.md").read_text(), re.M | re.S)
    assert block
    listed, folder = set(), ""
    for line in block.group(1).splitlines():
        path = line.split()[0]
        if not line.startswith(" "):
            folder = path if path.endswith("/") else ""
        else:
            path = folder + path
        assert (ROOT / path).exists(), path
        listed.add(path.rstrip("/"))
    rooms = {name(file).split("/")[1] for file in tracked_files() if _in_a_room(file)}
    missing = {room for room in rooms if f"megatron/{room}" not in listed}
    assert not missing, "rooms of megatron/ that the tree leaves out"


def _in_a_room(file: Path) -> bool:
    parts = file.relative_to(ROOT).parts
    return parts[0] == "megatron" and len(parts) > 2


def test_the_tour_names_what_is_where_it_says() -> None:
    """Check the classes in its table, and the functions and classes in its diagram of an update."""
    page = ROOT / "docs" / "tour.md"
    text, places = page.read_text(encoding="utf-8"), []
    for names, files in re.findall(r"^\| (`\w.*?) \| (\[.*?) \|", text, re.MULTILINE):
        links = [page.parent / target for target in re.findall(r"\]\((.*?)\)", files)]
        places += [(one, links) for one in re.findall(r"`(\w+)`", names)]
    ((_, picture),) = blocks_of(page, "text")
    for called, file in re.findall(r"^ *(\S+) .*?([\w/]+\.py)", picture, re.MULTILINE):
        links = [folder / file for folder in (ROOT, ROOT / "megatron") if (folder / file).exists()]
        places += [(part, links) for part in called.split(".") if part != "loop"]
    assert len(places) > 15
    missing = [
        one
        for one, links in places
        if not any(re.search(rf"(class|def) {one}\b", link.read_text()) for link in links)
    ]
    assert not missing


_FEWER = (
    ("--train-iters 300", "--train-iters 4"),
    ("--eval-interval 100 --eval-iters 10", "--eval-interval 2 --eval-iters 1"),
    ("--save-interval 100", "--save-interval 2"),
    ("--out-seq-length 100", "--out-seq-length 5"),
)


@pytest.mark.slow
def test_the_quickstart_runs_from_end_to_end(tmp_path: Path) -> None:
    blocks = [text for _, text in blocks_of(ROOT / "docs" / "quickstart.md", "bash")]
    assert "pip install" in blocks[0]
    assert blocks[-2].startswith("tensorboard")  # a server: it would not end
    script = "".join(blocks[1:-2] + blocks[-1:])
    for shown, used in _FEWER:
        assert shown in script
        script = script.replace(shown, used)
    for path in ("tools", "pretrain_gpt.py"):
        (tmp_path / path).symlink_to(ROOT / path)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=command_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    out = tmp_path / "runs" / "quickstart"
    assert (out / "loss.png").stat().st_size > 1000
    assert "\ndef " in done.stdout  # the prompt, which the last command continues
    assert list((out / "checkpoints").iterdir())
