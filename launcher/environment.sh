# Sourced by the two commands of the README: makes .venv with pinned torch, this project and its native library, or says what is missing.
# Usage: . launcher/environment.sh [extras]   (from the project's root; extras such as "test")

stop() { echo "ds_sparse: $1" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$candidate"; return; fi
  done
  stop "Python 3.11 or later is needed and none was found; install it, or name it as PYTHON=/path/to/python3."
}

prepare() {
  local extras=$1 python wanted
  if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
    python=$(find_python) || exit 1
    echo "ds_sparse: making .venv with $($python --version)"
    rm -rf .venv
    "$python" -m venv .venv || stop "$python cannot make a virtual environment; install its venv module (Debian: apt-get install python3-venv)."
  fi
  command -v "${CXX:-c++}" >/dev/null || stop "no C++ compiler (${CXX:-c++}) was found; install one (Debian: apt-get install g++) or name it as CXX=..."
  wanted=$(cat pyproject.toml setup.py | cksum)
  if [ "$(cat ".venv/ds_sparse-$extras.stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "ds_sparse: installing torch and the other requirements into .venv (once, about a minute)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0" "setuptools>=77" wheel \
      || stop "pip could not install torch; its message is above (no network, or no space?)."
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".${extras:+[$extras]}" \
      || stop "pip could not install ds_sparse; its message is above."
    echo "$wanted" > ".venv/ds_sparse-$extras.stamp"
  else
    .venv/bin/python setup.py --quiet build_ext --inplace || stop "the native library could not be built; the message is above."
  fi
}

prepare "${1:-}"
