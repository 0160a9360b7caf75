#!/usr/bin/env bash
# Trains on several nodes of a SLURM cluster, a host of fef on each. A template: fit the #SBATCH lines to the cluster.
#
#   scripts/setup.sh                                       # once, on a node that has a package index and a compiler
#   sbatch --nodes=4 scripts/slurm.sh --workdir=runs/mine  # arguments go to python -m experiments.train
#
# Submit it from the checkout, which must be on a file system that all nodes share, as must the workdir. The tasks find
# each other through SLURM's own variables. A job that is requeued continues its run.
#
#SBATCH --job-name=fef
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail

die() {
  echo "slurm: $*" >&2
  exit 2
}

[[ -n ${SLURM_JOB_ID:-} ]] || die "this is no SLURM job; start it with sbatch scripts/slurm.sh"
cd "$SLURM_SUBMIT_DIR" # SLURM runs a copy of this file, elsewhere
[[ -x .venv/bin/python ]] || die "$PWD/.venv/bin/python is missing; submit from the checkout, after scripts/setup.sh"

# Virtual CPU devices of each node; with accelerators the number of those.
devices_per_host=${DEVICES_PER_HOST:-4}

# The first task that fails ends the others, which would wait for it.
exec srun --kill-on-bad-exit=1 --label .venv/bin/python -P -m experiments.train \
  --config.mesh.devices=$((SLURM_NTASKS * devices_per_host)) "$@"
