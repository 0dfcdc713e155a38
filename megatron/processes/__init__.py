"""The processes of a job: how they start, connect to each other and end.

    torchrun    our launcher, which extends torchrun and exits with the code of the run
    warm        ranks forked from a process that has imported the script's modules
    launch      the rank of this process, from the launcher's variables
    process     runs one process from its start to its exit code, with its device and layout
    groups      process groups, formed once every device meets the requirements of the run
    ending      errors that end the run on all processes, and requests to exit early
    crashes     a log of the run's failures, used to end crash loops
    faults      faults that are injected into a process on purpose
    watchdog    reports why a run hangs, and ends all processes when one hangs or fails
    hang_files  files that record what every rank was doing when the run hung

Training, inference, tasks and tools start their processes here.
"""
