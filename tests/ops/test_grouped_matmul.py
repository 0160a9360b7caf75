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


ROWS, EXPERTS = 300, 4
RAGGED = {
    "even": [(0, 75, 0), (75, 75, 1), (150, 75, 2), (225, 75, 3)],
    "empty groups": [(0, 0, 0), (0, 203, 1), (203, 0, 2), (203, 97, 3)],
    "all rows to one": [(0, 0, 0), (0, 300, 1), (300, 0, 2), (300, 0, 3)],
    "unused trailing rows": [(0, 10, 0), (10, 0, 1), (10, 64, 2), (74, 65, 3)],
    "no rows at all": [(0, 0, 0)],
    "not adjacent, out of order": [(270, 30, 1), (2, 65, 1), (140, 20, 0), (70, 1, 1), (85, 0, 2), (200, 7, 0)],
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


@functools.partial(jax.jit, static_argnums=(4, 5))
def grouped_vjp(x, w, dy, of: Segments, transpose_w: bool, implementation: str):
    run = functools.partial(grouped_matmul, transpose_w=transpose_w, implementation=implementation)
    return vjp(lambda x, w: run(x, w, of), x, w, dy)


def numpy_vjp(x, w, dy, triples, transpose_w: bool):
    """The same, segment by segment."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    for first, rows, e in triples:
        of = slice(first, first + rows)
        w_e = w[e].T if transpose_w else w[e]
        y[of], dx[of] = x[of] @ w_e, dy[of] @ w_e.T
        dw[e] += dy[of].T @ x[of] if transpose_w else x[of].T @ dy[of]
    return y, dx, dw


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
def test_value_and_gradients(name, transpose_w, implementation):
    triples = RAGGED[name]
    padding = [(0, 0, 0)] * (6 - len(triples))  # one shape, so that all cases share one compiled function
    x, w, dy = arrays(ROWS, EXPERTS, transpose_w)
    in_segment = np.zeros((ROWS, 1), bool)
    for first, rows, _ in triples:
        in_segment[first : first + rows] = True
    # Rows in no segment must touch nothing, whatever they hold.
    spoiled_x, spoiled_dy = (jnp.where(in_segment, a, jnp.nan) for a in (x, dy))
    got = grouped_vjp(spoiled_x, w, spoiled_dy, segments(*triples, *padding), transpose_w, implementation)
    assert_close(got, numpy_vjp(x, w, dy, triples, transpose_w), 1e-4)
    assert not np.any(np.where(in_segment, 0.0, got[0])) and not np.any(np.where(in_segment, 0.0, got[1]))
    without_rows = sorted(set(range(EXPERTS)) - {e for _, rows, e in triples if rows > 0})
    assert not np.any(got[2][np.array(without_rows, int)])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_expert(implementation):
    x, w, dy = arrays(ROWS, 1)
    got = grouped_vjp(x, w, dy, of_counts(ROWS), False, implementation)
    assert_close(got, numpy_vjp(x, w, dy, [(0, ROWS, 0)], False), 1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_layers_with_remat_inside_a_scan_over_microbatches(implementation):
    x_MND = jnp.stack([arrays(20, 4, seed=seed)[0] for seed in range(2)])
    counts_ME = jnp.asarray([[5, 0, 9, 2], [20, 0, 0, 0]], jnp.int32)
    w_LEDD = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, D, D)), jnp.float32)

    def loss(matmul, x_MND, w_LEDD):
        def microbatch(total, batch):
            of = segments_of_counts(batch[1])
            layer = jax.checkpoint(lambda x, w: (jnp.tanh(x + matmul(x, w, of)), None))
            return total + (jax.lax.scan(layer, batch[0], w_LEDD)[0] ** 2).sum(), None

        return jax.lax.scan(microbatch, 0.0, (x_MND, counts_ME))[0]

    run = functools.partial(grouped_matmul, implementation=implementation)
    got, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(loss, matmul), (0, 1)))(x_MND, w_LEDD) for matmul in (run, dense)
    )
    assert_close(got, wanted)


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
    triples = [(0, 16, 0), (32, 3, 0), (35, 4, 1), (39, 5, 2), (48, 1, 1), (49, 15, 2)]
    assert_close(run(x, w, counts_RE, dy), numpy_vjp(x, w, dy, triples, False))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_equals_a_loop(implementation):
    of = of_counts(4, 0, 3)
    x, w, _ = arrays(8, 3)
    x_B = jnp.stack([x, 2 * x, x + 1])
    run = functools.partial(grouped_matmul, implementation=implementation)
    got = jax.jit(jax.vmap(jax.grad(lambda x: (run(x, w, of) ** 2).sum())))(x_B)
    one = jax.jit(jax.grad(lambda x: (dense(x, w, of) ** 2).sum()))
    assert_close(got, jnp.stack([one(x) for x in x_B]), 1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_is_summed_in_float32(implementation):
    of = of_counts(400, 0, 100)
    x, w, dy = (a.astype(jnp.bfloat16) for a in arrays(512, 3))
    got = grouped_vjp(x, w, dy, of, False, implementation)
    assert {a.dtype.name for a in got} == {"bfloat16"}
    wide = numpy_vjp(x, w, dy, [(0, 400, 0), (400, 100, 2)], False)
    for result, wanted in zip(got, wide, strict=True):  # off by the rounding of the result alone
        np.testing.assert_allclose(result.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-4)


def test_forward_mode_and_second_derivatives_are_refused():
    x, w, _ = arrays(4, 2)

    def loss(x):
        return (grouped_matmul(x, w, of_counts(2, 2)) ** 2).sum()

    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (x,), (x,))
    with pytest.raises(NotImplementedError, match="grouped_matmul has first derivatives only"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(x)


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
    monkeypatch.setattr(build, "library_path", lambda sanitize="", part="": library)
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
