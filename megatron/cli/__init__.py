"""The command line `megatron`. `main` has the table of commands and runs the requested one.

    main             the table of commands, and commands that only pass on their arguments
    pretrain         `megatron pretrain` and `finetune`: a recipe, and the processes that train it
    recipes          `megatron recipes`
    health           `megatron health`

A command that a module outside this folder implements needs only a line in the table.
"""
