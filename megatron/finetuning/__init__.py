"""What finetuning adds to training.

distillation   a student's losses, from a teacher on the same processes or from its logits
teacher        loads the teacher, and writes its logits of all training samples

    preference_losses   DPO and its variants, as functions of log-probabilities
    documents           log-probabilities of the documents of packed rows
    preferences         the recipe of training on pairs of a chosen and a rejected answer
    reference           the reference model's log-probabilities, computed once and kept

    rollouts   reinforcement learning: rows of a model's own answers, and their log-probabilities
"""
