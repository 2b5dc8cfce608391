#!/usr/bin/env bash
# Makes .venv ready to run megarl or to work on it:  tools/setup_env.sh [run|dev]
#   run  what training needs (the default)        dev  the test and lint tools as well
#
# 1. A step that succeeded leaves a stamp holding a hash of what it was made from.  Same hash, nothing
#    to do: a repeat takes a fraction of a second, and a change in csrc/ rebuilds the extension only.
# 2. A stamp is removed before its step starts.  If a set-up was cut short, packages that lack files
#    are removed and every step is repeated; what is sound is found in place and costs seconds.
# 3. One set-up runs at a time; a second one waits for the first.
#
# Variables:
#   PYTHON           the interpreter for a new .venv (default: the first of python3, python3.12,
#                    python3.11 that is 3.11 or 3.12)
#   TORCH_VERSION    default: what is installed; at first 2.14.1 with a GPU, else 2.13.0
#   TORCH_INDEX_URL  package index for torch alone (default: what pip is configured for)
#   MEGARL_CUDA      auto, 0 or 1: compile the CUDA kernels (see setup.py)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/.venv stamps=$PWD/.venv/.stamps

main() {
  local group=${1:-run}
  [[ $group == run || $group == dev ]] || die "unknown group '$group': use run or dev"
  take_lock
  prepare_folder
  export PATH=$venv/bin:$PATH  # ninja, for the extension

  step venv 1 "python environment" create_venv
  local torch_key
  torch_key=$(torch_key)
  step torch "$torch_key" "torch ${torch_key%% *}" install_torch "${torch_key%% *}"
  local torch_build python
  torch_build=$(<"$venv/torch-build.txt")
  python=$(basename "$venv"/lib/python3.*)

  local deps_key
  deps_key="$(hash_of pyproject.toml) $torch_build $python"
  step deps "$deps_key" "packages" install_packages base
  # On 3.12 megatron-core is one of the packages above.
  [[ $python != python3.11 ]] || step megatron "$deps_key" "megatron-core" install_megatron_on_311
  [[ $group != dev ]] || step deps-dev "$deps_key" "test and lint tools" install_packages dev

  local sources compiler key
  sources=$(find csrc build_backend -type f -not -name '*.pyc' | LC_ALL=C sort)
  compiler=$(find_compiler)
  if [[ -n $compiler ]] && ! ls megarl/_C.abi3.so megarl/_host.*.so >/dev/null 2>&1; then
    rm -f "$stamps/package"
  fi
  # shellcheck disable=SC2086  # file names, without spaces
  key="$(hash_of pyproject.toml setup.py $sources) $torch_build ${MEGARL_CUDA:-auto} ${compiler:-none}"
  step package "$key" "megarl and its compiled operators" install_megarl
  # What set-up has cost so far, for the demo's summary; a repeat adds nothing worth counting.
  local spent=0
  [[ ! -f $stamps/seconds ]] || spent=$(<"$stamps/seconds")
  echo $((spent + SECONDS)) >"$stamps/seconds"
  say "$venv is ready ($group)"
}

# --- steps -------------------------------------------------------------------------------------------

create_venv() {
  # On an existing environment this keeps the packages and puts back what an interruption left out.
  "$interpreter" -m venv "$venv" && pip install --upgrade pip 'setuptools>=77' ninja
}

install_torch() {  # install_torch VERSION
  local from=()
  # pip takes an installed 2.13.0 for the 2.13.0 of any index; an index that was named must win.
  [[ -z ${TORCH_INDEX_URL:-} ]] || from=(--index-url "$TORCH_INDEX_URL" --force-reinstall --no-deps)
  pip install "${from[@]}" "torch==$1" || return 1
  local build cuda
  build=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))') &&
    cuda=$(sed -n "s/^cuda.*= '\(.*\)'.*/\1/p" "$venv"/lib/python3.*/site-packages/torch/version.py) &&
    echo "$build" >"$venv/torch-build.txt" || return 1
  # Everything installed later is resolved around this one build.
  echo "torch==$build" >"$venv/constraints.txt"
  if [[ -z $cuda ]]; then
    say "torch $build is a CPU build" >&3
  else
    say "torch $build is a CUDA $cuda build" >&3
  fi
  if [[ -n $cuda ]] && ! has_gpu; then
    say "warning: no GPU is visible here, but pip chose a CUDA build of torch (gigabytes);" \
      "to replace it, name an index with CPU builds in TORCH_INDEX_URL and repeat" >&3
  fi
}

install_packages() {  # install_packages base|dev
  requirements "$1" >"$venv/requirements-$1.txt" &&
    pip install -c "$venv/constraints.txt" -r "$venv/requirements-$1.txt"
}

install_megatron_on_311() {
  # Its metadata asks for Python 3.12, its 3.11 wheel works; --no-deps because pip would refuse the
  # same way when it resolves what the wheel needs (pyproject.toml lists that).
  local pin
  pin=$(requirements base | sed -n 's/^\(megatron-core==[^ ;]*\).*/\1/p')
  [[ -n $pin ]] || { echo "pyproject.toml pins no megatron-core"; return 1; }
  pip install --no-deps --ignore-requires-python "$pin"
}

install_megarl() {
  local required=native
  if [[ -z $compiler ]]; then
    required=${MEGARL_OPS:-}
    say "warning: no C++ compiler (${CXX:-c++ or g++}): megarl runs without its compiled operators," \
      "slower; install g++ 9 or newer, or set CXX, and repeat" >&3
  fi
  # Without isolation: the build tools come from .venv, so that a rebuild needs no network.
  pip install -v --no-deps --no-build-isolation -e . &&
    MEGARL_OPS=$required "$venv/bin/python" -c 'from megarl import ops; ops.host_module()'
}

# --- how a step runs ---------------------------------------------------------------------------------

step() {  # step NAME KEY TITLE COMMAND...: run COMMAND unless NAME's stamp holds KEY
  local name=$1 key=$2 title=$3 start=$SECONDS log=$venv/setup-$1.log
  shift 3
  [[ ! -f $stamps/$name || $(<"$stamps/$name") != "$key" ]] || return 0
  rm -f "$stamps/$name"
  # The last step alone touches no package but megarl: interrupted, it is simply repeated.
  [[ $name == package ]] || touch "$stamps/unfinished"
  say "$title ..."
  if ! "$@" 3>&1 >"$log" 2>&1; then
    # A compiler's complaint stands far above the end of what pip prints.
    grep -m 10 ' error: ' "$log" >&2 || true
    echo "..." >&2
    tail -n 15 "$log" >&2
    die "$title: failed; the whole output is in $log"
  fi
  echo "$key" >"$stamps/$name"
  rm -f "$stamps/unfinished"
  say "$title ($((SECONDS - start)) s)"
}

take_lock() {
  # Beside .venv, not in it: .venv may have to be replaced.  Held until this process has ended.
  exec 9>"$PWD/.venv.lock"
  flock -n 9 && return
  say "another set-up is running here; waiting for it"
  flock -w 3600 9 || die "it still holds $PWD/.venv.lock after an hour: end it, then repeat"
}

prepare_folder() {
  local wanted
  if "$venv/bin/python" -c '' 2>/dev/null; then
    interpreter=$venv/bin/python
    supported "$interpreter" || die "$venv has $("$interpreter" -V); 3.11 or 3.12 is needed: remove it"
    if [[ -n ${PYTHON:-} ]]; then
      wanted=$("$PYTHON" -V 2>/dev/null) || die "PYTHON=$PYTHON does not run"
      [[ $wanted == "$("$interpreter" -V)" ]] ||
        die "PYTHON=$PYTHON is $wanted, $venv has $("$interpreter" -V): remove $venv to change it"
    fi
  else
    interpreter=$(choose_python)
    [[ ! -e $venv ]] || say "the interpreter of $venv is gone; making it anew"
    rm -rf "$venv"
  fi
  mkdir -p "$stamps"
  [[ ! -f $stamps/unfinished ]] || remove_broken_packages
}

remove_broken_packages() {
  say "the last set-up did not finish; checking what it left"
  local broken
  broken=$("$interpreter" - <<'PY'
from importlib.metadata import distributions

for dist in distributions():
    recorded = [(f.locate(), f.size) for f in dist.files or [] if f.size is not None]
    if dist.name and any(not p.is_file() or p.stat().st_size != size for p, size in recorded):
        print(dist.name)
PY
  )
  if [[ -n $broken ]]; then
    say "incomplete, to be installed again:" $broken
    # shellcheck disable=SC2086  # package names
    pip uninstall -q -y $broken || die "they cannot be removed: remove $venv, then repeat"
  fi
  find "$stamps" -type f -delete
}

# --- small things ------------------------------------------------------------------------------------

choose_python() {
  local candidate candidates=(python3 python3.12 python3.11)
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    supported "$candidate" && { echo "$candidate"; return; }
  done
  die "Python 3.11 or 3.12 is needed, and ${PYTHON:-python3} is" \
    "$("${PYTHON:-python3}" -V 2>/dev/null || echo missing): set PYTHON to one"
}

supported() {
  "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null
}

torch_key() {  # "VERSION INDEX"; without TORCH_VERSION and TORCH_INDEX_URL what is there stays
  if [[ -f $stamps/torch && -z ${TORCH_VERSION:-}${TORCH_INDEX_URL:-} ]]; then
    cat "$stamps/torch"
  elif [[ -n ${TORCH_VERSION:-} ]]; then
    echo "$TORCH_VERSION ${TORCH_INDEX_URL:-}"
  else
    echo "$(has_gpu && echo 2.14.1 || echo 2.13.0) ${TORCH_INDEX_URL:-}"
  fi
}

find_compiler() {  # empty without one; setup.py looks in the same places
  local candidate candidates=(c++ g++)
  [[ -z ${CXX:-} ]] || candidates=("${CXX%% *}")
  for candidate in "${candidates[@]}"; do
    command -v "$candidate" && return
  done
  true
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

requirements() {  # requirements base|dev: the lists of pyproject.toml, one requirement a line
  "$venv/bin/python" - "$1" <<'PY'
import sys, tomllib

with open("pyproject.toml", "rb") as f:
    project = tomllib.load(f)["project"]
base = sys.argv[1] == "base"
print(*(project["dependencies"] if base else project["optional-dependencies"]["dev"]), sep="\n")
PY
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
hash_of() { cat "$@" | sha256sum | cut -c1-16; }
say() { echo "[setup] $*"; }
die() { echo "[setup] error: $*" >&2; exit 1; }

main "$@"
