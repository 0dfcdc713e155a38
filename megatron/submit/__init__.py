"""Job files for clusters, from one description of a run.

    description  the command, its resources and its cluster, from a YAML file and flags, checked
    hosts        hostfiles of MPI and DeepSpeed
    render       the job files, from the Jinja2 templates in templates/
    command      the command line: print, write or submit

A job starts one launcher (`megatron.processes.torchrun`) on each node. Every value that reaches a
template is quoted for the language of the job file.
"""
