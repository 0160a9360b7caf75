import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fef.config import ConfigError
from fef.routing.gpt_oss import GptOss


def run(logits, bias, make_context):
    x = jnp.log(jnp.array([[logits]]))
    params = {"gate_DE": jnp.eye(x.shape[-1]), "bias_E": jnp.log(jnp.array(bias))}
    router = GptOss(x.shape[-1], 2)
    return jax.jit(lambda params, x: router(params, x, make_context(np.ones((1, 1))))[0])(params, x)


def test_softmax_over_the_kept_by_hand(make_context):
    # exp(logits) are 4, 3, 2, 1 times exp(bias) 1, 1, 3, 1: 4, 3, 6, 1. Experts 2 and 0 with 6/10 and 4/10.
    # Load 1 of 1 for both: f = 1, 0, 1, 0; P = 4/14, 3/14, 6/14, 1/14; loss = 0.01 * 4 * 10/14
    assignment = run([4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 3.0, 1.0], make_context)
    np.testing.assert_array_equal(assignment.expert_N, [2, 0])
    np.testing.assert_allclose(assignment.weight_N, [0.6, 0.4], rtol=1e-6)
    assert float(assignment.aux_loss) == pytest.approx(0.01 * 4 * 10 / 14, rel=1e-6)


def test_one_choice_is_refused():
    with pytest.raises(ConfigError, match=r"moe.num_choices=1: gpt_oss has weight 1 for a single choice"):
        GptOss(4, 1)
