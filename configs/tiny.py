"""Does the whole path work, and does a small MoE learn?

Command:  scripts/train.sh
Hardware: 2 CPU cores, 4 virtual devices.
Time:     TODO
Expected: TODO
"""

from fef.config import Config


def get_config() -> Config:
    return Config()
