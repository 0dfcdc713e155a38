"""Options for `tasks/main.py`: evaluation and finetuning on downstream tasks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Task.

    Attributes:
        task: Task to run. docs/tasks.md lists the tasks.
        valid_data: Files (folders for RACE) to evaluate on.
        results: JSON file for the results. Default: TASK-iter_N.json in a folder `evaluation` next
            to the checkpoint.
        overwrite: Replace an existing --results file.
    """

    task: str | None = None
    valid_data: tuple[str, ...] | None = None
    results: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class LanguageModelTaskConfig:
    """Language model tasks.

    Attributes:
        overlapping_eval: Tokens by which the evaluation window advances.
        strict_lambada: LAMBADA: require all tokens of the last word to be correct. Off: only the
            last token.
        detokenizer: How to undo a corpus's own tokenization. Default: chosen by `wiki`, `ptb` or
            `lambada` in the path of --valid-data, otherwise none.
        retro_eval_samples: PERPLEXITY of Retro: number of validation samples of --retro-workdir to
            evaluate on. Default: all.
        bert_embedder_load: PERPLEXITY of Retro on --valid-data: folder or name of the network that
            embeds chunks. Default: the one that --retro-workdir was created with.
    """

    overlapping_eval: int = flag(32, unit="tokens")
    strict_lambada: bool = False
    detokenizer: str | None = flag(None, choices=("wikitext", "ptb", "none"))
    retro_eval_samples: int | None = flag(None, unit="samples", at_least=1)
    bert_embedder_load: str | None = None


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """EleutherAI's lm-evaluation-harness (--task LM_EVAL).

    Attributes:
        lm_eval_tasks: Names of harness tasks or groups, patterns, or YAML task files.
        lm_eval_include_path: Folder with additional task files. Their code is executed.
        lm_eval_num_fewshot: Examples before each question. Default: each task's own setting.
        lm_eval_limit: Number of documents to use from each task, or a fraction if below 1. Default:
            all.
    """

    lm_eval_tasks: tuple[str, ...] | None = None
    lm_eval_include_path: str | None = None
    lm_eval_num_fewshot: int | None = flag(None, unit="examples")
    lm_eval_limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class DialogueConfig:
    """Multi-stage dialogue prompting (--task MSDP-PROMPT and MSDP-EVAL-F1).

    Attributes:
        prompt_type: What the model writes: knowledge about the topic, or the response to the user.
        prompt_file: File with the examples. For knowledge: JSON lines that give a list of examples
            for each "TOPIC LAST_TURN". For responses: one example in each line.
        num_prompt_examples: Number of lines of --prompt-file to use, with --prompt-type response.
        sample_input_file: Dialogues to continue. The columns are separated by tabs: topic, turns
            separated by " [SEP] ", and, for responses, knowledge.
        sample_output_file: File for the generated texts, one line for each dialogue. Default:
            --sample-input-file with .out added.
        out_seq_length: Maximum number of tokens to write for a dialogue.
        api_prompt: Ask the server at --megatron-api-url instead of loading a model.
        megatron_api_url: Address of a text generation server, such as http://localhost:5000/api.
        guess_file: File with the texts that a model wrote, one line for each dialogue.
        answer_file: File with the expected texts, one line for each dialogue.
    """

    prompt_type: str | None = flag(None, choices=("knowledge", "response"))
    prompt_file: str | None = None
    num_prompt_examples: int = flag(10, unit="examples", at_least=1)
    sample_input_file: str | None = None
    sample_output_file: str | None = None
    out_seq_length: int = flag(100, unit="tokens", at_least=1)
    api_prompt: bool = False
    megatron_api_url: str | None = None
    guess_file: str | None = None
    answer_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Finetuning tasks (GLUE and RACE).

    Attributes:
        train_data: Files (folders for RACE) to train on.
        epochs: Passes over --train-data. 0 only evaluates.
        pretrained_checkpoint: Folder with the pretrained BERT to start from, in the native,
            Megatron-LM or Hugging Face format.
        keep_last: Carry the samples of an incomplete last batch over to the first batch of the next
            epoch. Off: leave them out.
    """

    train_data: tuple[str, ...] | None = None
    epochs: int | None = flag(None, unit="epochs")
    pretrained_checkpoint: str | None = None
    keep_last: bool = False


@dataclass(frozen=True, kw_only=True)
class TowersConfig:
    """Finetuning of a bi-encoder (RET-FINETUNE-NQ).

    Attributes:
        train_with_neg: Also compare each question with its own wrong passages, not only with the
            passages of other questions.
        train_hard_neg: With --train-with-neg, number of wrong passages per question. Hard negatives
            are drawn again in each epoch. If a question has too few of them, other negatives are
            used instead.
        val_av_rank_hard_neg: Number of hard negatives per question in evaluations.
        val_av_rank_other_neg: Number of other negatives per question in evaluations.
        eval_micro_batch_size: Questions whose passages are ranked together in evaluations. Default:
            --micro-batch-size.
    """

    train_with_neg: bool = False
    train_hard_neg: int = flag(0, unit="passages", at_least=0)
    val_av_rank_hard_neg: int = flag(30, unit="passages", at_least=0)
    val_av_rank_other_neg: int = flag(30, unit="passages", at_least=0)
    eval_micro_batch_size: int | None = flag(None, unit="questions", at_least=1)


@dataclass(frozen=True, kw_only=True)
class RetrieverTextConfig:
    """Texts of a bi-encoder (RET-FINETUNE-NQ and RETRIEVER-EVAL).

    Attributes:
        retriever_seq_length: Maximum length of a question or passage in tokens. Longer ones are
            truncated.
    """

    retriever_seq_length: int = flag(256, unit="tokens", at_least=3)


@dataclass(frozen=True, kw_only=True)
class RetrieverTaskConfig:
    """Retrieval (ORQA).

    Attributes:
        evidence_data_path: Passages to search: a file of lines `id <tab> text <tab> title` after a
            header.
        qa_data_dev: Questions for development: a file of lines `question <tab> ['answer', ...]`.
        qa_data_test: Questions of the test set, in the format of --qa-data-dev.
        embedding_path: File for the vectors of the passages. If the file already contains the
            vectors for this checkpoint and these passages, they are not computed again. By default
            no file is written.
        indexer_batch_size: Passages that each process embeds at a time.
        indexer_log_interval: Batches of passages between two lines of progress.
        faiss_use_gpu: Search on GPUs.
        faiss_match: How an answer is recognized in a passage: as a sequence of words (string), or
            as a regular expression (regex).
        faiss_topk_retrievals: Passages to retrieve for each question.
    """

    evidence_data_path: str | None = None
    qa_data_dev: str | None = None
    qa_data_test: str | None = None
    embedding_path: str | None = None
    indexer_batch_size: int = flag(128, unit="passages", at_least=1)
    indexer_log_interval: int = flag(1000, unit="batches", at_least=1)
    faiss_use_gpu: bool = False
    faiss_match: str = flag("string", choices=("string", "regex"))
    faiss_topk_retrievals: int = flag(100, unit="passages", at_least=1)
