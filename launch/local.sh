#!/usr/bin/env bash
# A run on one node: trainer ranks under torchrun, rollout servers started by rank 0.
#
#   launch/local.sh CONFIG.yaml... [key=value ...]
#
# Ctrl-C or SIGTERM: the step in progress is finished and saved, at most run.stop_grace_s later everything ends.
# A failing rank or server ends the rest; the first cause is printed last. Exit code 0 only for a finished run.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ -x $here/.venv/bin/python ]] && python=$here/.venv/bin/python
fi

# One rank computes on one thread unless told otherwise: more of them only wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

settings=$("$python" -m megarl.cli config check --shell "$@")  # every problem at once, before anything starts
eval "$settings"                                                # NPROC and RUN_DIR, quoted for the shell
launch=$(date +%Y%m%d-%H%M%S)-$$
mkdir -p "$RUN_DIR/logs"
log=$RUN_DIR/logs/torchrun_${launch}_0.log

"$python" -m torch.distributed.run --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id="$launch" \
  --local-addr=127.0.0.1 --nnodes=1 --nproc-per-node="$NPROC" --max-restarts=0 \
  -m megarl.train "$@" 2>"$log" &
job=$!
signal=0
trap 'signal=15; kill -TERM "$job" 2>/dev/null || true' TERM
trap 'signal=2; kill -TERM "$job" 2>/dev/null || true' INT

status=0
while kill -0 "$job" 2>/dev/null; do # a trapped signal ends `wait` early
  status=0
  wait "$job" || status=$?
done

if ((status != 0)); then
  if ((signal != 0)); then
    echo "stopped by signal $signal; go on with run.resume=true if $RUN_DIR/checkpoints holds a checkpoint" >&2
    exit $((128 + signal))
  fi
  # It fails if it has found a cause; a rank that could not even start left its words to torchrun.
  if "$python" -m megarl.cli first-error "$RUN_DIR" --launch "$launch" >&2; then
    head -n 20 "$log" >&2
  fi
  echo "logs: $RUN_DIR/logs" >&2
  exit 1
fi
