"""A run's identity, and the newest checkpoint from which it can resume."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.non_persistent import NonPersistentStore
from megatron.checkpoint.reader import Reader
from megatron.config import RunConfig
from megatron.durable import open_trusted, replace_file, writing_to
from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout

_FILE = "run.json"
_MAX_BYTES = 2**16


@dataclass(frozen=True)
class RunRecord:
    """The identity and start time of a run, which distinguish it from others in the same folders.

    Attributes:
        run: A random string. If the folder of checkpoints is deleted, the next run gets another
            string and does not resume from the old run's non-persistent checkpoints.
        began: When the run was first started, in seconds since 1970.
    """

    run: str
    began: float

    @classmethod
    def of(cls, save: str | Path, layout: Layout) -> RunRecord:
        """Read the identity stored in a folder of checkpoints, or create one. Collective.

        A stored identity that is damaged, or that other users may have written, is replaced.

        Raises:
            StorageError: The folder cannot be written to.
        """
        path = Path(save).absolute() / _FILE

        def read() -> dict[str, object]:
            with suppress(OSError, ValueError, TypeError, RecursionError):
                with open_trusted(path) as file:
                    record = cls(**json.loads(file.read(_MAX_BYTES)))
                if type(record.run) is str and type(record.began) is float:
                    return asdict(record)
            new = asdict(cls(uuid.uuid4().hex, time.time()))
            with writing_to("--save", path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, json.dumps(new).encode() + b"\n")
            return new

        return cls(**JsonExchange(layout.world).on_main(read))


def store_of(config: RunConfig, layout: Layout) -> NonPersistentStore | None:
    """Return the store of the run's non-persistent checkpoints, if it has any. Collective.

    Raises:
        StorageError: A folder cannot be created.
    """
    options = config.checkpoint
    if options.non_persistent_save_interval is None:
        return None
    assert options.save is not None, "a requirement of the flag"
    is_shared = options.non_persistent_ckpt_type == "global"
    root = options.non_persistent_local_ckpt_dir
    if is_shared:
        root = options.non_persistent_global_ckpt_dir or str(Path(options.save) / "non_persistent")
    assert root is not None, "rules_reliability.non_persistent"
    return NonPersistentStore(
        root,
        RunRecord.of(options.save, layout).run,
        layout,
        copies=options.replication_factor if options.replication else 1,
        jump=options.replication_jump,
        is_shared=is_shared,
    )


def open_newest(
    config: RunConfig, layout: Layout, open_durable: Callable[[], Reader | None]
) -> Reader | None:
    """Open the newest intact checkpoint, durable or non-persistent, from which a run can resume.

    Collective. The result is `None` if there is none. Non-persistent checkpoints are ignored in
    four cases: --non-persistent-save-interval is not given; the run does not resume from its own
    --save folder; --finetune, --no-load-optim or --ckpt-step is given; or the tracker was set back
    to an older checkpoint.

    Args:
        config: The run's configuration, which has --load.
        layout: The grid of processes as this process sees it.
        open_durable: A function that opens the newest checkpoint of --load.

    Raises:
        CheckpointError: There are checkpoints, but none can be used.
        StorageError: A folder of non-persistent checkpoints cannot be created.
    """
    options = config.checkpoint
    load, save = options.load, options.save
    assert load is not None
    resumes = save is not None and Path(load).resolve() == Path(save).resolve()
    starts_over = options.finetune or options.no_load_optim or options.ckpt_step is not None
    store = store_of(config, layout) if resumes and not starts_over else None
    if store is None:
        return open_durable()

    def iterations() -> list[int]:
        with suppress(CheckpointError):  # none is complete: `open_durable` reports it
            return [checkpoint.iteration for checkpoint in list_checkpoints(Path(load), quiet=True)]
        return []

    durable = JsonExchange(layout.world).on_main(iterations)
    if durable and durable[0] < max(durable):
        return open_durable()
    newest = store.open_newest(after=durable[0] if durable else -1)
    if newest is not None:
        return newest
    reader, failure = None, None
    try:
        reader = open_durable()
    except CheckpointError as error:  # on all ranks
        failure = error
    if durable and (reader is None or reader.iteration < durable[0]):
        # The newest durable checkpoints are damaged.
        newest = store.open_newest(after=-1 if reader is None else reader.iteration)
    if newest is None and failure is not None:
        raise failure
    return newest or reader
