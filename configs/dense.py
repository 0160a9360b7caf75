"""Is the sparse model worth it? The dense model with as many active parameters as configs/tiny.py.

K experts of width F and the shared ones become one FFN of width (K + shared) * F in every layer; all else is equal.

Command:  scripts/train.sh --config=configs/dense.py
Hardware: 2 CPU cores, 4 virtual devices in one process.
Time:     about that of configs/tiny.py.
Expected: held-out loss 1.83 nats/byte, 0.05 (seed 0) and 0.06 (seed 1) above that of configs/tiny.py. Two of eight
experts of width 256 gained nothing over it in so short a run, four of sixteen of width 128 gained 0.02 to 0.04.
"""

from configs import tiny
from fef.config import Config


def get_config() -> Config:
    config = tiny.get_config()
    config.model.d_ff = (config.moe.num_choices + config.moe.num_shared) * config.moe.d_expert
    config.moe.every = 0
    return config
