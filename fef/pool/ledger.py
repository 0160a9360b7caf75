"""The ledger: how many units of what moved between members, by layer and expert, and how long members waited.

Counts are exact integers. A unit is a block (weights, refetch, gradients, missed), a token row (tokens) or a byte
(metadata); `Units` gives its size. Missed are blocks that were fetched ahead and then not used. What a member already
holds at home moves nothing and is not counted.
"""

import dataclasses

import numpy as np

PURPOSES = ("weights", "refetch", "gradients", "tokens", "metadata", "missed")
WEIGHTS, REFETCH, GRADIENTS, TOKENS, METADATA, MISSED = range(len(PURPOSES))
WAITS = ("published", "stage", "closed", "tokens")


@dataclasses.dataclass(frozen=True)
class Units:
    """Sizes in bytes: of a block as it is read, of a block of gradients, of a token row."""

    block_bytes: int
    gradient_bytes: int
    row_bytes: int

    def of(self, purpose: str) -> int:
        """Bytes of one unit of a purpose."""
        sizes = {
            "weights": self.block_bytes,
            "refetch": self.block_bytes,
            "gradients": self.gradient_bytes,
            "tokens": self.row_bytes,
            "metadata": 1,
            "missed": self.block_bytes,
        }
        return sizes[purpose]


def bytes_by_purpose(counts_LQE: np.ndarray, units: Units) -> dict[str, int]:
    """Exact bytes of each purpose.

    Args:
      counts_LQE: (layers, purposes, experts) integers, summed over members, steps or both.
      units: sizes of the units.
    """
    totals_Q = counts_LQE.astype(np.int64).sum(axis=(0, 2))
    return {purpose: int(totals_Q[i]) * units.of(purpose) for i, purpose in enumerate(PURPOSES)}


def bytes_received(counts_MLQP: np.ndarray, ranks: int, units: Units) -> dict[str, np.ndarray]:
    """Exact bytes that each member received from each other one, by purpose.

    Weights, refetched and missed ones and metadata come from the home of their position, gradients go there, and token
    rows go there and come back: half of them each, and when a member has sent an odd number, the last one went there.

    Example, 2 members with one position each: member 0 reads position 1 and sends its gradient. Then entry [0, 1] of
    weights is one block (member 0, from rank 1), and entry [1, 0] of gradients is one block.

    Args:
      counts_MLQP: (members of the whole mesh, layers, purposes, positions) integers, of one step or summed over steps.
      ranks: R; positions belong to ranks in R equal parts, members to data-parallel groups of R.
      units: sizes of the units.

    Returns:
      {purpose: (M, R) int64, what member m received from rank r of its group}, for the purposes that moved something.
    """
    totals_MQP = counts_MLQP.astype(np.int64).sum(1)
    at_home_GRQH = totals_MQP.reshape(-1, ranks, len(PURPOSES), ranks, totals_MQP.shape[2] // ranks).sum(4)
    received = {}
    for index, purpose in enumerate(PURPOSES):
        from_home_GRH = at_home_GRQH[:, :, index]  # units of the member of rank R, at the home H
        to_home_GHR = from_home_GRH.transpose(0, 2, 1)
        units_GRR = from_home_GRH
        if purpose == "gradients":
            units_GRR = to_home_GHR
        elif purpose == "tokens":
            units_GRR = (to_home_GHR + 1) // 2 + from_home_GRH // 2
        if units_GRR.any():
            received[purpose] = units_GRR.reshape(-1, ranks) * units.of(purpose)
    return received
