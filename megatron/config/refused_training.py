"""Megatron's flags for ways to train that are not built, or need no flag, here."""

from __future__ import annotations

from megatron.config.known_flag import KnownFlag, family

_IMPLEMENTATIONS = (
    *family(
        "NVIDIA's Kitchen is not used: layers are our own, drop the flag",
        """
        --use-kitchen-attention --kitchen-attention-backend=sdpa --kitchen-config-file:str
        --kitchen-recipe-number:int
        """,
    ),
    *family(
        "Transformer Engine is not used: record passes with --cuda-graph-impl local",
        "--external-cuda-graph",
    ),
    *family(
        "--cuda-graph-impl local records whole passes: drop the flag",
        "--cuda-graph-scope:str... --cuda-graph-modules:str... --optimizer-cuda-graph",
    ),
    *family(
        "the fastest kernel that fits is taken: use --use-flash-attn for flash, "
        "--no-masked-softmax-fusion for unfused, or drop the flag",
        "--attention-backend=auto|flash|fused|unfused|local --flash-attention-version:int",
    ),
    *family(
        "SwiGLU's two forms are one kernel, taken wherever sizes allow: drop the flag",
        "--no-bias-swiglu-fusion",
    ),
    *family(
        "an MLP computes all its tokens at once: save memory by --recompute-granularity, or drop "
        "the flag",
        "--mlp-chunks-for-training=1 --mlp-chunks-for-prefill=1",
    ),
    *family(
        "--recompute-granularity selective recomputes the core of attention: drop the flag",
        "--recompute-modules:str...",
    ),
    *family(
        "activations stay on the device: save memory by --recompute-granularity",
        """
        --cpu-offloading-num-layers=0 --cpu-offloading-retain-pinned-cpu-buffers
        --fine-grained-activation-offloading --fine-grained-offloading-max-inflight-offloads:int
        --offload-modules:str... --min-offloaded-tensor-size=1048576
        --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks=0
        --activation-offload-fraction=1.0
        """,
    ),
)

_COMMUNICATION = (
    *family(
        "--tp-comm-overlap has no parts that are chosen one by one: drop the flag",
        """
        --disable-tp-comm-split-ag --no-tp-comm-split-ag
        --disable-tp-comm-split-rs --no-tp-comm-split-rs
        --disable-tp-comm-overlap-ag --no-tp-comm-overlap-ag
        --disable-tp-comm-overlap-rs --no-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad
        --disable-tp-comm-bulk-dgrad --no-tp-comm-bulk-dgrad
        --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-wgrad
        --tp-comm-overlap-cfg:str --tp-comm-bootstrap-backend=nccl|mpi|gloo
        """,
    ),
    *family(
        "stages always compute while their messages travel: drop the flag",
        "--no-overlap-p2p-communication",
    ),
    *family(
        "stages talk over --distributed-backend: drop the flag",
        "--pipeline-model-parallel-comm-backend=nccl|ucc",
    ),
    *family(
        "an interleaved schedule takes groups of as many micro-batches as there are stages: drop "
        "the flag",
        """
        --microbatch-group-size-per-virtual-pipeline-stage:int
        --microbatch-group-size-per-vp-stage:int
        """,
    ),
    *family(
        "weight gradients are deferred by --pipeline-schedule zero-bubble: use that, or drop the "
        "flag",
        "--defer-embedding-wgrad-compute --delay-wgrad-compute --wgrad-deferral-limit=0",
    ),
    *family(
        "no pipeline stage waits for another's reduction or gathering: drop the flag",
        "--delay-grad-reduce --delay-param-gather --align-grad-reduce --align-param-gather",
    ),
    *family(
        "the gathering begins when the whole update is made, and is hidden behind forward: use "
        "--overlap-param-gather alone",
        "--overlap-param-gather-with-optimizer-step",
    ),
    *family(
        "gradients travel in buckets of 64 MiB or more: drop the flag",
        """
        --ddp-pad-buckets-for-high-nccl-busbw --ddp-bucket-size:int --ddp-num-buckets:int
        --suggested-communication-unit-size:int
        """,
    ),
    *family(
        "NCCL is tuned by its own environment variables: drop the flag",
        """
        --use-nccl-ub --use-sharp --sharp-enabled-group:str --disable-symmetric-registration
        --nccl-communicator-config-path:str
        """,
    ),
    *family(
        "processes tell each other numbers of the host over gloo: drop the flag",
        "--disable-gloo-process-groups",
    ),
    *family(
        "all groups' communication has the same priority: drop the flag",
        "--high-priority-stream-groups:str...",
    ),
    *family(
        "one time limit holds from start to end: use --distributed-timeout-minutes (fractions "
        "count)",
        "--distributed-timeout-seconds-after-init:int",
    ),
    *family(
        "ranks are numbered tensor fastest, then context, data, pipeline: drop the flag",
        "--use-tp-pp-dp-mapping",
    ),
)

_SHARING = (
    *family(
        "weights, gradients and states are sharded by --zero-stage: use that",
        """
        --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward --use-megatron-fsdp
        --use-custom-fsdp
        --data-parallel-sharding-strategy=no_shard|optim|optim_grads|optim_grads_params
        --outer-dp-sharding-strategy=no_shard --enable-full-sharding-in-hsdp
        --megatron-fsdp-main-params-dtype=fp32 --megatron-fsdp-main-grads-dtype=auto
        --megatron-fsdp-grad-comm-dtype=auto --megatron-fsdp-enable-fine-grained-param-gather
        --megatron-fsdp-max-pool-double-buffer --fsdp-manual-registration --fsdp-double-buffer
        --fsdp-db-use-persist-buf-on-alloc-fail --create-all-gather-group
        --no-gradient-reduce-div-fusion --keep-fp8-transpose-cache
        --keep-fp8-transpose-cache-when-using-custom-fsdp --init-model-with-meta-device
        """,
    ),
    *family(
        "what --zero-stage shards is shared among all processes with the same weights: drop the "
        "flag",
        "--num-distributed-optimizer-instances=1",
    ),
    *family(
        "a matrix is split once, over --tensor-model-parallel-size processes: drop the flag",
        "--tensor-parallel-num-weight-shards:int",
    ),
    *family(
        "all sequences are split alike, over --context-parallel-size processes that talk by "
        "--cp-comm-type p2p or a2a: drop the flag",
        """
        --hierarchical-context-parallel-sizes:int... --hybrid-context-parallel
        --max-seqlen-per-dp-cp-rank:int
        """,
    ),
    *family(
        "--optimizer-cpu-offload has one way: drop the flag",
        """
        --overlap-cpu-optimizer-d2h-h2d --use-torch-optimizer-for-cpu-offload --no-pin-cpu-grads
        --no-pin-cpu-params --optimizer-offload-fraction=1.0
        """,
    ),
)

_PRECISION = (
    *family(
        "gradients of --bf16, the optimizer's weights and its moments are in fp32: drop the flag",
        """
        --use-precision-aware-optimizer --grad-reduce-in-bf16
        --main-grads-dtype=fp32|bf16 --main-params-dtype=fp32|fp16
        --exp-avg-dtype=fp32|bf16|fp16|fp8 --exp-avg-sq-dtype=fp32|bf16|fp16|fp8
        """,
    ),
    *family(
        "gradients add up in fp32 with --bf16, and with --fp16 by "
        "--accumulate-allreduce-grads-in-fp32: drop the flag",
        """
        --ddp-reduce-scatter-with-fp32-accumulation
        --ddp-param-name-patterns-for-fp32-local-accumulation:str...
        """,
    ),
    *family(
        "products in bf16 add up as PyTorch has it by default: drop the flag",
        "--disable-bf16-reduced-precision-matmul",
    ),
    *family(
        "--fp8-format is for the linear layers of every block: drop the flag",
        """
        --first-last-layers-bf16 --num-layers-at-start-in-bf16=1 --num-layers-at-end-in-bf16=1
        --fp8-output-proj
        """,
    ),
    *family(
        "products are in 16 bits, or in 8 by --fp8-format and one of its recipes: drop the flag",
        """
        --fp4-format:str --fp4-recipe:str --fp4-quantizer-factory:str --fp4-param-gather
        --fp8-quantizer-factory:str --te-precision-config-file:str
        --reuse-grad-buf-for-mxfp8-param-ag
        """,
    ),
)

_UPDATES = (
    *family(
        "the update is that of --optimizer adam or sgd: drop the flag",
        """
        --muon-momentum=0.9 --muon-no-split-qkv --muon-use-nesterov --muon-nesterov
        --muon-scale-mode=spectral --muon-fp32-matmul-prec=medium --muon-coefficient-type=quintic
        --muon-num-ns-steps=5 --muon-tp-mode=blockwise --muon-extra-scale-factor=1.0
        --muon-scalar-optimizer=adam --lion-beta1=0.95 --lion-beta2=0.98
        --no-use-layer-wise-param-layout
        """,
    ),
    *family(
        "weights are changed by the optimizer alone, never clipped: drop the flag",
        "--qk-clip --qk-clip-alpha=0.5 --qk-clip-threshold=100.0",
    ),
    *family(
        "matrices and embeddings decay, biases and normalizations do not: drop the flag",
        "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type:str",
    ),
    *family("all weights are trained: drop the flag", "--freeze-all-layers"),
    *family(
        "which weights are updated alike is not written to a file: drop the flag",
        "--dump-param-to-param-group-map:str",
    ),
    *family(
        "the batch changes during a run by --rampup-batch-size alone: use that, or drop the flag",
        """
        --step-batch-size-schedule:str --phase-transition-iterations:str
        --decrease-batch-size-if-needed
        """,
    ),
)

_DATA = (
    *family(
        "data are read from file systems, not from object storage: copy them, and drop the flag",
        "--object-storage-cache-path:str --s3-cache-path:str --enable-msc",
    ),
    *family(
        "blended datasets are built with 0.5% to spare: drop the flag",
        "--mid-level-dataset-surplus=0.005",
    ),
    *family(
        "use --reset-attention-mask, and --reset-position-ids",
        "--dataloader-inter-document-masking",
    ),
    *family(
        "the vocabulary is padded to a multiple of --make-vocab-size-divisible-by times "
        "--tensor-model-parallel-size: use that (1 pads least)",
        "--padded-vocab-size:int --no-pad-vocab-size --disable-pad-vocab-size",
    ),
    *family(
        "a tokenizer does what its own files say: drop the flag",
        """
        --tokenizer-metadata:str --tokenizer-sentencepiece-legacy
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-use-fast
        --tokenizer-hf-include-special-tokens --tokenizer-hf-no-include-special-tokens
        --chat-template:str
        """,
    ),
    *family(
        "a NullTokenizer's documents end with the id --vocab-size: drop the flag",
        "--null-tokenizer-eod-id:int --null-tokenizer-pad-id=-1",
    ),
    *family("no code that comes with a tokenizer is run: drop the flag", "--trust-remote-code"),
    *family(
        "an evaluation is --eval-iters global batches of one validation set, every "
        "--eval-interval iterations: use those, or drop the flag",
        """
        --full-validation --multiple-validation-sets --validation-set-names:str...
        --eval-global-batch-size:int --start-eval-at-iter:int
        """,
    ),
)

REFUSED_TRAINING: tuple[KnownFlag, ...] = (
    *_IMPLEMENTATIONS,
    *_COMMUNICATION,
    *_SHARING,
    *_PRECISION,
    *_UPDATES,
    *_DATA,
)
