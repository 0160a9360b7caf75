"""The ledger: how many units of what moved between members, by layer and expert, and how long members waited.

Counts are exact integers. A unit is a block (weights, refetch, gradients), a token row (tokens) or a byte (metadata);
`UNITS` gives its size. What a member already holds at home moves nothing and is not counted.
"""

import dataclasses

import numpy as np

PURPOSES = ("weights", "refetch", "gradients", "tokens", "metadata")
WEIGHTS, REFETCH, GRADIENTS, TOKENS, METADATA = range(len(PURPOSES))
WAITS = ("published", "stage", "closed")


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
