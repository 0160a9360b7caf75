"""How much CPU time for a token does each dispatcher cost, where no network and no matmul hide it?

Command:  python -m experiments.compare --config=configs/compare/dispatch_cost.py
Hardware: one machine, 2 cores or more; nothing else running. One process with four virtual devices: no lab, no root.
Time:     5 minutes on 2 cores.
Expected: pooled, all_gather and fluid:mode=tokens 10 to 20 us at T=512 and about half of it at T=4096, for a part of
          each step is the same for any number of tokens; fluid costs more than either of its ways where tokens are
          few. Both forms of all_to_all take up to several times as much, shifted most under uneven routing: rows are
          copied, with padding.
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
