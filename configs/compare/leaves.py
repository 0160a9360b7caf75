"""What is it worth that a block crosses the spine once for each leaf, when leaves share narrow uplinks?

Command:  python -m experiments.compare --config=configs/compare/leaves.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     10 minutes on 2 cores.
Expected: nothing at 1:1; at 4:1 without the relay the uplinks set the pace, and with it compute nearly does.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=2,oversub=1", "leaves=2,oversub=2", "leaves=2,oversub=4"),
        "relays": ("off", "on"),
        "nics": (100,),
        "tokens": (4096,),
        "workloads": ("balanced",),
        "us_per_token": 463.0,
        "dispatchers": ("pooled", "fluid"),
    }


def get_quick() -> dict[str, Any]:
    """Links and devices four times as fast, so the same ratios; 2 minutes."""
    return get_grid() | {
        "networks": ("leaves=2,oversub=4",),
        "nics": (400,),
        "us_per_token": 116.0,
    }
