"""How much memory of a host does each dispatcher take, in XLA's buffers, in the pool, and as a process?

Command:  python -m experiments.compare --config=configs/compare/memory.py
Hardware: one machine, 2 cores or more, root for the lab.
Time:     5 minutes on 2 cores, most of it compiling: each dispatcher has processes of its own.
Expected: all_to_all has the largest buffers, for it holds rows as they are sent, padded to the largest count, as they
          are computed, and as they come back; fluid has room for visitors, used or not. all_gather holds all experts of
          a layer as arrays. pooled takes the least, though slots, stages and cache stand outside of XLA's buffers. The
          process of fluid peaks highest, for it measures its rates before.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    """Matmuls are computed: modelled ones have no hidden rows, which most dispatchers hold in XLA's buffers.

    Each cell measures the rate of its matmuls anew, so this is no comparison of step times.
    """
    return {
        "networks": ("leaves=1",),
        "nics": (400,),
        "tokens": (4096,),
        "workloads": ("balanced",),
        "us_per_token": "real",
        "dispatchers": (
            "all_to_all",
            "all_to_all:form=shifted",
            "all_gather",
            "fluid:mode=tokens",
            "pooled",
            "fluid",
        ),
        "steps": 3,
        "alone": True,
        "sheets": ("memory",),
    }


def get_quick() -> dict[str, Any]:
    """Three of them; 2 minutes on 2 cores."""
    return get_grid() | {"dispatchers": ("all_to_all", "all_gather", "pooled"), "steps": 1}
