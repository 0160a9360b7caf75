"""Rows of results made by hand, and files of them. No test file: tests import it."""

import json


def grid_row(dispatcher, step_ms, tokens=512, **changes):
    """Of experiments.compare: 4 members, 2 layers of 45 ms, links of 100 Mbit/s, balanced.

    Compute is 90 ms. Of the 1,024 rows of a member 768 cross, four times in each layer, with 1,024 bytes: 503 ms.
    """
    cell = {"network": "leaves=1", "relay": "auto", "nic": 100, "tokens": tokens, "us_per_token": 2.0, "steps": 2}
    setting = {"members": 4, "layers": 2, "experts": 8, "choices": 2, "d_model": 256, "nic": 100.0}
    return {
        "cell": cell, "code": "0123456789abcdef", "command": f"python -m experiments.launch --T={tokens}",
        "dispatcher": dispatcher, "tokens": tokens, "layer_s": 0.045, "step_ms": step_ms,
        "steps_ms": [900.0, step_ms, step_ms * 1.5], "bytes": 1_000_000, "hosts": 4, "commit": "c0ffee",
        "versions": {"jax": "1"}, "when": "2026-01-02T03:04:05+00:00", "machine": "an abacus",
        "flags": setting | {"workload": "balanced"},
    } | changes  # fmt: skip


def training_row(settings, heldout_loss, **changes):
    """Of experiments.tables."""
    return {
        "settings": settings, "code": "fedcba9876543210", "command": f"python -m experiments.train --x={settings}",
        "heldout_loss": heldout_loss, "max_vio": 0.5, "dropped_fraction": 0.25, "dead_experts": 1.0,
        "gate_entropy": 2.5, "steps": 8, "versions": {"jax": "1"}, "commit": "c0ffee",
    } | changes  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
