"""The more popular the first experts are, how much does each dispatcher lose to the busiest member?

Command:  python -m experiments.compare --config=configs/compare/skew.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     10 minutes on 2 cores, most of it for all_to_all, which has six capacities to compile.
Expected: with the exponent of Zipf's law the straggler factor of token dispatchers grows, and their step with it; those
          that move weights keep theirs. At 1.2 a capacity factor of 1.25 would drop a quarter of all choices.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "nics": (400,),
        "tokens": (4096,),
        "workloads": ("zipf:0", "zipf:0.6", "zipf:1.2"),
        "us_per_token": 116.0,
        "sheets": ("summary", "every_row"),
        "dispatchers": ("all_to_all", "all_to_all:form=shifted", "all_gather", "fluid:mode=tokens", "pooled", "fluid"),
    }


def get_quick() -> dict[str, Any]:
    """Fewer exponents, and no all_to_all; some minutes."""
    return get_grid() | {
        "workloads": ("zipf:0", "zipf:1.2"),
        "dispatchers": ("all_gather", "fluid:mode=tokens", "pooled", "fluid"),
    }
