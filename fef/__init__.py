"""fef, the fluidic-expert-fabric: Mixture-of-Experts Transformers over one pooled, globally addressed memory.

Importing it starts no JAX backend and loads no native code; names are imported when they are first used.
"""

import importlib
from typing import Any

_NAMES = {
    "Assignment": "fef.routing",
    "Config": "fef.config",
    "ConfigError": "fef.config",
    "DISPATCHERS": "fef.dispatch",
    "Decoder": "fef.model",
    "MoeLayer": "fef.moe",
    "Pool": "fef.pool.pool",
    "PoolClosedError": "fef.pool.errors",
    "PoolError": "fef.pool.errors",
    "PoolExhaustedError": "fef.pool.errors",
    "PoolTimeoutError": "fef.pool.errors",
    "ROUTERS": "fef.routing",
    "RouterContext": "fef.routing",
    "StaleVersionError": "fef.pool.errors",
    "UserError": "fef.config",
    "knob": "fef.config",
    "make_mesh": "fef.sharding",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'fef' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)
