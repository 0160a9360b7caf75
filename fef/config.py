"""Every knob of fef and its default, once.

A `Config` is a tree of dataclasses. It is mutable while flags are parsed, then `validate()` checks it and `freeze()`
locks it before anything reads it. Each field is declared by `knob(default, scope, doc)`; the scope says what may
change when a run is resumed:

- model: defines the function that is trained (shapes, initialisation, loss, optimizer); a changed one is refused.
- data:  defines which bytes are seen, and in which order; a changed one is refused.
- run:   how the same training is carried out (steps, logging, checkpoints, mesh, dispatcher); may change, is recorded.

Routing schemes and dispatchers declare their own options in their own file; they appear here as
`config.routing.<scheme>.<option>` and `config.dispatch.<dispatcher>.<option>`.
"""

import dataclasses
import hashlib
import json
from typing import Any

import fef.dispatch
import fef.routing
from fef.registry import nearest, scan

SCOPES = ("model", "data", "run")


def knob(default: Any, scope: str, doc: str) -> Any:
    """A configuration field: its default, its scope, and a line with meaning, unit and range."""
    assert scope in SCOPES, scope
    return dataclasses.field(default=default, metadata={"scope": scope, "doc": doc})


class ConfigError(ValueError):
    """A value that cannot work. The message names the key, the value and the remedy."""

    def __init__(self, key: str, value: Any, remedy: str):
        super().__init__(f"config.{key}={value!r}: {remedy}")


class Section:
    """Base of the configuration dataclasses: unknown names are refused at once, and everything after freezing."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:  # type: ignore[attr-defined]
            raise AttributeError(f"no field {name!r}{nearest(name, list(self.__dataclass_fields__))}")  # type: ignore[attr-defined]
        if self.__dict__.get("_is_frozen"):
            raise dataclasses.FrozenInstanceError(f"config is frozen after validation; cannot set {name!r}")
        object.__setattr__(self, name, value)


@dataclasses.dataclass
class ModelConfig(Section):
    vocab_size: int = knob(256, "model", "V, number of token ids; 256 for bytes")
    d_model: int = knob(128, "model", "D, width of the residual stream; a multiple of num_heads unless head_dim is set")
    num_layers: int = knob(4, "model", "number of decoder layers, >= 1")
    num_heads: int = knob(4, "model", "query heads, >= 1")
    num_kv_heads: int = knob(2, "model", "key/value heads; divides num_heads")
    head_dim: int | None = knob(None, "model", "width of a head, even; None means d_model / num_heads")
    d_ff: int = knob(256, "model", "hidden width of a dense SwiGLU FFN (layers without experts)")
    rope_theta: float = knob(10000.0, "model", "base of the rotary position frequencies, > 1")
    norm_eps: float = knob(1e-6, "model", "epsilon inside the RMSNorm root, > 0")
    init_scale: float = knob(1.0, "model", "factor on the truncated-normal 1/sqrt(fan_in) initialisation, > 0")
    tie_embeddings: bool = knob(True, "model", "use the embedding as output projection")
    dtype: str = knob("float32", "model", "compute type, float32 or bfloat16; parameters, router and sums are float32")
    scan_layers: bool = knob(False, "model", "stack equal layers and scan over them: smaller program, same function")
    remat: str = knob("none", "run", "recompute in the backward pass: none, dots (keep matmul results) or full")


@dataclasses.dataclass
class MoeConfig(Section):
    every: int = knob(1, "model", "experts in every n-th layer; 0 makes a dense model")
    leading_dense: int = knob(0, "model", "layers at the start that stay dense, 0 <= n <= num_layers")
    num_experts: int = knob(8, "model", "E, experts per MoE layer, >= 1")
    num_choices: int = knob(2, "model", "K, experts per token, 1 <= K <= E")
    d_expert: int = knob(256, "model", "F, hidden width of one expert's SwiGLU")
    num_shared: int = knob(0, "model", "shared experts every token visits; one FFN of width num_shared * d_expert")
    router: str = knob("top_k", "model", "routing scheme, a registered name (--list_routers)")
    dispatcher: str = knob("pooled", "run", "how tokens meet experts, a registered name (--list_dispatchers)")


@dataclasses.dataclass
class MeshConfig(Section):
    devices: int = knob(4, "run", "number of devices over all hosts, >= 1")
    data: int = knob(1, "run", "size of the data axis; the expert axis has R = devices / data members")


@dataclasses.dataclass
class PoolConfig(Section):
    transport: str = knob("auto", "run", "auto or local (one process); FEF_TRANSPORT overrides it")
    slots: int = knob(3, "run", "places per block for versions that are alive at the same time, >= 2")
    stages: int = knob(2, "run", "layers whose gradient blocks may be on their way at the same time, >= 2")
    deadline_s: float = knob(120.0, "run", "longest wait of a pool operation before it raises, seconds, > 0")
    update: str = knob("step_end", "run", "when new weights are published: step_end")


@dataclasses.dataclass
class DataConfig(Section):
    path: str = knob("", "data", "file or folder (.txt .md .py .jsonl, also .gz); empty means the embedded corpus")
    text_key: str = knob("text", "data", "key of the text in .jsonl lines")
    seq_len: int = knob(128, "data", "S, tokens per sequence, >= 1")
    batch_size: int = knob(16, "data", "sequences per optimizer step; a multiple of devices * microbatches")
    heldout_fraction: float = knob(0.05, "data", "share of the documents kept for evaluation, 0 <= f < 1")
    seed: int = knob(0, "data", "seed of the split and the shuffle")


@dataclasses.dataclass
class OptimConfig(Section):
    name: str = knob("adamw", "model", "adamw or sgd")
    learning_rate: float = knob(3e-3, "model", "peak learning rate, > 0")
    warmup_steps: int = knob(20, "model", "steps of linear warm-up, >= 0")
    decay_steps: int | None = knob(None, "model", "step at which the cosine reaches its floor; None means train.steps")
    final_fraction: float = knob(0.1, "model", "floor of the cosine as a share of the peak, 0 <= f <= 1")
    b1: float = knob(0.9, "model", "adamw: decay of the first moment, 0 <= b1 < 1")
    b2: float = knob(0.95, "model", "adamw: decay of the second moment, 0 <= b2 < 1")
    eps: float = knob(1e-8, "model", "adamw: epsilon, > 0")
    momentum: float = knob(0.9, "model", "sgd: momentum, 0 <= m < 1")
    weight_decay: float = knob(0.1, "model", "decoupled decay of matrices, >= 0")
    clip_norm: float | None = knob(1.0, "model", "clip the global gradient norm to this, > 0; None means no clipping")


@dataclasses.dataclass
class TrainConfig(Section):
    steps: int = knob(300, "run", "optimizer steps of the whole run, >= 1")
    microbatches: int = knob(1, "run", "parts into which a batch is split for gradient accumulation, >= 1")
    seed: int = knob(0, "model", "seed of initialisation and of every random choice in the step")
    eval_every: int = knob(100, "run", "steps between held-out evaluations, >= 1; one is always made at the end")
    eval_batches: int = knob(16, "run", "batches per held-out evaluation, >= 1")
    log_every: int = knob(1, "run", "steps between lines of metrics.jsonl, >= 1")
    sample_bytes: int = knob(200, "run", "bytes of text sampled from the trained model at the end, >= 0")


@dataclasses.dataclass
class CheckpointConfig(Section):
    every: int = knob(100, "run", "steps between checkpoints, >= 1; one is always made at the end")
    keep: int = knob(2, "run", "newest checkpoints kept, >= 1")
    keep_best: int = knob(1, "run", "checkpoints with the lowest held-out loss kept beside them, >= 0")


@dataclasses.dataclass
class RunConfig(Section):
    tensorboard: bool = knob(True, "run", "write TensorBoard events")
    report: bool = knob(True, "run", "write report.html at the end")
    malloc: bool = knob(True, "run", "let glibc keep freed memory (about a fifth less CPU per step)")


def _variant_options(registry: Any) -> list[tuple[str, type, Any]]:
    """One configuration field per registered variant that has options."""
    return [
        (name, registry.get(name).Options, dataclasses.field(default_factory=registry.get(name).Options))
        for name in registry.names()
        if dataclasses.fields(registry.get(name).Options)
    ]


@dataclasses.dataclass
class _RoutingBase(Section):
    module: str = knob("", "model", "path of a .py file that registers further routing schemes")
    allow_noncausal: bool = knob(False, "model", "accept a scheme whose choice depends on later tokens")
    record: str = knob("", "run", "write every step's assignments to this .npz file")
    replay: str = knob("", "run", "take the assignments from this .npz file instead of the router")


@dataclasses.dataclass
class _DispatchBase(Section):
    module: str = knob("", "run", "path of a .py file that registers further dispatchers")
    matmul: str = knob("auto", "run", "grouped matmul: auto, native (OpenBLAS handler) or jax (block loop)")


@dataclasses.dataclass
class Config(Section):
    """The whole configuration. `routing` and `dispatch` also hold the options of every registered variant."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)
    routing: Any = dataclasses.field(default_factory=lambda: _with_variants(_RoutingBase, fef.routing.ROUTERS))
    dispatch: Any = dataclasses.field(default_factory=lambda: _with_variants(_DispatchBase, fef.dispatch.DISPATCHERS))
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)


def _with_variants(base: type, registry: Any) -> Any:
    scan("fef.routing")
    scan("fef.dispatch")
    return dataclasses.make_dataclass(base.__name__.strip("_"), _variant_options(registry), bases=(base,))()


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """{"model.d_model": 128, ...}, in declaration order."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def scopes(config: Any, prefix: str = "") -> dict[str, str]:
    """{"model.d_model": "model", ...}; an option of a variant is a model field for routers, a run field else."""
    flat: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= scopes(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = field.metadata["scope"]
    return flat


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def config_hash(config: Config) -> str:
    """12 hex digits over every field."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:12]


def freeze(config: Any) -> None:
    """Locks the tree: setting any field raises FrozenInstanceError from now on."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            freeze(value)
    object.__setattr__(config, "_is_frozen", True)


def validate(config: Config) -> None:
    """Checks everything that can be known before JAX starts; raises ConfigError at the first fault."""
    model, moe, mesh, data = config.model, config.moe, config.mesh, config.data
    _check_ranges(config)
    if model.head_dim is None and model.d_model % model.num_heads:
        raise ConfigError("model.d_model", model.d_model, f"must be a multiple of model.num_heads={model.num_heads}")
    if head_dim(model) % 2:
        raise ConfigError("model.head_dim", head_dim(model), "rotary positions need an even head width")
    if model.num_heads % model.num_kv_heads:
        raise ConfigError("model.num_kv_heads", model.num_kv_heads, f"must divide model.num_heads={model.num_heads}")
    if moe.num_choices > moe.num_experts:
        raise ConfigError("moe.num_choices", moe.num_choices, f"must be <= moe.num_experts={moe.num_experts}")
    if moe.leading_dense > model.num_layers:
        raise ConfigError("moe.leading_dense", moe.leading_dense, f"must be <= model.num_layers={model.num_layers}")
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
    if moe.every:
        router = _known(fef.routing.ROUTERS, "moe.router", moe.router)
        _known(fef.dispatch.DISPATCHERS, "moe.dispatcher", moe.dispatcher)
        if not router.causal and not config.routing.allow_noncausal:
            raise ConfigError(
                "moe.router",
                moe.router,
                "looks at later tokens, so a decoder trained with it cannot generate; "
                "set config.routing.allow_noncausal=True to train it all the same",
            )


def _known(registry: Any, key: str, name: str) -> Any:
    try:
        return registry.get(name)
    except ValueError as error:
        raise ConfigError(key, name, str(error)) from None


def head_dim(model: ModelConfig) -> int:
    return model.d_model // model.num_heads if model.head_dim is None else model.head_dim


_CHOICES = {
    "model.dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "dots", "full"),
    "pool.transport": ("auto", "local"),
    "pool.update": ("step_end",),
    "optim.name": ("adamw", "sgd"),
    "dispatch.matmul": ("auto", "native", "jax"),
}
_ZERO_ALLOWED = {
    "moe.every", "moe.leading_dense", "moe.num_shared", "data.seed", "train.seed", "data.heldout_fraction",
    "optim.warmup_steps", "optim.final_fraction", "optim.b1", "optim.b2", "optim.momentum", "optim.weight_decay",
    "train.sample_bytes", "checkpoint.keep_best",
}  # fmt: skip
_BELOW_ONE = {"data.heldout_fraction", "optim.b1", "optim.b2", "optim.momentum"}


def _check_ranges(config: Config) -> None:
    for key, value in flatten(config).items():
        section = key.split(".")[0]
        if key in _CHOICES and value not in _CHOICES[key]:
            raise ConfigError(key, value, f"must be one of {', '.join(_CHOICES[key])}")
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise ConfigError(key, value, "must be a finite number")
        if section in ("routing", "dispatch") or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if value < 0 or (value == 0 and key not in _ZERO_ALLOWED):
            raise ConfigError(key, value, f"must be {'>= 0' if key in _ZERO_ALLOWED else '> 0'}")
        if key in _BELOW_ONE and value >= 1:
            raise ConfigError(key, value, "must be < 1")
    if config.optim.final_fraction > 1:
        raise ConfigError("optim.final_fraction", config.optim.final_fraction, "must be <= 1")
    if config.pool.slots < 2:
        raise ConfigError("pool.slots", config.pool.slots, "must be >= 2: a version is read while the next is written")
    if config.pool.stages < 2:
        raise ConfigError("pool.stages", config.pool.stages, "must be >= 2: one layer is summed while the next arrives")
