"""Megatron's flags for networks, and tasks of networks, that are not built here."""

from __future__ import annotations

from megatron.config.known_flag import KnownFlag, family

_MODELS = (
    *family(
        "mixtures of experts are not built: drop the flag",
        """
        --expert-parallel --num-experts:int --expert-model-parallel-size=1
        --expert-tensor-parallel-size:int --expert-tensor-parallel-num-weight-shards:int
        --moe-layer-freq:str=1 --moe-ffn-hidden-size:int --moe-latent-size:int
        --moe-shared-expert-intermediate-size:int --moe-shared-expert-gate
        --moe-shared-expert-overlap --moe-shared-expert-glu-interleave-size:int
        --moe-mlp-glu-interleave-size:int --moe-grouped-gemm --moe-use-legacy-grouped-gemm
        --moe-single-grouped-weight --moe-single-grouped-bias --use-grouped-gemm-for-shared-expert
        --use-fused-weighted-squared-relu --moe-layer-recompute --moe-extended-tp
        --moe-use-upcycling --moe-upcycling-granularity=1

        --moe-router-topk=2 --moe-router-pre-softmax --moe-router-score-function=softmax
        --moe-router-dtype:str --moe-router-fusion --moe-router-num-groups:int
        --moe-router-group-topk:int --moe-router-topk-scaling-factor:float
        --moe-router-load-balancing-type:str... --moe-router-enable-expert-bias
        --moe-router-bias-update-rate=0.001 --moe-router-quantile-balancing-ema=0.0
        --moe-router-force-load-balancing --moe-router-force-biased:float
        --moe-router-padding-for-fp8 --moe-router-padding-for-quantization
        --moe-enable-routing-replay --moe-aux-loss-coeff=0.0... --moe-z-loss-coeff:float
        --moe-input-jitter-eps:float --moe-per-layer-logging --save-tokens-per-expert-interval:int
        --moe-routing-trace-path:str --moe-routing-trace-max-training-iters:int
        --moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states
        --moe-routing-trace-dump-weights

        --moe-token-dispatcher-type:str --moe-flex-dispatcher-backend=deepep
        --moe-flex-dispatcher-num-sms:int --moe-enable-deepep --moe-deepep-num-sms:int
        --moe-hybridep-num-sms:int --moe-hybridep-num-sms-preprocessing=108
        --moe-hybridep-num-blocks-permute:int --moe-hybridep-num-blocks-unpermute:int
        --moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-static-shape --moe-ncclep-zero-copy
        --moe-permute-fusion --moe-permute-fusion-into-hybridep --moe-apply-probs-on-input
        --overlap-moe-expert-parallel-comm --ep-overlap-early-attn-memory-release
        --overlap-dispatch-backward-with-experts-wgrad --high-priority-a2a-comm-stream

        --moe-token-dropping --moe-token-drop-policy=probs --moe-expert-capacity-factor:float
        --moe-expert-rank-capacity-factor:float --moe-pad-expert-input-to-capacity
        --moe-pad-experts-for-cuda-graph-inference --moe-paged-stash --moe-paged-stash-page-size=64
        --moe-paged-stash-buffer-size-factor-cuda=1.1 --moe-paged-stash-buffer-size-factor-cpu=0.0
        """,
    ),
    *family(
        "keys and values have heads of their own, or share them by --num-query-groups; latent "
        "attention is not built: drop the flag",
        """
        --multi-latent-attention --q-lora-rank:int --kv-lora-rank=32 --qk-head-dim=128
        --qk-pos-emb-head-dim=64 --v-head-dim=128 --rotary-scaling-factor=1.0 --mscale=1.0
        --mscale-all-dim=0.0 --cache-mla-latents --mla-down-proj-fusion
        """,
    ),
    *family(
        "a model guesses the next token alone; guessing several is not built: drop the flag",
        """
        --mtp-num-layers:int --mtp-loss-scaling-factor=0.1 --mtp-use-repeated-layer
        --mtp-hybrid-override-pattern:str --mtp-standalone --mtp-detach-heads
        """,
    ),
    *family(
        "attention is a softmax over all tokens that a token may see; windows, and sparse, linear "
        "and gated forms are not built: drop the flag",
        """
        --window-size:str --window-attn-skip-freq:str --softmax-type=vanilla
        --attention-output-gate --experimental-attention-variant:str --linear-attention-freq:str
        --linear-conv-kernel-dim=4 --linear-key-head-dim=128 --linear-value-head-dim=128
        --linear-num-key-heads=16 --linear-num-value-heads=32
        --dsa-indexer-n-heads:int --dsa-indexer-head-dim:int --dsa-indexer-topk:int
        --dsa-indexer-topk-freq=1 --dsa-indexer-skip-topk-offset=0 --dsa-indexer-loss-coeff:float
        --dsa-indexer-use-sparse-loss --dsa-indexer-rope-interleaved --dsa-kernel-backend=none
        --dsa-indexer-k-norm-epsilon:float --dsa-indexer-k-norm-fp32
        --no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation
        --no-dsa-indexer-scoring-relu --disable-dsa-indexer-scoring-relu
        """,
    ),
    *family("queries and keys are normalized by --qk-layernorm: use that", "--qk-l2-norm"),
    *family(
        "every layer is attention and an MLP; state-space (Mamba) and hybrid models are not built: "
        "drop the flag",
        """
        --is-hybrid-model --hybrid-layer-pattern:str --hybrid-override-pattern:str
        --hybrid-attention-ratio=0.0 --hybrid-mlp-ratio=0.0 --mamba-state-dim=128
        --mamba-head-dim=64 --mamba-num-groups=8 --mamba-num-heads:int
        --mamba-training-ssm-states-dtype:str --disable-mamba-mem-eff-path
        """,
    ),
    *family(
        "all layers have the same sizes: give --num-layers, --hidden-size, --ffn-hidden-size and "
        "--num-query-groups",
        "--heterogeneous-layers-config-path:str --heterogeneous-layers-config-encoded-json:str",
    ),
    *family(
        "modules named on the command line are not loaded: the network's flags choose its layers",
        "--model-spec:str... --spec:str...",
    ),
    *family(
        "the layout is the same for a T5's encoder and decoder: use --tensor-model-parallel-size, "
        "--pipeline-model-parallel-size and --pipeline-model-parallel-split-rank",
        "--encoder-tensor-model-parallel-size=0 --encoder-pipeline-model-parallel-size=0",
    ),
)

_PARTS = (
    *family(
        "halves of each head rotate on every layer, as fast as --rotary-base, --rotary-percent, "
        "--rotary-seq-len-interpolation-factor and --use-rope-scaling say: use those, or drop the "
        "flag",
        """
        --rope-type=rope --rotary-interleaved --no-rope-freq:str --mrope-section:int...
        --yarn-original-max-position-embeddings:int --yarn-beta-fast:float --yarn-beta-slow:float
        --yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int
        --enable-gpt-oss
        """,
    ),
    *family(
        "an MLP's activation is GeLU, or what --openai-gelu, --squared-relu, --relu, --swiglu or "
        "--geglu says: use one of those, or drop the flag",
        "--quick-geglu --glu-linear-offset=0.0 --activation-func-clamp-value:float",
    ),
    *family(
        "the width changes neither learning rates nor outputs (muP is not built): drop the flag",
        """
        --use-mup --mup-width-mult=1.0 --mup-base-hidden-size:int --mup-embedding-mult=1.0
        --mup-output-mult=1.0 --mup-base-head-dim:float --mup-attn-scale-power=1.0
        """,
    ),
    *family(
        "embeddings are drawn with --init-method-std, as other weights are: use that, or drop the "
        "flag",
        "--embedding-init-method-std:float",
    ),
    *family(
        "weights depend on --seed, their name and position only, never on the process: "
        "drop the flag",
        "--data-parallel-random-init",
    ),
)

_TASKS = (
    *family(
        "embeddings of BERT are made for Retro, which is out of scope",
        "--output-bert-embeddings --bert-embedder-type=megatron|huggingface",
    ),
    *family(
        "retrieval-enhanced pretraining (Retro) is out of scope",
        """
        --retro-workdir:str --retro-project-dir:str --retro-add-retriever
        --retro-cyclic-train-iters:int --retro-encoder-layers=2 --retro-encoder-hidden-dropout=0.1
        --retro-encoder-attention-dropout=0.1 --retro-num-neighbors=2
        --retro-num-retrieved-chunks=2 --retro-attention-gate=1.0 --retro-return-doc-ids
        --retro-no-verify-neighbor-count
        """,
    ),
    *family(
        "retrieval with a bi-encoder (ICT, ORQA) is out of scope",
        """
        --ict-head-size:int --ict-load:str --bert-load:str --biencoder-projection-dim=0
        --biencoder-shared-query-context-model --titles-data-path:str --query-in-block-prob=0.1
        --use-one-sent-docs --evidence-data-path:str --block-data-path:str --embedding-path:str
        --indexer-batch-size=128 --indexer-log-interval=1000 --retriever-seq-length=256
        --retriever-score-scaling --retriever-report-topk-accuracies:int...
        --qa-data-dev:str --qa-data-test:str --eval-micro-batch-size:int
        --faiss-match=string|regex --faiss-topk-retrievals=100 --train-with-neg --train-hard-neg=0
        --val-av-rank-hard-neg=30 --val-av-rank-other-neg=30
        """,
    ),
    *family(
        "vision models are out of scope",
        """
        --vision-pretraining --vision-pretraining-type=classify|inpaint|dino
        --vision-backbone-type=vit|mit|swin --swin-backbone-type=tiny|base|h3 --num-classes=1000
        --img-h=224 --img-w=224 --num-channels=3 --patch-dim=16 --classes-fraction=1.0
        --data-per-class-fraction=1.0 --sample-rate=1.0 --head-lr-mult=1.0 --mask-type=random|row
        --mask-factor=1.0 --iter-per-epoch=1250 --dino-local-img-size=96
        --dino-local-crops-number=10 --dino-head-hidden-size=2048 --dino-bottleneck-size=256
        --dino-freeze-last-layer=1.0 --dino-norm-last-layer --dino-warmup-teacher-temp=0.04
        --dino-teacher-temp=0.07 --dino-warmup-teacher-temp-epochs=30
        --freeze-LM --freeze-ViT --disable-vision-class-token --dataloader-seq-length:int
        --decoder-tp-comm-overlap --use-packed-sequence
        """,
    ),
    *family(
        "reinforcement learning is not built: drop the flag",
        """
        --perform-rl-step --rl-prompts-per-eval=32 --grpo-prompts-per-step=32 --grpo-group-size=2
        --grpo-iterations=2 --grpo-clamp-eps-lower=0.01 --grpo-clamp-eps-upper=0.01
        --grpo-kl-beta=0.001 --grpo-entropy-term-weight=0.0 --grpo-filter-groups-with-same-reward
        --grpo-default-temperature=1.0 --grpo-default-top-p=0.0 --langrl-env-config:str
        --langrl-inference-server-type=inplace_megatron
        --langrl-inference-server-conversation-template:str --[no-]langrl-external-server
        --rl-default-temperature=1.0 --rl-default-top-p=0.0 --rl-default-top-k=-1
        --rl-num-parallel-generations:int --rl-num-parallel-generation-batches:int
        --rl-generation-batch-size:int --rl-parallel-generation-tasks:int --rl-generation-lag=0
        --rl-submission-granularity=B --rl-consumption-granularity=B --[no-]rl-partial-rollouts
        --rl-offload-optimizer-during-inference --rl-kv-cache-management-mode=persist
        --[no-]rl-offload-kv-cache-during-training --[no-]rl-remove-kv-cache-during-training
        --[no-]rl-reset-cuda-graphs --[no-]rl-persist-cuda-graphs --[no-]rl-training-cuda-graphs
        --[no-]rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef:float
        --[no-]rl-calculate-intra-group-similarity --[no-]rl-use-sequence-packing
        --rl-sequence-packing-bin-size=8192 --rl-sequence-packing-max-sequences-per-bin=50
        --rl-sequence-packing-algo=fifo --rl-inference-tensor-model-parallel-size:int
        --rl-inference-pipeline-model-parallel-size:int
        --rl-inference-expert-model-parallel-size:int
        --rl-inference-expert-tensor-model-parallel-size:int
        --rl-inference-model-unified-memory-level=0
        --[no-]rl-offload-inference-model-weights-when-idle --[no-]rl-verify-model-weights-swap
        --[no-]rl-skip-bos-token --rl-inference-parsers:str... --rl-profile --rl-profile-dir:str
        --refit-method=gloo
        """,
    ),
    *family(
        "a model learns from tokens alone, not from a teacher's logits: drop the flag",
        """
        --logits-save-dir:str --logits-save-top-k:int --logits-save-top-p:float
        --logits-save-top-p-min-k=1 --logits-save-dtype=fp16 --logits-load-dir:str
        --logits-load-decode-threads=4 --logits-load-prefetch-factor=3
        --logits-load-msc-prefetch-depth=2 --logits-load-kd-loss-alpha=1.0
        --logits-load-ignore-errors
        """,
    ),
    *family(
        "NVIDIA's Model Optimizer (quantization and distillation of a trained model) is not used: "
        "drop the flag",
        """
        --modelopt-enabled --export-model-type=GPTModel --export-legacy-megatron
        --export-te-mcore-model --export-force-local-attention --export-kv-cache-quant=none
        --export-real-quant-cfg=None --export-quant-cfg:str --export-kd-teacher-load:str
        --export-kd-teacher-model-config:str --export-kd-teacher-ckpt-format:str
        --export-kd-cfg:str --export-qk-l2-norm --export-moe-apply-probs-on-input
        --export-offline-model --finetune-hf-dataset:str --finetune-data-split=train
        """,
    ),
    *family(
        "finetuning reads plain documents, not conversations: write those as text, and give it to "
        "tools/preprocess_data.py",
        "--sft --sft-tokenizer-prompt-format=nemotron-h-aligned",
    ),
    *family(
        "a sample's tokens stay in their order (fill-in-the-middle is not built): drop the flag",
        """
        --fim-data --fim-rate=0.5 --fim-spm-rate=0.5 --fim-split-sample:str
        --fim-fragment-rate:float --fim-no-prefix:str --fim-prefix-token=<fim_prefix>
        --fim-middle-token=<fim_middle> --fim-suffix-token=<fim_suffix> --fim-pad-token=<fim_pad>
        --fim-eod-token:str
        """,
    ),
)

REFUSED_NETWORK: tuple[KnownFlag, ...] = (*_MODELS, *_PARTS, *_TASKS)
