"""What is it worth that neighbours in the order of hosts stand on one leaf, when leaves share narrow uplinks?

Command:  python -m experiments.compare --config=configs/compare/placement.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     10 minutes on 2 cores.
Expected: when hosts alternate between the leaves, all_gather, whose ring then crosses an uplink at each hop, loses a
          third; exact token rows a fifth; pooled and fluid, which read a block once for a leaf, less than a tenth;
          all_to_all nothing, for as many pairs of hosts cross in any order.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=2,oversub=4", "leaves=2,oversub=4,order=alternating"),
        "nics": (400,),
        "tokens": (4096,),
        "workloads": ("balanced",),
        "us_per_token": 116.0,
        "dispatchers": ("all_to_all", "all_to_all:form=shifted", "all_gather", "fluid:mode=tokens", "pooled", "fluid"),
    }


def get_quick() -> dict[str, Any]:
    """Without all_to_all; some minutes."""
    return get_grid() | {"dispatchers": ("all_gather", "fluid:mode=tokens", "pooled", "fluid")}
