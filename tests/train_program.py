"""Trains several times in the processes of one job, which start once: RUNS, a JSON list of [folder, changes].

The changes are to the small configuration (tests/small.py); the number of devices is that of the first run.
"""

import json
import sys

runs = json.loads(sys.argv[1])

from fef import startup

startup.prepare(runs[0][1]["mesh.devices"])

from small import small_config

import fef.train
from experiments.flags import run


def main(argv):
    for folder, changes in runs:
        fef.train.run(small_config(changes), folder)


run(main)
