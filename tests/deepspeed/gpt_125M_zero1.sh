#!/bin/bash
# A job of the kind that Megatron-DeepSpeed's users have: GPT 125M on 64 GPUs, ZeRO 1, curriculum learning.
# processes: 64
SEQ_LEN=2048
GLOBAL_BATCH=256
MICRO_BATCH=4
LOG_INTERVAL=10
NAME=gpt-125M-zero1-cl
TRAIN_TOKENS=300000000000

cat > "ds_${NAME}.json" <<JSON
{
  "train_batch_size": ${GLOBAL_BATCH},
  "train_micro_batch_size_per_gpu": ${MICRO_BATCH},
  "steps_per_print": ${LOG_INTERVAL},
  "zero_optimization": {
    "stage": 1
  },
  "gradient_clipping": 1.0,
  "prescale_gradients": false,
  "fp16": {
    "enabled": true,
    "loss_scale": 0,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "initial_scale_power": 11
  },
  "bf16": {
    "enabled": false
  },
  "curriculum_learning": {
    "enabled": true,
    "curriculum_type": "seqlen",
    "min_difficulty": 64,
    "max_difficulty": ${SEQ_LEN},
    "schedule_type": "fixed_linear",
    "schedule_config": {
      "total_curriculum_step": 11000,
      "difficulty_step": 8
    }
  },
  "wall_clock_breakdown": false
}
JSON

deepspeed --hostfile hostfile pretrain_gpt.py \
    --override-opt_param-scheduler \
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    --tensor-model-parallel-size 1 --init-method-std 0.02 \
    --train-tokens ${TRAIN_TOKENS} --train-samples $((TRAIN_TOKENS * 3 / SEQ_LEN)) \
    --lr-warmup-tokens 375000000 --lr-decay-tokens 260000000000 \
    --lr 6.0e-4 --min-lr 6.0e-5 --lr-decay-style cosine \
    --micro-batch-size ${MICRO_BATCH} --global-batch-size ${GLOBAL_BATCH} \
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 \
    --seq-length ${SEQ_LEN} --max-position-embeddings ${SEQ_LEN} \
    --exit-duration-in-mins 30000000 --hysteresis 2 --num-workers 0 --fp16 --split 98,2,0 \
    --log-interval ${LOG_INTERVAL} --eval-interval 100 --eval-iters 10 --save-interval 1000 \
    --load "checkpoints/${NAME}" --save "checkpoints/${NAME}" \
    --tensorboard-queue-size 1 --log-timers-to-tensorboard --log-batch-size-to-tensorboard \
    --log-validation-ppl-to-tensorboard --tensorboard-dir "tensorboard/${NAME}" \
    --log-optimizer-states-to-tensorboard \
    --vocab-file "${VOCAB_FILE}" --merge-file "${MERGE_FILE}" --data-path "${DATA_PATH}" \
    --data-impl mmap \
    --deepspeed --deepspeed_config "ds_${NAME}.json" --zero-stage 1 \
    --pipeline-model-parallel-size 1 --no-pipeline-parallel "$@"
