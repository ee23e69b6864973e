#!/usr/bin/env bash
# Makes the wheel in dist/: both native libraries, for Python 3.11 and later, glibc 2.28 and later, and every chip of the
# README. Needs nvcc; takes about 20 minutes on two cores the first time.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
extras=wheel
. "$root/launcher/environment.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH" DS_SPARSE_WHEEL=1 DS_SPARSE_CUDA=1
rm -rf build/wheel/package build/wheel/dist
python setup.py --quiet build --build-base build/wheel/package bdist_wheel --dist-dir build/wheel/dist
# The libraries are torch's operators and no modules of one Python.
python -m wheel tags --remove --python-tag py3 --abi-tag none build/wheel/dist/*.whl
auditwheel repair --plat manylinux_2_28_x86_64 --only-plat --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist \
  build/wheel/dist/*.whl
auditwheel show dist/ds_sparse-*-py3-none-manylinux_2_28_x86_64.whl
