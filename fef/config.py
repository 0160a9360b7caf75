"""Every knob of fef and its default, once.

A `Config` is a tree of dataclasses. It is mutable while flags are parsed, then `validate()` checks it and `freeze()`
locks it before anything reads it. Each field is declared by `knob(default, scope, doc)`; the scope says what may
change when a run is resumed:

- model: defines the function that is trained (shapes, initialisation, loss, optimizer); a changed one is refused.
- data:  defines which bytes are seen, and in which order; a changed one is refused.
- run:   how the same training is carried out (steps, logging, checkpoints, mesh, dispatcher); may change, is recorded.

Routing schemes and dispatchers declare their own options in their own file; they appear here as
`config.routing.<scheme>.<option>` and `config.dispatch.<dispatcher>.<option>`. Only the options of the chosen scheme
and dispatcher are in force: the others are neither recorded nor compared, so adding a scheme changes no old run.
"""

import dataclasses
import functools
import hashlib
import json
import math
import operator
import typing
from collections.abc import Iterator
from typing import Any

import fef.dispatch
import fef.routing
from fef.ffn import FFNS
from fef.registry import Registry, nearest, scan

SCOPES = ("model", "data", "run")

# The types a knob may have, and how an error names them. Text has no None: '' stands for nothing.
TYPES: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a finite number",
    str: "text",
    tuple[int, ...]: "a tuple of integers",
    int | None: "an integer or None",
    float | None: "a finite number or None",
}
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
GONE = "(no such field any more)"


def knob(
    default: Any,
    scope: str,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """A configuration field: its default, its scope, a line with meaning and unit, and the values it may take.

    `choices` lists the allowed words; `ge`, `gt`, `le` and `lt` bound a number (>=, >, <=, <).
    """
    assert scope in SCOPES, scope
    bounds = {sign: bound for sign, bound in zip(_COMPARE, (ge, gt, le, lt), strict=True) if bound is not None}
    metadata = {"scope": scope, "doc": doc, "choices": choices, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


class UserError(ValueError):
    """A mistake in what the user gave: programs print its one line and exit with status 2, without a traceback."""


class ConfigError(UserError):
    """A value that cannot work. The message names the key, the value and the remedy."""

    def __init__(self, key: str, value: Any, remedy: str):
        super().__init__(f"config.{key}={value!r}: {remedy}")


class Section:
    """Base of the configuration dataclasses: unknown names are refused at once, and everything after freezing."""

    __dataclass_fields__: dict[str, dataclasses.Field]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise AttributeError(f"no field {name!r}{nearest(name, list(self.__dataclass_fields__))}")
        if self.__dict__.get("_is_frozen"):
            raise dataclasses.FrozenInstanceError(f"config is frozen after validation; cannot set {name!r}")
        object.__setattr__(self, name, value)


@dataclasses.dataclass
class AttentionConfig(Section):
    """Variants of self-attention; the defaults are plain grouped-query attention."""

    bias: bool = knob(False, "model", "biases of the query, key, value and output projections")
    qk_norm: str = knob(
        "none",
        "model",
        "RMSNorm of queries and keys: of each head (Qwen3), or of the whole projection (OLMoE)",
        choices=("none", "head", "projection"),
    )
    sinks: bool = knob(False, "model", "a learned logit per head that takes its share of the softmax (gpt-oss)")
    window: int = knob(0, "model", "positions that a query sees, its own included; 0 is all of them", ge=0)
    window_every: int = knob(1, "model", "layers 0, n, 2n, ... have the window; the others see all", ge=1)


@dataclasses.dataclass(unsafe_hash=True)  # so that layers can keep it
class MlaConfig(Section):
    """Multi-head latent attention: keys and values from a narrow latent, and one rotary key for all heads."""

    kv_rank: int = knob(0, "model", "width of the latent of keys and values; 0 is ordinary attention", ge=0)
    q_rank: int = knob(0, "model", "width of the latent of queries; 0 projects them straight", ge=0)
    nope_dim: int = knob(128, "model", "width of a head's part of queries and keys without positions", ge=1)
    rope_dim: int = knob(64, "model", "width of the rotary part, even", ge=2)
    value_dim: int = knob(128, "model", "width of a head's values", ge=1)


@dataclasses.dataclass
class EncoderConfig(Section):
    """An encoder before the decoder, both with relative positions: the second half of each sequence is predicted."""

    layers: int = knob(0, "model", "layers of the encoder; 0 is a decoder alone", ge=0)
    buckets: int = knob(32, "model", "kinds of distances that have a bias of their own", ge=4)
    max_distance: int = knob(128, "model", "positions from which on all distances are one kind", ge=2)


@dataclasses.dataclass(unsafe_hash=True)  # so that layers can keep it
class YarnConfig(Section):
    """Rotary positions stretched beyond the length that a model was trained on (YaRN)."""

    factor: float = knob(1.0, "model", "how many times the trained length; 1 is plain rotary positions", ge=1)
    original_len: int = knob(4096, "model", "positions that the model was trained on", ge=1)
    beta_fast: float = knob(32.0, "model", "dimensions that turn more often than this over them keep their pace", gt=0)
    beta_slow: float = knob(1.0, "model", "dimensions that turn less often than this go `factor` times slower", gt=0)
    truncate: bool = knob(True, "model", "round the limits between these to whole dimensions")
    attention_factor: float | None = knob(
        None, "model", "factor of the rotated queries and keys; None means 0.1 ln(factor) + 1", gt=0
    )
    score_factor: float = knob(1.0, "model", "further factor of the attention scores (mscale_all_dim squared)", gt=0)


@dataclasses.dataclass
class ModelConfig(Section):
    """Shape and arithmetic of the decoder."""

    vocab_size: int = knob(256, "model", "V, number of token ids; 256 for bytes, else at least the tokenizer's", ge=1)
    d_model: int = knob(128, "model", "D, width of the residual stream; without head_dim a multiple of num_heads", ge=1)
    num_layers: int = knob(4, "model", "number of decoder layers", ge=1)
    num_heads: int = knob(4, "model", "query heads", ge=1)
    num_kv_heads: int = knob(2, "model", "key/value heads; divides num_heads", ge=1)
    head_dim: int | None = knob(None, "model", "width of a head, even; None means d_model / num_heads", ge=2)
    d_ff: int = knob(256, "model", "hidden width of a dense FFN (layers without experts)", ge=1)
    ffn: str = knob("swiglu", "model", "kind of all FFNs, dense and of experts", choices=tuple(FFNS))
    rope_theta: float = knob(10000.0, "model", "base of the rotary position frequencies", gt=1)
    norm_eps: float = knob(1e-6, "model", "epsilon inside the RMSNorm root", gt=0)
    init_scale: float = knob(1.0, "model", "factor on the truncated-normal 1/sqrt(fan_in) initialisation", gt=0)
    tie_embeddings: bool = knob(True, "model", "use the embedding as output projection")
    dtype: str = knob(
        "float32",
        "model",
        "compute type; parameters, router and sums are float32",
        choices=("float32", "bfloat16"),
    )
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    mla: MlaConfig = dataclasses.field(default_factory=MlaConfig)
    encoder: EncoderConfig = dataclasses.field(default_factory=EncoderConfig)
    yarn: YarnConfig = dataclasses.field(default_factory=YarnConfig)
    scan_layers: bool = knob(False, "model", "stack equal layers and scan over them: smaller program, same function")
    remat: str = knob(
        "none",
        "run",
        "what to recompute in the backward pass; dots keeps matmul results",
        choices=("none", "dots", "full"),
    )


@dataclasses.dataclass
class MoeConfig(Section):
    """Experts: where, how many, and how tokens find and meet them."""

    every: int = knob(1, "model", "experts in every n-th layer; 0 makes a dense model", ge=0)
    leading_dense: int = knob(0, "model", "layers at the start that stay dense, at most num_layers", ge=0)
    num_experts: int = knob(32, "model", "E, experts per MoE layer", ge=1)
    num_choices: int = knob(4, "model", "K, experts per token, at most E", ge=1)
    d_expert: int = knob(128, "model", "F, hidden width of one expert's FFN", ge=1)
    num_shared: int = knob(
        0, "model", "shared experts every token visits; one FFN of width num_shared * d_expert", ge=0
    )
    router: str = knob("top_k", "model", "routing scheme, a registered name (--list_routers)")
    dispatcher: str = knob("pooled", "run", "how tokens meet experts, a registered name (--list_dispatchers)")


@dataclasses.dataclass
class MeshConfig(Section):
    """Devices and their axes."""

    devices: int = knob(4, "run", "number of devices over all hosts", ge=1)
    data: int = knob(1, "run", "size of the data axis; the expert axis has R = devices / data members", ge=1)


@dataclasses.dataclass
class DeviceConfig(Section):
    """Modelled device time: expert matmuls take an accelerator's time and leave the CPU free."""

    flops: float | None = knob(None, "run", "FLOP/s of a large GEMM; None takes the time that the CPU takes", gt=0)
    half_rows: float = knob(0.0, "run", "rows at which a GEMM has half of that rate", ge=0)
    values: bool = knob(True, "model", "compute the matmuls too; else a stand-in that takes no time and learns nothing")


@dataclasses.dataclass
class PoolConfig(Section):
    """Slots, staging and waits of the pool."""

    transport: str = knob(
        "auto",
        "run",
        "how blocks come from other hosts; local is one process, rma needs UCX; FEF_TRANSPORT overrides it",
        choices=("auto", "local", "mmap", "tcp", "rma"),
    )
    leaf: str = knob(
        "",
        "run",
        "name of the network's leaf on which this host stands, the same for its neighbours; FEF_LEAF overrides it",
    )
    relay: str = knob(
        "auto",
        "run",
        "tcp: what crosses from leaf to leaf does so once for all hosts of a leaf; auto: where leaves are known",
        choices=("off", "on", "auto"),
    )
    memory: str = knob("memfd", "run", "what holds blocks: memfd is memory; file:FOLDER, nameless files there")
    slots: int = knob(16, "run", "most versions of a block held at once; memory is taken when one is needed", ge=2)
    stages: int = knob(2, "run", "layers whose gradients are on their way; one is summed while the next arrives", ge=2)
    window_bytes: int = knob(
        98304, "run", "tcp, rma: bytes asked of one host and not yet here; less than a switch queues", ge=32768
    )
    total_window_bytes: int = knob(
        131072, "run", "tcp: bytes asked of all hosts and not yet here; what is behind them may wait", ge=32768
    )
    cache_bytes: int = knob(
        1 << 30,
        "run",
        "memory for blocks fetched from other hosts, per table; what does not stay is fetched again",
        ge=0,
    )
    fetch_ahead: bool = knob(
        True, "run", "fetch what was used last as soon as it is published again; what is then not used was in vain"
    )
    deadline_s: float = knob(120.0, "run", "longest wait of a pool operation before it raises, seconds", gt=0)
    update: str = knob("step_end", "run", "when new weights are published", choices=("step_end",))


@dataclasses.dataclass
class DataConfig(Section):
    """Text, sequences and the held-out split."""

    path: str = knob("", "data", "file or folder (.txt .md .py .jsonl, also .gz); empty means the embedded corpus")
    text_key: str = knob("text", "data", "key of the text in .jsonl lines")
    tokenizer: str = knob("", "data", "JSON file of a Hugging Face tokenizer (tokenizer.json); empty: tokens are bytes")
    seq_len: int = knob(128, "data", "S, tokens per sequence", ge=1)
    batch_size: int = knob(16, "data", "sequences per optimizer step; a multiple of devices * microbatches", ge=1)
    heldout_fraction: float = knob(0.05, "data", "share of the documents kept for evaluation", ge=0, lt=1)
    seed: int = knob(0, "data", "seed of the split and the shuffle", ge=0, lt=2**32)


@dataclasses.dataclass
class OptimConfig(Section):
    """Optimizer and learning-rate schedule."""

    name: str = knob("adamw", "model", "optimizer", choices=("adamw", "sgd"))
    learning_rate: float = knob(3e-3, "model", "peak learning rate", gt=0)
    warmup_steps: int = knob(50, "model", "steps of linear warm-up", ge=0)
    decay_steps: int | None = knob(
        None, "model", "step at which the cosine reaches its floor; None means train.steps", ge=1
    )
    final_fraction: float = knob(0.1, "model", "floor of the cosine as a share of the peak", ge=0, le=1)
    b1: float = knob(0.9, "model", "adamw: decay of the first moment", ge=0, lt=1)
    b2: float = knob(0.95, "model", "adamw: decay of the second moment", ge=0, lt=1)
    eps: float = knob(1e-8, "model", "adamw: epsilon", gt=0)
    momentum: float = knob(0.9, "model", "sgd: momentum", ge=0, lt=1)
    weight_decay: float = knob(0.1, "model", "decoupled decay of matrices", ge=0)
    clip_norm: float | None = knob(1.0, "model", "clip the global gradient norm to this; None means no clipping", gt=0)


@dataclasses.dataclass
class TrainConfig(Section):
    """Length of the run, accumulation and evaluation."""

    steps: int = knob(200, "run", "optimizer steps of the whole run", ge=1)
    microbatches: int = knob(1, "run", "parts into which a batch is split for gradient accumulation", ge=1)
    seed: int = knob(0, "model", "seed of initialisation and of every random choice in the step", ge=0, lt=2**32)
    init_from: str = knob("", "run", "folder of checkpoints whose parameters the first step starts from; '' draws them")
    eval_every: int = knob(100, "run", "steps between held-out evaluations; one is always made at the end", ge=1)
    eval_batches: int = knob(16, "run", "batches per held-out evaluation", ge=1)
    log_every: int = knob(1, "run", "steps between lines of metrics.jsonl", ge=1)
    sample_bytes: int = knob(200, "run", "bytes of text (with data.tokenizer, tokens) sampled at the end", ge=0)


@dataclasses.dataclass
class CheckpointConfig(Section):
    """How often to save and what to keep."""

    every: int = knob(100, "run", "steps between checkpoints; one is always made at the end", ge=1)
    keep: int = knob(2, "run", "newest checkpoints kept", ge=1)
    keep_best: int = knob(1, "run", "checkpoints with the lowest held-out loss kept beside them", ge=0)


@dataclasses.dataclass
class RunConfig(Section):
    """What a run writes, and process settings."""

    tensorboard: bool = knob(True, "run", "write TensorBoard events")
    report: bool = knob(True, "run", "write report.html at the end")
    malloc: bool = knob(True, "run", "let glibc keep freed memory (about a fifth less CPU per step)")
    profile_steps: tuple[int, ...] = knob((), "run", "first,last step (or one) to trace into WORKDIR/profile; () none")


@dataclasses.dataclass
class _RoutingBase(Section):
    module: str = knob("", "run", "path of a .py file that registers further routing schemes")
    allow_noncausal: bool = knob(False, "model", "accept a scheme whose choice depends on later tokens")
    record: str = knob("", "run", "write every step's assignments to this .npz file")
    replay: str = knob("", "run", "take the assignments from this .npz file instead of the router")


@dataclasses.dataclass
class _DispatchBase(Section):
    module: str = knob("", "run", "path of a .py file that registers further dispatchers")
    matmul: str = knob(
        "auto",
        "run",
        "grouped matmul: native is the OpenBLAS handler, jax the block loop",
        choices=("auto", "native", "jax"),
    )


@dataclasses.dataclass
class Config(Section):
    """The whole configuration. `routing` and `dispatch` also hold the options of every registered variant."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)
    routing: Any = dataclasses.field(default_factory=lambda: _with_variants(_RoutingBase, fef.routing.ROUTERS))
    dispatch: Any = dataclasses.field(default_factory=lambda: _with_variants(_DispatchBase, fef.dispatch.DISPATCHERS))
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)


def _with_variants(base: type, registry: Registry) -> Any:
    scan("fef.routing")
    scan("fef.dispatch")
    return _section_class(base, registry, tuple((name, registry.get(name)) for name in registry))()


@functools.cache  # one class per set of variants, so that equal configurations compare equal
def _section_class(base: type, registry: Registry, variants: tuple[tuple[str, Any], ...]) -> type:
    """`base` with one more field per variant, its options."""
    taken = [field.name for field in dataclasses.fields(base)]
    fields = []
    for name, variant in variants:
        where = f"{registry.kind} {name!r} (module {variant.__module__})"
        if name in taken or not name.isidentifier():
            raise UserError(f"{where}: choose another name; a name is one word, and not one of {', '.join(taken)}")
        options = _checked_options(variant, where)
        fields.append((name, options, dataclasses.field(default_factory=options)))
    return dataclasses.make_dataclass(base.__name__.strip("_"), fields, bases=(base,))


def _checked_options(variant: Any, where: str) -> Any:
    """The options dataclass of a variant as a Section, or a UserError that tells its author what to change."""
    options = getattr(variant, "Options", None)
    if not isinstance(options, type) or not dataclasses.is_dataclass(options):
        raise UserError(f"{where}: needs a class attribute Options, a dataclass (without fields if it has no option)")
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        field.type = hints[field.name]  # a string under `from __future__ import annotations`
        if "scope" not in field.metadata:
            raise UserError(f"{where}: option {field.name!r} must be made by fef.config.knob(default, scope, doc)")
        if field.type not in TYPES:
            raise UserError(f"{where}: option {field.name!r} has type {hints[field.name]}; use {_type_names()}")
    return options if issubclass(options, Section) else type(options.__name__, (Section, options), {})


def _type_names() -> str:
    return ", ".join(name.__name__ if isinstance(name, type) else str(name) for name in TYPES)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yields (key, field, value) of every knob in declaration order; a key looks like "model.d_model"."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, value


def flatten(config: Any) -> dict[str, Any]:
    """{"model.d_model": 128, ...}, in declaration order, with the options of every registered variant."""
    return {key: value for key, _, value in walk(config)}


def assign(config: Any, key: str, value: Any) -> None:
    """Sets the field of a key like "model.d_model"; an AttributeError names the nearest when there is none."""
    *sections, name = key.split(".")
    for section in sections:
        config = getattr(config, section)
    setattr(config, name, value)


def scopes(config: Any) -> dict[str, str]:
    """{"model.d_model": "model", ...}"""
    return {key: field.metadata["scope"] for key, field, _ in walk(config)}


def allowed(field: dataclasses.Field) -> str:
    """The values a knob may take, in words: "one of adamw, sgd", ">= 0 and < 1"; empty when its type says it all."""
    if field.metadata["choices"]:
        return "one of " + ", ".join(field.metadata["choices"])
    return " and ".join(f"{sign} {bound}" for sign, bound in field.metadata["bounds"].items())


def to_dict(config: Config) -> dict[str, Any]:
    """What is in force, as nested plain values: without the options of the variants that are not chosen."""
    tree = dataclasses.asdict(config)
    for section, chosen in (("routing", config.moe.router), ("dispatch", config.moe.dispatcher)):
        tree[section] = {k: v for k, v in tree[section].items() if not isinstance(v, dict) or k == chosen}
    return tree


def from_dict(tree: dict[str, Any]) -> Config:
    """The inverse of `to_dict`, as read back from JSON; fields that do not exist any more are passed over."""
    config = Config()
    known = flatten(config)
    for key, value in _flat(tree).items():
        if key in known:
            assign(config, key, value)
    return config


def config_hash(config: Config) -> str:
    """12 hex digits over every field in force."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:12]


def resume_changes(old: dict[str, Any], new: Config) -> list[tuple[str, Any, Any]]:
    """What differs between the configuration of a run and the one that continues it.

    Args:
      old: `to_dict` of the earlier configuration, as read back from JSON. A key that it lacks, because it was written
        by an earlier version, had its default.
      new: the configuration that continues the run.

    Returns:
      (key, old value, new value) of every run field that changed, and (key, old value, GONE) of fields that no longer
      exist.

    Raises:
      ConfigError: a model or data field changed; the message has both values.
    """
    before, now, defaults, scope = _flat(old), _flat(to_dict(new)), flatten(Config()), scopes(new)
    changes = []
    for key, value in now.items():
        earlier = before.get(key, defaults[key])
        if earlier == value:
            continue
        if scope[key] != "run":
            raise ConfigError(
                key,
                value,
                f"the run to be continued has {earlier!r}, and a {scope[key]} field cannot change in it; "
                f"set config.{key}={earlier!r}, choose another --workdir, or start over with --fresh",
            )
        changes.append((key, earlier, value))
    return changes + [(key, value, GONE) for key, value in before.items() if key not in scope]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
    return flat


def freeze(config: Any) -> None:
    """Locks the tree: setting any field raises FrozenInstanceError from now on."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            freeze(value)
    object.__setattr__(config, "_is_frozen", True)


def check_fields(config: Any) -> None:
    """Checks each knob by itself: type, finite, within its range or choices. Raises ConfigError."""
    for key, field, value in walk(config):
        if not _has_type(value, field.type) or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(key, value, f"must be {TYPES[field.type]}")
        choices, bounds = field.metadata["choices"], field.metadata["bounds"]
        in_bounds = value is None or all(_COMPARE[sign](value, bound) for sign, bound in bounds.items())
        if not in_bounds or (choices and value not in choices):
            raise ConfigError(key, value, f"must be {allowed(field)} ({field.metadata['doc']})")


def _has_type(value: Any, annotation: Any) -> bool:
    if annotation is int or annotation is float:  # bool is an int to Python, and an int a fine float
        return isinstance(value, (int, annotation)) and not isinstance(value, bool)
    if annotation == tuple[int, ...]:
        return isinstance(value, tuple) and all(_has_type(item, int) for item in value)
    if isinstance(annotation, type):
        return isinstance(value, annotation)
    return any(value is None if option is type(None) else _has_type(value, option) for option in annotation.__args__)


def moe_layers(config: Config) -> list[bool]:
    """Which layers have experts: after `leading_dense`, every `every`-th, of the encoder (first) as of the decoder."""
    moe, stacks = config.moe, (config.model.encoder.layers, config.model.num_layers)
    return [
        bool(moe.every) and i >= moe.leading_dense and (i - moe.leading_dense + 1) % moe.every == 0
        for num_layers in stacks
        for i in range(num_layers)
    ]


def tokens_per_layer(config: Config) -> int:
    """How many of a sequence's tokens a layer sees; it is also how many have a prediction."""
    return config.data.seq_len // (2 if config.model.encoder.layers else 1)


def head_dim(model: ModelConfig) -> int:
    """A, the width of an attention head."""
    return model.d_model // model.num_heads if model.head_dim is None else model.head_dim


def windows(model: ModelConfig) -> list[int]:
    """Positions that a query of each layer sees; 0 is all of them."""
    attention = model.attention
    return [attention.window if i % attention.window_every == 0 else 0 for i in range(model.num_layers)]
