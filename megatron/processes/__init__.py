"""What runs before there is a model: how the processes of a job start, meet and end.

    launch    who this process is, from the launcher's variables
    process   one process from start to exit code; its device and layout
    groups    process groups, once every device has what the run needs
    ending    errors that end the run of all processes, and requests to leave early
    watchdog  why a run hangs, and how all processes end when one hangs or fails

Training, inference, tasks and tools start their processes here.
"""
