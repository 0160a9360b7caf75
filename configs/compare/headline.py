"""Where the native all_to_all leaves devices idle for two thirds of a step, what do the others make of it?

Command:  python -m experiments.compare --config=configs/compare/headline.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     about an hour on 2 cores; the longest step takes 13 s on the flat network.
Expected: native about 30 % utilisation, exact token rows less than half again as much; pooled and fluid over 92 % on
          the flat network, whatever the routing. Uplinks of 4:1 cost all of them; with the relay weights lose least.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1", "leaves=2,oversub=4"),
        "nics": (100,),
        "tokens": (4096,),
        "workloads": ("balanced", "hot_experts", "one_hot_expert"),
        "us_per_token": 463.0,
        "dispatchers": (
            "all_to_all",
            "all_to_all:form=shifted",
            "all_gather",
            "fluid:mode=tokens",
            "pooled",
            "fluid",
        ),
    }
