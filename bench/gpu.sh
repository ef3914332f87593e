#!/bin/sh
# Everything that needs a GPU, in one command: first what to check, then latency. The network is not used.
#   bench/gpu.sh                    ten minutes on one NVIDIA GPU; writes gpu.jsonl and gpu.json here
#   bench/gpu.sh --out DIR/NAME     writes DIR/NAME.jsonl and .json
#   bench/gpu.sh --dry              the same code on the CPU with tiny models, in about a minute
# PYTHON has the package's dependencies (default python3). Checks of ONNX Runtime need onnxruntime-gpu too.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" "$root/bench/gpu.py" "$@"
