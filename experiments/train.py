"""Trains one configuration, or continues its run.

    python -m experiments.train --config=configs/tiny.py --workdir=DIR --config.train.steps=1000

A run that exists in the workdir is continued by the same command, a finished one prints its summary, and --fresh
starts over. Exit status: 0, or 2 with one line when a flag, the configuration or the data cannot work.
"""

import logging
import pathlib

import absl.logging
from absl import flags

from experiments.flags import parse, run
from fef import startup


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", None, "folder of the run; None means runs/<config name>", flag_values=values)
    flags.DEFINE_bool("fresh", False, "delete the run in the workdir and start over", flag_values=values)


def main(argv: list[str]) -> None:
    config, values = parse(argv, define, doc=__doc__ or "")
    _silence_libraries()
    startup.prepare(config.mesh.devices, config.run.malloc, config.pool.deadline_s)
    import fef.train  # after startup.prepare, so that nothing it imports can start a backend before

    fef.train.run(config, values.workdir or f"runs/{pathlib.Path(values.config).stem}", fresh=values.fresh)


def _silence_libraries() -> None:
    absl.logging.set_verbosity(absl.logging.ERROR)
    for name in ("jax", "flax", "orbax", "grain"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    run(main)
