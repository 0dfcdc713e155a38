"""From files of token ids to micro-batches.

    preprocess, text_input, documents   text to `.bin` and `.idx` (`indexed`), before any training
    build, members, splits, blend       which datasets the flags name
    gpt, gpt_index                      samples of a GPT: pure functions of seed and number
    bert, t5, sentence_map, masking     samples of the others
    samplers, loader                    which samples come when, and the batches of them

What decides the order of samples are pure functions: a run goes on from any of them.
"""
