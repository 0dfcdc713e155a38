"""The command line `megatron`. `main` has the table of commands and runs the one that is named.

    main             the table of commands, and those that only pass their words on
    pretrain         `megatron pretrain` and `finetune`: a recipe, and the processes that train it
    recipes          `megatron recipes`

A command that is a module elsewhere needs only a line in the table.
"""
