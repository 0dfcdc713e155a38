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


def paths_of(word: str) -> Sequence[str]:
    """Return the paths for an entry of --input or --data-path, or the entry if it is not a name.

    Raises:
        DataError: The YAML file cannot be read, or the value of the name is not a path.
    """
    file = corpora_file()
    if file is None or os.sep in word or os.path.exists(word):
        return [word]
    import yaml

    where = f"MEGATRON_CORPORA={file}"
    try:
        names = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{where}: {error.strerror}: give a readable YAML file") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{where}: not a YAML file ({said}): fix the file") from error
    if not isinstance(names, dict):
        raise DataError(f"{where}: expected corpus names with their paths: fix the file")
    if word not in names:
        return [word]
    given = [names[word]] if isinstance(names[word], str) else names[word]
    if not (isinstance(given, list) and given and all(isinstance(path, str) for path in given)):
        raise DataError(
            f"{where}: the value of {word!r} is not a path or a list of paths: fix the file"
        )
    return [str(file.parent / path) for path in given]
