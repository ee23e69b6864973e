#!/usr/bin/env bash
# Runs a fuzz on a CPU library that is built with a sanitizer, in a copy of the tree; needs g++, takes two minutes more.
#   bash tests/fuzz/sanitized.sh address tests/fuzz/operators.py --cases 2000 --seed 1
#   bash tests/fuzz/sanitized.sh thread -m tests.fuzz --cases 400 --seed 1
# What follows the sanitizer is what Python is given. PYTHON names another one than .venv's.
set -euo pipefail
kind=${1:?address, with that of undefined behaviour, or thread}; shift
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
case $kind in
  address)
    flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    preloaded="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
    # Python leaks by design, and torch asks for more memory than there is to see whether it gets it.
    export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 ;;
  thread)
    flags="-fsanitize=thread -include tests/fuzz/thread_sanitizer.h"
    preloaded=$(g++ -print-file-name=libtsan.so)
    export TSAN_OPTIONS=ignore_noninstrumented_modules=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} ;;
  *) echo "$0: $kind is no sanitizer; give address or thread." >&2; exit 2 ;;
esac
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cd "$root"
cp -r setup.py pyproject.toml README.md LICENSE csrc ds_sparse launcher tests "$copy"
cd "$copy"
rm -rf ds_sparse/lib
printf '#!/bin/sh\nexec g++ %s -fno-omit-frame-pointer -g1 "$@" -O1\n' "$flags" > compiler
chmod +x compiler
export PYTHONPATH=$copy
CXX=$copy/compiler DS_SPARSE_CUDA=0 "$python" setup.py --quiet build_ext --inplace
# Without address space randomisation: ThreadSanitizer wants its own places.
LD_PRELOAD=$preloaded setarch "$(uname -m)" -R "$python" -W ignore "$@"
