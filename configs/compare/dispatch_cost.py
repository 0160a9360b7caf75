"""What does a dispatcher itself cost, without any network?

Command:  python -m experiments.compare --config=configs/compare/dispatch_cost.py
Hardware: 2 cores or more; nothing else running.
Time:     4 minutes on 2 cores.
Expected: some microseconds of CPU time for a token and layer. all_gather and pooled only sort rows; all_to_all fills
          and empties padded buffers; token rows by reads are gathered and added up one by one.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("none",),
        "nics": (1000,),
        "tokens": (512, 4096),
        "workloads": ("balanced", "hot_experts"),
        "us_per_token": 1.0,
        "dispatchers": ("all_to_all", "all_to_all:form=shifted", "all_gather", "fluid:mode=tokens", "pooled", "fluid"),
        "sheets": ("dispatch_cost",),
    }


def get_quick() -> dict[str, Any]:
    """Few tokens; a minute."""
    return get_grid() | {"tokens": (512,), "workloads": ("balanced",)}
