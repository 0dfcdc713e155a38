"""Job files for clusters, from one description of a run.

    description  what is to run, and on what: a YAML file or flags, checked
    hosts        hostfiles of MPI and DeepSpeed
    render       the job files, from the Jinja2 templates in templates/
    command      the command line: print, write or submit

A job starts one launcher (`megatron.processes.torchrun`) on each node. Values reach a template only
quoted for the language of the file.
"""
