"""Linear attention over chunks of positions: the causal form in O(L) time and memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearState:
    """Everything a normalised linear attention remembers of the past.

    Attributes:
        outer: Σ_j φ(k_j) v_jᵀ, `[B, H, M, K]`.
        normaliser: Σ_j φ(k_j), `[B, H, M]`.
    """

    outer: Float[Array, "B H M K"]
    normaliser: Float[Array, "B H M"]

    @classmethod
    def zeros(cls, batch: int, heads: int, features: int, width: int, dtype: Any) -> LinearState:
        """The state before the first token."""
        return cls(
            jnp.zeros((batch, heads, features, width), dtype),
            jnp.zeros((batch, heads, features), dtype),
        )


def divide(
    numerator: Float[Array, "B H L K"], denominator: Float[Array, "B H L"]
) -> Float[Array, "B H L K"]:
    """numerator / denominator, and 0 with gradient 0 where a query saw no key."""
    seen = denominator > 0
    inverse = jnp.where(seen, 1 / jnp.where(seen, denominator, 1), 0)
    return numerator * inverse[..., None]


def masked_features(
    key: Float[Array, "B H S M"], value: Float[Array, "B H S K"], mask: Bool[Array, "B S"]
) -> tuple[Float[Array, "B H S M"], Float[Array, "B H S K"]]:
    """Zeroes what pads would add: φ(0) is not 0, and 0 · NaN is not 0 either."""
    real = mask[:, None, :, None]
    return jnp.where(real, key, 0), jnp.where(real, value, 0)


def bidirectional(
    query: Float[Array, "B H L M"],
    key: Float[Array, "B H S M"],
    value: Float[Array, "B H S K"],
    mask: Bool[Array, "B S"],
) -> Float[Array, "B H L K"]:
    """o_i = φ(q_i)·Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j) (Katharopoulos et al. 2020, eq. 5).

    Args:
        query: φ(q) ≥ 0; a factor common to all features of one query cancels.
        key: φ(k) ≥ 0.
        value: values.
        mask: True for a real key.
    """
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    key, value = masked_features(key, value, mask)
    outer = jnp.einsum("bhsm,bhsk->bhmk", key, value, preferred_element_type=dtype)
    normaliser = key.astype(dtype).sum(2)
    numerator = jnp.einsum("bhlm,bhmk->bhlk", query.astype(dtype), outer)
    return divide(numerator, jnp.einsum("bhlm,bhm->bhl", query.astype(dtype), normaliser))


def causal(
    state: LinearState,
    query: Float[Array, "B H L M"],
    key: Float[Array, "B H L M"],
    value: Float[Array, "B H L K"],
    mask: Bool[Array, "B L"],
    *,
    chunk_size: int,
) -> tuple[LinearState, Float[Array, "B H L K"]]:
    """The same sum over j ≤ i, continued from `state`.

    Inside a chunk the weights φ(q_i)·φ(k_j) are formed and masked; what came before enters through
    the state: O_c = φ(Q_c) S_{c−1} + tril(φ(Q_c) φ(K_c)ᵀ) V_c, and likewise the denominator
    (Hua et al. 2022, arXiv 2202.10447, section 3.2). A scan carries the state; each chunk's weights
    are computed again in the backward pass, so that what is stored is one state per chunk.

    Args:
        state: what the positions before the first query left.
        query: φ(q) ≥ 0.
        key: φ(k) ≥ 0.
        value: values.
        mask: True for a real token; a pad leaves the state as it is.
        chunk_size: C, in tokens.

    Returns:
        The state after the last position, and the outputs.
    """
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    batch, heads, length, _ = query.shape
    key, value = masked_features(key, value, mask)
    size = min(chunk_size, length)
    count = -(-length // size)
    # Zero features add nothing to any sum: padding to whole chunks needs no mask.
    pad = ((0, 0), (0, 0), (0, count * size - length), (0, 0))
    chunks = tuple(
        jnp.pad(x, pad).reshape(batch, heads, count, size, -1).transpose(2, 0, 1, 3, 4)
        for x in (query, key, value)
    )
    lower = jnp.tril(jnp.ones((size, size), bool))

    @jax.checkpoint
    def one_chunk(
        state: LinearState, chunk: tuple[Array, Array, Array]
    ) -> tuple[LinearState, Array]:
        q, k, v = chunk
        weights = jnp.einsum("bhim,bhjm->bhij", q, k, preferred_element_type=dtype)
        weights = jnp.where(lower, weights, 0)
        numerator = jnp.einsum(
            "bhij,bhjk->bhik", weights.astype(v.dtype), v, preferred_element_type=dtype
        )
        numerator += jnp.einsum("bhim,bhmk->bhik", q.astype(dtype), state.outer)
        denominator = weights.sum(-1) + jnp.einsum(
            "bhim,bhm->bhi", q.astype(dtype), state.normaliser
        )
        after = LinearState(
            state.outer + jnp.einsum("bhjm,bhjk->bhmk", k, v, preferred_element_type=dtype),
            state.normaliser + k.astype(dtype).sum(2),
        )
        return after, divide(numerator, denominator)

    state, out = jax.lax.scan(one_chunk, state, chunks)
    out = out.transpose(1, 2, 0, 3, 4).reshape(batch, heads, count * size, -1)
    return state, out[:, :, :length]
