#!/usr/bin/env bash
# Makes the environment in which tests/te runs, with the real Transformer Engine on a machine that
# needs no GPU, and runs something in it:
#
#   tools/setup_te.sh                 make it ready
#   tools/setup_te.sh COMMAND...      and run COMMAND in it; `make check-te` runs pytest on tests/te
#
# The first time takes about 15 minutes, nearly all of them compiling Transformer Engine's torch part,
# of which pip has no built package, on two cores; 7 GB of disk. Both the environment and the package
# that was built lie outside the repository, for every clone: the environment is made again from the
# package in 2 to 4 minutes, and a repeat takes a second. Each step leaves a mark with the hash of
# what it was made from; of two runs at once one waits for the other.
#
# Exit code 3: this machine cannot make it, and the last line says what is missing.
#
# Variables:
#   MEGARL_TE_VENV   where (default: megarl/te in XDG_CACHE_HOME or ~/.cache)
#   PYTHON           the interpreter for a new one, 3.11 or 3.12 (default: .venv's, else python3)
#   CUDA_HOME        a CUDA 13 toolkit (default: that of nvcc, else /usr/local/cuda)
#   MAX_JOBS         compilers at once (default: one a core)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/megarl
venv=${MEGARL_TE_VENV:-$cache/te}

TORCH=2.14.1 TE=2.20.2  # as on clusters (pyproject.toml: te)
GIGABYTES=7

main() {
  mkdir -p "$venv/.steps" "$cache/wheels"
  venv=$(cd "$venv" && pwd)
  exec 9>"$venv/.lock"
  if ! flock -n 9; then
    say "another run is setting up $venv; waiting for it"
    flock 9
  fi
  local python key
  if [[ -x $venv/bin/python ]]; then python=$venv/bin/python; else python=$(choose_python); fi
  key=$(hash_of "${BASH_SOURCE[0]}")
  [[ -e $venv/.steps/imports.$key.$(hash_of "$root/pyproject.toml") ]] ||
    make_environment "$python" "$key"
  exec 9>&-
  [[ $# -gt 0 ]] || { say "$venv is ready"; return; }
  cd "$root"
  PYTHONPATH=$root exec "$venv/bin/$1" "${@:2}"
}

make_environment() {  # make_environment PYTHON KEY
  local python=$1 key=$2 tag wheel packages_key
  if [[ -e $venv/.steps/half ]]; then
    say "the last run was cut short; making the environment anew"
    find "$venv" -mindepth 1 -maxdepth 1 -not -name .lock -exec rm -rf {} +
    mkdir "$venv/.steps"
    python=$(choose_python)
  fi
  enough_disk
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  wheel=$cache/wheels/torch-$TORCH/transformer_engine_torch-$TE-$tag-$tag-linux_$(uname -m).whl
  [[ -f $wheel ]] || can_compile
  step venv "$key" "a Python environment" "$python" -m venv "$venv"
  step torch "$key" "torch $TORCH, its CUDA build (gigabytes)" pip install "torch==$TORCH" numpy
  # What builds and imports it, and what megatron-core imports without saying so.
  step core "$key" "Transformer Engine $TE without its torch part" pinned \
    "transformer-engine==$TE" "transformer-engine-cu13==$TE" 'setuptools>=77' wheel ninja pybind11 \
    einops onnxscript onnx nvdlfw-inspect psutil packaging
  if [[ ! -f $wheel ]]; then
    rm -f "$venv"/.steps/build.*  # one that was built and has been removed
    step build "$key" "its torch part, compiled here (about 15 minutes on two cores)" build "$wheel"
  fi
  step te "$key" "its torch part" pip install --no-deps --force-reinstall "$wheel"
  packages_key=$key.$(hash_of "$root/pyproject.toml")
  step packages "$packages_key" "megarl's packages" install_packages
  step imports "$packages_key" "a look at them" check_imports
}

build() {  # build WHEEL: without libcuda and without a GPU; headers come from pip's packages
  local site made
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  made=$venv/build-wheels
  rm -rf "$made"
  PATH=$venv/bin:$PATH CUDA_HOME=$(cuda_home) CUDNN_PATH=$site/nvidia/cudnn \
    CPATH=$site/nvidia/cu13/include:$site/nvidia/cudnn/include:$site/nvidia/nccl/include \
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_CUDA_ARCHS=90 TORCH_CUDA_ARCH_LIST=9.0 \
    MAX_JOBS=${MAX_JOBS:-$(nproc)} "$venv/bin/python" -m pip --disable-pip-version-check wheel -v \
    --no-build-isolation --no-deps --no-binary transformer-engine-torch -w "$made" \
    "transformer-engine-torch==$TE" || return 1
  mkdir -p "${1%/*}"
  # moved as a whole: a file of this name is complete, also where two environments build it at once
  cp "$made"/transformer_engine_torch-*.whl "$1.part.$$" && mv "$1.part.$$" "$1" && rm -rf "$made"
}

install_packages() {  # what pyproject.toml lists, and pytest
  "$venv/bin/python" - "$root/pyproject.toml" >"$venv/requirements.txt" <<'PY' || return 1
import sys, tomllib

with open(sys.argv[1], "rb") as f:
    project = tomllib.load(f)["project"]
dev = [r for r in project["optional-dependencies"]["dev"] if r.startswith(("pytest", "hypothesis"))]
base = [r for r in project["dependencies"] if not r.startswith(("torch", "megatron-core"))]
print(*base, *dev, sep="\n")
PY
  pinned -r "$venv/requirements.txt" || return 1
  # Its metadata asks for Python 3.12, its 3.11 wheel works (tools/setup_env.sh).
  local pin
  pin=$(grep -o 'megatron-core==[0-9.]*' "$root/pyproject.toml" | head -n 1)
  pip install --no-deps --ignore-requires-python "$pin"
}

check_imports() {
  "$venv/bin/python" -c 'import torch, transformer_engine.pytorch, megatron.core'
}

# --- what a machine must have ------------------------------------------------------------------------

can_compile() {
  local home release
  home=$(cuda_home)
  [[ -n $home ]] || cannot "no nvcc: Transformer Engine's torch part must be compiled once, against a" \
    "CUDA 13 toolkit; put its nvcc on PATH or set CUDA_HOME"
  release=$("$home/bin/nvcc" --version | grep -o 'release [0-9.]*')
  [[ $release == 'release 13.'* ]] ||
    cannot "$home is CUDA ${release#release }; 13 is needed, which torch $TORCH is built with"
  command -v "${CXX:-c++}" >/dev/null || cannot "no C++ compiler (${CXX:-c++}): install g++ 11 or newer"
}

cuda_home() {  # empty without one; an nvcc may be a script that starts the one of a toolkit
  local candidate nvcc
  nvcc=$(readlink -f "$(command -v nvcc)" || true)
  for candidate in "${CUDA_HOME:-}" "${nvcc%/bin/nvcc}" /usr/local/cuda; do
    if [[ -n $candidate && -x $candidate/bin/nvcc && -e $candidate/include/cuda.h ]]; then
      echo "$candidate"
      return
    fi
  done
}

enough_disk() {
  local free
  [[ -e $venv/lib ]] && return
  free=$(df --output=avail -BG "$venv" | tail -n 1 | tr -dc 0-9)
  ((free >= GIGABYTES)) ||
    cannot "$free GB are free where $venv lies, $GIGABYTES are needed: set MEGARL_TE_VENV"
}

choose_python() {
  local candidate
  local known='import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'
  for candidate in ${PYTHON:-"$root/.venv/bin/python" python3 python3.12 python3.11}; do
    if "$candidate" -c "$known" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  cannot "no Python 3.11 or 3.12: set PYTHON to one"
}

# --- small things ------------------------------------------------------------------------------------

step() {  # step NAME KEY TITLE COMMAND...: run COMMAND once for each KEY
  local name=$1 mark=$venv/.steps/$1.$2 title=$3 started=$SECONDS
  shift 3
  [[ ! -e $mark ]] || return 0
  say "$title ..."
  if ! "$@" >"$venv/setup-$name.log" 2>&1; then
    grep -m 10 ' error: ' "$venv/setup-$name.log" >&2 || true
    tail -n 15 "$venv/setup-$name.log" >&2
    die "$title: failed after $((SECONDS - started)) s; the whole output is in $venv/setup-$name.log"
  fi
  rm -f "$venv/.steps/$name".*
  : >"$mark"
  say "$title ($((SECONDS - started)) s)"
}

pip() {  # a pip that is killed leaves packages that lack files, which the next takes for installed
  local status=0
  : >"$venv/.steps/half"
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" || status=$?
  rm -f "$venv/.steps/half"
  return $status
}
pinned() { pip install -c <(echo "torch==$TORCH") "$@"; }
hash_of() { cat "$@" | sha256sum | cut -c1-16; }
say() { echo "[te] $*" >&2; }
die() { echo "[te] error: $*" >&2; exit 1; }
cannot() { echo "[te] not possible here: $*" >&2; exit 3; }

main "$@"
