"""With more hosts, does each keep the same part of its step for itself?

Command:  python -m experiments.compare --config=configs/compare/scaling.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     20 minutes on 2 cores, half of it compiling: eight hosts share them.
Expected: the bytes of a host grow with (R - 1) / R only, so weights hide at any number. At 8 hosts, of which each has
          one expert at home, the first blocks of a step are waited for: over 85 %.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "hosts": (2, 4, 8),
        "nics": (100,),
        "tokens": (4096,),
        "workloads": ("balanced",),
        "us_per_token": 537.0,
        "dispatchers": ("all_to_all", "all_gather", "fluid:mode=tokens", "pooled", "fluid"),
        "sheets": ("summary", "every_row"),
    }


def get_quick() -> dict[str, Any]:
    """Two hosts, and links and devices four times as fast; 2 minutes."""
    return get_grid() | {"hosts": (2,), "nics": (400,), "us_per_token": 134.0}
