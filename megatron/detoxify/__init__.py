"""Detoxification of a GPT by training it on the least toxic of its own texts.

    annotate           adds scores to texts, and resumes an interrupted run
    scorers            the sources of scores: a classifier or the Perspective API
    perspective        the client of the Perspective API
    select_texts       selects the texts with the lowest scores
    evaluate           measures how toxic a model's continuations of prompts are

The other steps use the general programs: `megatron generate`, `data preprocess`,
`pretrain_gpt.py --finetune` and `evaluate PERPLEXITY`. See docs/detoxify.md.
"""
