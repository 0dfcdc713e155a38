"""The faiss index of a chunk database, trained on sampled chunks and then filled with all chunks.

    index/train_emb/blocks/<a>-<b>.hdf5             data f32 [rows, h]: vectors of sampled chunks
    index/train_emb/train_<f>.bin                   the vectors used for training, raw f32
    index/<type>/<string>/empty_<f>.faissindex      the trained index
    index/<type>/<string>/add_codes/<a>-<b>.hdf5    data u8 [rows, bytes]: codes of the chunks
    index/<type>/<string>/added_<f>_<g>.faissindex  the filled index; an id is a database row

f and g are the fractions of vectors to train on and to add. The processes embed blocks in parallel,
and an interrupted run resumes after the last complete block. Only the first process trains the
index and adds the codes. For an index that does not store entries individually (such as HNSW),
blocks contain vectors instead of codes: data f32 [rows, h].

Megatron-LM 23.08 adds the first fraction g of every block, so a search never finds the remaining
rows. Here the rows to add are evenly spaced, unless `compatible` is set.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.command import print_line
from megatron.config.retro_preprocessing import RetroPreprocessing
from megatron.device import Device
from megatron.durable import atomic_file, open_trusted, sync_folder, writing_to
from megatron.environment import cores_per_process
from megatron.errors import ConfigError, DataError
from megatron.extras import packages_of
from megatron.parallel.collectives import broadcast
from megatron.parallel.layout import Axis
from megatron.retro.blocks import (
    DataSet,
    TableBlock,
    blocks_to_do,
    on_first,
    open_block,
    plan_blocks,
    write_block,
)
from megatron.retro.embedding import DecodedChunks, Embedder, Vectors
from megatron.tokenizer import Tokenizer

_MEGATRON_WIDTH = 1024  # the only vector width that Megatron-LM reuses
_ADDED_AT_ONCE = 100_000

Rows = NDArray[np.int64]
BuildEmbedder = Callable[[], Embedder]


class ChunkTable(Protocol):
    """A table of chunks of tokens, such as a chunk database."""

    def __len__(self) -> int:
        """Return the number of chunks."""

    def tokens(self, chunk_ids: Rows) -> NDArray[np.int64]:
        """Return the tokens of chunks, `[n, m]`, padded with end-of-document tokens."""


class ChunkTexts(NamedTuple):
    """The texts of a table's chunks.

    Attributes:
        chunks: The tokens of the chunks.
        tokenizer: The tokenizer that produced the tokens.
        compatible: Whether to write end-of-document tokens into texts, as in Megatron-LM.
    """

    chunks: ChunkTable
    tokenizer: Tokenizer
    compatible: bool = False

    def between(self, start: int, stop: int) -> DecodedChunks:
        """Return the texts of chunks `start` to `stop - 1`."""
        tokens = self.chunks.tokens(np.arange(start, stop))
        return DecodedChunks(tokens, self.tokenizer, keeps_ends=self.compatible)


@dataclass(frozen=True)
class IndexOptions:
    """Settings for the index to build.

    Attributes:
        factory: The string for faiss's `index_factory`, such as "IVF262144_HNSW32,Flat".
        width: The length of a vector, h.
        type: "faiss-par-add" or "faiss-base". Both are built in parallel.
        block_size: The number of chunks in a block.
        train_fraction: The fraction of the sampled chunks to train on.
        add_fraction: The fraction of the chunks to add.
        keep_training_vectors: Whether to keep the files of training vectors.
        keep_codes: Whether to keep the files of codes after adding them.
        threads: The maximum number of faiss threads. `None` uses this process's share of the
            cores.
        compatible: Whether to reproduce Megatron-LM's bugs.
    """

    factory: str
    width: int
    type: str = "faiss-par-add"
    block_size: int = 100_000
    train_fraction: float = 1.0
    add_fraction: float = 1.0
    keep_training_vectors: bool = False
    keep_codes: bool = False
    threads: int | None = None
    compatible: bool = False

    @classmethod
    def of(cls, options: RetroPreprocessing) -> IndexOptions:
        """Return the index settings that the preprocessing options specify."""
        index = options.index
        return cls(
            factory=str(index.retro_index_str),
            width=index.retro_index_nfeats,
            type=index.retro_index_type,
            block_size=options.stages.retro_block_size,
            train_fraction=index.retro_index_train_load_fraction,
            add_fraction=index.retro_index_add_load_fraction,
            keep_training_vectors=not index.retro_index_delete_training_embeddings,
            keep_codes=not index.retro_index_delete_added_codes,
            threads=options.stages.retro_threads,
            compatible=options.stages.retro_compatible,
        )

    def selected_rows(self, block: TableBlock, fraction: float) -> Rows:
        """Select a fraction of a block's rows, in ascending order.

        The rows are evenly spaced over the table. With `compatible`, they are the first rows of the
        block, as in Megatron-LM.

        Returns:
            The row numbers in the table, `[n]`.
        """
        if self.compatible:
            return np.arange(block.start, block.start + int(fraction * block.rows))
        rows = np.arange(block.start, block.stop)
        return rows[np.floor((rows + 1) * fraction) > np.floor(rows * fraction)]


class IndexPaths(NamedTuple):
    """The files of an index in a working folder."""

    workdir: Path
    options: IndexOptions

    @property
    def training(self) -> Path:
        """The folder of the training vectors."""
        return self.workdir / "index" / "train_emb"

    @property
    def merged(self) -> Path:
        """The file of the merged training vectors."""
        return self.training / f"train_{self.options.train_fraction:.3f}.bin"

    @property
    def folder(self) -> Path:
        """The folder of the index."""
        return self.workdir / "index" / self.options.type / self.options.factory

    @property
    def empty(self) -> Path:
        """The file of the trained index, before chunks are added."""
        return self.folder / f"empty_{self.options.train_fraction:.3f}.faissindex"

    @property
    def added(self) -> Path:
        """The file of the filled index."""
        fractions = f"{self.options.train_fraction:.3f}_{self.options.add_fraction:.3f}"
        return self.folder / f"added_{fractions}.faissindex"

    @property
    def codes(self) -> Path:
        """The folder of the codes."""
        return self.folder / "add_codes"


def train_index(
    workdir: Path,
    options: IndexOptions,
    sampled: ChunkTexts,
    build_embedder: BuildEmbedder,
    world: Axis,
) -> None:
    """Embed the sampled chunks and train the index, unless the trained index exists. Collective.

    Finally, the training vectors are deleted unless `options.keep_training_vectors` is set.

    Args:
        workdir: The working folder.
        options: The index to build.
        sampled: The texts to train on.
        build_embedder: A function that loads the embedder. It is called only if vectors are
            missing.
        world: The processes that share the work.

    Raises:
        ConfigError: `check_factory` rejects the options, or the vectors have a different width.
        DataError: The existing index does not match, or there are too few vectors.
        StorageError: A file cannot be written.
    """
    paths = IndexPaths(workdir, options)
    if _exists_on_first(paths.empty, world):
        read_index(paths.empty, options)
    else:
        check_factory(options)
        blocks = plan_blocks(paths.training / "blocks", len(sampled.chunks), options.block_size)
        if not (
            _exists_on_first(paths.merged, world) and _is_complete(paths.merged, options, blocks)
        ):
            _embed_blocks(blocks, options, sampled, build_embedder, world)
        on_first(lambda: _train(paths, blocks), world)
    if not options.keep_training_vectors:
        on_first(lambda: shutil.rmtree(paths.training, ignore_errors=True), world)


def add_to_index(
    workdir: Path,
    options: IndexOptions,
    texts: ChunkTexts,
    build_embedder: BuildEmbedder,
    world: Axis,
) -> None:
    """Embed the database's chunks and add the selected ones to the trained index. Collective.

    An existing filled index is kept. Finally, the codes are deleted unless `options.keep_codes` is
    set.

    Args:
        workdir: The working folder.
        options: The index to build.
        texts: The texts of the database.
        build_embedder: A function that loads the embedder. It is called only if vectors are
            missing.
        world: The processes that share the work.

    Raises:
        ConfigError: The vectors have a different width. Or the index is complete, and `compatible`
            reproduces the error with which Megatron-LM's "faiss-par-add" then stops, unless
            `keep_codes` is set.
        DataError: The trained index is missing or does not match.
        StorageError: A file cannot be written.
    """
    paths = IndexPaths(workdir, options)
    if not _exists_on_first(paths.added, world):
        with faiss_threads(options.threads):
            index = read_index(paths.empty, options)
            codec = codec_of(index)
            blocks = plan_blocks(paths.codes, len(texts.chunks), options.block_size)
            embedder: Embedder | None = None
            for block in _log_progress(
                blocks_to_do(blocks, codec.contents, world), blocks, "encoded"
            ):
                embedder = embedder or check_width(build_embedder(), options)
                vectors = embedder.embed(texts.between(block.start, block.stop))
                write_block(block, {"data": codec.encode(vectors)})
        on_first(lambda: _add(paths, blocks), world)
    if options.keep_codes:
        return
    if options.compatible and options.type == "faiss-par-add":
        # Megatron-LM stops here with the message "remove?", having written the index but not
        # removed the codes.
        raise ConfigError(
            "remove? --retro-compatible stops here, as Megatron-LM 23.08 does: the index is "
            "complete; give --retro-index-no-delete-added-codes to continue"
        )
    on_first(lambda: shutil.rmtree(paths.codes, ignore_errors=True), world)


def _log_progress(missing: Iterator[TableBlock], blocks: Sequence[TableBlock], verb: str) -> Any:
    """Yield the missing blocks, and print the progress after each."""
    for block in missing:
        yield block
        print_line(f"  {verb} {block.start:,} to {block.stop - 1:,} of {blocks[-1].stop:,} chunks")


def _embed_blocks(
    blocks: Sequence[TableBlock],
    options: IndexOptions,
    texts: ChunkTexts,
    build_embedder: BuildEmbedder,
    world: Axis,
) -> None:
    """Write the vectors of all missing blocks. Collective."""
    # Megatron-LM reuses only vectors of BERT-large's width. It recomputes all others.
    width = _MEGATRON_WIDTH if options.compatible else options.width

    def contents(block: TableBlock) -> dict[str, DataSet]:
        return {"data": DataSet("f4", (block.rows, width))}

    embedder: Embedder | None = None
    for block in _log_progress(blocks_to_do(blocks, contents, world), blocks, "embedded"):
        embedder = embedder or check_width(build_embedder(), options)
        write_block(block, {"data": embedder.embed(texts.between(block.start, block.stop))})


def check_width(embedder: Embedder, options: IndexOptions) -> Embedder:
    """Return the embedder after checking that its vectors have the index's width.

    Raises:
        ConfigError: The vectors have a different width.
    """
    if embedder.width != options.width:
        raise ConfigError(
            f"--retro-index-nfeats {options.width}: the vectors of the BERT have "
            f"{embedder.width} numbers: give --retro-index-nfeats {embedder.width}"
        )
    return embedder


def _is_complete(merged: Path, options: IndexOptions, blocks: Sequence[TableBlock]) -> bool:
    """Return whether the file of training vectors has its full size."""
    count = sum(len(options.selected_rows(block, options.train_fraction)) for block in blocks)
    return merged.is_file() and merged.stat().st_size == count * options.width * 4


def _train(paths: IndexPaths, blocks: Sequence[TableBlock]) -> None:
    """Merge the training vectors and train the index."""
    options = paths.options
    if not _is_complete(paths.merged, options, blocks):

        def contents(block: TableBlock) -> dict[str, DataSet]:
            return {"data": DataSet("f4", (block.rows, options.width))}

        with writing_to("--retro-workdir", paths.merged):
            paths.training.mkdir(parents=True, exist_ok=True)  # missing if there are no blocks
            with atomic_file(paths.merged) as file:
                for block in blocks:
                    rows = options.selected_rows(block, options.train_fraction) - block.start
                    with open_block(block, contents) as sets:
                        file.write(sets["data"][()][rows].tobytes())
    if not paths.merged.stat().st_size:
        raise DataError(
            "--retro-index-ntrain: there are no chunks on which to train the index: raise it"
        )
    vectors = np.memmap(paths.merged, np.float32, "r").reshape(-1, options.width)
    with faiss_threads(options.threads) as faiss:
        print_line(f"  training {options.factory} on {len(vectors):,} vectors")
        index = faiss.index_factory(options.width, options.factory)
        inverted = faiss.try_extract_index_ivf(index)
        clustering = None
        if inverted is not None and _gpus(faiss):
            clustering = faiss.index_cpu_to_all_gpus(faiss.IndexFlatL2(inverted.d))
            inverted.clustering_index = clustering
        try:
            index.train(vectors)
        except RuntimeError as error:
            raise DataError(
                f"--retro-index-str {options.factory}: faiss cannot train it on {len(vectors):,} "
                f"vectors ({_reason(error)}): give a larger --retro-index-ntrain or a smaller index"
            ) from error
        _write_index(faiss, index, paths.empty)


def _add(paths: IndexPaths, blocks: Sequence[TableBlock]) -> None:
    """Add the codes of the blocks' selected rows to the trained index, with the rows as ids."""
    options = paths.options
    # Megatron-LM's faiss-base adds everything, regardless of the fraction in the file's name.
    adds_all = options.compatible and options.type == "faiss-base"
    fraction = 1.0 if adds_all else options.add_fraction
    with faiss_threads(options.threads) as faiss:
        index = read_index(paths.empty, options)
        codec = codec_of(index)
        for block in blocks:
            rows = options.selected_rows(block, fraction)
            for first in range(0, len(rows), _ADDED_AT_ONCE):
                batch = rows[first : first + _ADDED_AT_ONCE]
                low, high = int(batch[0]) - block.start, int(batch[-1]) + 1 - block.start
                with open_block(block, codec.contents) as sets:
                    data = sets["data"][low:high][batch - block.start - low]
                codec.add(data, batch)
        print_line(f"  {index.ntotal:,} of {blocks[-1].stop:,} chunks are in the index")
        _write_index(faiss, index, paths.added)


class Codec:
    """Encodes vectors as the codes that an index stores.

    Attributes:
        index: A trained faiss index.
        inverted: The index's inverted lists if they store entries individually, otherwise `None`.
    """

    def __init__(self, index: Any, inverted: Any) -> None:
        """Store the index."""
        self.index, self.inverted = index, inverted

    def contents(self, block: TableBlock) -> dict[str, DataSet]:
        """Return the data sets that a block of codes must contain."""
        if self.inverted is None:
            return {"data": DataSet("f4", (block.rows, self.index.d))}
        return {"data": DataSet("u1", (block.rows, self.index.sa_code_size()))}

    def encode(self, vectors: Vectors) -> NDArray[Any]:
        """Return the codes of vectors `[n, h]`, u8 `[n, bytes]`.

        If the index does not store entries individually, return the vectors unchanged.
        """
        codes: NDArray[Any] = vectors
        if self.inverted is not None:
            codes = self.index.sa_encode(vectors)
        return codes

    def add(self, codes: NDArray[Any], rows: Rows) -> None:
        """Add codes to the index, with their rows as ids.

        An index without ids numbers its entries from 0, so rows must be added in order and without
        gaps.

        Args:
            codes: The result of `encode`.
            rows: The database row of each code, `[n]`.
        """
        codes = np.ascontiguousarray(codes)
        if self.inverted is not None:
            self.inverted.add_sa_codes(codes, rows)
            self.index.ntotal = self.inverted.ntotal
        elif self.stores_ids:
            self.index.add_with_ids(codes, rows)
        else:
            self.index.add(codes)

    @cached_property
    def stores_ids(self) -> bool:
        """Whether the index stores the ids of its entries."""
        try:
            self.index.add_with_ids(np.empty((0, self.index.d), np.float32), np.empty(0, np.int64))
        except RuntimeError as error:
            return "not implemented" not in str(error)  # otherwise, the index is not trained yet
        return True


def codec_of(index: Any) -> Codec:
    """Return the codec that matches how a faiss index stores its entries."""
    with packages_of("retro"):
        import faiss
    inner = index
    while type(inner) is faiss.IndexPreTransform:
        inner = faiss.downcast_index(inner.index)
    # Other types pack the entries of a list together, or store entries outside the lists.
    separate = (faiss.IndexIVFFlat, faiss.IndexIVFPQ, faiss.IndexIVFScalarQuantizer)
    return Codec(index, inner if type(inner) in separate else None)


def check_factory(options: IndexOptions) -> None:
    """Check the flags that describe the index before anything is embedded.

    Raises:
        ConfigError: faiss rejects the --retro-index-str or is missing, the string contains "/", or
            the index cannot skip rows although `options.add_fraction` is below 1.
    """
    flag = f"--retro-index-str {options.factory}"
    with faiss_threads(options.threads) as faiss:
        try:
            index = faiss.index_factory(options.width, options.factory)
        except RuntimeError as error:
            raise ConfigError(
                f"{flag}: faiss cannot build such an index for vectors of {options.width} numbers "
                f"({_reason(error)}): give a string for faiss's index_factory, such as "
                "IVF4096_HNSW32,Flat"
            ) from error
        if "/" in options.factory:
            raise ConfigError(f"{flag}: the name of a folder cannot contain '/': remove it")
        codec = codec_of(index)
        if options.add_fraction < 1 and codec.inverted is None and not codec.stores_ids:
            raise ConfigError(
                f"--retro-index-add-load-fraction {options.add_fraction}: {options.factory} does "
                "not store the ids of its entries, so none can be skipped: drop the flag, or give "
                f"--retro-index-str IDMap,{options.factory}"
            )


def read_index(path: Path, options: IndexOptions, *, mapped: bool = False) -> Any:
    """Read an index that this program or Megatron-LM wrote.

    Args:
        path: The file. It must belong to this user or root, because faiss does not validate files.
        options: The expected index.
        mapped: Whether to memory-map the entries, so that processes on a machine share them. Index
            types that do not support this are read into memory.

    Raises:
        DataError: The file is missing or damaged, cannot be read or trusted, or contains a
            different or untrained index.
    """
    with packages_of("retro"):
        import faiss
    remedy = "run the task index-build again"
    try:
        with open_trusted(path) as file:
            flags = faiss.IO_FLAG_MMAP if mapped else 0
            index = faiss.read_index(f"/dev/fd/{file.fileno()}", flags)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: {remedy}") from None
    except PermissionError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}): if you trust it, make it your own and "
            "remove write access for others (chown, chmod go-w)"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}): {remedy}") from error
    except RuntimeError as error:
        raise DataError(
            f"{path}: not an index, or damaged ({_reason(error)}): remove it, and {remedy}"
        ) from error
    if index.d != options.width:
        raise DataError(
            f"{path} is an index for vectors of {index.d} numbers, but --retro-index-nfeats is "
            f"{options.width}: give {index.d}, or remove the file and {remedy}"
        )
    if not index.is_trained:
        raise DataError(f"{path} is not trained: remove it and {remedy}")
    return index


def on_device(index: Any, device: Device, neighbors: int) -> Any:
    """Copy an index to the GPU, or return it unchanged if faiss cannot search it there.

    On a GPU, the reason is then printed. Without a GPU, the index is always returned unchanged.

    Args:
        index: A filled index.
        device: The device of this process.
        neighbors: The number of neighbors per search.
    """
    with packages_of("retro"):
        import faiss
    device_index = device.torch_device.index or 0
    if not device.is_gpu:
        return index
    if device_index >= _gpus(faiss):
        print_line(
            "  the index stays on the CPU (this faiss cannot use GPUs: install a package that can, "
            "such as faiss-gpu-cu12, in place of faiss-cpu)"
        )
        return index
    try:
        on_gpu = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), device_index, index)
        on_gpu.search(np.zeros((1, index.d), np.float32), neighbors)
    except RuntimeError as error:  # unsupported type, too large, or too many neighbors or probes
        print_line(f"  the index stays on the CPU ({_reason(error)})")
        return index
    return on_gpu


def _gpus(faiss: Any) -> int:
    """Return the number of GPUs that this build of faiss can use."""
    return faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0


def _write_index(faiss: Any, index: Any, path: Path) -> None:
    with writing_to("--retro-workdir", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            try:
                faiss.write_index(index, f"/dev/fd/{file.fileno()}")
            except RuntimeError as error:  # a full disk, for example
                raise OSError(errno.EIO, _reason(error), str(path)) from error
        sync_folder(path.parent)


def _reason(error: RuntimeError) -> str:
    """Return the last sentence of a faiss error, without the function's signature."""
    return str(error).strip().splitlines()[-1].rpartition("Error: ")[2].strip() or str(error)


@contextmanager
def faiss_threads(threads: int | None) -> Iterator[Any]:
    """Yield the faiss module, limited to a number of threads inside the `with` body.

    Args:
        threads: The maximum number of threads. `None` uses this process's share of the cores.

    Raises:
        ConfigError: The package is missing.
    """
    with packages_of("retro"):
        import faiss
    previous = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads or cores_per_process())
    try:
        yield faiss
    finally:
        faiss.omp_set_num_threads(previous)


def _exists_on_first(path: Path, world: Axis) -> bool:
    """Return, on all processes, whether a file exists on the first process. Collective."""
    return bool(broadcast(torch.tensor([int(path.exists())]), world))
