#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=08:00:00
# sbatch slurm.sh COMMAND…: a refitd on every node of the job, without root, and COMMAND once a node beside it.
# COMMAND finds its daemon by REFITD_SOCKET. Everything ends with the job: daemons, etcd, sockets, secrets.
set -euo pipefail
umask 077

first=${SLURM_JOB_NODELIST:+$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
shared=${REFITD_SHARED:-$HOME}/refitd-$SLURM_JOB_ID        # that all nodes see: secrets of this job
local=${TMPDIR:-/tmp}/refitd-$SLURM_JOB_ID                 # of each node: socket and state
etcd=$(getent ahostsv4 "$first" | awk '{print $1; exit}'):$((20000 + SLURM_JOB_ID % 20000))
export REFITD_SOCKET=$local/hook.sock

case "${1:-}" in
--daemon)    # a task a node: no file, the whole configuration is here
    address=$(getent ahostsv4 "$SLURMD_NODENAME" | awk '{print $1; exit}')
    export REFITD_NODE__NAME=$SLURMD_NODENAME REFITD_NODE__STATE_DIR=$local/state
    export REFITD_STORE__CA=$shared/etcd.pem REFITD_STORE__CERT=$shared/etcd.pem REFITD_STORE__KEY=$shared/etcd.key
    export REFITD_DATA__HOST=$address REFITD_DATA__SECRET_FILE=$shared/data-secret
    export REFITD_METRICS__LISTEN=127.0.0.1:0              # a free port: another job may be on this node
    if [ "$SLURM_NODEID" = 0 ]; then
        export REFITD_STORE__URL=etcd+spawn:// REFITD_STORE__LISTEN=$etcd
    else
        export REFITD_STORE__URL=etcd://$etcd
    fi
    mkdir -p "$local"
    trap : TERM INT    # Slurm tells the daemon, too; we wait for it and tidy up
    refitd run 2> "refitd-$SLURM_JOB_ID-$SLURM_NODEID.log" || status=$?
    rm -rf "$local"
    exit "${status:-0}"
    ;;
--command)    # a task a node
    shift
    until refitd status > /dev/null 2>&1; do sleep 0.5; done
    exec "$@"
    ;;
esac

# The batch script, on the first node: secrets, daemons, then the work.
mkdir -p "$shared"
trap 'kill -TERM ${work:-} ${daemons:-} 2> /dev/null; wait; rm -rf "$shared"' EXIT
trap 'exit 143' TERM
cp "$0" "$shared/slurm.sh"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj "/CN=refitd $SLURM_JOB_ID" \
    -addext "subjectAltName=IP:${etcd%:*}" -keyout "$shared/etcd.key" -out "$shared/etcd.pem" 2> /dev/null
head -c 32 /dev/urandom | base64 > "$shared/data-secret"

srun --overlap --ntasks-per-node=1 --kill-on-bad-exit=1 bash "$shared/slurm.sh" --daemon &
daemons=$!
srun --overlap --ntasks-per-node=1 --kill-on-bad-exit=1 bash "$shared/slurm.sh" --command "$@" &
work=$!
wait -n || status=$?    # whichever ends first
kill -0 $daemons 2> /dev/null || { echo "a daemon has ended: see refitd-$SLURM_JOB_ID-*.log" >&2; exit 1; }
exit "${status:-0}"
