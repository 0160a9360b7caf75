"""Matrix product of groups of rows with the weights of their experts.

Letters: N rows, D and F the widths of the two sides of a weight, E experts, G segments.

    y_NF[rows of g] = x_ND[rows of g] @ w_EDF[expert of g]      for each segment g

Worked example, N = 5 rows, E = 4 experts with 3, 0, 2, 0 rows (cases/dispatch/empty_groups.json):

    segments = segments_of_counts([3, 0, 2, 0])      first_G = [0, 3, 3, 5], rows_G = [3, 0, 2, 0]
    y_NF     = concatenate([x[0:3] @ w[0], x[3:5] @ w[2]])
    dw_EDF   = [x[0:3].T @ dy[0:3], 0, x[3:5].T @ dy[3:5], 0]

Implementations: `native`, an XLA custom call over OpenBLAS with XLA's threads, CPU only; `jax`, a loop over blocks of
rows with a dynamic number of steps, on any platform, which is the reference. `jax.lax.ragged_dot` is no choice on a
CPU: XLA expands it to E times the work.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fef.ops.first_order import first_order
from fef.pool import native

IMPLEMENTATIONS = ("auto", "native", "jax")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Segments:
    """Runs of rows that belong to one expert; no two share a row. G is static, what they hold is not.

    An expert may have any number of segments, adjacent or not; segments of 0 rows are allowed.

    Attributes:
      first_G: (G,) int32, first row.
      rows_G: (G,) int32, number of rows, >= 0.
      expert_G: (G,) int32 in [0, E).
    """

    first_G: jax.Array
    rows_G: jax.Array
    expert_G: jax.Array


jax.tree_util.register_dataclass(Segments, data_fields=["first_G", "rows_G", "expert_G"], meta_fields=[])


def segments_of_counts(counts_E: jax.Array) -> Segments:
    """Returns the E segments of rows that are sorted by expert; counts_E: (E,) int32 rows of each."""
    counts_E = jnp.asarray(counts_E, jnp.int32)
    num_experts = counts_E.shape[0]
    return Segments(
        jnp.cumsum(counts_E, dtype=jnp.int32) - counts_E, counts_E, jnp.arange(num_experts, dtype=jnp.int32)
    )


def resolve(implementation: str) -> str:
    """Returns 'native' or 'jax' for the implementation that is asked for.

    'auto' is 'native' on the CPU backend once the native library has been built, else 'jax'.

    Raises:
      ValueError: an unknown name, or 'native' on another backend.
      fef.pool.native.NativeError: the native library is wanted but is missing, stale or broken; says what to do.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: choose one of {', '.join(IMPLEMENTATIONS)}")
    is_cpu = jax.default_backend() == "cpu"
    if implementation == "native" and not is_cpu:
        raise ValueError(f"implementation='native' runs on CPUs, not on {jax.default_backend()}; use 'auto' or 'jax'")
    if implementation == "jax" or not is_cpu or (implementation == "auto" and not native.is_built()):
        return "jax"
    native.library()
    return "native"


def grouped_matmul(
    x_ND: jax.Array,
    w_EDF: jax.Array,
    segments: Segments,
    *,
    transpose_w: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Multiplies the rows of each segment with the weight of its expert.

    Args:
      x_ND: (N, D) float32, bfloat16 or float16.
      w_EDF: (E, D, F), the same dtype; (E, F, D) with transpose_w.
      segments: which rows belong to which expert. Out of range or overlapping segments: `native` raises
        INVALID_ARGUMENT when it runs, `jax` returns undefined values.
      transpose_w: multiply with the transpose of each weight.
      implementation: 'auto', 'native' or 'jax', see `resolve`.

    Returns:
      y_NF: (N, F), dtype of x_ND; products are summed in float32. Rows in no segment are zero.

    Sharding: arrays of one member; under a mesh call it inside `jax.shard_map(..., check_vma=False)`.
    Gradient: with respect to x_ND (the same product with the other transposition) and w_EDF (sum over the rows of each
      expert, exactly zero without rows). Reverse mode, first order: forward mode (jvp) is refused by JAX, a second
      derivative by a NotImplementedError. vmap runs one call after the other.

    Raises:
      ValueError: shapes, dtypes or the implementation do not fit; the text names them.
      fef.pool.native.NativeError: see `resolve`.
    """
    _check(x_ND, w_EDF, segments, transpose_w)
    y_NF = _matmul(x_ND.astype(jnp.float32), w_EDF.astype(jnp.float32), segments, transpose_w, resolve(implementation))
    return y_NF.astype(x_ND.dtype)


def _check(x: jax.Array, w: jax.Array, segments: Segments, transpose_w: bool) -> None:
    if 0 in x.shape or 0 in w.shape or segments.first_G.size == 0:
        raise ValueError(f"grouped_matmul: nothing to do: x {x.shape}, w {w.shape}, {segments.first_G.size} segments")
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2 if transpose_w else 1]:
        wanted = "(N, D) and (E, F, D)" if transpose_w else "(N, D) and (E, D, F)"
        raise ValueError(f"grouped_matmul: x {x.shape} and w {w.shape} are not {wanted} (transpose_w={transpose_w})")
    if x.dtype != w.dtype or x.dtype.name not in _DTYPES:
        raise ValueError(f"grouped_matmul: x is {x.dtype} and w is {w.dtype}; both must be one of {', '.join(_DTYPES)}")
    for field in dataclasses.fields(segments):
        array = getattr(segments, field.name)
        if array.dtype != jnp.int32 or array.ndim != 1 or array.shape != segments.first_G.shape:
            raise ValueError(
                f"grouped_matmul: segments.{field.name} is {array.dtype}{array.shape}; all three must be int32 (G,)"
            )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _matmul(x: jax.Array, w: jax.Array, segments: Segments, transpose_w: bool, implementation: str) -> jax.Array:
    run = _native_matmul if implementation == "native" else _jax_matmul
    return run(x, w, segments, transpose_w)


def _matmul_fwd(x: jax.Array, w: jax.Array, segments: Segments, transpose_w: bool, implementation: str) -> Any:
    return _matmul(x, w, segments, transpose_w, implementation), (x, w, segments)


def _matmul_bwd(transpose_w: bool, implementation: str, residuals: Any, dy: jax.Array) -> Any:
    x, w, segments = residuals
    x, w, dy = first_order("grouped_matmul", (x, w, dy))
    dx = _matmul(dy, w, segments, not transpose_w, implementation)
    outer = _native_outer if implementation == "native" else _jax_outer
    dw = outer(dy, x, segments, w.shape[0]) if transpose_w else outer(x, dy, segments, w.shape[0])
    return dx, dw, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


# native


def _native_matmul(x: jax.Array, w: jax.Array, segments: Segments, transpose_w: bool) -> jax.Array:
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[1 if transpose_w else 2]), jnp.float32)
    call = jax.ffi.ffi_call("fef_grouped_matmul", result, vmap_method="sequential")
    return call(x, w, segments.first_G, segments.rows_G, segments.expert_G, transpose_w=transpose_w)


def _native_outer(a_ND: jax.Array, b_NF: jax.Array, segments: Segments, num_experts: int) -> jax.Array:
    """c_EDF[e] = sum over the segments of expert e of a_ND[rows].T @ b_NF[rows]."""
    result = jax.ShapeDtypeStruct((num_experts, a_ND.shape[1], b_NF.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call("fef_grouped_outer", result, vmap_method="sequential")
    return call(a_ND, b_NF, segments.first_G, segments.rows_G, segments.expert_G)


# jax


@dataclasses.dataclass(frozen=True)
class _Block:
    """The window of rows that one step of the loop works on, and those of them that are meant."""

    first_row: jax.Array
    expert: jax.Array
    valid_B: jax.Array


def _for_each_block(num_rows: int, segments: Segments, step: Any, init: jax.Array) -> jax.Array:
    """Carries `init` through `step(block, rows_of, carry)`; the number of steps depends on the segments."""
    # Large blocks multiply faster, small ones waste less on the last block of a segment. Measured for 64-512 rows each.
    mean_rows = num_rows // segments.rows_G.shape[0]
    size = min(num_rows, 256 if mean_rows >= 256 else 128 if mean_rows >= 128 else 64)
    blocks_G = (segments.rows_G + size - 1) // size
    last_G = jnp.cumsum(blocks_G)

    def body(i: jax.Array, carry: jax.Array) -> jax.Array:
        g = jnp.sum(last_G <= i)
        begin = segments.first_G[g] + (i - (last_G[g] - blocks_G[g])) * size
        end = jnp.minimum(begin + size, segments.first_G[g] + segments.rows_G[g])
        first_row = jnp.minimum(begin, num_rows - size)  # a window at the very end reaches back over earlier rows
        row_B = first_row + jnp.arange(size)
        block = _Block(first_row, segments.expert_G[g], (row_B >= begin) & (row_B < end))
        return step(block, lambda array: jax.lax.dynamic_slice_in_dim(array, first_row, size), carry)

    return jax.lax.fori_loop(0, last_G[-1], body, init)


def _jax_matmul(x: jax.Array, w: jax.Array, segments: Segments, transpose_w: bool) -> jax.Array:
    def step(block: _Block, rows_of: Any, y: jax.Array) -> jax.Array:
        w_e = w[block.expert]
        product = rows_of(x) @ (w_e.T if transpose_w else w_e)
        merged = jnp.where(block.valid_B[:, None], product, rows_of(y))
        return jax.lax.dynamic_update_slice_in_dim(y, merged, block.first_row, axis=0)

    zeros = jnp.zeros((x.shape[0], w.shape[1 if transpose_w else 2]), jnp.float32)
    return _for_each_block(x.shape[0], segments, step, zeros)


def _jax_outer(a_ND: jax.Array, b_NF: jax.Array, segments: Segments, num_experts: int) -> jax.Array:
    def step(block: _Block, rows_of: Any, c_EDF: jax.Array) -> jax.Array:
        # Both factors are masked: a zero of one would turn a NaN of the other into a NaN.
        valid = block.valid_B[:, None]
        a, b = jnp.where(valid, rows_of(a_ND), 0.0), jnp.where(valid, rows_of(b_NF), 0.0)
        sum_DF = jax.lax.dynamic_index_in_dim(c_EDF, block.expert, keepdims=False) + a.T @ b
        return jax.lax.dynamic_update_index_in_dim(c_EDF, sum_DF, block.expert, axis=0)

    zeros = jnp.zeros((num_experts, a_ND.shape[1], b_NF.shape[1]), jnp.float32)
    return _for_each_block(a_ND.shape[0], segments, step, zeros)
