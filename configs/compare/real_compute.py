"""When the hosts' CPUs really compute the expert matmuls, beside the network, who takes the shortest step?

Command:  python -m experiments.compare --config=configs/compare/real_compute.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running. Hosts share the cores.
Time:     5 minutes on 2 cores; the longest step takes some seconds.
Expected: on 2 cores large GEMMs and the link take about a second each in a step of pooled. pooled and fluid are first
          and equal, with half or more of the step in GEMMs, less than where device time is modelled: what moves and
          sorts takes its CPU time from the matmuls. all_gather, token rows and all_to_all follow, in this order.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "nics": (200,),
        "tokens": (4096,),
        "workloads": ("balanced",),
        "us_per_token": "real",
        "dispatchers": ("all_to_all", "all_gather", "fluid:mode=tokens", "pooled", "fluid"),
        "sheets": ("summary", "every_row"),
    }


def get_quick() -> dict[str, Any]:
    """Three of them, fewer steps; 2 minutes on 2 cores, most of it compiling."""
    return get_grid() | {"dispatchers": ("all_to_all", "pooled", "fluid"), "steps": 2}
