"""Where the native all_to_all leaves devices idle for two thirds of a step, what do the others make of it?

Command:  python -m experiments.compare --config=configs/compare/headline.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     an hour and a quarter on 2 cores; the longest step takes 40 s.
Expected: on the flat network native about 30 % utilisation, exact token rows less than half again as much, pooled and
          fluid over 92 %, whatever the routing. Uplinks of 4:1 cost all of them; with the relay weights lose least.

The second routing is a trained router's: its recording was made by two runs of

    python -m experiments.train --config.moe.num_experts=8 --config.moe.num_choices=2 --config.moe.every=4

the first of 200 steps, the second of one step of 128 sequences from there (--config.train.init_from) with
--config.routing.record=configs/compare/measured_routing.npz.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1", "leaves=2,oversub=4"),
        "nics": (100,),
        "tokens": (4096,),
        "workloads": ("balanced", "trace:configs/compare/measured_routing.npz", "one_hot_expert"),
        "us_per_token": 463.0,
        "dispatchers": (
            "all_to_all",
            "all_to_all:form=shifted",
            "all_gather",
            "fluid:mode=tokens",
            "pooled",
            "fluid",
        ),
        "sheets": ("summary", "every_row", "realism"),
    }


def get_quick() -> dict[str, Any]:
    """Links and devices four times as fast, so the same ratios; 3 minutes on 2 cores, most of it compiling."""
    return get_grid() | {
        "networks": ("leaves=1",),
        "nics": (400,),
        "workloads": ("balanced",),
        "us_per_token": 116.0,
    }
