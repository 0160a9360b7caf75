"""Rows to capacity slots and back, against loops in numpy; each is the transpose of the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.ops.slots import from_slots, to_slots

D = 3
COUNTS = {  # of N = 12 rows and C = 4 places; rows beyond a position's C are not carried
    "some rows unused": [3, 0, 4, 1],
    "first and last empty": [0, 4, 4, 0],
    "all rows used": [4, 4, 0, 4],
    "no rows": [0, 0, 0, 0],
    "more than fit": [6, 0, 2, 4],
}
NUM_ROWS, CAPACITY = 12, 4
each_counts = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


def pairs(counts: list[int]) -> list[tuple[int, int, int]]:
    """(row, position, place) of every row that has a slot."""
    first = np.cumsum(counts) - counts
    return [(first[p] + c, p, c) for p, count in enumerate(counts) for c in range(min(count, CAPACITY))]


def slots_by_hand(rows_ND: np.ndarray, counts: list[int]) -> np.ndarray:
    slots_PCD = np.zeros((len(counts), CAPACITY, D), rows_ND.dtype)
    for row, p, c in pairs(counts):
        slots_PCD[p, c] = rows_ND[row]
    return slots_PCD


def rows_by_hand(slots_PCD: np.ndarray, counts: list[int]) -> np.ndarray:
    rows_ND = np.zeros((NUM_ROWS, D), slots_PCD.dtype)
    for row, p, c in pairs(counts):
        rows_ND[row] = slots_PCD[p, c]
    return rows_ND


def rows_and_slots() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(NUM_ROWS, D)).astype(np.float32), rng.normal(size=(4, CAPACITY, D)).astype(np.float32)


def test_worked_example():
    rows = jnp.array([[1.0], [2.0], [3.0], [9.0]])
    counts_P = jnp.array([1, 2], jnp.int32)
    np.testing.assert_array_equal(to_slots(rows, counts_P, 2)[..., 0], [[1, 0], [2, 3]])
    slots = jnp.array([[[5.0], [8.0]], [[6.0], [7.0]]])
    np.testing.assert_array_equal(from_slots(slots, counts_P, 4)[:, 0], [5, 6, 7, 0])


@each_counts
def test_values_and_gradients(counts):
    """The gradient of each is the other one, applied to the cotangent."""
    rows, slots = rows_and_slots()
    counts_P = jnp.array(counts, jnp.int32)
    to, pull_to = jax.vjp(lambda rows: to_slots(rows, counts_P, CAPACITY), rows)
    back, pull_back = jax.vjp(lambda slots: from_slots(slots, counts_P, NUM_ROWS), slots)
    np.testing.assert_array_equal(to, slots_by_hand(rows, counts))
    np.testing.assert_array_equal(back, rows_by_hand(slots, counts))
    np.testing.assert_array_equal(pull_to(slots)[0], rows_by_hand(slots, counts))
    np.testing.assert_array_equal(pull_back(rows)[0], slots_by_hand(rows, counts))


def test_unused_rows_and_slots_do_not_matter_even_when_they_are_not_finite():
    rows, slots = rows_and_slots()
    counts = COUNTS["some rows unused"]
    used_rows, used_slots = rows_by_hand(np.ones_like(slots), counts) > 0, slots_by_hand(np.ones_like(rows), counts) > 0
    counts_P = jnp.array(counts, jnp.int32)
    to = to_slots(jnp.where(used_rows, rows, jnp.nan), counts_P, CAPACITY)
    back = from_slots(jnp.where(used_slots, slots, jnp.nan), counts_P, NUM_ROWS)
    np.testing.assert_array_equal(to, slots_by_hand(rows, counts))
    np.testing.assert_array_equal(back, rows_by_hand(slots, counts))


@pytest.mark.parametrize("operation", [to_slots, from_slots])
def test_counts_are_run_time_values_and_bfloat16_stays(operation):
    array = rows_and_slots()[operation is from_slots].astype(jnp.bfloat16)
    size = NUM_ROWS if operation is from_slots else CAPACITY
    by_hand = rows_by_hand if operation is from_slots else slots_by_hand

    def value_and_gradient(array, counts_P):
        out, pull = jax.vjp(lambda array: operation(array, counts_P, size), array)
        return out, pull(out)[0]

    jitted = jax.jit(value_and_gradient)
    for counts in COUNTS.values():
        out, gradient = jitted(array, jnp.array(counts, jnp.int32))
        assert out.dtype == gradient.dtype == jnp.bfloat16
        np.testing.assert_array_equal(out, by_hand(array, counts))


@pytest.mark.parametrize("operation", [to_slots, from_slots])
def test_second_order_is_supported_and_forward_mode_refused(operation):
    array = jnp.asarray(rows_and_slots()[operation is from_slots])
    size = NUM_ROWS if operation is from_slots else CAPACITY
    counts_P = jnp.array(COUNTS["some rows unused"], jnp.int32)

    def cubed(array):
        return jnp.sum(operation(array, counts_P, size) ** 3)

    second = jax.grad(lambda array: jnp.sum(jax.grad(cubed)(array) ** 2))(array)
    used = jax.grad(lambda array: jnp.sum(operation(array, counts_P, size)))(array)
    np.testing.assert_allclose(second, 36 * array**3 * used, rtol=1e-5)  # d/dx of (3 x^2)^2
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(cubed, (array,), (array,))
