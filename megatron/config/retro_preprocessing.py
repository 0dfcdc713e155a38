"""Options for `tools/retro/main.py`, named as in Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron.config.data import TOKENIZER_TYPES, TokenizerConfig
from megatron.config.fields import MAX_IDS, fields_of, flag

# The tasks that --retro-tasks accepts, in order, with the components of combined tasks.
STAGES = ("db-build", "index-train", "index-add", "query-pretraining-neighbors")
_TASKS: Mapping[str, tuple[str, ...]] = {
    "build": STAGES,
    "index-build": ("index-train", "index-add"),
    **{stage: (stage,) for stage in STAGES},
}
EMBEDDER_TYPES = ("megatron", "huggingface")
INDEX_TYPES = ("faiss-base", "faiss-par-add")


@dataclass(frozen=True, kw_only=True)
class RetroStagesConfig:
    """Retro preprocessing.

    Attributes:
        retro_workdir: Working folder, which all machines share.
        retro_tasks: Stages to run, separated by commas: build (all of them), db-build, index-build
            (index-train and index-add), query-pretraining-neighbors.
        retro_block_size: Number of chunks in a file of embeddings or neighbors. After an
            interruption, work continues with the first file that is missing.
        retro_doc_block_size: Number of documents in a file of chunks.
        retro_compatible: Reproduce the bugs of Megatron-LM's preprocessing (docs/retro.md has the
            list), so that the files are identical to the ones that it writes.
        retro_threads: Number of faiss threads in each process. Default: an equal share of the
            cores.
        retro_return_doc_ids: Accepted for old scripts; no effect. Neighbors from a sample's own
            documents are always left out.
    """

    retro_workdir: str | None = flag(None, required="required")
    retro_tasks: str = "build"
    retro_block_size: int = flag(100_000, unit="chunks", at_least=1)
    retro_doc_block_size: int = flag(100_000, unit="documents", at_least=1)
    retro_compatible: bool = False
    retro_threads: int | None = flag(None, unit="threads", at_least=1)
    retro_return_doc_ids: bool = False

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages to run, in their order, each once."""
        requested = {
            stage for task in self.retro_tasks.split(",") for stage in _TASKS.get(task, ())
        }
        return tuple(stage for stage in STAGES if stage in requested)


@dataclass(frozen=True, kw_only=True)
class RetroGPTConfig:
    """Retro preprocessing: the GPT that will be trained.

    Attributes:
        retro_gpt_data_path: Indexed datasets, as WEIGHT PREFIX WEIGHT PREFIX ... or one PREFIX.
        retro_gpt_split: Shares of the documents for training, validation and test. Only chunks of
            training documents are retrieved.
        retro_gpt_seed: Seed for the sample order.
        retro_gpt_seq_length: Sequence length of the GPT.
        retro_gpt_chunk_length: Length of a chunk. It divides the sequence length.
        retro_gpt_eval_interval: Number of iterations between evaluations of the training run.
        retro_gpt_eval_iters: Number of batches in an evaluation.
        retro_gpt_global_batch_size: Accepted for old scripts; no effect. --global-batch-size is the
            batch size of the training run.
        retro_gpt_tokenizer_type: Type of the tokenizer that made the datasets.
        retro_gpt_vocab_file: Vocabulary file of GPT-2's tokenizer.
        retro_gpt_merge_file: Merges file of GPT-2's tokenizer.
        retro_gpt_tokenizer_model: File or folder of any other tokenizer.
        retro_gpt_data_impl: Accepted for old scripts; no effect.
        retro_gpt_mmap_warmup: Accepted for old scripts; no effect.
    """

    retro_gpt_data_path: tuple[str, ...] | None = flag(None, required="required")
    retro_gpt_split: str = "969,30,1"
    retro_gpt_seed: int = flag(1234, at_least=0)
    retro_gpt_seq_length: int | None = flag(
        None, unit="tokens", at_least=1, at_most=MAX_IDS, required="required"
    )
    retro_gpt_chunk_length: int = flag(64, unit="tokens", at_least=1, at_most=MAX_IDS)
    retro_gpt_eval_interval: int | None = flag(None, unit="iterations", at_least=1)
    retro_gpt_eval_iters: int | None = flag(None, unit="iterations", at_least=0)
    retro_gpt_global_batch_size: int | None = flag(None, unit="samples")
    retro_gpt_tokenizer_type: str | None = flag(None, choices=TOKENIZER_TYPES, required="required")
    retro_gpt_vocab_file: str | None = None
    retro_gpt_merge_file: str | None = None
    retro_gpt_tokenizer_model: str | None = None
    retro_gpt_data_impl: str = flag("infer", choices=("mmap", "infer", "lazy", "cached"))
    retro_gpt_mmap_warmup: bool = False

    @property
    def tokenizer(self) -> TokenizerConfig:
        """The tokenizer of the datasets."""
        return TokenizerConfig(
            tokenizer_type=self.retro_gpt_tokenizer_type,
            vocab_file=self.retro_gpt_vocab_file,
            merge_file=self.retro_gpt_merge_file,
            tokenizer_model=self.retro_gpt_tokenizer_model,
        )


@dataclass(frozen=True, kw_only=True)
class RetroEmbeddingConfig:
    """Retro preprocessing: embeddings of the chunks.

    Attributes:
        bert_embedder_type: Network that computes the embeddings: megatron (the BERT in --load) or
            huggingface (a sentence encoder).
        bert_embedder_load: Folder of the embedding network. Default: --load.
        retro_bert_tokenizer_type: Type of BERT's tokenizer.
        retro_bert_vocab_file: BERT's vocabulary file.
        retro_bert_batch_size: Number of chunks to embed at a time.
        retro_bert_max_chunk_length: Maximum length of a text in BERT's tokens. Longer texts are
            truncated.
        output_bert_embeddings: Accepted for old scripts; no effect.
    """

    bert_embedder_type: str = flag("megatron", choices=EMBEDDER_TYPES)
    bert_embedder_load: str | None = None
    retro_bert_tokenizer_type: str | None = flag(
        None, choices=tuple(kind for kind in TOKENIZER_TYPES if kind.startswith("BertWordPiece"))
    )
    retro_bert_vocab_file: str | None = None
    retro_bert_batch_size: int = flag(128, unit="chunks", at_least=1)
    retro_bert_max_chunk_length: int = flag(256, unit="tokens", at_least=3, at_most=MAX_IDS)
    output_bert_embeddings: bool = False

    @property
    def tokenizer(self) -> TokenizerConfig:
        """BERT's tokenizer."""
        return TokenizerConfig(
            tokenizer_type=self.retro_bert_tokenizer_type, vocab_file=self.retro_bert_vocab_file
        )


@dataclass(frozen=True, kw_only=True)
class RetroIndexConfig:
    """Retro preprocessing: index and neighbors.

    Attributes:
        retro_index_type: How chunks are added to the index: faiss-par-add (in parallel, block by
            block) or faiss-base (by one process).
        retro_index_str: Description of the index for faiss.index_factory.
        retro_index_nfeats: Width of an embedding.
        retro_index_ntrain: Number of chunks that the index is trained on.
        retro_index_train_load_fraction: Fraction of the --retro-index-ntrain chunks to use.
        retro_index_add_load_fraction: Fraction of the chunks to add to the index.
        retro_index_delete_training_embeddings: Delete the embeddings of the training chunks once
            the index is trained.
        retro_index_delete_added_codes: Delete the codes of the chunks once they are in the index.
        retro_query_ef_search: Number of candidates that HNSW considers in a search.
        retro_query_nprobe: Number of index lists that a search visits.
        retro_query_num_neighbors_query: Number of neighbors to search for.
        retro_query_num_neighbors_save: Number of neighbors to keep.
    """

    retro_index_type: str = flag("faiss-par-add", choices=INDEX_TYPES)
    retro_index_str: str | None = None
    retro_index_nfeats: int = flag(1024, at_least=1, at_most=MAX_IDS)
    retro_index_ntrain: int | None = flag(None, unit="chunks", at_least=1)
    retro_index_train_load_fraction: float = flag(1.0, unit="0 to 1", above=0, at_most=1)
    retro_index_add_load_fraction: float = flag(1.0, unit="0 to 1", above=0, at_most=1)
    retro_index_delete_training_embeddings: bool = flag(
        True, off="--retro-index-no-delete-training-embeddings"
    )
    retro_index_delete_added_codes: bool = flag(True, off="--retro-index-no-delete-added-codes")
    retro_query_ef_search: int = flag(256, at_least=1)
    retro_query_nprobe: int = flag(65536, at_least=1)
    retro_query_num_neighbors_query: int = flag(200, unit="chunks", at_least=1)
    retro_query_num_neighbors_save: int = flag(20, unit="chunks", at_least=1)


@dataclass(frozen=True)
class RetroPreprocessing:
    """All options of the preprocessing except those of BERT's run."""

    stages: RetroStagesConfig = RetroStagesConfig()
    gpt: RetroGPTConfig = RetroGPTConfig()
    embedding: RetroEmbeddingConfig = RetroEmbeddingConfig()
    index: RetroIndexConfig = RetroIndexConfig()

    @property
    def values(self) -> dict[str, Any]:
        """All values by field name."""
        parts: tuple[Any, ...] = (self.stages, self.gpt, self.embedding, self.index)
        return {entry.name: getattr(part, entry.name) for part in parts for entry in fields(part)}


RETRO_SECTIONS = (RetroStagesConfig, RetroGPTConfig, RetroEmbeddingConfig, RetroIndexConfig)

# Flags without which a stage cannot run.
_ALWAYS_REQUIRED = (
    *("retro_workdir", "retro_gpt_data_path", "retro_gpt_seq_length"),
    *("retro_gpt_tokenizer_type", "retro_index_ntrain"),
)
_REQUIRED_BY_STAGE: Mapping[str, tuple[str, ...]] = {
    "db-build": ("retro_bert_tokenizer_type", "retro_bert_vocab_file"),
    "index-train": ("retro_index_str",),
    "index-add": ("retro_index_str",),
    "query-pretraining-neighbors": (
        *("retro_index_str", "retro_gpt_eval_interval", "retro_gpt_eval_iters"),
    ),
}
_BERT_TOKENIZER = ("retro_bert_tokenizer_type", "retro_bert_vocab_file")


def find_mistakes(*parts: Any) -> Iterator[str]:
    """Yield a line for each mistake in instances of `RETRO_SECTIONS`."""
    options = RetroPreprocessing(*parts)
    values = options.values
    known = {field.name: field for section in RETRO_SECTIONS for field in fields_of(section)}
    tasks = options.stages.retro_tasks.split(",")
    for task in tasks:
        if task not in _TASKS:
            yield f"--retro-tasks {task!r}: expected {', '.join(_TASKS)}, separated by commas"
    for name, field in known.items():
        rule = "" if field.many else field.out_of_bounds(values[name])
        if rule:
            yield f"{field.names[0]} {values[name]}: {rule}"
    required = dict.fromkeys(_ALWAYS_REQUIRED)
    for stage in options.stages.stages:
        required |= dict.fromkeys(_REQUIRED_BY_STAGE[stage])
    if options.embedding.bert_embedder_type == "megatron":
        required |= dict.fromkeys(_BERT_TOKENIZER)
    for name in required:
        if not values[name]:
            yield f"{known[name].names[0]} is required: give it a value"
    sequence, chunk = options.gpt.retro_gpt_seq_length, options.gpt.retro_gpt_chunk_length
    if sequence and chunk >= 1 and sequence % chunk:
        yield (
            f"--retro-gpt-seq-length {sequence} is not a multiple of --retro-gpt-chunk-length "
            f"{chunk}: change one of them"
        )
    index = options.index
    too_few = index.retro_query_num_neighbors_query < index.retro_query_num_neighbors_save
    if too_few and not options.stages.retro_compatible:
        yield (
            f"--retro-query-num-neighbors-save {index.retro_query_num_neighbors_save} is more than "
            f"--retro-query-num-neighbors-query {index.retro_query_num_neighbors_query} finds: "
            "lower it, or search for more"
        )
