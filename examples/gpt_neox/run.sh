#!/usr/bin/env bash
# Sets up everything and trains a small GPT-NeoX decoder with block-sparse attention. Arguments go to train.py and win
# over those given here.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
extras=train,transformers
. "$root/launcher/environment.sh"
exec "$root/.venv/bin/python" "$root/examples/gpt_neox/train.py" --deepspeed_sparse_attention \
  --deepspeed_config "$root/configs/bslongformer.json" "$@"
