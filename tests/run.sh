#!/usr/bin/env bash
# Sets up everything and runs the tests; arguments go to pytest. Compiles the CUDA library too, wherever there is an nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."
if command -v nvcc >/dev/null; then export DS_SPARSE_CUDA="${DS_SPARSE_CUDA:-1}"; fi
. launcher/environment.sh test
exec .venv/bin/python -m pytest "$@"
