"""Trains one configuration, or continues its run.

    python -m experiments.train --config=configs/tiny.py --workdir=DIR --config.train.steps=1000

A run that exists in the workdir is continued by the same command, a finished one prints its summary, and --fresh
starts over. Exit status: 0, or 2 with one line when a flag, the configuration or the data cannot work.

Several hosts train together when `experiments.launch` or a cluster's launcher (SLURM, Open MPI) starts this program
once per host, or each is told by --coordinator, --num_processes and --process_id. They divide config.mesh.devices among
them and need a workdir that all of them see.
"""

import logging
import pathlib

import absl.logging
from absl import flags

from experiments.flags import define_job, job, parse, run
from fef import startup


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", None, "folder of the run; None means runs/<config name>", flag_values=values)
    flags.DEFINE_bool("fresh", False, "delete the run in the workdir and start over", flag_values=values)
    define_job(values)


def main(argv: list[str]) -> None:
    config, values = parse(argv, define, doc=__doc__ or "")
    _silence_libraries()
    startup.prepare(config.mesh.devices, config.run.malloc, config.pool.deadline_s, job(values), values.join_timeout_s)
    import fef.train  # after startup.prepare, so that nothing it imports can start a backend before

    fef.train.run(config, values.workdir or f"runs/{pathlib.Path(values.config).stem}", fresh=values.fresh)


def _silence_libraries() -> None:
    absl.logging.set_verbosity(absl.logging.ERROR)
    for name in ("jax", "flax", "orbax", "grain"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    run(main)
