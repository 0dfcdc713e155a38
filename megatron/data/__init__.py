"""Text files to token ids, and token ids to micro-batches.

    preprocess, text_input              text to `.bin` and `.idx` files, before any training
    indexed                             those files
    datasets, cache                     the datasets that the flags name: splits, blends, caches
    gpt                                 samples of a GPT, and its micro-batches
    bert, t5                            samples of the others, which are made of sentences
    sentences, sentence_map, masking    runs of sentences, and which of their words are hidden
    mock                                generated tokens for all three
    sample, loader                      what a sample is; which come when; batches of them

The order of samples is decided by pure functions of seed, data and counts, so a run can continue
from any of them. A new kind of sample is one module that calls `datasets.build_datasets`.
"""
