"""The command line `megatron`. `main` has the table of commands, and finds the one asked for.

    main             the table of commands
    pretrain         `megatron pretrain` and `finetune`: a recipe, and the processes that train it
    recipes          `megatron recipes`
    chat             `megatron chat`
    programs         commands that only hand their words on

A command for which there is a module elsewhere is a line of the table alone.
"""
