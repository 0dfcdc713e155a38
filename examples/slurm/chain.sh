#!/bin/bash
# gpt-345m: 4 nodes with 8 processes each. Submit with: sbatch FILE
# Written by megatron submit --to slurm: to change it, edit the description and rerun the command (docs/clusters.md).
#SBATCH --job-name=gpt-345m
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1 # one launcher per node starts all of its processes
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=900G
#SBATCH --time=4:00:00
#SBATCH --partition=gpu
#SBATCH --output=logs/%x-%A_%a.log # the folder must exist
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120 # this many seconds before the end, all ranks save and exit with 3
#SBATCH --array=1-8%1 # one at a time; each continues from the last checkpoint
#SBATCH --no-requeue
set -uo pipefail

export OMP_NUM_THREADS=12
export NCCL_DEBUG=WARN

# The first node's address, as SLURM itself knows it. The port differs from job to job.
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node --oneliner "$FIRST" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
# Each rank's output is also stored here: node-N/*/attempt_0/RANK/stdout.log
LOGS=logs/gpt-345m-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

LAUNCHER=(
    python -m megatron.processes.torchrun
    --nnodes 4
    --nproc-per-node 8
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
    --tee 3
)
COMMAND=(
    pretrain_gpt.py
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --micro-batch-size 8
    --global-batch-size 512
    --train-iters 100000
    --bf16
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --clip-grad 1.0
    --data-path data/my_text_document
    --split 949,50,1
    --tokenizer-type GPT2BPETokenizer
    --vocab-file data/gpt2-vocab.json
    --merge-file data/gpt2-merges.txt
    --load checkpoints/gpt-345m
    --save checkpoints/gpt-345m
    --save-interval 1000
    --eval-interval 1000
    --eval-iters 10
    --log-interval 10
)

# The quotes are single because each node must expand its own SLURM_NODEID. After one node has ended,
# the others have a minute to end by themselves with the exit code of the run.
srun --wait=60 --kill-on-bad-exit=0 --cpus-per-task=96 \
    bash -c 'PET_NODE_RANK=$SLURM_NODEID PET_LOG_DIR=$0/node-$SLURM_NODEID exec "$@"' \
    "$LOGS" "${LAUNCHER[@]}" "${COMMAND[@]}"
CODE=$?

if [ "$CODE" -eq 3 ]; then # saved, but not complete: the next job of the array continues
    exit 0
fi
if [ "$CODE" -ne 0 ]; then # the next jobs would fail in the same way
    scancel "$SLURM_ARRAY_JOB_ID"
fi
exit "$CODE"
