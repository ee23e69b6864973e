#!/usr/bin/env bash
# Sets up everything and pretrains a small BERT on long documents with block-sparse attention; arguments go to deepspeed_train.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
. launcher/environment.sh
exec .venv/bin/python examples/bing_bert/deepspeed_train.py "$@"
