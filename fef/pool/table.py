"""Which member is the home of which expert, and where its block lies."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ExpertTable:
    """Maps each expert to its home rank and place there; the same for every layer.

    Experts are dealt out in contiguous runs whose lengths differ by at most one. Parameters have a physical axis of
    P = R * ceil(E / R) positions, R equal parts: position p belongs to rank p // (P / R). Positions that hold no
    expert are zero, get zero gradients, and count nowhere.

    Example, E = 3 experts on R = 2 members: home [0, 0, 1], local [0, 1, 0], position [0, 1, 2], position 3 is empty.
    """

    num_experts: int
    num_members: int

    @property
    def per_member(self) -> int:
        """P / R, places of one member."""
        return -(-self.num_experts // self.num_members)

    @property
    def num_positions(self) -> int:
        """P, length of the physical axis."""
        return self.num_members * self.per_member

    @property
    def home_E(self) -> np.ndarray:
        """(E,) int32, the rank that owns the expert."""
        base, extra = divmod(self.num_experts, self.num_members)
        counts = [base + (rank < extra) for rank in range(self.num_members)]
        return np.repeat(np.arange(self.num_members), counts).astype(np.int32)

    @property
    def local_E(self) -> np.ndarray:
        """(E,) int32, the expert's index among its home's blocks."""
        home_E = self.home_E
        first_R = np.searchsorted(home_E, np.arange(self.num_members))
        return (np.arange(self.num_experts) - first_R[home_E]).astype(np.int32)

    @property
    def position_E(self) -> np.ndarray:
        """(E,) int32, the expert's place on the physical axis."""
        return self.home_E * self.per_member + self.local_E
