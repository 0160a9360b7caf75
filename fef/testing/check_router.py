"""`check_router`: the invariants every routing scheme must keep, checked on small inputs.

    from fef.testing import check_router
    check_router(MyRouter(num_experts=4, num_choices=2))

The first broken invariant is an AssertionError that names it. Shape letters as in fef.routing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fef.routing import Assignment, RouterContext, next_state

# Each program runs a few times on tiny arrays: compiling it is all that costs.
_compile = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
_MEMBERS = "members"  # name of the vmap axis that plays the members


def check_router(router: Any, *, d_model: int = 16, seq_len: int = 8, seed: int = 0) -> None:
    """Checks a router against the contract of `fef.routing.Router`, in training and in evaluation.

    Shapes, dtypes, ids in range, no expert twice for a token, finite weights, padding (takes nothing, changes
    nothing), metrics that add up, float32 routing for bfloat16 inputs, sequences that do not influence each other,
    causality (unless `causal = False`), equivariance under reordered tokens (where `equivariant` claims it),
    auxiliary losses and a state that do not depend on the number of members, gradients that reach every parameter, zero
    parameters, one expert, only padding, jit = eager, and jax.checkpoint inside lax.scan.

    Args:
      router: the router to check; a few experts suffice, a power of two makes uniform probabilities exact.
      d_model: D of the inputs.
      seq_len: S of the inputs, >= 4.
      seed: seed of the inputs.

    Raises:
      AssertionError: naming the router and the broken invariant.
    """
    bench = _Bench(router, d_model, seq_len, seed)
    bench.check_declaration()
    for train in (False, True):
        bench.train = train
        bench.check_shapes()
        bench.check_values()
        bench.check_sequences()
        bench.check_order()
        bench.check_padding()
    bench.check_eager()
    bench.check_float32()
    bench.check_gradients()
    bench.check_members()
    bench.check_one_expert()
    bench.check_transforms()


@dataclasses.dataclass(frozen=True)
class _Inputs:
    x_BSD: np.ndarray
    mask_BS: np.ndarray
    token_ids_BS: np.ndarray

    def edited(self, where_BS: np.ndarray) -> "_Inputs":
        """The inputs with other tokens where `where_BS`."""
        x_BSD = np.where(where_BS[..., None], np.float32(3) - 2 * self.x_BSD, self.x_BSD)
        return _Inputs(x_BSD, self.mask_BS, self.token_ids_BS + where_BS.astype(np.int32))

    def reordered(self, order_S: np.ndarray) -> "_Inputs":
        return _Inputs(self.x_BSD[:, order_S], self.mask_BS[:, order_S], self.token_ids_BS[:, order_S])


jax.tree_util.register_dataclass(_Inputs, data_fields=["x_BSD", "mask_BS", "token_ids_BS"], meta_fields=[])


class _Bench:
    """A router with its parameters and inputs; each method checks one group of invariants."""

    def __init__(self, router: Any, d_model: int, seq_len: int, seed: int):
        self.router, self.d_model, self.train = router, d_model, True
        self.key, init_key = jax.random.split(jax.random.key(seed))
        random = np.random.default_rng(seed)
        shape = (4, seq_len)
        # One full sequence, one with a padded end, one of padding only, one with holes.
        mask_BS = np.ones(shape, bool)
        mask_BS[1, seq_len // 2 :] = False
        mask_BS[2] = False
        mask_BS[3, ::3] = False
        x_BSD = random.standard_normal((*shape, d_model), np.float32)
        self.inputs = _Inputs(x_BSD, mask_BS, random.integers(0, 256, shape, np.int32))
        self.full = dataclasses.replace(self.inputs, mask_BS=np.ones(shape, bool))
        self.empty = dataclasses.replace(self.inputs, mask_BS=np.zeros(shape, bool))
        self.params = router.init(init_key, d_model)
        self.state = router.init_state()
        self._compiled = _compile(jax.grad(self._loss, has_aux=True), static_argnames="train")

    def _route(self, params: Any, inputs: Any, state: Any, key: jax.Array, *, train: bool, psum: Any = None) -> Any:
        ctx = RouterContext(
            mask_BS=inputs.mask_BS,
            token_ids_BS=inputs.token_ids_BS,
            layer=jnp.int32(1),
            step=jnp.int32(5),
            key=key,
            train=train,
            state=state,
            psum=psum or (lambda statistics: statistics),
        )
        return self.router(params, inputs.x_BSD, ctx)

    def _loss(
        self, params: Any, inputs: Any, state: Any, key: jax.Array, weights: Any, aux: Any, *, train: bool
    ) -> tuple[jax.Array, Any]:
        """`weights` * a sum of the weights, each with another factor, + `aux` * aux_loss; and what the router gave."""
        assignment, seen = self._route(params, inputs, state, key, train=train)
        factor_N = jnp.cos(1.0 + assignment.token_N + 7.0 * assignment.expert_N) * assignment.valid_N
        return weights * jnp.sum(factor_N * assignment.weight_N) + aux * assignment.aux_loss, (assignment, seen)

    def run(
        self, inputs: _Inputs, *, params: Any = None, state: Any = None, key: Any = None, weights=1.0, aux=1.0
    ) -> tuple[Any, Assignment, Any]:
        """Gradient by the parameters of `_loss`, assignment and what the router has seen, compiled."""
        params = self.params if params is None else params
        state = self.state if state is None else state
        key = self.key if key is None else key
        gradient, outcome = self._compiled(params, inputs, state, key, weights, aux, train=self.train)
        return gradient, *outcome

    def route(self, inputs: _Inputs, **changed: Any) -> Assignment:
        return self.run(inputs, **changed)[1]

    def gradient(self, inputs: _Inputs, **changed: Any) -> Any:
        return self.run(inputs, **changed)[0]

    def require(self, is_kept: Any, broken: str) -> None:
        if not is_kept:
            mode = "training" if self.train else "evaluation"
            raise AssertionError(f"{type(self.router).__name__} ({mode}): {broken}")

    def table(self, assignment: Assignment) -> np.ndarray:
        """(T, E) float32, the weight of each pair that is carried out and NaN elsewhere, whatever the places' order."""
        table_TE = np.full((self.inputs.mask_BS.size, self.router.num_experts), np.nan, np.float32)
        valid_N = np.asarray(assignment.valid_N)
        token_N, expert_N = np.asarray(assignment.token_N)[valid_N], np.asarray(assignment.expert_N)[valid_N]
        table_TE[token_N, expert_N] = np.asarray(assignment.weight_N)[valid_N]
        return table_TE

    def check_declaration(self) -> None:
        router = self.router
        self.require(isinstance(getattr(router, "causal", None), bool), "class attribute `causal` must be a bool")
        for field in dataclasses.fields(router.Options):
            self.require("scope" in field.metadata, f"option {field.name!r} must be declared with fef.config.knob")
        router.Options()
        for leaf in jax.tree.leaves(self.params):
            self.require(leaf.dtype == jnp.float32, f"parameters must be float32, got {leaf.dtype}")
            self.require(np.isfinite(leaf).all(), "init gives parameters that are not finite")

    def check_shapes(self) -> None:
        """What can be known without computing: shapes, dtypes, the structure of metrics and state."""
        route = functools.partial(self._route, train=self.train)
        try:
            assignment, seen = jax.eval_shape(route, self.params, self.inputs, self.state, self.key)
            state = jax.eval_shape(functools.partial(next_state, self.router), self.state, seen)
        except (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError) as error:
            cause = str(error).splitlines()[0]
            self.require(False, f"cannot be compiled; shapes and branches must not depend on values: {cause}")
        num_places = (assignment.token_N.size,)
        num_experts = (self.router.num_experts,)
        expected: dict[str, tuple[tuple[int, ...], Any]] = {
            "token_N": (num_places, jnp.int32),
            "expert_N": (num_places, jnp.int32),
            "weight_N": (num_places, jnp.float32),
            "valid_N": (num_places, jnp.bool_),
            "aux_loss": ((), jnp.float32),
        }
        counts = {"load_E": num_experts, "kept_E": num_experts, "tokens": (), "entropy_sum": ()}
        missing = set(counts) - set(assignment.metrics)
        self.require(not missing, f"metrics lack {', '.join(sorted(missing))}")
        arrays = {name: (getattr(assignment, name), *form) for name, form in expected.items()}
        for name, shape in counts.items():
            dtype = jnp.float32 if name == "entropy_sum" else jnp.int32
            arrays[f"metrics[{name!r}]"] = (assignment.metrics[name], shape, dtype)
        for name, (array, shape, dtype) in arrays.items():
            self.require(array.shape == shape, f"{name} must have shape {shape}, got {array.shape}")
            self.require(array.dtype == dtype, f"{name} must be {dtype.__name__}, got {array.dtype}")
        if assignment.num_choices is not None:
            self.require(assignment.num_choices == self.router.num_choices, "num_choices must be the router's, or None")
        self.require(
            jax.tree.map(_shape_dtype, state) == jax.tree.map(_shape_dtype, self.state),
            "next_state must return the structure, shapes and dtypes of init_state()",
        )

    def check_values(self) -> None:
        x_BSD = self.inputs.x_BSD
        identical = dataclasses.replace(self.inputs, x_BSD=np.broadcast_to(x_BSD[:1, :1], x_BSD.shape))
        for what, case in {"random": self.inputs, "identical": identical, "only padding": self.empty}.items():
            assignment = self.route(case)
            self._check_places(assignment, case, what)
            self._check_metrics(assignment, case, what)

    def _check_places(self, assignment: Assignment, inputs: _Inputs, what: str) -> None:
        num_tokens, num_choices, aux_loss = inputs.mask_BS.size, assignment.num_choices, assignment.aux_loss
        token_N, expert_N, valid_N = map(np.asarray, (assignment.token_N, assignment.expert_N, assignment.valid_N))
        self.require(np.isfinite(aux_loss), f"aux_loss is {aux_loss} ({what} tokens)")
        self.require(np.isfinite(assignment.weight_N).all(), f"weight_N is not finite ({what} tokens)")
        self.require(((token_N >= 0) & (token_N < num_tokens)).all(), "token_N outside [0, T)")
        self.require(((expert_N >= 0) & (expert_N < self.router.num_experts)).all(), "expert_N outside [0, E)")
        if num_choices is not None:
            ordered = np.array_equal(token_N, np.repeat(np.arange(num_tokens), num_choices))
            self.require(ordered, "with num_choices set, token_N must be [0]*K + [1]*K + ...; set num_choices=None")
        on_padding = valid_N & ~inputs.mask_BS.reshape(-1)[token_N]
        self.require(not on_padding.any(), f"valid_N is True for a padding token ({what} tokens)")
        pairs = np.stack([token_N, expert_N], 1)[valid_N]
        self.require(len(np.unique(pairs, axis=0)) == len(pairs), f"a token has the same expert twice ({what} tokens)")

    def _check_metrics(self, assignment: Assignment, inputs: _Inputs, what: str) -> None:
        metrics, num_experts, tokens = assignment.metrics, self.router.num_experts, int(inputs.mask_BS.sum())
        kept_E = np.bincount(assignment.expert_N[assignment.valid_N], minlength=num_experts)
        self.require(np.array_equal(metrics["kept_E"], kept_E), f"metrics['kept_E'] must count valid_N ({what} tokens)")
        self.require((metrics["load_E"] >= kept_E).all(), "metrics['load_E'] is below kept_E")
        self.require(metrics["tokens"] == tokens, "metrics['tokens'] must count the unmasked tokens")
        if assignment.num_choices is not None:
            total, expected = int(metrics["load_E"].sum()), tokens * assignment.num_choices
            self.require(total == expected, f"metrics['load_E'] sums to {total}, not to tokens * K = {expected}")
        most = tokens * np.log(num_experts) * (1 + 1e-5) + 1e-5
        is_entropy = -1e-5 <= float(metrics["entropy_sum"]) <= most
        self.require(is_entropy, f"metrics['entropy_sum'] outside [0, tokens * ln E] ({what} tokens)")

    def check_eager(self) -> None:
        eager, _ = self._route(self.params, self.inputs, self.state, self.key, train=self.train)
        compiled = self.route(self.inputs)
        self.require(_close(self.table(eager), self.table(compiled)), "jit and eager execution differ")
        self.require(_close(eager.aux_loss, compiled.aux_loss), "aux_loss differs between jit and eager execution")

    def check_float32(self) -> None:
        low = dataclasses.replace(self.inputs, x_BSD=self.inputs.x_BSD.astype(jnp.bfloat16))
        widened = dataclasses.replace(low, x_BSD=low.x_BSD.astype(jnp.float32))
        eager = [self._route(self.params, case, self.state, self.key, train=True)[0] for case in (low, widened)]
        same = _identical(*map(self.table, eager))
        self.require(same, "a bfloat16 input must be routed in float32")

    def check_padding(self) -> None:
        mask_BS = self.inputs.mask_BS
        ours, other = self.route(self.inputs), self.route(self.inputs.edited(~mask_BS))
        same = _identical(self.table(ours), self.table(other))
        self.require(same, "the content of padding changes the assignment of real tokens")
        self.require(_close(ours.aux_loss, other.aux_loss), "the content of padding changes aux_loss")
        self.require(self.route(self.empty).aux_loss == 0, "aux_loss must be 0 for a batch of padding")

    def check_sequences(self) -> None:
        batch, seq_len = self.full.mask_BS.shape
        others_BS = np.broadcast_to(np.arange(batch)[:, None] != batch // 2, (batch, seq_len))
        ours_TE, other_TE = (self.table(self.route(case)) for case in (self.full, self.full.edited(others_BS)))
        kept_T = ~others_BS.reshape(-1)
        self.require(
            _identical(ours_TE[kept_T], other_TE[kept_T]),
            "a sequence's assignment depends on other sequences, so it would change with the number of members",
        )

    def check_order(self) -> None:
        batch, seq_len = self.full.mask_BS.shape
        if self.router.causal:
            for inputs in (self.inputs, self.full):
                for start in (seq_len - 1, seq_len // 2):
                    later_BS = np.broadcast_to(np.arange(seq_len) >= start, (batch, seq_len))
                    ours_TE, other_TE = (self.table(self.route(case)) for case in (inputs, inputs.edited(later_BS)))
                    earlier_T = ~later_BS.reshape(-1)
                    self.require(
                        _identical(ours_TE[earlier_T], other_TE[earlier_T]),
                        "an assignment depends on later tokens; set `causal = False` if that is meant",
                    )
        if getattr(self.router, "equivariant", False):
            order_S = np.random.default_rng(0).permutation(seq_len)
            reordered = self.inputs.reordered(order_S)
            ours_TE, other_TE = (self.table(self.route(case)) for case in (self.inputs, reordered))
            order_T = (np.arange(batch)[:, None] * seq_len + order_S).reshape(-1)
            self.require(
                _close(ours_TE[order_T], other_TE),
                "`equivariant` is claimed, but reordering the tokens does more than reorder the assignments",
            )

    def check_members(self) -> None:
        """Two members with half of the sequences each must do what one member does with all."""
        aux_gradient, whole, whole_seen = self.run(self.inputs, weights=0.0)
        noisy = self.route(self.inputs, key=jax.random.key(12345))
        if not _identical(self.table(whole), self.table(noisy)):
            return  # a scheme with noise draws it per member

        def member(params: Any, inputs: _Inputs) -> Any:
            def psum(statistics: Any) -> Any:
                return jax.lax.psum(statistics, _MEMBERS)

            assignment, seen = self._route(params, inputs, self.state, self.key, train=self.train, psum=psum)
            return assignment.aux_loss, (assignment, seen)

        halves = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), self.inputs)
        each = jax.value_and_grad(member, has_aux=True)
        (aux_R, (parts, seen)), gradients = _compile(jax.vmap(each, (None, 0), axis_name=_MEMBERS))(self.params, halves)
        half = self.inputs.mask_BS.size // 2
        tables = [self.table(jax.tree.map(lambda leaf, r=r: leaf[r], parts))[:half] for r in range(2)]
        same = _close(np.concatenate(tables), self.table(whole))
        self.require(same, "the assignment depends on the number of members")
        self.require(
            _close(aux_R.sum(), whole.aux_loss),
            f"aux_loss must be an additive share: over two members {aux_R.sum()}, in one {whole.aux_loss}",
        )
        summed = jax.tree.map(lambda leaf: leaf.sum(0), gradients)
        self.require(
            _close(summed, aux_gradient),
            "the members' gradients of aux_loss do not add up to the whole gradient",
        )
        self.require(
            _close(jax.tree.map(lambda leaf: leaf.sum(0), seen), whole_seen),
            "what the members have seen does not add up to what one member sees; return sums over tokens",
        )

    def check_gradients(self) -> None:
        zeros = jax.tree.map(jnp.zeros_like, self.params)
        gradient, at_zero, _ = self.run(self.inputs, params=zeros)
        self.require(np.isfinite(at_zero.aux_loss), "aux_loss is not finite at zero parameters")
        self.require(np.isfinite(at_zero.weight_N).all(), "weight_N is not finite at zero parameters")
        self.require(_finite(gradient), "the gradient is not finite at zero parameters")

        gradient = self.gradient(self.inputs)
        self.require(_finite(gradient), "the gradient is not finite")
        edited = self.gradient(self.inputs.edited(~self.inputs.mask_BS))
        self.require(_close(gradient, edited), "the content of padding changes the gradient")
        self.require(_close(self.gradient(self.empty), zeros), "a batch of padding must have a zero gradient")

        if self.router.num_experts > 1:
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.gradient(self.inputs, aux=0.0)):
                broken = f"weight_N carries no gradient to parameter {jax.tree_util.keystr(path)}"
                self.require(np.any(leaf), broken)

    def check_one_expert(self) -> None:
        try:
            single = dataclasses.replace(self.router, num_experts=1, num_choices=1)
        except ValueError:
            return  # refused in one line
        bench = _Bench(single, self.d_model, self.inputs.mask_BS.shape[1], seed=1)
        bench.check_shapes()
        bench.check_values()
        bench.require(_finite(bench.gradient(bench.inputs)), "with one expert the gradient is not finite")

    def check_transforms(self) -> None:
        """Two steps with the state handed on: jax.checkpoint inside lax.scan against two separate steps."""

        def scanned(params: Any, keys: jax.Array) -> jax.Array:
            def body(state: Any, key: jax.Array) -> Any:
                loss, (_, seen) = self._loss(params, self.inputs, state, key, 1.0, 1.0, train=True)
                return next_state(self.router, state, seen), loss

            return jax.lax.scan(jax.checkpoint(body), self.state, keys)[1].sum()

        keys = jax.random.split(self.key, 2)
        ours = _compile(jax.grad(scanned))(self.params, keys)
        first, _, seen = self.run(self.inputs, key=keys[0])
        second, _, _ = self.run(self.inputs, key=keys[1], state=next_state(self.router, self.state, seen))
        both = jax.tree.map(jnp.add, first, second)
        self.require(_close(ours, both), "jax.checkpoint inside lax.scan gives another gradient")


def _shape_dtype(leaf: Any) -> tuple[Any, Any]:
    return jnp.shape(leaf), jnp.result_type(leaf)


def _close(ours: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(other), strict=True)
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True) for a, b in pairs)


def _identical(ours: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(ours, other, equal_nan=True)


def _finite(tree: Any) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
