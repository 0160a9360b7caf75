"""The headline's ratios in minutes: where the native all_to_all leaves devices idle, what do the others make of it?

Command:  python -m experiments.compare --config=configs/compare/headline_quick.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     8 minutes on 2 cores, most of it to compile both forms of all_to_all.
Expected: native about 30 % utilisation, exact token rows less than half again as much, pooled and fluid over 90 %.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "nics": (400,),
        "tokens": (4096,),
        "workloads": ("balanced",),
        "us_per_token": 116.0,
        "dispatchers": (
            "all_to_all",
            "all_to_all:form=shifted",
            "all_gather",
            "fluid:mode=tokens",
            "pooled",
            "fluid",
        ),
    }
