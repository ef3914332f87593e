#!/usr/bin/env bash
# README's first command after the installation, alone and beside one busy process: seconds from start to end, and what
# the run says of other work. Nothing else must run on the machine.
# Usage: bench/first_command.sh; writes into a temporary folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
unset OMP_NUM_THREADS MKL_NUM_THREADS
python=${PYTHON:-python3}
folder=$(mktemp -d)
busy=
trap '[ -z "$busy" ] || kill "$busy"; rm -rf "$folder"' EXIT

once() {
  local started=$SECONDS
  "$python" -m hies_export quickstart -o "$folder/$1" >/dev/null 2>"$folder/$1.log"
  echo "$1: $((SECONDS - started)) s"
  sed 's/^/    /' "$folder/$1.log"
}

once idle
"$python" -c "while True: pass" &
busy=$!
once busy
