"""Does fluid follow the better of weights and tokens over sizes, links and routings, and how near does it come?

Command:  python -m experiments.compare --config=configs/compare/envelope.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     half an hour on 2 cores, most of it compiling.
Expected: tokens win with few of them on slow links, weights with many on fast ones; fluid within 1.05 of the best.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "nics": (200, 400),
        "tokens": (256, 512, 1024, 2048),
        "workloads": ("balanced", "hot_experts", "one_hot_expert"),
        "us_per_token": 463.0,  # the device of T=512 and T=4096 in the table of steps on a slow network
        "dispatchers": ("pooled", "fluid:mode=tokens", "fluid", "fluid:cost=bytes:deduplicate=False:room=8"),
    }


def get_quick() -> dict[str, Any]:
    """One link and the ends of the tokens; some minutes."""
    return get_grid() | {
        "nics": (400,),
        "tokens": (256, 2048),
        "workloads": ("balanced",),
    }
