"""The optimizer: learning-rate schedule, clipping and update rule, all of optax.

Sources: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019 (adamw), and "SGDR", 2017 (cosine).
"""

import re
from typing import Any

import jax
import optax

from fef.config import Config


def learning_rate(config: Config) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine down to `final_fraction` of it; constant after `decay_steps`."""
    optim = config.optim
    decay_steps = config.train.steps if optim.decay_steps is None else optim.decay_steps
    warmup = optax.linear_schedule(0.0, optim.learning_rate, max(optim.warmup_steps, 1))
    cosine = optax.cosine_decay_schedule(
        optim.learning_rate, max(decay_steps - optim.warmup_steps, 1), alpha=optim.final_fraction
    )
    return optax.join_schedules([lambda step: warmup(step + 1), cosine], [optim.warmup_steps])


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """The chain of transformations that `config.optim` describes; works leaf by leaf but for the global-norm clip."""
    optim = config.optim
    parts = [] if optim.clip_norm is None else [optax.clip_by_global_norm(optim.clip_norm)]
    if optim.name == "adamw":
        parts.append(optax.scale_by_adam(optim.b1, optim.b2, optim.eps))
    else:
        parts.append(optax.trace(optim.momentum))
    parts.append(optax.add_decayed_weights(optim.weight_decay, mask=_is_decayed))
    parts.append(optax.scale_by_learning_rate(learning_rate(config)))
    return optax.chain(*parts)


def _is_decayed(params: Any) -> Any:
    """True for matrices, False for the scales of norms, biases and the logits of sinks."""
    spared = re.compile(r"norm|bias|\bb_|sinks")
    return jax.tree_util.tree_map_with_path(lambda path, _: not spared.search(jax.tree_util.keystr(path)), params)
