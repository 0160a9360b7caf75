"""What does each way of hiding reads take off the stall of a layer?

Command:  python -m experiments.compare --config=configs/compare/overlap.py
Hardware: one machine, 2 cores or more, root for the lab; nothing else running.
Time:     10 minutes on 2 cores.
Expected: reading a whole layer before computing stalls most; computing with blocks as they come, and fetching ahead
          what the last step used, take most of the stalls away. With few tokens, which do not hide weights, fluid's
          choice is what helps.

From left to right one thing more is switched on: a layer is read, then computed with (matmul=jax); blocks are computed
with as they come; those that the last step used, the prediction for this one, are fetched as soon as they are published
(pool.fetch_ahead); rows move where that takes less time (fluid).
"""

from typing import Any


def get_grid() -> dict[str, Any]:
    return {
        "networks": ("leaves=1",),
        "nics": (200,),
        "tokens": (1024, 4096),
        "workloads": ("balanced", "hot_experts"),
        "us_per_token": 232.0,
        "layers": 4,
        "dispatchers": (
            "pooled:dispatch.matmul=jax:pool.fetch_ahead=False",
            "pooled:pool.fetch_ahead=False",
            "pooled",
            "fluid",
        ),
        "sheets": ("summary", "stalls"),
    }


def get_quick() -> dict[str, Any]:
    """Few tokens and one routing; 3 minutes."""
    return get_grid() | {"tokens": (1024,), "workloads": ("balanced",)}
