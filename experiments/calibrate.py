"""Measures what the cost model of the fluid dispatcher goes by: links, and the expert matmuls of a configuration.

    python -m experiments.calibrate --config=configs/tiny.py --output=calibration.json
    python -m experiments.launch --hosts=4 -- python -m experiments.calibrate --output=calibration.json
    python -m experiments.train --config.moe.dispatcher=fluid --config.dispatch.fluid.calibration=calibration.json

A run that chooses by time and names no file measures by itself when it first starts, and keeps what it found in its
workdir, so that it goes on as it began.
"""

import dataclasses
import json
import pathlib

from absl import flags

from experiments.flags import define_job, job, parse, run
from fef import hosts, sharding, startup
from fef.config import UserError
from fef.fabric.measure import measure
from fef.ffn import FFNS
from fef.layers import make_device
from fef.pool.pool import Pool


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("output", "calibration.json", "the file to write", flag_values=values)
    define_job(values)


def main(argv: list[str]) -> None:
    config, values = parse(argv, define, doc=__doc__ or "")
    path = pathlib.Path(values.output)
    if not path.parent.is_dir():
        raise UserError(f"--output={path}: there is no folder {path.parent}")
    startup.prepare(config.mesh.devices, config.run.malloc, config.pool.deadline_s, job(values), values.join_timeout_s)
    mesh = sharding.make_mesh(config.mesh.devices, config.mesh.data)
    with Pool(mesh, config.pool):
        ffn, device = FFNS.get(config.model.ffn), make_device(config)
        found = measure(mesh, ffn, config.model.d_model, config.moe.d_expert, device, config.dispatch.matmul)
    if hosts.is_main():
        found.save(path)
    hosts.say(f"{path}: {json.dumps(dataclasses.asdict(found))}")


if __name__ == "__main__":
    run(main)
