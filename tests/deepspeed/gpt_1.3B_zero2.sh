#!/bin/bash
# A job of the kind that Megatron-DeepSpeed's users have: GPT 1.3B on 128 GPUs, TP 2, ZeRO 2, activation
# checkpointing, curriculum learning, DeepSpeed's profiler and TensorBoard.
# processes: 128
SEQ_LEN=2048
GLOBAL_BATCH=4096
MICRO_BATCH=16
NAME=gpt-1.3B-zero2
TRAIN_TOKENS=300000000000

cat > "ds_${NAME}.json" <<JSON
{
  "train_batch_size": ${GLOBAL_BATCH},
  "train_micro_batch_size_per_gpu": ${MICRO_BATCH},
  "gradient_accumulation_steps": 4,
  "steps_per_print": 2000,
  "zero_allow_untested_optimizer": true,
  "zero_optimization": {
    "stage": 2,
    "contiguous_gradients": true,
    "overlap_comm": true,
    "reduce_scatter": true,
    "reduce_bucket_size": 5e7,
    "allgather_bucket_size": 5e7
  },
  "gradient_clipping": 1.0,
  "communication_data_type": "fp16",
  "fp16": {
    "enabled": true,
    "loss_scale": 0,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "initial_scale_power": 11
  },
  "activation_checkpointing": {
    "partition_activations": true,
    "contiguous_memory_optimization": false,
    "cpu_checkpointing": false
  },
  "curriculum_learning": {
    "enabled": true,
    "curriculum_type": "seqlen",
    "min_difficulty": 80,
    "max_difficulty": ${SEQ_LEN},
    "schedule_type": "fixed_root",
    "schedule_config": {
      "total_curriculum_step": 13767,
      "difficulty_step": 8,
      "root_degree": 2
    }
  },
  "flops_profiler": {
    "enabled": true,
    "profile_step": 1,
    "module_depth": -1,
    "top_modules": 3,
    "detailed": true,
    "output_file": null
  },
  "wall_clock_breakdown": true
}
JSON

deepspeed --num_nodes 16 --num_gpus 8 pretrain_gpt.py \
    --override-opt_param-scheduler \
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    --tensor-model-parallel-size 2 --init-method-std 0.013 \
    --train-tokens ${TRAIN_TOKENS} --train-samples $((TRAIN_TOKENS * 3 / SEQ_LEN)) \
    --lr-warmup-tokens 375000000 --lr-decay-tokens 260000000000 \
    --lr 8.0e-4 --min-lr 2.0e-5 --lr-decay-style cosine \
    --micro-batch-size ${MICRO_BATCH} --global-batch-size ${GLOBAL_BATCH} \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length ${SEQ_LEN} --max-position-embeddings ${SEQ_LEN} \
    --exit-duration-in-mins 30000000 --hysteresis 2 --num-workers 0 --fp16 --seed 1234 \
    --split 949,50,1 --no-async-tensor-model-parallel-allreduce \
    --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 1000 \
    --load "checkpoints/${NAME}" --save "checkpoints/${NAME}" \
    --tensorboard-queue-size 1 --log-timers-to-tensorboard --log-batch-size-to-tensorboard \
    --log-validation-ppl-to-tensorboard --tensorboard-dir "tensorboard/${NAME}" \
    --log-optimizer-states-to-tensorboard \
    --vocab-file "${VOCAB_FILE}" --merge-file "${MERGE_FILE}" --data-path "${DATA_PATH}" \
    --data-impl mmap \
    --checkpoint-activations --deepspeed-activation-checkpointing --partition-activations \
    --deepspeed --deepspeed_config "ds_${NAME}.json" --zero-stage 2 \
    --pipeline-model-parallel-size 1 --no-pipeline-parallel "$@"
