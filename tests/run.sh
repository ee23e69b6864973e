#!/usr/bin/env bash
# Sets up everything and runs the tests that hold what users rely on; with --all, the others: those that are marked slow,
# with the CUDA library compiled, where there is an nvcc. Other arguments go to pytest, and win over those given here.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
which="not slow" arguments=()
for argument in "$@"; do
  if [ "$argument" = --all ]; then which=slow; else arguments+=("$argument"); fi
done
if [ "$which" = slow ]; then
  if command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
    export DS_SPARSE_CUDA="${DS_SPARSE_CUDA:-1}"
  fi
fi
extras=test
. "$root/launcher/environment.sh"
cd "$root"
# A process a core, eight at most, with one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
processes=$(.venv/bin/python -c 'import os; print(min(8, len(os.sched_getaffinity(0))))')
exec .venv/bin/python -m pytest -m "$which" -n "$processes" --dist worksteal ${arguments[@]+"${arguments[@]}"}
