#!/bin/bash
# A job of the kind that Megatron-DeepSpeed's users have: GPT 13B on 256 GPUs, TP 8, PP 4, ZeRO 1, a ramp of
# batch sizes, activation checkpointing with all its switches.
# processes: 256
NAME=gpt-13B-tp8-pp4

cat > "ds_${NAME}.json" <<JSON
{
  "train_batch_size": 1024,
  "train_micro_batch_size_per_gpu": 4,
  "steps_per_print": 10,
  "zero_optimization": {
    "stage": 1,
    "elastic_checkpoint": true
  },
  "gradient_clipping": 1.0,
  "prescale_gradients": true,
  "gradient_predivide_factor": 8,
  "data_types": {
    "grad_accum_dtype": "fp32"
  },
  "fp16": {
    "enabled": true,
    "loss_scale": 0,
    "initial_scale_power": 12
  },
  "tensorboard": {
    "enabled": false,
    "output_path": "ds_logs",
    "job_name": "${NAME}"
  },
  "wall_clock_breakdown": false
}
JSON

deepspeed --hostfile hostfile pretrain_gpt.py \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 \
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 4 --global-batch-size 1024 --rampup-batch-size 64 64 2000000 \
    --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 \
    --lr 1.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine \
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 \
    --init-method-std 0.008 --fp16 --distributed-backend nccl --split 949,50,1 \
    --log-interval 10 --eval-interval 1000 --eval-iters 10 --save-interval 500 \
    --load "checkpoints/${NAME}" --save "checkpoints/${NAME}" --tensorboard-dir "tensorboard/${NAME}" \
    --vocab-file "${VOCAB_FILE}" --merge-file "${MERGE_FILE}" --data-path "${DATA_PATH}" \
    --data-impl mmap --num-workers 2 \
    --checkpoint-activations --checkpoint-num-layers 1 --deepspeed-activation-checkpointing \
    --partition-activations --contigious-checkpointing --synchronize-each-layer --profile-backward \
    --zero-contigious-gradients --zero-reduce-scatter \
    --deepspeed --deepspeed-config "ds_${NAME}.json" --zero-stage 1 "$@"
