"""With matmuls that the hosts' CPUs compute, does moving weights still hide?

Command:  python -m experiments.compare --config=configs/compare/real_compute.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     5 minutes on 2 cores, which four hosts share.
Expected: the same order as with modelled devices, but less utilisation: what carries the bytes takes CPU time too.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "nics": (100,),
        "tokens": (4096,),
        "workloads": ("balanced",),
        "us_per_token": "real",
        "dispatchers": ("all_to_all", "all_gather", "fluid:mode=tokens", "pooled", "fluid"),
        "sheets": ("summary", "every_row"),
    }


def get_quick() -> dict[str, Any]:
    """Without all_to_all; 2 minutes."""
    return get_grid() | {"dispatchers": ("all_gather", "fluid:mode=tokens", "pooled", "fluid")}
