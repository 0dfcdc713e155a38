"""Names for corpora, such as wikipedia, which the user defines in a YAML file.

The environment variable MEGATRON_CORPORA names the file, which maps each name to a path or a list
of paths, relative to the file's folder:

    wikipedia: /data/wikipedia/wiki_*
    BooksCorpus: [books1.jsonl, books2.jsonl]
    roberta: /data/roberta_text_sentence
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron.environment import corpora_file
from megatron.errors import DataError


def paths_of(entry: str) -> Sequence[str]:
    """Return the paths for an entry of --input or --data-path, or the entry if it is not a name.

    An entry that contains a path separator, or that exists as a file or folder, is not a name.

    Raises:
        DataError: The YAML file cannot be read or does not contain names, or the value of the name
            is neither a path nor a list of paths.
    """
    file = corpora_file()
    if file is None or os.sep in entry or os.path.exists(entry):
        return [entry]
    import yaml

    source = f"MEGATRON_CORPORA={file}"
    try:
        names = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{source}: {error.strerror}: give a readable YAML file") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{source}: not a YAML file ({reason}): fix the file") from error
    if not isinstance(names, dict):
        raise DataError(f"{source}: expected corpus names with their paths: fix the file")
    if entry not in names:
        return [entry]
    value = [names[entry]] if isinstance(names[entry], str) else names[entry]
    if not (isinstance(value, list) and value and all(isinstance(path, str) for path in value)):
        raise DataError(
            f"{source}: the value of {entry!r} is not a path or a list of paths: fix the file"
        )
    return [str(file.parent / path) for path in value]
