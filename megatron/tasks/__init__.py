"""Downstream tasks: evaluation of language models, and finetuning. `tasks/main.py` runs them.

main                                  the command
table                                 the names of all tasks
language_model, neighbors, harness    evaluation of language models
dialogue                              dialogue prompting
finetune_command, towers              finetuning of classifiers and bi-encoders
retrieval                             the search for passages that answer questions
"""
