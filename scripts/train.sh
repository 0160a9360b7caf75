#!/usr/bin/env bash
# Sets everything up (the first time), then trains: scripts/train.sh [flags of python -m experiments.train]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
# -P: a folder named experiments or configs in the current directory must not hide ours.
exec "$root/.venv/bin/python" -P -m experiments.train "$@"
