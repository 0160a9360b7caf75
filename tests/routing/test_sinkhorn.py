import jax.numpy as jnp
import numpy as np

from fef.routing.sinkhorn import Sinkhorn, column_scales


def options(**changed):
    return Sinkhorn.Options(**changed)


# Both tokens prefer expert 0, the second one less: rows 0.9, 0.1 and 0.6, 0.4. Their columns sum to 1.5 and 0.5, and
# are to sum to 1: factors 2/3 and 2, so 0.6, 0.2 and 0.4, 0.8: the second token goes to expert 1.
LOGITS = np.log([[[0.9, 0.1], [0.6, 0.4]]])


def test_one_iteration_by_hand(route):
    scales = column_scales(jnp.asarray(LOGITS, jnp.float32), jnp.ones((1, 2), bool), 1)
    np.testing.assert_allclose(jnp.exp(scales), [[2 / 3, 2]], rtol=1e-5)
    assignment = route(Sinkhorn(2, 1, options(iterations=1)), LOGITS)
    np.testing.assert_array_equal(assignment.expert_N, [0, 1])
    np.testing.assert_allclose(assignment.weight_N, [0.9, 0.4], rtol=1e-6)  # of the raw logits


def test_evaluation_takes_the_best_logits(route):
    assignment = route(Sinkhorn(2, 1), LOGITS, train=False)
    np.testing.assert_array_equal(assignment.expert_N, [0, 0])
    np.testing.assert_allclose(assignment.weight_N, [0.9, 0.6], rtol=1e-6)


def test_sigmoid_weights_by_hand(route):
    # sigmoid(ln p) = p / (1 + p)
    assignment = route(Sinkhorn(2, 1, options(gate="sigmoid")), LOGITS, train=False)
    np.testing.assert_allclose(assignment.weight_N, [0.9 / 1.9, 0.6 / 1.6], rtol=1e-6)


def test_padding_claims_no_part_of_a_column(route):
    # two tokens of padding that want expert 1 leave the factors at 2/3 and 2
    logits = np.concatenate([LOGITS, np.log([[[0.01, 0.99]] * 2])], axis=1)
    mask = [[True, True, False, False]]
    assignment = route(Sinkhorn(2, 1, options(iterations=1)), logits, mask)
    np.testing.assert_array_equal(assignment.expert_N[:2], [0, 1])
    scales = column_scales(jnp.asarray(logits, jnp.float32), jnp.array(mask), 1)
    np.testing.assert_allclose(jnp.exp(scales), [[2 / 3, 2]], rtol=1e-5)


def test_scaled_columns_have_equal_sums():
    logits = np.random.default_rng(0).normal(size=(2, 32, 4)) + [3, 0, 0, -3]
    logits = jnp.asarray(logits, jnp.float32)
    mask = jnp.asarray(np.arange(32) < np.array([[32], [20]]))
    scaled = np.exp(logits + column_scales(logits, mask, 50)[:, None])
    scaled /= scaled.sum(-1, keepdims=True)
    sums = (scaled * mask[..., None]).sum(1)
    np.testing.assert_allclose(sums, np.broadcast_to([[8], [5]], (2, 4)), rtol=1e-3)
