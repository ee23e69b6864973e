#!/usr/bin/env bash
# Sets up everything and runs the tests that hold what users rely on; with --all, the others: those that are marked slow,
# and of the CUDA library, which is compiled for them. Other arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
which="not slow"
if [ "${1:-}" = --all ]; then
  shift
  which=slow
  if command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
    export DS_SPARSE_CUDA="${DS_SPARSE_CUDA:-1}"
  fi
fi
extras=test
. "$root/launcher/environment.sh"
cd "$root"
# A process a core, with one thread each; options that are given count, as the last of a kind does.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest -m "$which" -n logical --maxprocesses 8 --dist worksteal "$@"
