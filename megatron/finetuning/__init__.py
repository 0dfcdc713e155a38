"""Additions to training for finetuning.

distillation   a student's losses, given a teacher on the same processes or its logits
teacher        loads the teacher, and writes its logits for all training samples

documents      log-probabilities of the documents of packed rows
preferences    DPO and its variants, and reward models: training on pairs of answers
kto            training on single answers, each labeled desirable or undesirable
reference      the reference model's log-probabilities, computed once and stored

rollouts       reinforcement learning: rows of a model's own answers, and their log-probabilities
"""
