"""Over link rates and oversubscription, who is fastest?

Command:  python -m experiments.compare --config=configs/compare/network.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     half an hour on 2 cores, most of it compiling.
Expected: the slower the links and uplinks, the more weights win over tokens. With links of 1 Gbit/s the network is no
          longer what limits, and all come nearer to each other.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=2,oversub=1", "leaves=2,oversub=2", "leaves=2,oversub=4"),
        "nics": (200, 400, 1000),
        "tokens": (4096,),
        "workloads": ("balanced",),
        "us_per_token": 116.0,
        "dispatchers": ("all_to_all", "all_gather", "fluid:mode=tokens", "pooled", "fluid"),
    }


def get_quick() -> dict[str, Any]:
    """One network and the fastest links; 2 minutes."""
    return get_grid() | {"networks": ("leaves=2,oversub=4",), "nics": (1000,)}
