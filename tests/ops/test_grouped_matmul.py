"""Values and gradients of both implementations against a dense einsum, and what is refused."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from fef.native import build
from fef.ops.grouped_matmul import Segments, grouped_matmul, resolve, segments_of_counts
from fef.pool import native

CASE_FILE = pathlib.Path(__file__).parents[1] / "cases" / "dispatch" / "empty_groups.json"
IMPLEMENTATIONS = ("native", "jax")
D, F = 6, 10


@pytest.fixture(scope="module", autouse=True)
def built_library():
    build.build()


def segments(*triples: tuple[int, int, int]) -> Segments:
    """From (first, rows, expert) of each."""
    return Segments(*(jnp.asarray(column, jnp.int32) for column in zip(*triples, strict=True)))


def of_counts(*counts: int) -> Segments:
    return segments_of_counts(jnp.asarray(counts, jnp.int32))


# name: rows, experts, segments
RAGGED = {
    "even": (32, 4, of_counts(8, 8, 8, 8)),
    "empty groups": (20, 6, of_counts(0, 3, 0, 12, 5, 0)),
    "one expert": (9, 1, of_counts(9)),
    "all rows to one": (300, 3, of_counts(0, 300, 0)),
    "unused trailing rows": (50, 3, of_counts(10, 0, 7)),
    "no rows at all": (8, 2, of_counts(0, 0)),
    "several blocks": (700, 3, of_counts(129, 128, 400)),
    "not adjacent, out of order": (90, 3, segments((70, 15, 1), (2, 5, 1), (40, 20, 0), (7, 1, 1), (85, 0, 2))),
}


def arrays(num_rows: int, num_experts: int, transpose_w: bool = False, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, D))
    w = rng.normal(size=(num_experts, F, D) if transpose_w else (num_experts, D, F))
    dy = rng.normal(size=(num_rows, F))
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, w, dy))


def dense(x, w, of: Segments, transpose_w: bool = False):
    """The oracle: one-hot over experts, so that a row without a segment is zero."""
    row = jnp.arange(x.shape[0])[:, None]
    in_segment_NG = (row >= of.first_G[None]) & (row < (of.first_G + of.rows_G)[None])
    onehot_NE = in_segment_NG.astype(x.dtype) @ jax.nn.one_hot(of.expert_G, w.shape[0], dtype=x.dtype)
    return jnp.einsum("nd,efd,ne->nf" if transpose_w else "nd,edf,ne->nf", x, w, onehot_NE)


def vjp(f, x, w, dy):
    """(y, dx, dw)"""
    y, pull_back = jax.vjp(f, x, w)
    return (y, *pull_back(dy))


def assert_close(got, wanted, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_published_example_and_exact_zeros_of_empty_groups(implementation):
    case = json.loads(CASE_FILE.read_text())
    x, w = jnp.asarray(case["lhs_5x2"], jnp.float32), jnp.asarray(case["rhs_4x2x2"], jnp.float32)
    of = of_counts(*case["group_sizes"])
    y, dw = jax.value_and_grad(
        lambda w: (lambda y: (y.sum(), y))(grouped_matmul(x, w, of, implementation=implementation)), has_aux=True
    )(w)
    np.testing.assert_array_equal(y[1], case["expected_out"])
    np.testing.assert_array_equal(dw, case["expected_drhs_of_sum"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("name", RAGGED)
def test_value_and_gradients_equal_dense(name, transpose_w, implementation):
    num_rows, num_experts, of = RAGGED[name]
    x, w, dy = arrays(num_rows, num_experts, transpose_w)
    run = functools.partial(grouped_matmul, transpose_w=transpose_w, implementation=implementation)
    got = jax.jit(lambda of: vjp(lambda x, w: run(x, w, of), x, w, dy))(of)
    assert_close(got, vjp(lambda x, w: dense(x, w, of, transpose_w), x, w, dy), 1e-4)
    has_rows_E = np.zeros(num_experts, bool)
    has_rows_E[np.asarray(of.expert_G)[np.asarray(of.rows_G) > 0]] = True
    assert not np.any(np.asarray(got[2])[~has_rows_E])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_in_no_segment_touch_nothing(implementation):
    _, num_experts, of = RAGGED["not adjacent, out of order"]
    x, w, dy = arrays(90, num_experts)
    in_segment = np.asarray(dense(jnp.ones((90, 1)), jnp.ones((num_experts, 1, 1)), of))[:, 0] > 0
    spoiled_x, spoiled_dy = (jnp.where(in_segment[:, None], a, jnp.nan) for a in (x, dy))
    run = functools.partial(grouped_matmul, implementation=implementation)
    got = vjp(lambda x, w: run(x, w, of), spoiled_x, w, spoiled_dy)
    assert_close(got, vjp(lambda x, w: run(x, w, of), x, w, jnp.where(in_segment[:, None], dy, 0.0)))
    assert not np.any(np.asarray(got[0])[~in_segment]) and not np.any(np.asarray(got[1])[~in_segment])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_layers_with_remat(implementation):
    of = of_counts(5, 0, 9, 2)
    x = arrays(20, 4)[0]
    w_LEDD = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, D, D)), jnp.float32)

    def loss(matmul, x, w_LEDD):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x + matmul(x, w, of)), None))
        return (jax.lax.scan(layer, x, w_LEDD)[0] ** 2).sum()

    run = functools.partial(grouped_matmul, implementation=implementation)
    got = jax.jit(jax.value_and_grad(functools.partial(loss, run), (0, 1)))(x, w_LEDD)
    assert_close(got, jax.value_and_grad(functools.partial(loss, dense), (0, 1))(x, w_LEDD))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shard_map_with_other_segments_on_each_device(implementation):
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    counts_RE = jnp.asarray([[16, 0, 0], [0, 0, 0], [3, 4, 5], [0, 1, 15]], jnp.int32)
    x, w, dy = arrays(4 * 16, 3)
    spec = PartitionSpec("expert")

    def member(x, w, counts_E, dy):
        of = segments_of_counts(counts_E[0])
        y, dx, dw = vjp(lambda x, w: grouped_matmul(x, w, of, implementation=implementation), x, w, dy)
        return y, dx, jax.lax.psum(dw, "expert")

    run = jax.jit(
        jax.shard_map(
            member,
            mesh=mesh,
            in_specs=(spec, PartitionSpec(), spec, spec),
            out_specs=(spec, spec, PartitionSpec()),
            check_vma=False,
        )
    )
    first = (jnp.cumsum(counts_RE, axis=1) - counts_RE + 16 * jnp.arange(4)[:, None]).reshape(-1)
    whole = Segments(first.astype(jnp.int32), counts_RE.reshape(-1), jnp.tile(jnp.arange(3, dtype=jnp.int32), 4))
    assert_close(run(x, w, counts_RE, dy), vjp(lambda x, w: dense(x, w, whole), x, w, dy))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_equals_a_loop(implementation):
    of = of_counts(4, 0, 3)
    x, w, _ = arrays(8, 3)
    x_B = jnp.stack([x, 2 * x, x + 1])
    run = functools.partial(grouped_matmul, implementation=implementation)
    got = jax.vmap(jax.grad(lambda x: (run(x, w, of) ** 2).sum()))(x_B)
    assert_close(got, jnp.stack([jax.grad(lambda x: (dense(x, w, of) ** 2).sum())(x) for x in x_B]), 1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradient_of_a_gradient(implementation):
    of = of_counts(4, 0, 3)
    x, w, dy = arrays(8, 3)

    def penalty(matmul, x, w):
        dx, dw = jax.grad(lambda x, w: (jnp.sin(matmul(x, w, of)) * dy).sum(), (0, 1))(x, w)
        return (dx**2).sum() + (dw**2).sum()

    run = functools.partial(grouped_matmul, implementation=implementation)
    got = jax.grad(functools.partial(penalty, run), (0, 1))(x, w)
    assert_close(got, jax.grad(functools.partial(penalty, dense), (0, 1))(x, w), 1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_is_summed_in_float32(implementation):
    of = of_counts(400, 0, 100)
    x, w, dy = (a.astype(jnp.bfloat16) for a in arrays(512, 3))
    got = vjp(lambda x, w: grouped_matmul(x, w, of, implementation=implementation), x, w, dy)
    assert {a.dtype.name for a in got} == {"bfloat16"}
    wide = vjp(lambda x, w: dense(x, w, of), *(a.astype(jnp.float32) for a in (x, w, dy)))
    for result, wanted in zip(got, wide, strict=True):  # off by the rounding of the result alone
        np.testing.assert_allclose(result.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-4)


def test_forward_mode_is_refused():
    x, w, _ = arrays(4, 2)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: grouped_matmul(x, w, of_counts(2, 2)), (x,), (x,))


@pytest.mark.parametrize(
    "triples, text",
    [
        ([(0, 2, 0), (2, 3, 1)], r"segment \(first row 2, rows 3, expert 1\) is outside of the 4 rows"),
        ([(0, 2, 2)], "names none of the 2 experts"),
        ([(0, 3, 0), (2, 1, 1)], "share rows"),
    ],
)
def test_native_refuses_wrong_segments_when_it_runs(triples, text):
    x, w, dy = arrays(4, 2)
    wrong = segments(*triples)
    run = jax.jit(lambda of: grouped_matmul(x, w, of, implementation="native"))
    with pytest.raises(Exception, match="INVALID_ARGUMENT: fef_grouped_matmul: .*" + text):
        jax.block_until_ready(run(wrong))
    # The gradient reports it, too, in a call that does not go through the forward product.
    gradient = jax.jit(lambda of: jax.vjp(lambda w: grouped_matmul(x, w, of, implementation="native"), w)[1](dy))
    with pytest.raises(Exception, match="INVALID_ARGUMENT: fef_grouped_outer: .*" + text):
        jax.block_until_ready(gradient(wrong))


def test_arguments_that_do_not_fit():
    x, w, _ = arrays(4, 2)
    of = of_counts(2, 2)
    with pytest.raises(ValueError, match=r"x \(4, 6\) and w \(2, 6, 10\) are not .*\(E, F, D\) \(transpose_w=True\)"):
        grouped_matmul(x, w, of, transpose_w=True)
    with pytest.raises(ValueError, match="x is float32 and w is bfloat16"):
        grouped_matmul(x, w.astype(jnp.bfloat16), of)
    with pytest.raises(ValueError, match="segments.rows_G is float32"):
        grouped_matmul(x, w, Segments(of.first_G, of.rows_G.astype(jnp.float32), of.expert_G))
    with pytest.raises(ValueError, match="nothing to do"):
        grouped_matmul(x[:0], w, of)
    with pytest.raises(ValueError, match="implementation='blas': choose one of auto, native, jax"):
        grouped_matmul(x, w, of, implementation="blas")


def test_native_on_another_platform_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="runs on CPUs, not on gpu; use 'auto' or 'jax'"):
        resolve("native")
    assert resolve("auto") == "jax"


def test_missing_stale_and_broken_library(monkeypatch, tmp_path):
    library = tmp_path / "libfef.so"
    monkeypatch.setattr(build, "library_path", lambda sanitize="": library)
    native._load.cache_clear()
    with pytest.raises(native.NativeError, match="libfef.so is not built; run `python -m fef.native.build`"):
        resolve("native")
    assert resolve("auto") == "jax"
    library.write_bytes(b"fef_source_hash=" + b"0" * 64)
    for implementation in ("native", "auto"):
        with pytest.raises(native.NativeError, match="libfef.so is stale.*run `python -m fef.native.build`"):
            resolve(implementation)
    library.write_bytes(b"fef_source_hash=" + build.source_hash().encode())
    with pytest.raises(native.NativeError, match="libfef.so cannot be loaded .*remove it and run"):
        resolve("auto")
    monkeypatch.undo()
    assert resolve("native") == "native"
