"""publish and get: the loss is a true function of its parameters under every transformation, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pool_programs as programs
import pytest

from fef.config import PoolConfig
from fef.native import build
from fef.ops.get import get
from fef.ops.publish import publish
from fef.ops.release import release
from fef.pool import errors
from fef.pool.pool import Pool
from fef.pool.table import ExpertTable
from fef.sharding import REPLICATED, TOKENS, island, make_mesh

L, E, R, D = 3, 6, 4, 8
TABLE = ExpertTable(E, R)
RNG = np.random.default_rng(0)
W1, W2 = (programs.random_blocks(RNG, L, TABLE, (D,)) for _ in range(2))
X_MD = RNG.normal(size=(R, D)).astype(np.float32)
# A place that reads nothing, an expert named twice, one that nobody reads in layer 1, and layers that differ.
IDS_LMN = np.array(
    [
        [[0, 1, -1], [2, 3, 0], [4, 5, 3], [-1, -1, -1]],
        [[1, 1, 2], [5, 3, 0], [2, -1, 3], [0, 5, 1]],
        [[0, 4, 2], [1, 1, 1], [5, 3, 4], [2, 0, -1]],
    ],
    np.int32,
)
ONCE = "(get|publish) has first derivatives only .reverse mode.; it cannot be differentiated twice"
reference = jax.jit(functools.partial(programs.reference_get_loss, TABLE, ids_LMn=IDS_LMN))
reference_grad = jax.jit(jax.value_and_grad(lambda w, x: reference(w, x), argnums=(0, 1)))


@pytest.fixture(scope="module")
def mesh():
    build.build()
    return make_mesh(R)


@pytest.fixture(scope="module")
def pool(mesh):
    with Pool(mesh) as pool:
        yield pool


@pytest.fixture(scope="module")
def handle(pool):
    return pool.table("test", L, TABLE, ((D,),), jnp.float32)


@pytest.fixture(scope="module")
def loss(mesh):
    return lambda w, x, handle: programs.get_loss(mesh, handle, w, x, IDS_LMN)


@pytest.fixture(scope="module")
def value_and_grad(loss):
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def test_worked_example():
    """The docstrings' two members with one expert each."""
    mesh, table = make_mesh(2), ExpertTable(2, 2)
    w_LPD = np.array([[[1.0, 2.0], [3.0, 4.0]]], np.float32)
    coefficients = np.array([[[10.0, 20.0], [0.5, 0.5]], [[1.0, 2.0], [3.0, 4.0]]], np.float32)

    def weighted(w, handle):
        published = programs.publish_all(mesh, handle, (w,))
        blocks = programs.get_all(mesh, published, 0, [[1, -1], [0, 1]], 2)
        return (blocks * coefficients).sum(), blocks

    with Pool(mesh) as pool:
        handle = pool.table("example", 1, table, ((2,),), jnp.float32)
        (_, blocks), grad = jax.value_and_grad(weighted, has_aux=True)(w_LPD, handle)
    np.testing.assert_array_equal(blocks, [[[3.0, 4.0], [0.0, 0.0]], [[1.0, 2.0], [3.0, 4.0]]])
    np.testing.assert_array_equal(grad, [[[1.0, 2.0], [10.0 + 3.0, 20.0 + 4.0]]])


def test_other_parameters_give_another_loss(value_and_grad, handle):
    for w in (W1, W2, W1, W1 * 0):
        programs.assert_close(value_and_grad(w, X_MD, handle), reference_grad(w, X_MD))


def test_finite_differences(loss, value_and_grad, handle):
    forward = jax.jit(loss)
    direction = programs.random_blocks(np.random.default_rng(1), L, TABLE, (D,), 1e-2)
    difference = forward(W1 + direction, X_MD, handle) - forward(W1 - direction, X_MD, handle)
    slope = 2 * (value_and_grad(W1, X_MD, handle)[1][0] * direction).sum()
    np.testing.assert_allclose(difference, slope, rtol=1e-2)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(mesh, handle, remat):
    """The layer's number is traced. With remat each layer is read again in the backward pass."""

    def scanned(w, x_MD, handle):
        published = programs.publish_all(mesh, handle, (w,))

        def layer(x_MD, layer_and_ids):
            return programs.get_layer(mesh, published, layer_and_ids[0], x_MD, layer_and_ids[1]), None

        layer = jax.checkpoint(layer) if remat else layer
        return (jax.lax.scan(layer, x_MD, (jnp.arange(L), IDS_LMN))[0] ** 2).sum()

    got = jax.jit(jax.value_and_grad(scanned, argnums=(0, 1)))(W1, X_MD, handle)
    programs.assert_close(got, reference_grad(W1, X_MD))


def test_gradient_accumulation(mesh, handle):
    """The experts are published once; the loop differentiates with respect to the chain."""
    x_BMD = np.stack([X_MD, -X_MD, 2 * X_MD])

    @jax.jit
    def step(w, x_BMD, handle):
        (version_M4, chain_M), collect = jax.vjp(lambda w: programs.publish_all(mesh, handle, (w,)), w)

        def microbatch(chain_M, index, x_MD):
            published = programs.at_microbatch((version_M4, chain_M), index)
            for layer in range(L):
                x_MD = programs.get_layer(mesh, published, layer, x_MD, IDS_LMN[layer])
            return (x_MD**2).sum()

        def add(sums, index_and_x):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(microbatch)(chain_M, *index_and_x)), None

        zeros = (jnp.float32(0), jnp.zeros(R))
        (loss, d_chain_M), _ = jax.lax.scan(add, zeros, (jnp.arange(len(x_BMD)), x_BMD))
        no_cotangent = np.zeros(version_M4.shape, jax.dtypes.float0)
        return loss, collect((no_cotangent, d_chain_M))[0]

    wanted = jax.jit(jax.value_and_grad(lambda w: sum(reference(w, x) for x in x_BMD)))(W1)
    for _ in range(2):
        programs.assert_close(step(W1, x_BMD, handle), wanted)


def test_a_backward_pass_may_run_again(loss, handle):
    value, vjp = jax.vjp(jax.jit(lambda w: loss(w, X_MD, handle)), W1)
    wanted, (d_w, _) = reference_grad(W1, X_MD)
    programs.assert_close(value, wanted)
    for scale in (1.0, 1.0, -2.0):
        programs.assert_close(vjp(jnp.float32(scale))[0], scale * d_w)


def test_two_publishes_in_one_program(loss, handle):
    both = jax.jit(jax.grad(lambda w1, w2, x, handle: loss(w1, x, handle) - loss(w2, x, handle), argnums=(0, 1)))
    wanted = reference_grad(W1, X_MD)[1][0], -reference_grad(W2, X_MD)[1][0]
    for _ in range(3):
        programs.assert_close(both(W1, W2, X_MD, handle), wanted)


def test_one_layer_read_by_branches_that_do_not_depend_on_each_other(mesh, handle):
    """All of them wait for staging at once, and their gradients add up."""

    def branches(w, x_MD, handle):
        published = programs.publish_all(mesh, handle, (w,))
        ends = [programs.get_layer(mesh, published, 1, scale * x_MD, IDS_LMN[2]) for scale in (1, 2, 3)]
        return sum((end**2).sum() for end in ends)

    def wanted(w, x_MD):
        return sum(programs.reference_get_loss(TABLE, w[1:2], scale * x_MD, IDS_LMN[2:]) for scale in (1, 2, 3))

    got = jax.jit(jax.value_and_grad(branches, argnums=(0, 1)))(W1, X_MD, handle)
    programs.assert_close(got, jax.jit(jax.value_and_grad(wanted, argnums=(0, 1)))(W1, X_MD))


def test_optimizer_steps_in_one_program(loss, handle):
    def steps(grad, w):
        return jax.lax.scan(lambda w, _: (w - 0.01 * grad(w), None), w, length=7)[0]

    got = jax.jit(lambda w, handle: steps(jax.grad(lambda w: loss(w, X_MD, handle)), w))(W1, handle)
    programs.assert_close(got, jax.jit(lambda w: steps(jax.grad(lambda w: reference(w, X_MD)), w))(W1))


def test_versions_that_nobody_differentiates(loss, value_and_grad, handle):
    """They neither use up the slots nor disturb training, in programs of their own or beside a gradient."""
    forward = jax.jit(loss)
    for _ in range(50):
        programs.assert_close(forward(W2, X_MD, handle), reference(W2, X_MD))
    beside = jax.jit(lambda w1, w2, x, h: (loss(w2, x, h), jax.grad(loss)(w1, x, h)))
    for _ in range(8):
        programs.assert_close(beside(W1, W2, X_MD, handle), (reference(W2, X_MD), reference_grad(W1, X_MD)[1][0]))
    programs.assert_close(value_and_grad(W1, X_MD, handle), reference_grad(W1, X_MD))


def test_more_members_than_experts_on_8_devices():
    mesh, table = make_mesh(8), ExpertTable(3, 8)
    rng = np.random.default_rng(2)
    w, x_MD = programs.random_blocks(rng, 1, table, (D,)), rng.normal(size=(8, D)).astype(np.float32)
    ids_LMn = rng.integers(-1, 3, (1, 8, 2))
    with Pool(mesh) as pool:
        handle = pool.table("test", 1, table, ((D,),), jnp.float32)
        run = jax.jit(jax.value_and_grad(lambda w, x: programs.get_loss(mesh, handle, w, x, ids_LMn)))
        got = run(w, x_MD)
    wanted = jax.value_and_grad(lambda w: programs.reference_get_loss(table, w, x_MD, ids_LMn))
    programs.assert_close(got, jax.jit(wanted)(w))
    assert not np.asarray(got[1])[:, 3:].any(), "empty positions get zero gradients"


def test_bfloat16_blocks_of_several_runs_and_parts(mesh, pool):
    """Two runs of layers, two parts in a block: stored as bfloat16, gradients float32 on the way, dtypes kept."""
    rng = np.random.default_rng(3)
    runs = [programs.random_blocks(rng, layers, TABLE, shape) for layers in (1, 2) for shape in ((2, 3), (2,))]
    runs = [jnp.asarray(w).astype(jnp.bfloat16 if i < 2 else jnp.float32) for i, w in enumerate(runs)]
    handle = pool.table("parts", 3, TABLE, ((2, 3), (2,)), jnp.bfloat16)

    @jax.jit
    def blocks_and_grads(runs, handle):
        def read(runs):
            published = programs.publish_all(mesh, handle, runs, num_parts=2, dtype=jnp.bfloat16)
            ids_Mn = np.array([[0], [1], [5], [1]])
            blocks = [programs.get_all(mesh, published, layer, ids_Mn, 8, jnp.bfloat16) for layer in range(3)]
            return sum(b.astype(jnp.float32).sum() * (layer + 1) for layer, b in enumerate(blocks)), blocks

        return jax.grad(read, has_aux=True)(runs)

    grads, blocks = jax.device_get(blocks_and_grads(runs, handle))
    stored = [np.asarray(w.astype(jnp.bfloat16)) for w in runs]
    for layer, (first, second, row) in enumerate(((0, 1, 0), (2, 3, 0), (2, 3, 1))):
        uses_P = np.zeros(TABLE.num_positions)
        for member, expert in enumerate((0, 1, 5, 1)):
            position = TABLE.position_E[expert]
            uses_P[position] += layer + 1
            parts = stored[first][row, position].ravel(), stored[second][row, position].ravel()
            np.testing.assert_array_equal(blocks[layer][member, 0], np.concatenate(parts))
        for grad in (grads[first], grads[second]):
            uses = uses_P.reshape(-1, *[1] * (grad.ndim - 2))
            np.testing.assert_array_equal(grad[row].astype(np.float32), np.broadcast_to(uses, grad[row].shape))
    assert [grad.dtype for grad in grads] == [w.dtype for w in runs]


def test_two_pools_and_one_compiled_program(mesh, pool, handle, value_and_grad):
    """Handles are run-time values: the program serves any pool, and pools do not share memory."""
    publish_it = jax.jit(lambda w, handle: programs.publish_all(mesh, handle, (w,)))
    read = jax.jit(lambda published: programs.get_all(mesh, published, 1, [[0, 5]] * R, D))
    with Pool(mesh) as other:
        other_handle = other.table("test", L, TABLE, ((D,),), jnp.float32)
        programs.assert_close(value_and_grad(W2, X_MD, other_handle), reference_grad(W2, X_MD))
        published, other_published = publish_it(W1, handle), publish_it(W2, other_handle)
        for at, w in ((published, W1), (other_published, W2), (published, W1)):
            np.testing.assert_array_equal(read(at)[0], w[1, TABLE.position_E[[0, 5]]])
    assert value_and_grad._cache_size() == publish_it._cache_size() == read._cache_size() == 1


def compiled_calls(text, target):
    """The lines that call a native operation in a compiled program."""
    return [line for line in text.splitlines() if f'custom_call_target="{target}"' in line]


def test_compiled_program(mesh, handle):
    """The version's agreement is the only collective, and what must be ordered hangs on each other.

    Of a forward and a backward pass; the cotangent comes in from outside.
    """

    def program(w, x_MD, handle, cotangent_MD):
        def run(w, x_MD):
            published = programs.publish_all(mesh, handle, (w,))
            for layer in range(2):
                x_MD = programs.get_layer(mesh, published, layer, x_MD, IDS_LMN[layer])
            return x_MD

        y_MD, vjp = jax.vjp(run, w, x_MD)
        return y_MD, vjp(cotangent_MD)

    sharded = jax.sharding.NamedSharding(mesh, TOKENS), jax.sharding.NamedSharding(mesh, programs.LAYERS_FIRST)
    jitted = jax.jit(program, in_shardings=(sharded[1], sharded[0], None, sharded[0]))
    text = jitted.lower(W1, X_MD, handle, X_MD).compile().as_text()
    collective = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(.*")
    lines = [found[0] for found in collective.finditer(text)]
    between_members = [line for line in lines if "replica_groups={{0},{1},{2},{3}}" not in line]  # that over `data`
    assert len(between_members) == 1 and "ffi_call" in between_members[0] and "all-reduce" in between_members[0]

    (publish_line,) = compiled_calls(text, "fef_publish")
    chain = publish_line.split()[0]
    for target, count in (("fef_get", 2), ("fef_accumulate", 2), ("fef_await_closed", 1)):
        lines = compiled_calls(text, target)
        assert len(lines) == count and all(re.search(rf"[(, ]{chain}[,)]", line) for line in lines), target
        assert target == "fef_get" or all("custom_call_has_side_effect=true" in line for line in lines)


def test_equal_reads_send_their_gradients_twice(mesh, handle):
    """XLA may merge the reads, not what goes home."""

    def twice(w, handle):
        published = programs.publish_all(mesh, handle, (w,))
        return sum(programs.get_all(mesh, published, 0, [[2]] * R, D).sum() for _ in range(2))

    grad = np.asarray(jax.jit(jax.grad(twice))(W1, handle))
    assert (grad[0, TABLE.position_E[2]] == 2 * R).all() and grad.sum() == 2 * R * D


@pytest.mark.parametrize(
    ("transform", "error", "text"),
    [
        (lambda loss, w: jax.vmap(loss)(w[None]), NotImplementedError, "vmap is only supported"),
        (lambda loss, w: jax.jvp(loss, (w,), (w,)), TypeError, "forward-mode autodiff .jvp. to a custom_vjp"),
        (lambda loss, w: jax.hessian(loss)(w), TypeError, "forward-mode autodiff"),
        (lambda loss, w: jax.grad(lambda w: jax.grad(loss)(w).sum())(w), NotImplementedError, ONCE),
        (
            lambda loss, w: jax.lax.scan(lambda w, _: (jax.grad(lambda w: jax.grad(loss)(w).sum())(w), 0), w, length=2),
            NotImplementedError,
            ONCE,
        ),
    ],
    ids=["vmap", "jvp", "hessian", "second order", "second order in scan"],
)
def test_refused_transformations(loss, handle, transform, error, text):
    with pytest.raises(error, match=text):
        transform(jax.jit(lambda w: loss(w, X_MD, handle)), W1)


def test_vmap_over_ids_is_refused(mesh):
    published = np.zeros((R, 4), np.int32), np.zeros(R, np.float32)
    with pytest.raises(NotImplementedError, match="vmap is only supported"):
        jax.vmap(lambda ids_Mn: programs.get_all(mesh, published, 0, ids_Mn, D))(IDS_LMN)


# ---- What fails when it runs, and its words. ----


@pytest.fixture
def short_pool(mesh):
    """A fresh pool with a short deadline and few slots."""
    config = PoolConfig()
    config.slots = 3
    config.deadline_s = 0.3
    with Pool(mesh, config) as pool:
        yield pool


@pytest.fixture(scope="module")
def publish_one(mesh):
    return jax.jit(lambda w_LPD, handle: programs.publish_all(mesh, handle, (w_LPD,)))


@pytest.fixture(scope="module")
def read_one(mesh):
    """Reads experts of a layer on all members."""
    return jax.jit(lambda published, layer, ids_n: programs.get_all(mesh, published, layer, jnp.tile(ids_n, (R, 1)), D))


def pool_error(run):
    """The typed error behind `run`, seen through both ways of waiting for an array."""
    with pytest.raises((RuntimeError, ValueError)) as caught:
        result = run()
        jax.tree.leaves(result)[0].block_until_ready()
    first = errors.as_pool_error(caught.value)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        jax.block_until_ready({"tree": run()})
    second = errors.as_pool_error(caught.value)
    assert first is not None and type(first) is type(second)
    return first


def with_counter(published, counter):
    version_M4, chain_M = published
    return version_M4.at[:, 2].set(counter), chain_M


IDS = np.array([0, 5], np.int32)


def test_a_version_that_is_never_published(short_pool, publish_one, read_one):
    published = with_counter(publish_one(W1, short_pool.table("test", L, TABLE, ((D,),), jnp.float32)), 99)
    error = pool_error(lambda: read_one(published, 1, IDS))
    assert type(error) is errors.PoolTimeoutError
    assert str(error) == (
        f"get: table test, version ({short_pool.incarnation},99): rank 0,1,2,3 has not published it within 0.3 s"
    )


def test_a_stale_address_is_never_answered_with_other_data(short_pool, publish_one, read_one):
    """Case P-01: every block holds its version's number; each read gets that or a refusal."""
    handle = short_pool.table("test", L, TABLE, ((D,),), jnp.float32)
    num_versions = 40
    versions = [publish_one(np.full_like(W1, n), handle) for n in range(1, num_versions + 1)]
    refusals = {}
    for n, published in enumerate(versions, start=1):
        try:
            blocks = np.asarray(read_one(published, 2, IDS))
        except (RuntimeError, ValueError) as error:
            refusals[n] = errors.as_pool_error(error)
            assert type(refusals[n]) is errors.StaleVersionError, error
        else:
            np.testing.assert_array_equal(blocks, n)
    # Of what earlier executions left open, only the version before the newest is kept: memory does not grow.
    assert sorted(refusals) == list(range(1, num_versions - 1))
    place = f"get: table test, version ({short_pool.incarnation},"
    assert str(refusals[1]) == f"{place}1) is no longer remembered; publish again"
    assert str(refusals[36]) == (
        f"{place}36), layer 2, expert 0, home rank 0: no slot holds this version; it was refilled or never published"
    )
    np.testing.assert_array_equal(read_one(publish_one(W1, handle), 2, IDS)[3], W1[2, TABLE.position_E[IDS]])


@pytest.mark.parametrize(
    ("layer", "ids", "text"),
    [
        (L, [0, 1], "layer 3, expert 0 is out of range: the table has 3 layers of 6 experts"),
        (-1, [0, 1], "layer -1, expert 0 is out of range"),
        (0, [0, 6], "layer 0, expert 6 is out of range"),
    ],
)
def test_out_of_range(short_pool, publish_one, read_one, layer, ids, text):
    published = publish_one(W1, short_pool.table("test", L, TABLE, ((D,),), jnp.float32))
    error = pool_error(lambda: read_one(published, layer, np.array(ids, np.int32)))
    assert type(error) is errors.PoolError and text in str(error) and "table test" in str(error)


@pytest.mark.parametrize(("layer", "ids"), [(L, [0, 1]), (0, [0, 6])])
def test_out_of_range_when_only_the_gradient_is_left(mesh, short_pool, layer, ids):
    """XLA drops a read whose result nobody uses; its transpose must refuse by itself."""
    handle = short_pool.table("test", L, TABLE, ((D,),), jnp.float32)

    @jax.jit
    def grad(w, ids_n):
        def total(w):
            published = programs.publish_all(mesh, handle, (w,))
            return programs.get_all(mesh, published, layer, jnp.tile(ids_n, (R, 1)), D).sum()

        return jax.grad(total)(w)

    error = pool_error(lambda: grad(W1, np.array(ids, np.int32)))
    assert type(error) is errors.PoolError and "is out of range: the table has" in str(error)
    assert str(error).startswith("accumulate: table test")


@pytest.mark.parametrize(
    ("elems", "dtype", "text"),
    [
        (D + 1, jnp.float32, "holds blocks of 8 elements in 32 bytes, asked for 9 in 36"),
        (2 * D, jnp.bfloat16, "holds blocks of 8 elements in 32 bytes, asked for 16 in 32"),
        (D, jnp.bfloat16, "holds blocks of 8 elements in 32 bytes, asked for 8 in 16"),
    ],
)
def test_read_of_another_shape(mesh, short_pool, publish_one, elems, dtype, text):
    published = publish_one(W1, short_pool.table("test", L, TABLE, ((D,),), jnp.float32))
    run = jax.jit(lambda: programs.get_all(mesh, published, 0, [[0]] * R, elems, dtype))
    error = pool_error(run)
    assert type(error) is errors.PoolError and text in str(error) and "table test" in str(error)


@pytest.mark.parametrize(
    ("arrays", "num_parts", "text"),
    [
        ((W1[:2],), 1, "table test has 3 layers, the arrays 2"),
        ((W1, W1), 2, "table test, layer 0: blocks have 32 bytes, the arrays 64"),
        ((W1[:1], W1[:, :, :4]), 1, "table test has 3 layers, the arrays 4"),
        ((W1[:1], W1[:2, :, :4]), 1, "table test, layer 1: blocks have 32 bytes, the arrays 16"),
        ((W1[:, :4],), 1, "second dimension is not the 2 positions of a member"),
    ],
)
def test_publish_of_another_shape(mesh, short_pool, arrays, num_parts, text):
    handle = short_pool.table("test", L, TABLE, ((D,),), jnp.float32)
    error = pool_error(jax.jit(lambda: programs.publish_all(mesh, handle, arrays, num_parts)))
    assert type(error) is errors.PoolError and text in str(error)


def test_publish_of_half_a_block(mesh, handle):
    with pytest.raises(ValueError, match="publish: 3 arrays are no whole number of runs of 2 parts"):
        programs.publish_all(mesh, handle, (W1, W1, W1), num_parts=2)


def test_handle_of_another_mesh(handle):
    mesh = make_mesh(8)
    w = np.zeros((L, 16, D), np.float32)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        jax.block_until_ready(jax.jit(lambda: programs.publish_all(mesh, handle, (w,)))())
    assert "table 0 has no group 0, rank" in str(errors.as_pool_error(caught.value))


@pytest.mark.parametrize("is_released", [False, True])
def test_slots_within_one_program(mesh, short_pool, is_released):
    """More open versions than slots are refused with the remedies; releasing them is one."""
    handle = short_pool.table("test", L, TABLE, ((D,),), jnp.float32)

    def member(handle_2, w_LPD):
        total = jnp.float32(0)
        for n in range(short_pool.config.slots + 1):
            version_4, chain = publish(handle_2, (w_LPD * n + total * 0,), 1, jnp.float32)
            total += get(version_4, chain, 0, jnp.array([0]), D, jnp.float32).sum()
            if is_released:
                total += release(version_4, total)
            total = jax.lax.psum(total, ("data", "expert")) / R  # no member is ahead of another by a version
        return total[None]

    run = jax.jit(island(mesh, member, (REPLICATED, programs.LAYERS_FIRST), TOKENS))
    if is_released:
        np.testing.assert_allclose(run(jnp.asarray(handle), W1), W1[0, 0].sum() * 6, rtol=1e-5)
    else:
        error = pool_error(lambda: run(jnp.asarray(handle), W1))
        assert type(error) is errors.PoolExhaustedError
        assert "all 3 slots hold versions that are still open" in str(error)
        assert "raise config.pool.slots or release() a version" in str(error) and "table test, version" in str(error)


def test_closed_pool_and_a_handle_of_another_incarnation(mesh, publish_one, read_one, value_and_grad):
    with Pool(mesh) as pool:
        handle = pool.table("test", L, TABLE, ((D,),), jnp.float32)
        published = publish_one(W1, handle)
    with Pool(mesh) as again:
        new_handle = again.table("test", L, TABLE, ((D,),), jnp.float32)
        assert again.incarnation != pool.incarnation
        error = pool_error(lambda: read_one(published, 0, IDS))
        assert type(error) is errors.PoolClosedError
        assert str(error) == f"the pool of version ({pool.incarnation},1) was closed; open one and publish again"
        error = pool_error(lambda: value_and_grad(W1, X_MD, handle))
        assert type(error) is errors.PoolClosedError
        assert str(error) == "publish: the pool was closed; open one and pass it to the step"
        programs.assert_close(value_and_grad(W1, X_MD, new_handle), reference_grad(W1, X_MD))


def test_the_pool_goes_on_after_errors(short_pool, mesh, publish_one, read_one, value_and_grad):
    """Programs that fail half-way leave neither leases nor stages behind."""
    handle = short_pool.table("test", L, TABLE, ((D,),), jnp.float32)

    @jax.jit
    def fails_in_backward(w, handle):
        def total(w):
            published = programs.publish_all(mesh, handle, (w,))
            ids_Mn = jnp.where(jnp.arange(R)[:, None] < R - 1, IDS, 6)  # the last member's gradient is refused
            return programs.get_all(mesh, published, 1, ids_Mn, D).sum()

        return jax.grad(total)(w)

    for _ in range(2 * short_pool.config.stages):
        with pytest.raises((RuntimeError, ValueError), match="expert 6 is out of range"):
            jax.block_until_ready(fails_in_backward(W1, handle))
    for _ in range(short_pool.config.slots + 1):
        programs.assert_close(value_and_grad(W1, X_MD, handle), reference_grad(W1, X_MD))
