"""What must hold between the knobs of a configuration, checked before JAX starts."""

import os
from typing import Any

import fef.dispatch
import fef.routing
from fef.config import Config, ConfigError, ModelConfig, check_fields, flatten, head_dim
from fef.registry import Registry


def validate(config: Config) -> None:
    """Checks everything that can be known before JAX starts, the router's own conditions included.

    Raises ConfigError at the first fault.
    """
    check_fields(config)
    check_model(config)
    _check_batch(config)
    _check_profile(config)
    _check_variants(config)


def check_model(config: Config) -> None:
    """Checks the shapes of the model and its schedule. Raises ConfigError."""
    model, moe, optim = config.model, config.moe, config.optim
    if model.head_dim is None and model.d_model % model.num_heads:
        raise ConfigError("model.d_model", model.d_model, f"must be a multiple of model.num_heads={model.num_heads}")
    if head_dim(model) % 2:
        raise ConfigError("model.head_dim", head_dim(model), "rotary positions need an even head width")
    _check_mla(model)
    _check_encoder(config)
    if model.num_heads % model.num_kv_heads:
        raise ConfigError("model.num_kv_heads", model.num_kv_heads, f"must divide model.num_heads={model.num_heads}")
    if moe.num_choices > moe.num_experts:
        raise ConfigError("moe.num_choices", moe.num_choices, f"must be <= moe.num_experts={moe.num_experts}")
    if moe.leading_dense > model.num_layers:
        raise ConfigError("moe.leading_dense", moe.leading_dense, f"must be <= model.num_layers={model.num_layers}")
    if optim.decay_steps is not None and optim.decay_steps <= optim.warmup_steps:
        raise ConfigError("optim.decay_steps", optim.decay_steps, f"must be > optim.warmup_steps={optim.warmup_steps}")


def _check_mla(model: ModelConfig) -> None:
    if not model.mla.kv_rank:
        return
    if model.mla.rope_dim % 2:
        raise ConfigError("model.mla.rope_dim", model.mla.rope_dim, "rotary positions need an even width")
    _check_plain(model, "attention", "latent attention; set config.model.mla.kv_rank=0")


def _check_encoder(config: Config) -> None:
    model, encoder = config.model, config.model.encoder
    if not encoder.layers:
        return
    if config.data.seq_len % 2:
        raise ConfigError("data.seq_len", config.data.seq_len, "an encoder reads one half of it; make it even")
    if encoder.max_distance <= encoder.buckets // 2:
        raise ConfigError(
            "model.encoder.max_distance", encoder.max_distance, f"must be > buckets / 2 = {encoder.buckets // 2}"
        )
    if model.num_kv_heads != model.num_heads:
        remedy = f"relative positions have no grouped queries; set it to model.num_heads={model.num_heads}"
        raise ConfigError("model.num_kv_heads", model.num_kv_heads, remedy)
    for section in ("attention", "mla", "yarn"):
        _check_plain(model, section, "relative positions; set config.model.encoder.layers=0")


def _check_plain(model: ModelConfig, section: str, instead_of: str) -> None:
    """Refuses variants of attention that another choice leaves without effect."""
    chosen = getattr(model, section)
    for key, default in flatten(type(chosen)()).items():
        if getattr(chosen, key) != default:
            raise ConfigError(f"model.{section}.{key}", getattr(chosen, key), f"is not for {instead_of}")


def _check_batch(config: Config) -> None:
    mesh, data = config.mesh, config.data
    if mesh.devices % mesh.data:
        raise ConfigError("mesh.data", mesh.data, f"must divide mesh.devices={mesh.devices}")
    parts = mesh.devices * config.train.microbatches
    if data.batch_size % parts:
        near = max(parts, round(data.batch_size / parts) * parts)
        raise ConfigError(
            "data.batch_size",
            data.batch_size,
            f"must be a multiple of mesh.devices * train.microbatches = {parts}; nearest: {near}",
        )


def _check_profile(config: Config) -> None:
    steps, total = config.run.profile_steps, config.train.steps
    if steps and not (len(steps) <= 2 and 1 <= steps[0] <= steps[-1] <= total):
        remedy = f"must be one step or first,last with 1 <= first <= last <= train.steps={total}"
        raise ConfigError("run.profile_steps", steps, remedy)


def _check_variants(config: Config) -> None:
    if not config.moe.every:
        return  # a dense model has neither router nor dispatcher
    routing, router = config.routing, _known(fef.routing.ROUTERS, "moe.router", config.moe.router)
    dispatcher = _known(fef.dispatch.DISPATCHERS, "moe.dispatcher", config.moe.dispatcher)
    _check_device(config, dispatcher)
    made = router(config.moe.num_experts, config.moe.num_choices, getattr(routing, config.moe.router))
    if not made.causal and not routing.allow_noncausal:
        raise ConfigError(
            "moe.router",
            config.moe.router,
            "looks at later tokens, so a decoder trained with it cannot generate; "
            "set config.routing.allow_noncausal=True to train it all the same",
        )
    if routing.record and routing.replay:
        raise ConfigError("routing.record", routing.record, f"cannot be used with routing.replay={routing.replay!r}")
    if routing.replay and not os.path.isfile(routing.replay):
        raise ConfigError("routing.replay", routing.replay, "no such file; give one written by config.routing.record")


def _check_device(config: Config, dispatcher: Any) -> None:
    device = config.device
    if device.flops is None:
        if not device.values:
            raise ConfigError(
                "device.values", device.values, "leaves the matmuls out, so say how long they take: device.flops"
            )
        return
    if not dispatcher.models_device:
        raise ConfigError("device.flops", device.flops, f"the {config.moe.dispatcher} dispatcher models no device time")
    if config.model.remat != "none":
        raise ConfigError("device.flops", device.flops, "does not cover recomputation; set config.model.remat='none'")


def _known(registry: Registry, key: str, name: str) -> Any:
    try:
        return registry.get(name)
    except ValueError as error:
        raise ConfigError(key, name, str(error)) from None
