"""Detoxification of a GPT by training it on the least toxic of its own texts.

    annotate           adds scores to texts, and continues where it was stopped
    scorers            what computes the scores of texts, in their order
    perspective        the client of the Perspective API
    select_texts       keeps the texts with the lowest scores
    evaluate           measures how toxic a model's continuations of prompts are

The other steps are the programs that everyone uses: `megatron generate`, `data preprocess`,
`pretrain_gpt.py --finetune` and `evaluate PERPLEXITY`. See docs/detoxify.md.
"""
