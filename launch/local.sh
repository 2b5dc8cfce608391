#!/usr/bin/env bash
# A run on one node: trainer ranks under torchrun, rollout servers started by rank 0.
#
#   launch/local.sh CONFIG.yaml... [key=value ...]
#
# Ctrl-C or SIGTERM: the step in progress is finished, or left while it waits for samples; what is done is saved, and at
# most run.stop_grace_s later everything ends.
# A failing rank or server ends the rest; the first cause is printed last.
# With on_failure={trainer: restart, servers: restart} the ranks are started again, and the servers, started here, stay.
# What a restart does not mend (settings, data, installation) ends the run at once.
# Exit codes: 0 finished, 1 failed, 2 refused before anything started, 128 + signal stopped.
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
eval "$settings"                                                # NPROC, RUN_DIR, RESTARTS, SERVERS
start=$(date +%Y%m%d-%H%M%S)-$$
mkdir -p "$RUN_DIR/logs"

servers= job= signal=0
end_servers() { # by pid; they end with the process that started them
  [[ -n $servers ]] || return 0
  kill -TERM "$servers" 2>/dev/null || true
  wait "$servers" || true
}
trap end_servers EXIT
still_serves() { # or nothing was to
  [[ -z $servers ]] || kill -0 "$servers" 2>/dev/null || {
    echo "the rollout servers have ended: $RUN_DIR/logs/servers.log" >&2
    return 1
  }
}
trap 'signal=15; [[ -z $job ]] || kill -TERM "$job" 2>/dev/null || true' TERM
trap 'signal=2; [[ -z $job ]] || kill -TERM "$job" 2>/dev/null || true' INT

# One start of all ranks, to its end.
train() {
  "$python" -m torch.distributed.run --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id="$launch" \
    --local-addr=127.0.0.1 --nnodes=1 --nproc-per-node="$NPROC" --max-restarts=0 \
    -m megarl.train "$@" 2>"$log" &
  job=$!
  ((signal == 0)) || kill -TERM "$job"
  while kill -0 "$job" 2>/dev/null; do # a trapped signal ends `wait` early
    status=0
    wait "$job" || status=$?
  done
  job=
}

if ((SERVERS)); then
  "$python" -m megarl.cli servers --parent-pid=$$ "$@" 2>>"$RUN_DIR/logs/servers.log" &
  servers=$!
  set -- "$@" rollout.discover=true
fi

status=1 attempt=0 resume=()
while ((signal == 0)); do
  launch=$start
  ((attempt == 0)) || launch=$start-r$attempt
  log=$RUN_DIR/logs/torchrun_${launch}_0.log
  train "$@" "${resume[@]}"
  ((status != 0 && signal == 0)) || break
  # It fails if it has found a cause; a rank that could not even start left its words to torchrun.
  if "$python" -m megarl.cli first-error "$RUN_DIR" --launch "$launch" >&2; then
    head -n 20 "$log" >&2
  fi
  ((attempt < RESTARTS)) || break
  still_serves || break
  # It says what has failed, and fails if another start would meet it again.
  settings=$("$python" -m megarl.cli go-on "$RUN_DIR" --launch "$launch") || break
  resume=()
  [[ -z $settings ]] || mapfile -t resume <<<"$settings"
  attempt=$((attempt + 1))
  pause=$((attempt > 6 ? 60 : 1 << (attempt - 1)))
  echo "restart $attempt of $RESTARTS of the trainer in $pause s ${resume[*]}" >&2
  for ((second = 0; second < pause && signal == 0; second++)); do sleep 1 || true; done
  still_serves || break
done

if ((status != 0 && signal != 0)); then
  echo "stopped by signal $signal; go on with run.resume=true if $RUN_DIR/checkpoints holds a checkpoint" >&2
  exit $((128 + signal))
fi
if ((status != 0)); then
  echo "logs: $RUN_DIR/logs" >&2
  exit 1
fi
