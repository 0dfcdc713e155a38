"""What finetuning adds to training.

distillation   a student's losses, from a teacher on the same processes or from its logits
teacher        loads the teacher, and writes its logits of all training samples
"""
