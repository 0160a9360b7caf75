"""Where the native all_to_all leaves devices idle for two thirds of a step, what do the others make of it?

Command:  python -m experiments.compare --config=configs/compare/headline.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     about four hours on 2 cores; the longest step takes 20 s on the flat network.
Expected: native about 30 % utilisation, exact token rows less than half again as much; from T=4096 on pooled and fluid
          over 92 % on the flat network, whatever the routing. At T=512 token rows win. Uplinks of 4:1 cost all of
          them; with the relay weights lose least.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1", "leaves=2,oversub=4"),
        "nics": (100,),
        "tokens": (512, 1024, 4096, 8192),
        "workloads": ("balanced", "hot_experts", "one_hot_expert"),
        "us_per_token": (463.0, 463.0, 463.0, 226.0),
        "dispatchers": (
            "all_to_all",
            "all_to_all:form=shifted",
            "all_gather",
            "fluid:mode=tokens",
            "pooled",
            "fluid",
        ),
    }


def get_quick() -> dict[str, Any]:
    """Links and devices four times as fast, so the same ratios; 3 minutes on 2 cores, most of it compiling."""
    return get_grid() | {
        "networks": ("leaves=1",),
        "nics": (400,),
        "tokens": (4096,),
        "workloads": ("balanced",),
        "us_per_token": 116.0,
    }
