"""The ledger: how many units of what moved between members, by layer and expert, and how long members waited.

Counts are exact integers. A unit is a block (weights, refetch, gradients, missed, relayed, gathered), a token row
(tokens) or a byte (metadata); `Units` gives its size. Missed are blocks that were fetched ahead and then neither used
nor relayed. Where a relay serves its leaf of the network (config.pool.relay), relayed are blocks that a host got from
its relay, used or not, and gathered are blocks of gradients that it sent there; what the relay itself gets from
a home and sends there are weights, refetch and gradients as ever. What a member already holds at home moves nothing and
is not counted.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

PURPOSES = ("weights", "refetch", "gradients", "tokens", "metadata", "missed", "relayed", "gathered")
WEIGHTS, REFETCH, GRADIENTS, TOKENS, METADATA, MISSED, RELAYED, GATHERED = range(len(PURPOSES))
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
            "relayed": self.block_bytes,
            "gathered": self.gradient_bytes,
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


def relays(host_GR: np.ndarray, leaf_of_host: Sequence[int], positions: int) -> np.ndarray:
    """By way of whom each member's blocks go, where a relay serves each leaf (fef/native/domain_relay.cc has the rule).

    Each of the hosts of a leaf relays in turn, from home to home and position to position of the other leaves.

    Args:
      host_GR: (groups, R), the host of each member.
      leaf_of_host: the number of each host's leaf.
      positions: P.

    Returns:
      (G, R, P) ranks: of the relay's first member, or of the home where blocks go directly.
    """
    groups, ranks = host_GR.shape
    per_member = positions // ranks
    leaf_GR = np.asarray(leaf_of_host)[host_GR]
    relay_GRP = np.broadcast_to(np.arange(positions) // per_member, (groups, ranks, positions)).copy()
    for group, rank in np.ndindex(groups, ranks):
        leaf_R, host_R = leaf_GR[group], host_GR[group]
        is_other_R = leaf_R != leaf_R[rank]
        neighbours = np.unique(host_R[~is_other_R])
        for position in range(positions if len(neighbours) > 1 else 0):
            home, local = divmod(position, per_member)
            if is_other_R[home]:
                host = neighbours[(is_other_R[:home].sum() + local) % len(neighbours)]
                relay_GRP[group, rank, position] = np.argmax(host_R == host)
    return relay_GRP


def bytes_received(
    counts_MLQP: np.ndarray, ranks: int, units: Units, relay_GRP: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Exact bytes that each member received from each other one, by purpose.

    Weights, refetched and missed ones and metadata come from the home of their position, gradients go there, and token
    rows go there and come back: half of them each, and when a member has sent an odd number, the last one went there.
    Relayed blocks come from the relay, and gathered ones go there.

    Example, 2 members with one position each: member 0 reads position 1 and sends its gradient. Then entry [0, 1] of
    weights is one block (member 0, from rank 1), and entry [1, 0] of gradients is one block.

    Args:
      counts_MLQP: (members of the whole mesh, layers, purposes, positions) integers, of one step or summed over steps.
      ranks: R; positions belong to ranks in R equal parts, members to data-parallel groups of R.
      units: sizes of the units.
      relay_GRP: of `relays`, if something was relayed.

    Returns:
      {purpose: (M, R) int64, what member m received from rank r of its group}, for the purposes that moved something.
    """
    totals_MQP = counts_MLQP.astype(np.int64).sum(1)
    totals_GRQP = totals_MQP.reshape(-1, ranks, *totals_MQP.shape[1:])
    groups, _, _, positions = totals_GRQP.shape
    home_P = np.arange(positions) // (positions // ranks)
    group_G11, rank_R1 = np.arange(groups)[:, None, None], np.arange(ranks)[:, None]
    received = {}
    for index, purpose in enumerate(PURPOSES):
        at_GRP: np.ndarray = home_P
        if relay_GRP is not None and purpose in ("relayed", "gathered"):
            at_GRP = relay_GRP
        from_GRR = np.zeros((groups, ranks, ranks), np.int64)  # units of a member, at the one it deals with
        np.add.at(from_GRR, (group_G11, rank_R1, at_GRP), totals_GRQP[:, :, index])
        to_GRR = from_GRR.transpose(0, 2, 1)
        units_GRR = from_GRR
        if purpose in ("gradients", "gathered"):
            units_GRR = to_GRR
        elif purpose == "tokens":
            units_GRR = (to_GRR + 1) // 2 + from_GRR // 2
        if units_GRR.any():
            received[purpose] = units_GRR.reshape(-1, ranks) * units.of(purpose)
    return received


def bytes_by_leaf(counts_MLQP: np.ndarray, leaf_GR: np.ndarray, units: Units) -> tuple[int, int]:
    """Exact bytes that stay within a leaf of the network, and those that cross from one to another.

    Args:
      counts_MLQP: as of `bytes_received`.
      leaf_GR: (groups, R), the leaf of each member. What moves within a host stays within its leaf too.
      units: sizes of the units.
    """
    groups, ranks = leaf_GR.shape
    per_member = counts_MLQP.shape[-1] // ranks
    totals_QGRP = counts_MLQP.astype(np.int64).sum(1).swapaxes(0, 1).reshape(len(PURPOSES), groups, ranks, -1)
    is_other_GRP = leaf_GR[:, :, None] != np.repeat(leaf_GR, per_member, axis=1)[:, None]
    whole = crossing = 0
    for purpose, totals_GRP in zip(PURPOSES, totals_QGRP, strict=True):
        whole += int(totals_GRP.sum()) * units.of(purpose)
        if purpose not in ("relayed", "gathered"):
            crossing += int(totals_GRP[is_other_GRP].sum()) * units.of(purpose)
    return whole - crossing, crossing
