#!/usr/bin/env bash
# Train on one or several hosts: start the same line on each, in a folder that all of them share.
#
#   NODES=2 HEAD=node0 clusters/torchrun.sh configs/llama-1b.toml --train.steps 100
#
# The first word is the config, the rest are options of minitron.train. Started again, the run goes
# on from its newest good checkpoint. What the environment may say, with its defaults:
#
#   NODES=1         hosts                          GPUS=8       GPUs of each
#   HEAD=localhost  one of them, name or address   PORT=29500   a free port there
#   RUN=runs/NAME   folder of the run              LOGS=        folder for what each rank prints
#   JOB=minitron    the same on all hosts          RESTARTS=3   after a rank has died
set -euo pipefail

config=${1:?a config, as in configs/llama-8b.toml}
shift
# A store for each start: else ranks that are started again may find the addresses of the dead.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds from SIGTERM to SIGKILL: time to save. torch before 2.13 gives 30, whatever is asked for.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}

# exec: what signals this process shall signal torchrun, which passes it on to the ranks.
exec torchrun \
    --nnodes "${NODES:-1}" --nproc-per-node "${GPUS:-8}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29500}" \
    --rdzv-id "${JOB:-minitron}" ${LOGS:+--log-dir "$LOGS" --tee 3} \
    -m minitron.train "$config" \
    --run-dir "${RUN:-runs/$(basename "$config" .toml)}" --restart "$@"
