#!/usr/bin/env bash
# Sets up everything and runs the tests; arguments go to pytest. Compiles the CUDA library too, wherever there is an nvcc.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
  export DS_SPARSE_CUDA="${DS_SPARSE_CUDA:-1}"
fi
extras=test
. "$root/launcher/environment.sh"
cd "$root"
exec .venv/bin/python -m pytest "$@"
