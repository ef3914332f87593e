#!/usr/bin/env bash
# The tables under bench/results/sweep-*: every criterion at four sparsities, three seeds, alone and with least squares.
# `alphas` is HIES cut alone on STS-B, at six values of alpha and three numbers of samples to score on.
# Usage: bench/quality.sh [stsb | sst2 | mrpc | alphas ...] (default: all); goes on where it was when started again.
set -euo pipefail
cd "$(dirname "$0")/.."

criteria="hies,his,ad,l2,random,activation,output-norm,obs,llm-pruner-block,llm-pruner-channel,slicegpt"
criteria="$criteria,ae + activation-l2,compensated"
[ $# -gt 0 ] || set -- stsb sst2 mrpc alphas
for name in "$@"; do
  if [ "$name" = alphas ]; then
    hies-export sweep recipes/minilm-stsb.yaml -o runs/sweep-alphas --criteria hies --alphas 0,0.2,0.4,0.6,0.8,0.9 \
      --calibration-sizes 8,32,128 --sparsities 0.1,0.3,0.5,0.7 --seeds 0,1,2
  else
    hies-export sweep "recipes/minilm-$name.yaml" -o "runs/sweep-$name" --criteria "$criteria" \
      --alphas 0.9,auto --sparsities 0.1,0.3,0.5,0.7 --seeds 0,1,2 --compensations none,least_squares
  fi
done
