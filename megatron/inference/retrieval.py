"""`megatron generate` for a Retro: a text, and the passages that the model read while it wrote."""

from __future__ import annotations

import numpy as np

from megatron.command import format_panel
from megatron.config import ParsedRun
from megatron.config.generation import SamplesConfig
from megatron.errors import EXIT_OK, ConfigError, say_on_stderr
from megatron.inference.load import load_gpt, model_rows
from megatron.inference.request import Sampling
from megatron.inference.text import Detokenizer
from megatron.processes.launch import Launch
from megatron.processes.process import processes, show_notices
from megatron.retro.generation import open_retriever, write

_SHOWN = 300  # characters of a passage


def run_retro(program: str, parsed: ParsedRun, launch: Launch) -> int:
    """Continue --prompt, print the text and then the passages, and return the exit code.

    Raises:
        UserError: A flag, the checkpoint or the working folder must be changed.
    """
    config = parsed.config
    samples: SamplesConfig
    (samples,) = parsed.extra
    show_notices(parsed.notices, launch, say_on_stderr)
    if samples.prompt is None or samples.num_samples > 1:
        raise ConfigError("a Retro continues a single prompt: give --prompt TEXT alone")
    if launch.world_size > 1:
        raise ConfigError(
            f"{launch.world_size} processes: a Retro generates text on a single one: launch one"
        )
    with processes(config, launch) as (device, layout):
        folder = config.checkpoint.load
        assert folder is not None, "a rule requires it"
        loaded = load_gpt(folder, device, layout, config=config, row_by_row=False, kinds=("retro",))
        retriever = open_retriever(config, loaded.tokenizer, device, samples.bert_embedder_load)
        about = ("passages", f"{config.data.retro_workdir}, for each complete chunk")
        say_on_stderr(format_panel(program, [*model_rows(loaded, device), about]))
        sampling = Sampling(
            max_new_tokens=samples.out_seq_length,
            temperature=0.0 if samples.greedy else samples.temperature,
            top_k=samples.top_k,
            top_p=samples.top_p,
            stop_tokens=(loaded.tokenizer.eod,),
        )
        prompt = loaded.tokenizer.tokenize_open(samples.prompt)
        text = Detokenizer(loaded.tokenizer, prompt)
        print(samples.prompt, end="", flush=True)
        neighbors = np.empty((0, config.model.retro_num_neighbors), np.int64)
        for written in write(loaded, retriever, prompt, sampling, device, config.training.seed):
            neighbors = written.neighbors
            if written.token != loaded.tokenizer.eod:
                print(text.add(written.token), end="", flush=True)
        print(text.rest())
        for passage in retriever.passages(neighbors):
            shown = passage.text[:_SHOWN].replace("\n", " ")
            print(
                f"----- chunk {passage.chunk + 1} read document {passage.document} of corpus "
                f"{passage.corpus}: {shown}"
            )
    return EXIT_OK
