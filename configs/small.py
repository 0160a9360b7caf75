"""Does the path hold at a size where expert weights, not overheads, make the traffic?

Command:  scripts/train.sh --config=configs/small.py
Hardware: 2 CPU cores, 4 virtual devices in one process; better 8 cores or more.
Time:     several times that of configs/tiny.py, by the step.
Expected: a lower held-out loss than configs/tiny.py after the same steps.
"""

from fef.config import Config


def get_config() -> Config:
    config = Config()
    config.model.d_model = 256
    config.model.num_layers = 6
    config.model.num_heads = 8
    config.model.num_kv_heads = 4
    config.model.d_ff = 1024
    config.moe.d_expert = 256
    config.moe.leading_dense = 1
    config.data.seq_len = 256
    config.optim.learning_rate = 2e-3
    config.train.steps = 1000
    return config
