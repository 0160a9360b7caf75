"""Which routing scheme learns best, balances best, drops least, at equal compute and equal tokens?

Command:  python -m experiments.tables routing
          (configs/tables/routing.py is what it reads)
Hardware: 2 CPU cores; one device, so that nothing depends on a network.
Time:     40 seconds a run, about an hour for all.
Expected: without any balance method most experts get little; a bias balances without a cost in loss; capacity drops.
"""

from typing import Any

SETTINGS = {
    "data.path": "fef/corpus/topics.jsonl.gz",  # the embedded text, the same for every Python
    "data.seq_len": 64,
    "data.batch_size": 16,
    "mesh.devices": 1,
    "model.d_model": 64,
    "model.num_layers": 3,
    "model.d_ff": 256,
    "moe.leading_dense": 1,
    "moe.num_experts": 16,
    "moe.num_choices": 2,
    "moe.d_expert": 64,
    "moe.dispatcher": "all_gather",
    "routing.allow_noncausal": True,  # to compare; schemes that look ahead cannot generate
    "train.steps": 400,
    "train.eval_every": 400,
    "train.sample_bytes": 0,
    "checkpoint.every": 400,
    "run.report": False,
    "run.tensorboard": False,
}
ONE_CHOICE = {"moe.num_choices": 1, "moe.d_expert": 128}  # one expert of twice the width: equal compute


def _router(name: str, **options: Any) -> dict[str, Any]:
    return {"moe.router": name} | {f"routing.{name}.{key}": value for key, value in options.items()}


def get_table() -> dict[str, Any]:
    schemes = {name: _router(name) for name in ("top_k", "expert_choice")}
    schemes |= {name: _router(name) | ONE_CHOICE for name in ("switch",)}
    capacity = {}
    for factor in (2.0, 1.25, 1.0):
        capacity[f"top-2, {factor}"] = _router("top_k", capacity_factor=factor)
        capacity[f"top-1, {factor}"] = _router("switch", capacity_factor=factor) | ONE_CHOICE
    return {
        "settings": SETTINGS,
        "seeds": (0, 1, 2),
        "sections": {"Schemes, each with its own balance method": schemes, "Capacity": capacity},
        "published": {},
    }
