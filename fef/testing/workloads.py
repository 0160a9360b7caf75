"""Imbalance workloads: stored assignments that load the experts and members in known, uneven ways.

They let every dispatcher be tested and timed on the same assignments without training a router first.

| label | name | what is uneven |
|---|---|---|
| W0 | balanced | nothing: every expert gets the same number of tokens, from every member |
| W1 | hot_experts | a quarter of the experts is 16 times as popular as the rest |
| W2 | hot_rank | the experts homed on one member are 16 times as popular |
| W3 | spread_hot | one expert of each member is 16 times as popular |
| W4 | ragged_sources | members hold different numbers of tokens, from all places down to none |
| W5 | zero_load | half of the experts gets no token, every second member has none |
| W6 | rotating_hotspot | as W1, but the hot experts move on with every step |
| W7 | burst | balanced, but every fourth step is as W1 |
| - | one_hot_expert | one expert has 40 % of the assignments, as far as a token has it once |
| - | zipf:S | the expert of rank i, 1 to E, is popular in proportion to 1 / i**S; zipf:0 is balanced |
| - | trace:PATH | what a router chose: the last step of a recording (`config.routing.record`), in its first MoE layer |

Source of W0 to W7: the imbalance suite proposed in NVIDIA/Megatron-LM pull request 7488. Numpy only; equal arguments
give equal arrays. Shape letters: R members, T tokens of a member, N = T*K assignments, E experts, K choices.
"""

import functools
from collections.abc import Callable

import numpy as np

from fef.config import UserError
from fef.pool.table import ExpertTable
from fef.registry import nearest
from fef.routing import Assignment
from fef.testing.traces import last_step

HOT = 16.0  # popularity of a hot expert, that of the others being 1
HOT_SHARE = 0.4  # of all assignments, of the one hot expert
MOST_TOKENS = 0.95  # that may choose it
BURST_EVERY = 4  # steps
ZIPF, TRACE = "zipf:", "trace:"
MOST_ZIPF = 10.0  # beyond it nobody but the first is chosen, unless K forces it


def workload(
    name: str,
    num_members: int,
    tokens_per_member: int,
    num_experts: int,
    num_choices: int,
    *,
    step: int = 0,
    seed: int = 0,
) -> Assignment:
    """The assignments of all members in one training step.

    Args:
      name: one of WORKLOADS, zipf:S with a number S from 0 to 10, or trace:PATH, of which the members take the first
        R*T tokens, the same in every step.
      num_members: R; experts are homed as `fef.pool.table.ExpertTable` does.
      tokens_per_member: T, places for tokens on each member.
      num_experts: E.
      num_choices: K, 1 <= K <= E.
      step: training step, >= 0; the tokens' choices differ from step to step, the popularity only in W6 and W7.
      seed: seed of the hot experts and of the choices.

    Returns:
      An Assignment of numpy arrays with a leading member axis: (R, N) token_N, expert_N, weight_N (positive, summing
      to 1 over the choices of a valid token), valid_N; (R,) aux_loss of 0; metrics likewise. Member r's own is
      `jax.tree.map(lambda leaf: leaf[r], assignment)`. No token has the same expert twice; no choice is dropped.

    Raises:
      ValueError: an unknown name, or K outside [1, E].
      UserError: the trace cannot be read, is of other experts or choices, has too few tokens or has dropped some.
    """
    if not is_workload(name):
        raise ValueError(f"unknown workload {name!r}{nearest(name, list(WORKLOADS))}")
    if not 1 <= num_choices <= num_experts:
        raise ValueError(f"num_choices={num_choices} must be between 1 and num_experts={num_experts}")
    shape = (num_members, tokens_per_member)
    if name.startswith(TRACE):
        expert_RTK, weight_RTK = _of_trace(name.removeprefix(TRACE), shape, num_experts, num_choices)
        return _assignment(expert_RTK, weight_RTK, np.ones(shape, bool), num_experts)
    popularity_E, num_tokens_R = _maker(name)(num_members, tokens_per_member, num_experts, num_choices, step, seed)
    random = np.random.default_rng([seed, step])
    if np.all((popularity_E == 1) | (popularity_E == 0)):
        expert_RTK = _take_turns(random, np.flatnonzero(popularity_E), shape, num_choices)
    else:
        expert_RTK = _draw(random, popularity_E, shape, num_choices)
    valid_RT = np.arange(tokens_per_member) < num_tokens_R[:, None]
    weight_RTK = random.uniform(0.5, 1.5, expert_RTK.shape)
    return _assignment(expert_RTK, weight_RTK, valid_RT, num_experts)


def is_workload(name: str) -> bool:
    """Whether there is a workload of this name."""
    return name in WORKLOADS or _zipf_exponent(name) is not None or name.startswith(TRACE)


def is_of_experts(name: str) -> bool:
    """Whether it is nothing but a popularity of the experts, alike for every number of members."""
    return name in OF_EXPERTS or _zipf_exponent(name) is not None


def _zipf_exponent(name: str) -> float | None:
    """S of zipf:S; None of any other name."""
    try:
        exponent = float(name.removeprefix(ZIPF)) if name.startswith(ZIPF) else -1.0
    except ValueError:
        return None
    return exponent if 0 <= exponent <= MOST_ZIPF else None


def _of_trace(path: str, shape: tuple[int, int], num_experts: int, num_choices: int) -> tuple[np.ndarray, np.ndarray]:
    """(R, T, K): the experts and weights of the first tokens of a recording."""
    header, arrays_LN = last_step(path)
    if (header.num_experts, header.num_choices) != (num_experts, num_choices):
        raise UserError(
            f"{path}: recorded with {header.num_experts} experts and {header.num_choices} choices, asked for "
            f"{num_experts} and {num_choices}; record a run that has as many"
        )
    num_tokens, there = shape[0] * shape[1], header.batch_size * header.seq_len
    if there < num_tokens:
        raise UserError(f"{path}: has {there} tokens, {shape[0]} members of {shape[1]} need {num_tokens}; record more")
    first_N = {name: array_LN[0, : num_tokens * num_choices] for name, array_LN in arrays_LN.items()}
    every_choice_N = np.repeat(np.arange(num_tokens), num_choices)
    if not np.array_equal(first_N["token_N"], every_choice_N) or not first_N["valid_N"].all():
        raise UserError(f"{path}: has not all choices of every token; record a router that drops and pads nothing")
    expert_RTK, weight_RTK = (first_N[name].reshape(*shape, num_choices) for name in ("expert_N", "weight_N"))
    return expert_RTK, weight_RTK


def _assignment(expert_RTK: np.ndarray, weight_RTK: np.ndarray, valid_RT: np.ndarray, num_experts: int) -> Assignment:
    num_members, num_tokens, num_choices = expert_RTK.shape
    weight_RTK = weight_RTK / weight_RTK.sum(-1, keepdims=True) * valid_RT[..., None]
    expert_RN = expert_RTK.reshape(num_members, -1).astype(np.int32)
    valid_RN = np.repeat(valid_RT, num_choices, axis=1)
    load_RE = np.stack([np.bincount(e[v], minlength=num_experts) for e, v in zip(expert_RN, valid_RN, strict=True)])
    arrays = {
        "token_N": np.tile(np.repeat(np.arange(num_tokens, dtype=np.int32), num_choices), (num_members, 1)),
        "expert_N": expert_RN,
        "weight_N": weight_RTK.reshape(num_members, -1).astype(np.float32),
        "valid_N": valid_RN,
        "aux_loss": np.zeros(num_members, np.float32),
        "metrics": {
            "load_E": load_RE.astype(np.int32),
            "kept_E": load_RE.astype(np.int32),
            "tokens": valid_RT.sum(1).astype(np.int32),
            "entropy_sum": np.zeros(num_members, np.float32),
        },
    }
    return Assignment(**arrays, num_choices=num_choices)  # type: ignore[arg-type]


def _take_turns(
    random: np.random.Generator, experts: np.ndarray, shape: tuple[int, int], num_choices: int
) -> np.ndarray:
    """(R, T, K): the experts in turn, so that a member's loads differ by at most one; tokens in random order."""
    num_members, num_tokens = shape
    turns_TK = np.arange(num_tokens * num_choices).reshape(num_tokens, num_choices)
    return np.stack([experts[(random.permutation(turns_TK) + r) % len(experts)] for r in range(num_members)])


def _draw(
    random: np.random.Generator, popularity_E: np.ndarray, shape: tuple[int, int], num_choices: int
) -> np.ndarray:
    """(R, T, K): draws without replacement in proportion to the popularity (the top K of Gumbel-perturbed logs)."""
    scores_RTE = np.log(popularity_E) + random.gumbel(size=(*shape, len(popularity_E)))
    return np.argsort(-scores_RTE, axis=-1)[..., :num_choices]


def _popularity(num_experts: int, hot: np.ndarray) -> np.ndarray:
    popularity_E = np.ones(num_experts)
    popularity_E[hot] = HOT
    return popularity_E


def _num_hot(num_experts: int) -> int:
    return -(-num_experts // 4)


def _full(num_members: int, num_tokens: int) -> np.ndarray:
    return np.full(num_members, num_tokens)


def _balanced(num_members, num_tokens, num_experts, num_choices, step, seed):
    return np.ones(num_experts), _full(num_members, num_tokens)


def _hot_experts(num_members, num_tokens, num_experts, num_choices, step, seed):
    hot = np.random.default_rng(seed).permutation(num_experts)[: _num_hot(num_experts)]
    return _popularity(num_experts, hot), _full(num_members, num_tokens)


def _hot_rank(num_members, num_tokens, num_experts, num_choices, step, seed):
    home_E = ExpertTable(num_experts, num_members).home_E
    rank = np.random.default_rng(seed).choice(home_E)  # a member that is home to an expert
    return _popularity(num_experts, np.flatnonzero(home_E == rank)), _full(num_members, num_tokens)


def _spread_hot(num_members, num_tokens, num_experts, num_choices, step, seed):
    _, first_of_each = np.unique(ExpertTable(num_experts, num_members).home_E, return_index=True)
    return _popularity(num_experts, first_of_each), _full(num_members, num_tokens)


def _ragged_sources(num_members, num_tokens, num_experts, num_choices, step, seed):
    num_tokens_R = num_tokens * np.arange(num_members)[::-1] // max(1, num_members - 1)
    return np.ones(num_experts), num_tokens_R if num_members > 1 else _full(1, num_tokens // 2)


def _zero_load(num_members, num_tokens, num_experts, num_choices, step, seed):
    used = max(num_choices, num_experts // 2)
    num_tokens_R = np.where(np.arange(num_members) % 2, 0, num_tokens)
    return (np.arange(num_experts) < used).astype(float), num_tokens_R


def _rotating_hotspot(num_members, num_tokens, num_experts, num_choices, step, seed):
    num_hot = _num_hot(num_experts)
    hot = (seed + step * num_hot + np.arange(num_hot)) % num_experts
    return _popularity(num_experts, hot), _full(num_members, num_tokens)


def _burst(num_members, num_tokens, num_experts, num_choices, step, seed):
    calm = (step + 1) % BURST_EVERY
    return (_balanced if calm else _hot_experts)(num_members, num_tokens, num_experts, num_choices, step, seed)


def _one_hot_expert(num_members, num_tokens, num_experts, num_choices, step, seed):
    popularity_E, share = np.ones(num_experts), min(HOT_SHARE * num_choices, MOST_TOKENS)
    popularity_E[seed % num_experts] = _popularity_for(share, num_experts, num_choices)
    return popularity_E, _full(num_members, num_tokens)


def _popularity_for(share: float, num_experts: int, num_choices: int) -> float:
    """Of an expert that a token is to choose with the probability `share`, the others' being 1; by bisection."""
    low, high = 0.0, 1e6
    left_K = num_experts - 1 - np.arange(min(num_choices, num_experts - 1))  # others that can still be chosen
    for _ in range(60):
        middle = (low + high) / 2
        is_chosen = 1 - np.prod(left_K / (middle + left_K))
        low, high = (middle, high) if is_chosen < share else (low, middle)
    return high


def _zipf(exponent, num_members, num_tokens, num_experts, num_choices, step, seed):
    rank_E = 1.0 + np.random.default_rng(seed).permutation(num_experts)
    return rank_E**-exponent, _full(num_members, num_tokens)


Maker = Callable[[int, int, int, int, int, int], tuple[np.ndarray, np.ndarray]]


def _maker(name: str) -> Maker:
    exponent = _zipf_exponent(name)
    return WORKLOADS[name] if exponent is None else functools.partial(_zipf, exponent)


# name -> (popularity_E, num_tokens_R): how likely an expert is chosen, and how many tokens each member holds
WORKLOADS: dict[str, Maker] = {
    "balanced": _balanced,
    "hot_experts": _hot_experts,
    "hot_rank": _hot_rank,
    "spread_hot": _spread_hot,
    "ragged_sources": _ragged_sources,
    "zero_load": _zero_load,
    "rotating_hotspot": _rotating_hotspot,
    "burst": _burst,
    "one_hot_expert": _one_hot_expert,
}

# Workloads that are nothing but a popularity of the experts, alike for every number of members -> steps after which it
# comes again, for a number of experts.
OF_EXPERTS: dict[str, Callable[[int], int]] = {
    "balanced": lambda num_experts: 1,
    "hot_experts": lambda num_experts: 1,
    "rotating_hotspot": lambda num_experts: num_experts,
    "burst": lambda num_experts: BURST_EVERY,
    "one_hot_expert": lambda num_experts: 1,
}


def popularity_by_step(name: str, num_experts: int, num_choices: int, seed: int = 0) -> np.ndarray:
    """(P, E): how popular each expert is in a step, which is row `step % P`. For workloads that are `is_of_experts`."""
    num_steps = OF_EXPERTS[name](num_experts) if name in OF_EXPERTS else 1
    of_step = (_maker(name)(1, 1, num_experts, num_choices, step, seed) for step in range(num_steps))
    return np.stack([popularity_E for popularity_E, _ in of_step])
