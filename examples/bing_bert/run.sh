#!/usr/bin/env bash
# Sets up everything and pretrains a small BERT on long documents with block-sparse attention. Arguments go to
# deepspeed_train.py and win over those given here.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
extras=train
. "$root/launcher/environment.sh"
exec "$root/.venv/bin/python" "$root/examples/bing_bert/deepspeed_train.py" --deepspeed_sparse_attention \
  --deepspeed_config "$root/configs/bslongformer.json" "$@"
