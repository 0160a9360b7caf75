"""On a slow link, does fluid go over from tokens to weights where it should?

Command:  python -m experiments.compare --config=configs/compare/slow_link.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     15 minutes on 2 cores; the longest step takes 17 s.
Expected: tokens win at T=512, weights from T=2048 on; fluid within 1.05 of the better everywhere.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "nics": (100,),
        "tokens": (512, 1024, 2048, 4096, 8192),
        "workloads": ("balanced",),
        "us_per_token": 463.0,
        "dispatchers": ("pooled", "fluid:mode=tokens", "fluid"),
    }


def get_quick() -> dict[str, Any]:
    """Links and devices four times as fast, so the same ratios; some minutes."""
    return get_grid() | {
        "nics": (400,),
        "tokens": (512, 4096),
        "us_per_token": 116.0,
    }
