"""The rows of the table, in its order."""

from __future__ import annotations

from tests.reliability.scoreboard.caches import attacked_caches
from tests.reliability.scoreboard.corpora import (
    bad_lines,
    changed_indexes,
    cut_corpora,
    other_settings,
)
from tests.reliability.scoreboard.damage import damaged_files, torn_trackers
from tests.reliability.scoreboard.disks import failing_disk, full_disk, shared_folders
from tests.reliability.scoreboard.forgery import forged_tables
from tests.reliability.scoreboard.gpus import restarts_on_gpus, saving_throughput
from tests.reliability.scoreboard.hangs import hanging_ranks
from tests.reliability.scoreboard.hostile import every_reader, hostile_pickles
from tests.reliability.scoreboard.kills import (
    killed_at_every_call,
    killed_in_a_background_save,
    killed_in_a_save,
)
from tests.reliability.scoreboard.layouts import all_layouts
from tests.reliability.scoreboard.limits import merely_large
from tests.reliability.scoreboard.malice import malicious_files
from tests.reliability.scoreboard.mute import mute_store
from tests.reliability.scoreboard.numbers import flipped_bits, slow_ranks, spoiled_batches
from tests.reliability.scoreboard.partition import cut_network
from tests.reliability.scoreboard.recovery import (
    killed_ranks,
    leaks,
    not_finite,
    soaked,
    verification,
)
from tests.reliability.scoreboard.runs import (
    fresh_runs,
    jumping_clock,
    resumed_runs,
    sample_order,
    terminated,
    waiting_time,
)
from tests.reliability.scoreboard.score import Row
from tests.reliability.scoreboard.serving import (
    crowded_server,
    fuzzed_requests,
    guarded_server,
    hostile_texts,
)
from tests.reliability.scoreboard.source import banned_calls
from tests.reliability.scoreboard.untrusted import hostile_checkpoints

ROWS: tuple[Row, ...] = (
    Row(
        1,
        "SIGKILL to one of two ranks at a random time of training, under `torchrun --max-restarts`:"
        " the run resumes by itself, the next step follows within 15 s, no more than the steps "
        "since the last checkpoint are repeated, and all losses are those of an undisturbed run, "
        "bit for bit",
        killed_ranks,
        full=20,
        quick=0,  # tested by tests/reliability/test_restarts.py
    ),
    Row(
        2,
        "SIGKILL to one of two ranks at a random time during a save: the newest complete "
        "checkpoint loads, with nothing mixed in; the other rank ends; the next save cleans up",
        killed_in_a_save,
        full=100,
        quick=3,
    ),
    Row(
        3,
        "the same with `--async-save` and `--keep-latest`; the tracker, read every millisecond,"
        " never names a checkpoint that does not verify",
        killed_in_a_background_save,
        full=100,
        quick=3,
    ),
    Row(
        4,
        "SIGKILL at every system call of a save (new, replacing, with retention, in the "
        "background): the run resumes",
        killed_at_every_call,
        full=100,
        quick=2,
    ),
    Row(
        5,
        "40 iterations in one run, compared with 20 and 20 with a restart between them, with "
        "dropout, in 12 layouts and formats, some with `--async-save`: losses, weights, moments"
        " and position are equal bit for bit on every rank",
        resumed_runs,
        full=12,
        quick=1,
    ),
    Row(
        6,
        "checkpoints of all layouts of tensor {1, 2} x pipeline {1, 2} x data {1, 2, 4} x ZeRO "
        "{0, 1, 3}, each loaded into each: parameters, moments and position are equal bit for "
        "bit, and the next loss of each layout is within 1e-5 of a single process's",
        all_layouts,
        full=36,
        quick=3,
    ),
    Row(
        7,
        "a run that continues with 4, 2, 1 and 3 processes, in all orders, and runs whose torchrun "
        "loses a machine, gets another or has a spare one: each iteration reads the samples of an "
        "uninterrupted run, none twice and none skipped",
        sample_order,
        full=24,
        quick=0,
    ),
    Row(
        8,
        "disk full at 10 offsets of a shard, in the foreground and background: exit code 8 with"
        " the path, the tracker is unchanged, and the run continues once there is space again",
        full_disk,
        full=10,
        quick=1,
    ),
    Row(
        9,
        "input/output error in any call of any writer on either rank, in the foreground and "
        "background: nothing is published, and all ranks report it, at once or at the next save",
        failing_disk,
        full=8,
        quick=1,
    ),
    Row(
        10,
        "a checkpoint with damaged bytes at random places of all files (bit flips, holes, "
        "truncations, additions, swapped blocks: the file is named), or as an attacker may leave "
        "it (signed manifests with wrong types, NaN, infinity, 1e999 or thousands of overlapping "
        "pieces; FIFOs, sockets, devices, folders and links in place of files; a link out of the "
        "folder; files of other users or writable by all): refused by name within 10 s before a "
        "tensor changes, and the older checkpoint loads",
        damaged_files,
        full=1000,
        quick=20,
    ),
    Row(
        11,
        "trackers torn or wrong in 15 ways, with the whole program, and random ones, only with "
        "the function that finds a checkpoint (bytes, numbers, words, FIFOs, sockets, devices, "
        "folders, links): the newest sound checkpoint loads; if all are damaged, the run ends "
        "with exit code 4 and does not start from scratch",
        torn_trackers,
        full=1000,
        quick=2,
    ),
    Row(
        12,
        "training waits for a save in the background at most 0.1 s plus one second per gigabyte "
        "(CPU)",
        waiting_time,
        full=10,
        quick=0,
    ),
    Row(
        13,
        "a model of 1.3B parameters on GPUs, whose iterations take about 0.3 s: with a save in the "
        "background every 50 iterations, it trains at least 98% as fast as without",
        saving_throughput,
        full=3,
        quick=0,
        gpus=1,
    ),
    Row(
        14,
        "the digests of half a gigabyte are verified at 1 GB/s of processor time or more, on one "
        "rank (CPU)",
        verification,
        full=10,
        quick=0,
    ),
    Row(
        15,
        "SIGTERM or SIGINT at a random time, during an iteration, an evaluation or a save: exit"
        " code 3, a checkpoint of the last iteration, and the next run continues after it",
        terminated,
        full=40,
        quick=2,
    ),
    Row(
        16,
        "one of four ranks is stopped, sleeps, waits for a sample or leaves out a collective "
        "operation, in five layouts, with a limit of 4 s: every other rank ends with exit code 5 "
        "within 10 s more, and exactly one report names the rank and the operation",
        hanging_ranks,
        full=40,
        quick=0,  # tested by tests/reliability/test_faults.py
    ),
    Row(
        17,
        "the network between two machines (namespaces) is cut at a random time, with a limit of 4 "
        "s: both sides end within 10 s more and say why, what the tracker names is whole, and the "
        "next start resumes from it and cleans up",
        cut_network,
        full=10,
        quick=0,  # tested by tests/reliability/test_machines.py
    ),
    Row(
        18,
        "one of four ranks takes twice as long for its work from a random update on, in five "
        "layouts: within 50 updates it is named, and no other rank; 1,000 updates in which no rank "
        "is slow, on two cores: none is named",
        slow_ranks,
        full=20,
        quick=0,  # tested by tests/training/test_stragglers.py
    ),
    Row(
        19,
        "NaN in the loss or its gradient, on one of two ranks in four layouts, with "
        "`--on-nonfinite skip`: weights and moments are those of a run that leaves the samples "
        "out, bit for bit; three times in a row, with a limit of two: code 7, and the samples are "
        "named",
        not_finite,
        full=20,
        quick=1,
    ),
    Row(
        20,
        "a sample whose loss is eight times too large, at a random iteration, with `--on-spike "
        "skip`: a spike in that iteration and in no other; a clean run of 1,000 iterations: none",
        spoiled_batches,
        full=20,
        quick=0,  # tested by tests/training/test_spikes.py
    ),
    Row(
        21,
        "a random bit of a random weight flips on one of three replicas, and changes it by more "
        "than 1e-6, or `--fault-inject` flips one; they are compared every 1 to 10 iterations: the "
        "next comparison ends the run on all ranks, and names the rank and the weight",
        flipped_bits,
        full=20,
        quick=0,  # tested by tests/training/test_replica_hashes.py
    ),
    Row(
        22,
        "each file of a dataset, cut at random places: refused by name within 5 s when it is "
        "opened, and before the first step",
        cut_corpora,
        full=1000,
        quick=4,
    ),
    Row(
        23,
        "a byte of a dataset's index is changed: refused by name, or every sequence has the tokens "
        "that it had",
        changed_indexes,
        full=2000,
        quick=40,
    ),
    Row(
        24,
        "corpora in which one line in a hundred is bad, preprocessed by 1, 2 and 4 workers: "
        "exactly those lines are skipped, and the output has the bytes that the others alone give; "
        "without `--on-error skip`, the first of them is named, and no output is left",
        bad_lines,
        full=10000,
        quick=200,
    ),
    Row(
        25,
        "a run that resumes with another network, vocabulary or optimizer: refused, with the "
        "setting named, before the first step, and the checkpoints are left as they were",
        other_settings,
        full=12,
        quick=2,
    ),
    Row(
        26,
        "a second job in the same folder, a job after a killed one, a read-only folder, a "
        "folder that is removed, one that is replaced by a file: refused by name or survived, "
        "without a hang",
        shared_folders,
        full=2,
        quick=0,
    ),
    Row(
        27,
        "the clock jumps back and forth by an hour: same losses, and no timer fires",
        jumping_clock,
        full=10,
        quick=1,
    ),
    Row(
        28,
        "50 iterations twice with `--deterministic-mode`, in 12 layouts and formats: losses and"
        " states are equal bit for bit on every rank (CPU)",
        fresh_runs,
        full=12,
        quick=0,
    ),
    Row(
        29,
        "known hostile files, and random ones: pickles that call functions, or that exhaust their "
        "reader by hashes, depth or size, in place of checkpoints, tokenizers and models; YAML "
        "with tags and growing aliases; models that name code; arrays of objects; a compiled "
        "library in a cache to which others could write; modules and a .pth file in the current "
        "folder: nothing is executed, nothing appears outside the folder, and every command "
        "refuses",
        malicious_files,
        full=1000,
        quick=6,
    ),
    Row(
        30,
        "no shipped Python file names a function that executes what it reads, goes through a shell "
        "or loads a library, apart from the exceptions that `tests/test_banned_calls.py` lists; "
        "and "
        "each such call planted at a random place of the source, under a random name, is found",
        banned_calls,
        full=1100,
        quick=20,
    ),
    Row(
        31,
        "fuzzed requests to the text generation server on two ranks (types, sizes, Unicode, "
        "values that are not numbers, depth, broken HTTP): no 5xx, no crash, and valid requests"
        " in between are answered; requests with Content-Length and Transfer-Encoding, or one of "
        "them twice, in any spelling: 400 or nothing, once, and the connection is closed",
        fuzzed_requests,
        full=50,
        quick=0,  # tested by tests/inference/server/test_fuzz.py and test_processes.py
    ),
    Row(
        32,
        "50 clients that send slowly, bodies of 2 MiB, clients that disconnect: 408, 413, slots"
        " are free within 1 s, and the p99 of valid requests at most doubles; then 200 clients "
        "at a time",
        crowded_server,
        full=10,
        quick=0,  # tested by tests/inference/server/test_limits.py
    ),
    Row(
        33,
        "the text generation server listens on 127.0.0.1; another address is refused without a "
        "token; of random requests without the token (paths, hosts, encodings, methods), none "
        "reaches anything but the health check and the page",
        guarded_server,
        full=1003,
        quick=0,  # tested by tests/inference/server/test_guard.py
    ),
    Row(
        34,
        "200 starts that resume, with a data loading process, and 300 saves in a process, half of "
        "them in the background: no process, file descriptor or file in /dev/shm is left, and from "
        "the 50th save on a process's memory grows by at most 5%",
        leaks,
        full=200,
        quick=4,
    ),
    Row(
        35,
        "an hour with a SIGKILL to one of four ranks about every minute, with non-persistent "
        "checkpoints every 25 iterations: goodput is at least 80%, at most 50 steps are repeated "
        "at a time, and the losses are those of an undisturbed run, bit for bit",
        soaked,
        full=60,
        quick=0,
    ),
    Row(
        36,
        "manifests and file headers that contradict each other or the files in names, types, "
        "shapes, offsets, sizes or paths, or hold values of any other type, with matching digests: "
        "refused by name within 10 s before a tensor changes, and the older checkpoint loads",
        forged_tables,
        full=1000,
        quick=20,
    ),
    Row(
        37,
        "the launcher, which holds the store, is stopped at a random time of a start, a step, a "
        "hang report, a save, the end after an error and the end of a run (always while a rank is "
        "still running), and a rank is killed or stopped as well, in 5 layouts of 2 and 4 ranks: "
        "every other rank ends by itself within the time limit plus 10 s, and one of them says why",
        mute_store,
        full=1000,
        quick=6,
    ),
    Row(
        38,
        "index caches, sentence maps, compiled libraries and vocabularies, and the names of "
        "temporary files, each with random bytes, swapped entries, exchanged files, links, pipes, "
        "other owners and modes, or planted whole: never used and never followed, and "
        "the result equals a fresh one",
        attacked_caches,
        full=2000,
        quick=40,
    ),
    Row(
        39,
        "large lines in every format, a tight `ulimit -v`, a `/dev/shm` of 4 to 256 KB and logs "
        "whose readers exit, against preprocessing, tokenizer training and training (everything "
        "else, and a twentieth of the training runs, in new interpreters, whose imports are "
        "limited too): each ends with a documented code and one line, without a traceback; earlier "
        "output is replaced completely or not at all, and a run continues from its newest "
        "checkpoint",
        merely_large,
        full=1000,
        quick=5,
    ),
    Row(
        40,
        "random hostile prompts and conversations, under random hostile chat templates and "
        "tokenizers whose patterns take exponential time or panic, sent to the text generation "
        "server: each is answered without a 5xx, and the health check answers within 5 s in "
        "between",
        hostile_texts,
        full=1000,
        quick=0,  # tested by tests/inference/server/test_texts.py
    ),
    Row(
        41,
        "damaged input for every reader of bytes (`tests/fuzz`), 1,000 and more for each: accepted "
        "or refused with an error of our own; no crash, nothing executed, no 10 s of work, no 2 "
        "GiB of memory",
        every_reader,
        full=1000,
        quick=0,  # tested by tests/fuzz
    ),
    Row(
        42,
        "random pickle programs, up to hundreds of thousands of instructions long and levels deep "
        "(nested keys, loops, shared parts, large integers, chains of calls), and mutations: read "
        "or refused by the reader of old checkpoints; nothing is executed, and no 10 s of work; "
        "random trees that Python pickles are read as they are",
        hostile_pickles,
        full=5000,
        quick=200,
    ),
    Row(
        43,
        "signed manifests and metadata with wrong types, impossible numbers or thousands of "
        "pieces that overlap; links, FIFOs, folders and devices in place of files; files of other "
        "users or writable by all: refused by name within 10 s, and the older checkpoint loads",
        hostile_checkpoints,
        full=1000,
        quick=30,
    ),
    Row(
        44,
        "SIGKILL to one of the ranks that train a model of 1.3B parameters on GPUs, at a random "
        "time: the next step follows within 30 s, and no more than the steps since the last "
        "checkpoint are repeated",
        restarts_on_gpus,
        full=3,
        quick=0,
        gpus=2,
    ),
)
