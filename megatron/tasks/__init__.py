"""Downstream tasks: evaluation of language models, and finetuning. `tasks/main.py` runs them.

    main             the command
    table            the names of all tasks

`language_model`, `neighbors` and `harness` evaluate, `dialogue` prompts, `finetune_command` trains
a classifier, and `retrieval` searches passages for answers.
"""
