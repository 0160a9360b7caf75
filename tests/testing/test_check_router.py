"""Each broken router must be caught, and the message must name what is broken. The sound ones: tests/contract."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from fef.config import knob
from fef.routing.gate import count_by_expert, token_choice
from fef.testing import check_router


@dataclasses.dataclass(frozen=True)
class Sound:
    """A small top-2 router; the broken ones below change one thing."""

    @dataclasses.dataclass
    class Options:
        pass

    causal = True
    equivariant = True

    num_experts: int = 4  # a power of two: uniform probabilities are exact
    num_choices: int = 2
    options: Options = dataclasses.field(default_factory=Options)

    def init(self, key, d_model):
        return {"gate_DE": jax.random.normal(key, (d_model, self.num_experts))}

    def init_state(self):
        return {}

    def logits(self, params, x_BSD):
        return x_BSD.astype(jnp.float32) @ params["gate_DE"]

    def aux(self, probs_BSE, ctx):
        """Mean over the real tokens of all members of the first expert's probability."""
        tokens = ctx.psum(ctx.mask_BS.sum())
        return jnp.sum(probs_BSE[..., 0] * ctx.mask_BS) / jnp.maximum(tokens, 1)

    def edit(self, assignment, ctx):
        return assignment

    def __call__(self, params, x_BSD, ctx):
        probs_BSE = jax.nn.softmax(self.logits(params, x_BSD))
        weight_BSK, expert_BSK = jax.lax.top_k(probs_BSE, self.num_choices)
        assignment = token_choice(
            expert_BSK,
            weight_BSK,
            jnp.broadcast_to(ctx.mask_BS[..., None], expert_BSK.shape),
            ctx.mask_BS,
            num_experts=self.num_experts,
            entropy_BS=jnp.zeros(ctx.mask_BS.shape),
            aux_loss=self.aux(probs_BSE, ctx),
        )
        return self.edit(assignment, ctx), {}


def edited(**changes):
    """An `edit` that replaces fields by functions of the assignment."""

    def edit(self, assignment, ctx):
        return dataclasses.replace(assignment, **{name: change(assignment) for name, change in changes.items()})

    return edit


def share_without_gradient(self, probs_BSE, ctx):
    """The right value, but the gradient of a mean of means."""
    share, tokens = Sound.aux(self, probs_BSE, ctx), ctx.mask_BS.sum()
    own = jnp.sum(probs_BSE[..., 0] * ctx.mask_BS) / jnp.maximum(tokens, 1)
    return jax.lax.stop_gradient(share - own) + own


@dataclasses.dataclass
class BareOptions:
    factor: float = 1.0


@dataclasses.dataclass
class KnobOptions:
    factor: float = knob(1.0, "model", "a factor")


BROKEN = {
    "a token has the same expert twice": dict(edit=edited(expert_N=lambda a: a.expert_N * 0)),
    "valid_N is True for a padding token": dict(edit=edited(valid_N=lambda a: jnp.ones_like(a.valid_N))),
    r"expert_N outside \[0, E\)": dict(edit=edited(expert_N=lambda a: a.expert_N + 1)),
    r"token_N outside \[0, T\)": dict(edit=edited(token_N=lambda a: a.token_N - 1)),
    "weight_N must be float32, got bfloat16": dict(edit=edited(weight_N=lambda a: a.weight_N.astype(jnp.bfloat16))),
    "expert_N must have shape": dict(edit=edited(expert_N=lambda a: a.expert_N[:-1])),
    "weight_N is not finite": dict(edit=edited(weight_N=lambda a: a.weight_N / 0)),
    "with num_choices set, token_N must be": dict(
        edit=edited(**{n: lambda a, n=n: getattr(a, n)[::-1] for n in ("token_N", "expert_N", "weight_N", "valid_N")})
    ),
    "num_choices must be the router's": dict(edit=edited(num_choices=lambda a: 1)),
    r"metrics\['kept_E'\] must count valid_N": dict(
        edit=edited(metrics=lambda a: a.metrics | {"kept_E": a.metrics["load_E"] * 0})
    ),
    r"metrics\['load_E'\] sums to": dict(
        edit=edited(metrics=lambda a: a.metrics | {"load_E": a.metrics["load_E"] + 1})
    ),
    r"metrics\['entropy_sum'\] outside": dict(
        edit=edited(metrics=lambda a: a.metrics | {"entropy_sum": jnp.float32(-1)})
    ),
    "metrics lack tokens": dict(edit=edited(metrics=lambda a: {k: v for k, v in a.metrics.items() if k != "tokens"})),
    r"aux_loss must have shape \(\), got \(1,\)": dict(aux=lambda self, p, ctx: jnp.zeros(1)),
    r"aux_loss is nan \(only padding tokens\)": dict(
        aux=lambda self, p, ctx: jnp.sum(p * ctx.mask_BS[..., None]) / ctx.psum(ctx.mask_BS.sum())
    ),
    "next_state must return the structure": dict(
        init_state=lambda self: {"bias_E": jnp.zeros(4)}, next_state=lambda self, state, seen: seen
    ),
    "the content of padding changes the assignment": dict(
        logits=lambda self, params, x: Sound.logits(self, params, x - x.mean(1, keepdims=True)), causal=False
    ),
    "the content of padding changes aux_loss": dict(aux=lambda self, p, ctx: p[..., 0].sum() * ctx.mask_BS.any()),
    "aux_loss must be 0 for a batch of padding": dict(aux=lambda self, p, ctx: jnp.float32(1)),
    "depends on other sequences": dict(
        logits=lambda self, params, x: Sound.logits(self, params, x) - Sound.logits(self, params, x[:1]) * 2
    ),
    "depends on later tokens; set `causal = False`": dict(
        logits=lambda self, params, x: Sound.logits(self, params, x) - Sound.logits(self, params, x[:, -1:]) * 2
    ),
    "`equivariant` is claimed": dict(
        logits=lambda self, params, x: Sound.logits(self, params, x) * (jnp.arange(x.shape[1])[None, :, None] % 3 - 1.0)
    ),
    "a bfloat16 input must be routed in float32": dict(
        logits=lambda self, params, x: (x @ params["gate_DE"].astype(x.dtype)).astype(jnp.float32)
    ),
    "the gradient is not finite at zero parameters": dict(
        aux=lambda self, p, ctx: jnp.std(jnp.sum(p * ctx.mask_BS[..., None], (0, 1)))
    ),
    r"carries no gradient to parameter \['gate_DE'\]": dict(
        edit=edited(weight_N=lambda a: jax.lax.stop_gradient(a.weight_N))
    ),
    "aux_loss must be an additive share: over two members": dict(
        aux=lambda self, p, ctx: jnp.sum(p[..., 0] * ctx.mask_BS) / jnp.maximum(ctx.mask_BS.sum(), 1)
    ),
    "the members' gradients of aux_loss do not add up": dict(aux=share_without_gradient),
    "cannot be compiled": dict(
        edit=lambda self, assignment, ctx: assignment if assignment.valid_N.any() else assignment
    ),
    "`causal` must be a bool": dict(causal=None),
    "option 'factor' must be declared with fef.config.knob": dict(Options=BareOptions),
    "parameters must be float32, got bfloat16": dict(
        init=lambda self, key, d_model: {"gate_DE": jnp.ones((d_model, self.num_experts), jnp.bfloat16)}
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_router_is_caught(message):
    router = type("Broken", (Sound,), BROKEN[message])()
    with pytest.raises(AssertionError, match=f"Broken.*: .*{message}"):
        check_router(router, seq_len=4, d_model=4)


class Biased(Sound):
    """Keeps the load of the last step as state; `share` is what a member tells of it."""

    def init_state(self):
        return {"load_E": jnp.zeros(self.num_experts, jnp.int32)}

    def next_state(self, state, seen):
        return {"load_E": seen}

    def share(self, load_E, ctx):
        return ctx.psum(load_E)

    def __call__(self, params, x_BSD, ctx):
        assignment, _ = Sound.__call__(self, params, x_BSD, ctx)
        load_E = count_by_expert(assignment.expert_N, assignment.valid_N, self.num_experts)
        return assignment, self.share(load_E, ctx)


class Balanced(Biased):
    Options = KnobOptions

    def share(self, load_E, ctx):
        return load_E


def test_what_members_tell_of_their_tokens_must_add_up():
    with pytest.raises(AssertionError, match="Biased.*: what the members have seen does not add up"):
        check_router(Biased(), seq_len=4, d_model=4)
    check_router(Balanced(), seq_len=4, d_model=4)
