#!/bin/sh
# Everything that needs a GPU, in one command: python's torch and transformers are enough, the network is not used.
#   bench/gpu.sh            under 9 minutes on one NVIDIA GPU; writes bench/results/gpu.json and gpu.html
#   bench/gpu.sh --dry      the same code on the CPU with tiny models, in under a minute
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" "$root/bench/gpu.py" "$@"
