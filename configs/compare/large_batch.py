"""With twice the headline's tokens and devices twice as fast, how much is left to token exchanges?

Command:  python -m experiments.compare --config=configs/compare/large_batch.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     11 minutes on 2 cores; the longest step takes 20 s.
Expected: native below 20 % utilisation, the best exchange of token rows below 30 %; pooled and fluid over 92 %.
"""

from typing import Any

from configs.compare import headline


def get_grid() -> dict[str, Any]:
    return headline.get_grid() | {
        "networks": ("leaves=1",),
        "tokens": (8192,),
        "workloads": ("balanced",),
        "us_per_token": 226.0,
    }


def get_quick() -> dict[str, Any]:
    """Links and devices four times as fast, so the same ratios; without all_to_all, some minutes."""
    return get_grid() | {
        "nics": (400,),
        "us_per_token": 56.5,
        "dispatchers": ("all_gather", "fluid:mode=tokens", "pooled", "fluid"),
    }
