"""Which routing scheme learns best, balances best, drops least, at equal compute and equal tokens?

Command:  python -m experiments.tables routing
          (configs/tables/routing.py is what it reads)
Hardware: 2 CPU cores; one device, so that nothing depends on a network.
Time:     40 seconds a run, about an hour for all.
Expected: without any balance method most experts get little; a bias balances without a cost in loss; capacity drops.
          Learned gates beat hash and random; top_p takes at most as many experts as the others.
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
# Of other models and texts: only the direction can be compared. Wang et al., "Auxiliary-Loss-Free Load Balancing
# Strategy for Mixture-of-Experts", 2024, 1B parameters; Fedus, Zoph, Shazeer, "Switch Transformers", 2021, table 1.
PUBLISHED = {
    "aux loss 0.01": "perplexity 9.56, MaxVio 0.72 (coefficient 0.001)",
    "bias, u = 0.001": "perplexity 9.50, MaxVio 0.04",
    "top-2, 2.0": "negative log perplexity -1.547",
    "top-1, 2.0": "negative log perplexity -1.554",
    "top-2, 1.25": "negative log perplexity -1.559",
    "top-1, 1.25": "negative log perplexity -1.553",
    "top-2, 1.0": "negative log perplexity -1.572",
    "top-1, 1.0": "negative log perplexity -1.561",
}
ONE_CHOICE = {"moe.num_choices": 1, "moe.d_expert": 128}  # one expert of twice the width: equal compute


def _router(name: str, **options: Any) -> dict[str, Any]:
    return {"moe.router": name} | {f"routing.{name}.{key}": value for key, value in options.items()}


def get_table() -> dict[str, Any]:
    names = ("top_k", "gpt_oss", "sigmoid_bias", "quantile_bias", "noisy_top_k", "gshard", "sinkhorn", "expert_choice")
    schemes = {name: _router(name) for name in (*names, "top_p", "hash", "random")}
    schemes |= {name: _router(name) | ONE_CHOICE for name in ("switch", "base")}
    balance = {
        "none": _router("top_k", balance_coef=0.0, z_coef=0.0),
        "aux loss 0.01": _router("top_k", z_coef=0.0),
    }
    for rate in (0.01, 0.001, 0.0001):
        balance[f"bias, u = {rate}"] = _router("sigmoid_bias", update_rate=rate, sequence_coef=0.0)
    balance["bias, u = 0.001, and aux loss"] = _router("sigmoid_bias", update_rate=0.001, sequence_coef=0.01)
    capacity = {}
    for factor in (2.0, 1.25, 1.0):
        capacity[f"top-2, {factor}"] = _router("top_k", capacity_factor=factor)
        capacity[f"top-1, {factor}"] = _router("switch", capacity_factor=factor) | ONE_CHOICE
    for overflow in ("next_best", "batch_priority"):
        capacity[f"top-2, 1.0, {overflow}"] = _router("top_k", capacity_factor=1.0, overflow=overflow)
        capacity[f"top-1, 1.0, {overflow}"] = _router("switch", capacity_factor=1.0, overflow=overflow) | ONE_CHOICE
    return {
        "settings": SETTINGS,
        "seeds": (0, 1, 2),
        "sections": {
            "Schemes, each with its own balance method": schemes,
            "Balance by an auxiliary loss or by a bias": balance,
            "Capacity": capacity,
        },
        "published": PUBLISHED,
    }


def get_quick() -> dict[str, Any]:
    """One seed of the balance methods, a tenth of the steps; two minutes."""
    table = get_table()
    title = "Balance by an auxiliary loss or by a bias"
    steps = dict.fromkeys(("train.steps", "train.eval_every", "checkpoint.every"), 40)
    return table | {
        "settings": table["settings"] | steps,
        "seeds": (0,),
        "sections": {title: table["sections"][title]},
        "published": {},
    }
