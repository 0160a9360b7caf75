"""ExpertTable: what must hold for any number of experts and members."""

import numpy as np
import pytest

from fef.pool.table import ExpertTable


@pytest.mark.parametrize("experts", [1, 2, 3, 5, 6, 7, 8, 16, 63, 64, 257])
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 8, 64])
def test_properties(experts, members):
    table = ExpertTable(experts, members)
    assert table.per_member == -(-experts // members)
    assert table.num_positions == members * table.per_member >= experts
    for array_E in (table.home_E, table.local_E, table.position_E):
        assert array_E.shape == (experts,) and array_E.dtype == np.int32
    assert (np.diff(table.home_E) >= 0).all(), "contiguous runs"
    counts_R = np.bincount(table.home_E, minlength=members)
    assert len(counts_R) == members and counts_R.max() - counts_R.min() <= 1, "lengths differ by at most one"
    assert (np.diff(counts_R) <= 0).all(), "the first members hold more"
    for rank in range(members):
        np.testing.assert_array_equal(table.local_E[table.home_E == rank], np.arange(counts_R[rank]))
    assert counts_R.max() <= table.per_member
    assert len(set(table.position_E)) == experts, "no two experts share a position"
    np.testing.assert_array_equal(table.position_E // table.per_member, table.home_E)
    np.testing.assert_array_equal(table.position_E % table.per_member, table.local_E)
    assert (np.diff(table.position_E) > 0).all(), "positions keep the logical order"
    if experts % members == 0:
        np.testing.assert_array_equal(table.position_E, np.arange(experts))


def test_docstring_example():
    table = ExpertTable(3, 2)
    assert table.home_E.tolist() == [0, 0, 1]
    assert table.local_E.tolist() == [0, 1, 0]
    assert table.position_E.tolist() == [0, 1, 2] and table.num_positions == 4
