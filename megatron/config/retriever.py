"""Options for a bi-encoder: its towers, the text it is trained on, and its scores."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import flag

# Names of a bi-encoder's towers. The names of their parameters begin with them, as in Megatron.
SHARED, QUERY, CONTEXT = TOWERS = ("shared_model", "query_model", "context_model")


@dataclass(frozen=True, kw_only=True)
class RetrieverConfig:
    """Retrieval (ICT).

    Attributes:
        bert_load: Folder with the pretrained BERT from which both towers of a bi-encoder start, in
            the native, Megatron-LM or Hugging Face format. Only the first start of a run reads it.
        titles_data_path: Prefix of the dataset with the title of each document of --data-path.
        query_in_block_prob: Probability that the sentence that serves as the query also stays in
            its block.
        use_one_sent_docs: Also use documents and blocks of a single sentence. If the sentence is
            removed from such a block, only the block's title is left.
        retriever_report_topk_accuracies: For each of these k, report the percentage of queries
            whose block is among the k with the highest scores.
        retriever_score_scaling: Divide scores by the square root of --hidden-size.
    """

    bert_load: str | None = flag(None, only_for=("ict",))
    titles_data_path: str | None = flag(None, only_for=("ict",))
    query_in_block_prob: float = flag(0.1, unit="0 to 1", at_least=0, at_most=1, only_for=("ict",))
    use_one_sent_docs: bool = flag(False, only_for=("ict",))
    retriever_report_topk_accuracies: tuple[int, ...] = flag((), at_least=1, only_for=("ict",))
    retriever_score_scaling: bool = flag(False, only_for=("ict",))
