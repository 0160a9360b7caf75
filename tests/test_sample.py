"""Text from a model, byte by byte."""

import pytest
from small import echo, fast_compilation, small_config  # noqa: F401

from fef import sharding
from fef.sample import sample
from fef.step import Stepper


@pytest.fixture(scope="module")
def dense():
    config = small_config({"moe.every": 0, "mesh.devices": 2, "model.vocab_size": 300})
    stepper = Stepper(config, sharding.make_mesh(2))
    return stepper, stepper.init()


def test_the_next_byte_follows_the_last_one_also_beyond_the_window(dense):
    stepper, state = dense
    for prompt in (b"A", b"xyzB", b"0123456789" * 3 + b"C"):  # a window holds 16
        assert sample(stepper, echo(state), 20, prompt) == prompt[-1:].decode() * 20


def test_a_sample_is_drawn_and_repeatable(dense):
    stepper, state = dense
    text = sample(stepper, state, 24)
    assert text == sample(stepper, state, 24) and len(set(text)) > 6
    assert sample(stepper, state, 0) == ""


def test_a_scheme_that_looks_ahead_cannot_generate():
    config = small_config({"moe.router": "expert_choice", "routing.allow_noncausal": True})
    stepper = Stepper(config, sharding.make_mesh(4))
    assert sample(stepper, None, 5) == "(none: router expert_choice looks at later tokens)"
