#!/usr/bin/env bash
# Train on one or several hosts: run the same command on each, in a folder that all of them share.
#
#   NODES=2 HEAD=node0 clusters/torchrun.sh configs/llama-1b.toml --train.steps 100
#
# The first argument is the config, the rest are options of minitron.train. If started again, the
# run continues from its newest good checkpoint. Environment variables, with their defaults:
#
#   NODES=1         number of hosts                GPUS=8       GPUs per host
#   HEAD=localhost  name or address of one host    PORT=29500   a free port on HEAD
#   RUN=runs/NAME   folder of the run              LOGS=        folder for each rank's output
#   JOB=minitron    job id, equal on all hosts     RESTARTS=3   how often to restart dead ranks
set -euo pipefail

config=${1:?name a config, as in configs/llama-8b.toml}
shift
# A new store for each start; otherwise restarted ranks may find the addresses of the dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds from SIGTERM to SIGKILL, for saving. torch before 2.13 ignores this and gives 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}

# exec, so that signals to this process reach torchrun, which passes them on to the ranks.
exec torchrun \
    --nnodes "${NODES:-1}" --nproc-per-node "${GPUS:-8}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29500}" \
    --rdzv-id "${JOB:-minitron}" ${LOGS:+--log-dir "$LOGS" --tee 3} \
    -m minitron.train "$config" \
    --run-dir "${RUN:-runs/$(basename "$config" .toml)}" --restart "$@"
