#!/usr/bin/env bash
# The tables under bench/results/sweep-*: every criterion at four sparsities, three seeds, alone and with least squares.
# Usage: bench/quality.sh [TASK ...] (default: stsb sst2 mrpc); goes on where it was when it is started again.
set -euo pipefail
cd "$(dirname "$0")/.."
for task in "${@:-stsb sst2 mrpc}"; do
  for name in $task; do
    hies-export sweep "recipes/minilm-$name.yaml" -o "runs/sweep-$name" \
      --criteria "hies,his,ad,l2,random,activation-l2,output-norm,obs,llm-pruner-block,ae + activation-l2,hies-compensated" \
      --alphas 0.9,auto --sparsities 0.1,0.3,0.5,0.7 --seeds 0,1,2 --compensations none,least_squares
  done
done
