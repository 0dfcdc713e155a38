"""Job files for clusters, from one description of a run.

    description  the command, its resources and its cluster, from a YAML file and flags, checked
    command      the command line: render the job file, and print, write or submit it

A job starts one launcher (`megatron.processes.torchrun`) on each node. Every value that reaches a
template (in templates/) is quoted for the language of the job file.
"""
