"""Where tokens are few, is one of all_to_all's forms or all_gather better than fluid?

Command:  python -m experiments.compare --config=configs/compare/baselines.py
          (the published rows with XLA_FLAGS=--xla_cpu_use_fusion_emitters=false)
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     8 minutes on 2 cores: all_to_all takes long to compile, for it has six capacities.
Expected: all_to_all comes near to token rows by reads if the routing is balanced, and takes twice as long if it is not.
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "nics": (200,),
        "tokens": (128,),
        "workloads": ("balanced", "hot_experts", "one_hot_expert"),
        "us_per_token": 463.0,
        "dispatchers": (
            "all_to_all",
            "all_to_all:form=shifted",
            "all_gather",
            "pooled",
            "fluid:mode=tokens",
            "fluid",
            "fluid:cost=bytes:deduplicate=False:room=8",
        ),
    }


def get_quick() -> dict[str, Any]:
    """One routing, and one form of all_to_all; some minutes."""
    return get_grid() | {
        "workloads": ("balanced",),
        "dispatchers": ("all_to_all", "all_gather", "fluid:mode=tokens", "fluid"),
    }
