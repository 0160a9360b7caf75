"""From how many tokens of an expert on should weights move, and does the formula say so?

Command:  python -m experiments.compare --config=configs/compare/crossover.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     12 minutes on 2 cores.
Expected: the break-even in time is at half of T*, for weights hide under compute and token rows do not; fluid is with
          the faster of both on either side, and ahead of both in between.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "nics": (100,),
        "tokens": (256, 512, 1024, 2048, 4096),
        "workloads": ("balanced",),
        "us_per_token": 463.0,
        "dispatchers": ("all_to_all", "fluid:mode=tokens", "pooled", "fluid"),
        "sheets": ("summary", "break_even"),
    }


def get_quick() -> dict[str, Any]:
    """Links and devices four times as fast, two numbers of tokens and no all_to_all; 2 minutes."""
    return get_grid() | {
        "nics": (400,),
        "tokens": (512, 2048),
        "us_per_token": 116.0,
        "dispatchers": ("fluid:mode=tokens", "pooled", "fluid"),
    }
