"""Small programs over the pool that several test files share, and what they should compute.

Letters as in fef; M members of the whole mesh, G data-parallel groups. A model is a chain of layers. In `get_loss` a
layer reads blocks of a few numbers, x <- x + tanh(x * block) for each; in `ffn_loss` it is a residual expert FFN.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fef.ffn import SWIGLU
from fef.ops.get import get
from fef.ops.pooled_ffn import pooled_ffn
from fef.ops.publish import publish
from fef.sharding import REPLICATED, TOKENS, island

LAYERS_FIRST = PartitionSpec(None, "expert")


def publish_all(mesh, handle_2, arrays, num_parts=1, dtype=jnp.float32):
    """arrays (L, P, ...) -> version_M4, chain_M, as every read below takes them."""

    def body(handle_2, *arrays):
        version_4, chain = publish(handle_2, arrays, num_parts, dtype)
        return version_4[None], chain[None]

    run = island(mesh, body, (REPLICATED, *[LAYERS_FIRST] * len(arrays)), (TOKENS, TOKENS))
    return run(jnp.asarray(handle_2), *arrays)


def get_all(mesh, published, layer, ids_Mn, block_elems, dtype=jnp.float32):
    """blocks (M, n, block_elems)."""

    def body(version_M4, chain_M, layer, ids_Mn):
        return get(version_M4[0], chain_M[0], layer, ids_Mn[0], block_elems, dtype)[None]

    run = island(mesh, body, (TOKENS, TOKENS, REPLICATED, TOKENS), TOKENS)
    return run(*published, jnp.int32(layer), jnp.asarray(ids_Mn, jnp.int32))


def ffn_all(mesh, published, layer, x_ND, rows_ME, d_expert, kind=SWIGLU):
    """y (M * N, D)."""

    def body(version_M4, chain_M, layer, x_ND, rows_ME):
        like_0F = jnp.zeros((0, d_expert))
        return pooled_ffn(version_M4[0], chain_M[0], layer, x_ND, rows_ME[0], like_0F, kind=kind)

    run = island(mesh, body, (TOKENS, TOKENS, REPLICATED, TOKENS, TOKENS), TOKENS)
    return run(*published, jnp.int32(layer), x_ND, jnp.asarray(rows_ME, jnp.int32))


def at_microbatch(published, index):
    version_M4, chain_M = published
    return version_M4.at[:, 3].set(index), chain_M


def get_layer(mesh, published, layer, x_MD, ids_Mn):
    blocks_MnD = get_all(mesh, published, layer, ids_Mn, x_MD.shape[1])
    return x_MD + jnp.tanh(x_MD[:, None] * blocks_MnD).sum(1)


def get_loss(mesh, handle_2, w_LPD, x_MD, ids_LMn):
    """Publishes w and runs a layer for each of its L."""
    published = publish_all(mesh, handle_2, (w_LPD,))
    for layer, ids_Mn in enumerate(ids_LMn):
        x_MD = get_layer(mesh, published, layer, x_MD, ids_Mn)
    return (x_MD**2).sum()


def reference_get_loss(table, w_LPD, x_MD, ids_LMn):
    position_E = np.append(table.position_E, -1)  # -1 names the last, which is masked
    for w_PD, ids_Mn in zip(w_LPD, ids_LMn, strict=True):
        blocks_MnD = jnp.where((np.asarray(ids_Mn) >= 0)[..., None], w_PD[position_E[np.asarray(ids_Mn)]], 0)
        x_MD = x_MD + jnp.tanh(x_MD[:, None] * blocks_MnD).sum(1)
    return (x_MD**2).sum()


def ffn_loss(mesh, handle_2, weights, x_ND, rows_ME):
    """weights: gate and up (L, P, D, F), down (L, P, F, D)."""
    published = publish_all(mesh, handle_2, weights, num_parts=3)
    for layer in range(weights[0].shape[0]):
        x_ND = x_ND + ffn_all(mesh, published, layer, x_ND, rows_ME, weights[0].shape[3])
    return (x_ND**2).sum()


def reference_ffn(table, weights, layer, x_ND, rows_ME):
    num_members, num_experts = rows_ME.shape
    rows = x_ND.shape[0] // num_members
    counts = np.concatenate([rows_ME, rows - rows_ME.sum(1, keepdims=True)], axis=1)
    expert_N = np.concatenate([np.repeat(np.arange(num_experts + 1), row) for row in counts])
    position_N = np.append(table.position_E, 0)[expert_N]
    gate, up, down = (w[layer][position_N] for w in weights)
    hidden_NF = jax.nn.silu(jnp.einsum("nd,ndf->nf", x_ND, gate)) * jnp.einsum("nd,ndf->nf", x_ND, up)
    y_ND = jnp.einsum("nf,nfd->nd", hidden_NF, down)
    return jnp.where((expert_N < num_experts)[:, None], y_ND, 0)


def reference_ffn_loss(table, weights, x_ND, rows_ME):
    for layer in range(weights[0].shape[0]):
        x_ND = x_ND + reference_ffn(table, weights, layer, x_ND, rows_ME)
    return (x_ND**2).sum()


def random_weights(rng, num_layers, table, d_model, d_expert):
    """Gate, up and down of `ffn_loss`; empty positions are zero."""
    shapes = ((d_model, d_expert), (d_model, d_expert), (d_expert, d_model))
    return tuple(random_blocks(rng, num_layers, table, shape, 0.4) for shape in shapes)


def random_blocks(rng, num_layers, table, shape, scale=1.0):
    """(L, P, *shape) float32; empty positions are zero."""
    w = np.zeros((num_layers, table.num_positions, *shape), np.float32)
    w[:, table.position_E] = scale * rng.normal(size=(num_layers, table.num_experts, *shape))
    return w


def assert_close(got, wanted, tolerance=1e-5):
    """Leaf by leaf, relative to the largest number of the leaf."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error < tolerance, f"relative error {error}"
