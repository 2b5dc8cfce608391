#!/usr/bin/env bash
# Builds the virtual environment in which the tests run the real SGLang server on CPU.
#
#   tests/sglang/install.sh [VENV]      default: .venv-sglang in the repository root
#   PYTHON=python3.12 tests/sglang/install.sh
#
# Takes about two minutes and 2.7 GB the first time, well under a second when nothing is to be done.
# Each step leaves a mark, so that an interrupted run goes on where it stopped; marks carry the hash
# of this script and of requirements.txt, so that a changed pin is installed. Of two runs at once one
# waits for the other. pip's own output goes to VENV/install.log.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:-$root/.venv-sglang}
python=${PYTHON:-python3}
plugin=$root/megarl/sync/sglang_plugin

TORCH=2.13.0          # sglang 0.5.23 asks for a later one but serves with this one on CPU
SGLANG=0.5.23

mkdir -p "$venv/.steps"
venv=$(cd "$venv" && pwd)
log=$venv/install.log

exec 9>"$venv/.lock"
if ! flock -n 9; then
  echo "sglang: another install into $venv is running, waiting for it"
  flock 9
fi

hash_of() { cat "$@" | sha256sum | cut -c1-16; }

# step NAME HASH COMMAND...: run COMMAND once for each HASH.
step() {
  local name=$1 mark="$venv/.steps/$1.$2" started=$SECONDS
  shift 2
  [ -e "$mark" ] && return 0
  echo "=== $name: $*" >>"$log"
  if ! "$@" >>"$log" 2>&1; then
    echo "sglang: $name FAILED after $((SECONDS - started)) s; the end of $log:" >&2
    tail -n 15 "$log" >&2
    exit 1
  fi
  rm -f "$venv/.steps/$name".*
  : >"$mark"
  echo "sglang: $name, $((SECONDS - started)) s"
}

# A killed pip leaves package folders without INSTALLER or RECORD (it writes those last), which the
# next pip takes for installed: drop such remains, pip then copies the files anew.
drop_half_installed() {
  local info
  for info in "$venv"/lib/python3*/site-packages/*.dist-info; do
    [ -d "$info" ] || continue
    [ -e "$info/RECORD" ] && [ -e "$info/INSTALLER" ] || rm -r "$info"
  done
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

install() {
  drop_half_installed
  pip install -q -c <(echo "torch==$TORCH") "$@"
}

check_imports() {
  PYTHONPATH=$here/support SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c \
    "import torch, megarl_sglang_plugin, sglang.srt.managers.scheduler as s; print(torch.__version__, s)"
}

key=$(hash_of "${BASH_SOURCE[0]}" "$here/requirements.txt")
plugin_key=$key.$(hash_of "$plugin/pyproject.toml" "$plugin"/megarl_sglang_plugin/*.py)

step venv "$key" "$python" -m venv "$venv"
# torch first and alone: pip then takes a CPU build where its configuration offers one, and nothing
# after it may move it.
step torch "$key" install "torch==$TORCH"
step packages "$key" install -r "$here/requirements.txt"
# Without dependencies: these name the CUDA torch and kernel packages that do not exist for CPU.
step sglang "$key" install --no-deps torchvision==0.28.0 compressed-tensors==0.18.0 xgrammar==0.2.7 \
  "sglang==$SGLANG"
step plugin "$plugin_key" install --no-deps --force-reinstall "$plugin"
step imports "$key" check_imports
