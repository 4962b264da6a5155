#!/usr/bin/env bash
# A raypfl command on the nodes of a Slurm job, in a Ray cluster that starts and ends with the job:
#   sbatch cluster/slurm.sh run my_experiment.yaml rounds=100
# sbatch's own options change what it asks for: sbatch --nodes=4 --gpus-per-node=8 cluster/slurm.sh run ...
#SBATCH --job-name=raypfl
#SBATCH --output=raypfl-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@180

set -euo pipefail

# A job that is requeued keeps its number, so its next attempt finds the run of the one before.
if [ "${1:-}" = run ] && [[ " $* " != *" --run-dir"* ]]; then
    set -- "$@" --run-dir "runs/job-$SLURM_JOB_ID"
fi

# Other jobs may run on the same nodes: this one has ports, a folder and a token of its own.
export PORT=$((20000 + SLURM_JOB_ID % 1000 * 10)) FOLDER=/tmp/raypfl-$SLURM_JOB_ID
RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

# One task a node. In a task, SLURM_LAUNCH_NODE_IPADDR is the address of the node where this script runs, the first.
each=(srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --overlap)
# shellcheck disable=SC2016  # a variable of the task
address=$("${each[@]}" --nodes=1 --ntasks=1 bash -c 'echo "$SLURM_LAUNCH_NODE_IPADDR:$PORT"')
# Slurm sends SIGTERM to all processes of a job before it kills them. Ray must not hear it, or raypfl could save nothing.
deaf=(python3 -c 'import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execvp(sys.argv[1], sys.argv[1:])')

# shellcheck disable=SC2016  # the variables are those of the tasks
"${deaf[@]}" "${each[@]}" "${deaf[@]}" bash -c '
    if [ "$SLURM_NODEID" = 0 ]; then
        place=(--head --node-ip-address="$SLURM_LAUNCH_NODE_IPADDR" --port="$PORT" --include-dashboard=false
            --ray-client-server-port="$((PORT + 1))")
    else
        place=(--address="$SLURM_LAUNCH_NODE_IPADDR:$PORT")
    fi
    exec ray start --block "${place[@]}" --temp-dir="$FOLDER" --dashboard-agent-listen-port="$((PORT + 2))" \
        --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" \
        ${SLURM_MEM_PER_NODE:+--object-store-memory="$((SLURM_MEM_PER_NODE * 300000))"}
' >>"ray-$SLURM_JOB_ID.log" 2>&1 &
ray=$!

export RAY_ADDRESS=$address # for raypfl, too
python3 - "$ray" <<'END'
import os
import sys
import time

import ray


def joined() -> int:
    try:
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="error")
    except ConnectionError:
        return 0
    return sum(node["Alive"] for node in ray.nodes())


wanted, until = int(os.environ["SLURM_JOB_NUM_NODES"]), time.monotonic() + 300
while (here := joined()) < wanted:
    if time.monotonic() > until or not os.path.exists(f"/proc/{sys.argv[1]}"):
        sys.exit(f"Ray has started on {here} of {wanted} nodes; ray-{os.environ['SLURM_JOB_ID']}.log says why.")
    time.sleep(1)
END

raypfl "$@" &
raypfl=$!
trap : TERM # Slurm has sent it to raypfl, too
trap 'requeue=yes; kill -TERM $raypfl' USR1
while kill -0 $raypfl 2>/dev/null; do
    wait $raypfl || :
done
code=0
wait $raypfl || code=$?

scancel --signal=KILL "$SLURM_JOB_ID.1" 2>/dev/null || : # the second step, Ray
wait
"${each[@]}" rm -rf "$FOLDER" || :
if [ "${requeue:-}" ] && [ $code != 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
