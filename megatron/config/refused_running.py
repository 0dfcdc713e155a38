"""Megatron's flags for checkpoints, watching, restarts and generation that have no field here."""

from __future__ import annotations

from megatron.config.known_flag import KnownFlag, family

_CHECKPOINTS = (
    *family(
        "checkpoints are native ones, which load in any layout, or --ckpt-format legacy; "
        "tools/checkpoint/util.py converts: drop the flag",
        """
        --use-dist-ckpt --dist-ckpt-format:str --dist-ckpt-save-pre-mcore-014
        --ckpt-convert-format:str --ckpt-convert-save:str
        --ckpt-convert-update-legacy-dist-opt-format
        --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
        --no-stream-ckpt-dequant --disable-stream-ckpt-dequant --load-model-opt-format
        """,
    ),
    *family(
        "a checkpoint that is damaged, lacks a tensor or has one too many is not loaded: drop the "
        "flag",
        """
        --dist-ckpt-strictness=assume_ok_unexpected --no-ckpt-load-validate-sharding-integrity
        --disable-ckpt-load-validate-sharding-integrity
        """,
    ),
    *family(
        "--finetune begins at iteration 0, another start goes on where the checkpoint stopped: "
        "drop the flag",
        "--override-ckpt-iteration:int",
    ),
    *family("use --load with --finetune", "--pretrained-checkpoint:str"),
    *family(
        "a checkpoint loads in any layout: say which by --tensor-model-parallel-size, "
        "--pipeline-model-parallel-size and --context-parallel-size",
        "--use-mp-args-from-checkpoint-args",
    ),
    *family(
        "every checkpoint lasts, and --async-save makes it cheap: use that, with --save-interval "
        "or --save-interval-in-mins, and --keep-latest",
        """
        --non-persistent-save-interval:int --non-persistent-ckpt-type:str
        --non-persistent-global-ckpt-dir:str --non-persistent-local-ckpt-dir:str
        --non-persistent-local-ckpt-algo=fully_parallel --replication --replication-jump:int
        --replication-factor=2
        """,
    ),
    *family(
        "weights are written in checkpoints (--save-interval), activations and gradients never: "
        "drop the flag",
        """
        --save-wgrads-interval:int --save-dgrads-interval:int --save-params-interval:int
        --save-activations-interval:int
        """,
    ),
)

_FAILURES = (
    *family(
        "NVIDIA's internal autoresume service is not used; SIGTERM saves and leaves, and --load "
        "goes on",
        "--adlr-autoresume --adlr-autoresume-interval=1000",
    ),
    *family("SIGTERM and SIGINT save and leave: drop the flag", "--exit-signal=SIGTERM"),
    *family(
        "results are not computed twice; what is not finite stops the run, or is skipped by "
        "--on-nonfinite skip: drop the flag",
        """
        --rerun-mode=disabled|validate_results|report_stats --result-rejected-tracker-filename:str
        --check-for-spiky-loss --check-for-large-grads
        """,
    ),
    *family(
        "faults are made by the tests alone: drop the flag",
        """
        --error-injection-rate=0 --error-injection-type=transient_error
        --fault-injector-ranks:str --fault-injector-num-ranks:int --fault-injector-fault-types:str
        --fault-injector-fault-probabilities:str --fault-injector-fault-delay:float
        --fault-injector-delay-start-iteration:int --fault-injector-mtti-seconds:float
        --fault-injector-offset-seconds:float --fault-injector-seed:int
        """,
    ),
    *family(
        "torchrun --max-restarts starts processes again, and --distributed-timeout-minutes ends a "
        "run that hangs: drop the flag",
        """
        --inprocess-restart --inprocess-max-iterations:int --inprocess-monitor-thread-interval=1.0
        --inprocess-monitor-process-interval=1.0 --inprocess-progress-watchdog-interval=1.0
        --inprocess-heartbeat-interval=30.0 --inprocess-soft-timeout=60.0
        --inprocess-hard-timeout=90.0 --inprocess-heartbeat-timeout=60.0
        --inprocess-barrier-timeout=120.0 --inprocess-completion-timeout=120.0
        --inprocess-last-call-wait=1.0 --inprocess-termination-grace-time=1.0
        --inprocess-granularity=node --inprocess-active-world-size:int
        --inprocess-empty-cuda-cache --enable-ft-package --calc-ft-timeouts
        --ft-num-warmup-iters=5
        """,
    ),
    *family(
        "a hang is told with its rank, step and operation without it: drop the flag",
        """
        --flight-recorder-dump-path:str --flight-recorder-trace-buffer-size=2000
        --flight-recorder-include-stack-trace --no-flight-recorder-dump-on-timeout
        --disable-flight-recorder-dump-on-timeout --no-flight-recorder-include-only-active
        --disable-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec
        --disable-flight-recorder-extra-dump-on-exec
        """,
    ),
    *family(
        "neither GPUs nor copies of the same weights are tested during a run: drop the flag",
        "--gpu-sniff-test-interval:int --check-weight-hash-across-dp-replicas-interval:int",
    ),
    *family("nothing is tested beside a run: drop the flag", "--test-mode"),
    *family("use --dry-run, with --dry-run-world-size", "--fake-process-group"),
)

_WATCHING = (
    *family(
        "slow ranks show in --timing-log-level 1 --timing-log-option all: use those",
        """
        --log-straggler --straggler-ctrlr-port=65535 --straggler-minmax-count=1
        --disable-straggler-on-startup
        """,
    ),
    *family(
        "NVIDIA's OneLogger is not used: use --tensorboard-dir, --wandb-project or --metrics-jsonl",
        """
        --enable-one-logger --one-logger-project:str --one-logger-entity:str
        --one-logger-run-name:str --one-logger-async --app-tag-run-name:str
        --app-tag-run-version=0.0.0
        """,
    ),
    *family("use --metrics-jsonl", "--log-progress"),
    *family("it is not measured: drop the flag", "--log-energy --log-max-attention-logit"),
    *family(
        "memory is told by --log-memory-to-tensorboard, and beforehand by --dry-run: use those",
        """
        --log-memory-interval:int --log-device-memory-used --record-memory-history
        --memory-snapshot-path=snapshot.pickle
        """,
    ),
    *family("what a run says goes by no level: drop the flag", "--logging-level:int"),
    *family(
        "the resolved configuration is written to config.yaml in the --save folder: drop the flag",
        "--config-logger-dir:str",
    ),
    *family(
        "--profile records kernels, with their shapes and named ranges: use that",
        """
        --nvtx-ranges --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra
        --run-workload-inspector-server
        """,
    ),
    *family("use --config (docs/configuration.md describes the file)", "--yaml-cfg:str"),
)

_GENERATION = (
    *family(
        "use --max-batch-size of tools/run_text_generation_server.py; training generates nothing",
        """
        --inference-max-requests=8 --inference-max-batch-size:int
        --inference-dynamic-batching-max-requests:int
        --inference-dynamic-batching-max-requests-override:int
        """,
    ),
    *family(
        "use --out-seq-length of tools/run_text_generation_server.py; training generates nothing",
        "--inference-max-seq-length=2560",
    ),
    *family(
        "use --cache-tokens of tools/run_text_generation_server.py; training generates nothing",
        """
        --inference-dynamic-batching-buffer-size-gb=40.0
        --inference-dynamic-batching-paused-buffer-size-gb:float
        --inference-dynamic-batching-buffer-guaranteed-fraction=0.2
        --inference-dynamic-batching-buffer-overflow-factor:float
        """,
    ),
    *family(
        "tools/run_text_generation_server.py has flags of its own (--help), and training generates "
        "nothing: drop the flag",
        """
        --inference-dynamic-batching-max-tokens:int
        --inference-dynamic-batching-max-tokens-override:int
        --inference-dynamic-batching-block-size=256 --inference-dynamic-batching-chunk-size=256
        --inference-dynamic-batching-mamba-memory-ratio:float
        --inference-dynamic-batching-unified-memory-level=0
        --inference-dynamic-batching-num-cuda-graphs=16
        --inference-dynamic-batching-cuda-graph-max-tokens=16384
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count=16
        --inference-dynamic-batching-cuda-graph-sizing-distribution=exponential
        --inference-dynamic-batching-track-paused-request-events
        --inference-dynamic-batching-track-generated-token-events
        --inference-dynamic-batching-sampling-backend=torch
        --inference-dynamic-batching-async-sched-mode=legacy
        --inference-dynamic-batching-logprobs-mode=raw_logprobs
        --[no-]inference-dynamic-batching-prefix-caching
        --inference-dynamic-batching-prefix-caching-eviction-policy=ref_zero
        --inference-dynamic-batching-prefix-caching-coordinator-policy=load_balanced
        --inference-dynamic-batching-prefix-caching-routing-alpha=0.5
        --inference-dynamic-batching-prefix-caching-mamba-gb:float
        --inference-cuda-graph-scope:str --inference-cuda-graph-max-tokens=512
        --inference-cuda-graph-all-prefills --decode-only-cuda-graphs
        --inference-fuse-tp-communication --inference-disable-triton-nvls-kernels
        --inference-grouped-gemm-backend:str --inference-moe-disable-fused-quant-kernels
        --inference-moe-token-dispatcher-type=nvls --[no-]inference-disable-ep-consensus
        --inference-logging-step-interval=0 --inference-wandb-logging-step-interval=0
        --[no-]inference-text-gen-server-logging --[no-]inference-wandb-logging
        --inference-coordinator-port:int --inference-shards:str
        --[no-]inference-use-synchronous-zmq-collectives --use-same-sampling-seed-across-dp-ranks
        --mamba-inference-conv-states-dtype=bf16 --mamba-inference-ssm-states-dtype=bf16
        --use-legacy-static-engine --enable-chunked-prefill --disable-chunked-prefill
        --num-speculative-tokens=0 --flash-decode --batch-invariant-mode --symmetric-ar-type:str
        --nccl-all-reduce-for-prefill
        """,
    ),
)

REFUSED_RUNNING: tuple[KnownFlag, ...] = (*_CHECKPOINTS, *_FAILURES, *_WATCHING, *_GENERATION)
