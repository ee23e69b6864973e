# Sourced by the two commands of the README: makes $root/.venv with pinned torch, this project and its native library, or says
# in one sentence what is missing. The caller sets root, the project's folder, and extras, optional requirements of
# pyproject.toml such as "test".

stop() {
  echo "ds_sparse: $1" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  stop "no Python 3.11 or later was found${PYTHON:+ as PYTHON=$PYTHON}; install one, or name it: PYTHON=/path/to/python3."
}

find_compiler() {
  local candidate
  for candidate in ${CXX:-g++ c++ clang++}; do
    if command -v "$candidate" >/dev/null; then return; fi
  done
  stop "no C++ compiler was found${CXX:+ as CXX=$CXX}; install one (Debian and Ubuntu: apt-get install g++), or name it: CXX=/path/to/g++."
}

prepare() {
  local venv=$root/.venv stamp=$root/.venv/ds_sparse-$extras.stamp python wanted pinned compiling
  find_compiler
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || exit 1
    if [ -e "$venv" ] && ! ls "$venv"/ds_sparse-* >/dev/null 2>&1; then
      stop "$venv has no pip that runs, and was not made here; move it away, or give it pip: python -m ensurepip."
    fi
    echo "ds_sparse: making .venv with $("$python" --version)"
    rm -rf "$venv"
    mkdir "$venv" && : >"$venv/ds_sparse-makes-this" || stop "$venv cannot be made; the reason is above."
    "$python" -m venv "$venv" || stop "$python cannot make a virtual environment; install its venv module (Debian and Ubuntu: apt-get install python3-venv)."
  fi
  wanted=$(cat "$root/pyproject.toml" "$root/setup.py" | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    (build) || stop "the native library could not be built; the reason is above."
    return
  fi
  echo "ds_sparse: installing torch into .venv (once, half a minute or more)"
  pinned=$("$venv/bin/python" -c 'import sys, tomllib; print(*tomllib.load(open(sys.argv[1], "rb"))["build-system"]["requires"])' \
    "$root/pyproject.toml") || stop "pyproject.toml cannot be read; the reason is above."
  # Unquoted: one word for each requirement.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check $pinned \
    || stop "pip could not install torch; the reason is above (no network, no space, or a Python that torch 2.13 has no wheel for)."
  echo "ds_sparse: compiling the native library, and installing the other requirements (once, one or two minutes)"
  set -m  # a group of processes, which ends as one
  build &
  compiling=$!
  set +m
  trap "kill -- -$compiling 2>/dev/null" EXIT
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable "$root${extras:+[$extras]}" \
    || { wait $compiling && stop "pip could not install ds_sparse; the reason is above."; }
  wait $compiling || stop "the native library could not be built; the reason is above."
  trap - EXIT
  echo "$wanted" >"$stamp"
}

# A line for each file that is compiled.
build() {
  cd "$root"
  exec "$root/.venv/bin/python" setup.py --quiet build_ext --inplace
}

# `prepare` ends in several places, and what the two commands call then has an answer of its own to Ctrl-C.
trap 'echo "ds_sparse: interrupted; start it again to go on" >&2; exit 130' INT
prepare
trap - INT
