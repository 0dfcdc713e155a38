"""An mkdocs hook that adds pages for files outside docs/ to which the documentation links.

A link such as `../megatron/config/run.py` works on GitHub. For the site, the hook adds a page with
the text of that file and redirects the link to this page, so that no online repository is needed.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

_ROOT = Path(__file__).resolve().parent.parent
_DOCS = _ROOT / "docs"
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"(?<=\]\()(?!\w+:)[^)#\s]+(?=[)#])")
_LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".sh": "bash"}
_HEAD = "---\ntitle: {title}\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Files, config: Any) -> Files:
    """Add pages for files and folders outside docs/ that are linked, directly or indirectly."""
    pending = [_DOCS / file.src_uri for file in files.documentation_pages()]
    seen = set(pending)
    while pending:
        page = pending.pop()
        for target in _TARGET.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
            path = (page.parent / target).resolve()
            if path in seen or path.is_relative_to(_DOCS) or not path.exists():
                continue
            seen.add(path)
            text = _source_page(path)
            generated = File.generated(
                config, _address(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(generated)
            pending += [path] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Redirect the links of a page to the pages that `on_files` added."""
    address = page.file.src_uri
    source = _DOCS / address
    if address.startswith("source/"):
        source = _ROOT / address.removeprefix("source/").removesuffix(".md")
        if source.suffix != ".md":
            return markdown

    def redirect(match: re.Match[str]) -> str:
        path = (source.parent / match.group()).resolve()
        if not path.exists():
            return match.group()  # mkdocs warns
        return posixpath.relpath(_address(path), posixpath.dirname(address))

    segments = _FENCED.split(markdown)
    segments[::2] = [_TARGET.sub(redirect, segment) for segment in segments[::2]]
    return "".join(segments)


def _address(path: Path) -> str:
    if path.is_relative_to(_DOCS):
        return path.relative_to(_DOCS).as_posix()
    return f"source/{path.relative_to(_ROOT).as_posix()}.md"


def _source_page(path: Path) -> str:
    """Return the Markdown page of a file or a folder outside docs/."""
    name = path.relative_to(_ROOT).as_posix()
    head = _HEAD.format(title=name)
    if path.is_dir():
        package = path / "__init__.py"
        docstring = ast.get_docstring(ast.parse(package.read_text())) if package.is_file() else None
        parts = [f"``````text\n{docstring}\n``````"] if docstring else []
        files = sorted(file.name for file in path.iterdir() if not file.name.startswith("__"))
        parts.append("\n".join(f"- `{file}`" for file in files))
        return f"{head}# {name}/\n\n" + "\n\n".join(parts) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return head + text
    return f"{head}# {name}\n\n``````{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n``````\n"
