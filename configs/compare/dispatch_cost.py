"""How much CPU time for a token does each dispatcher cost, where no network and no matmul hide it?

Command:  python -m experiments.compare --config=configs/compare/dispatch_cost.py
Hardware: one machine, 2 cores or more; nothing else running. One process with four virtual devices: no lab, no root.
Time:     5 minutes on 2 cores.
Expected: a token costs less among many, for a part of each step is the same for any number of them. all_gather and
          pooled, which handle every expert's weights on every member, cost more at T=512 than those that move rows;
          uneven routing makes all_to_all dearer, for it pads rows to the largest count.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("none",),
        "nics": (0,),
        "tokens": (512, 4096),
        "workloads": ("balanced", "hot_experts"),
        "us_per_token": 1.0,
        "dispatchers": (
            "all_to_all",
            "all_to_all:form=shifted",
            "all_gather",
            "fluid:mode=tokens",
            "pooled",
            "fluid",
        ),
        "sheets": ("dispatch_cost",),
    }


def get_quick() -> dict[str, Any]:
    """The few tokens only, fewer steps; a minute on 2 cores."""
    return get_grid() | {"tokens": (512,), "steps": 3}
