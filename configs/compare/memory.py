"""How much memory does a host need for each dispatcher?

Command:  python -m experiments.compare --config=configs/compare/memory.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     5 minutes on 2 cores.
Expected: all_gather has all experts of a layer at once, all_to_all padded rows; pooled and fluid have slots, and the
          blocks of other hosts that they keep (config.pool.cache_bytes bounds these).
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "nics": (400,),
        "tokens": (4096,),
        "workloads": ("balanced",),
        "us_per_token": 20.0,
        "dispatchers": ("all_to_all", "all_to_all:form=shifted", "all_gather", "fluid:mode=tokens", "pooled", "fluid"),
        "alone": True,
        "steps": 3,
        "sheets": ("memory",),
    }


def get_quick() -> dict[str, Any]:
    """Two dispatchers; a minute."""
    return get_grid() | {"dispatchers": ("all_gather", "pooled")}
