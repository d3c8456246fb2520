"""Kernel attention over chunks of positions: the causal form in O(L) time and memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

#: Stands for log 0 where differences are taken: finite, so that −∞ − (−∞) does not arise.
LOG_ZERO = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearState:
    """Everything a kernel attention remembers of the past.

    The sums that it stands for are `exp(level)` times what it holds.

    Attributes:
        outer: Σ_j w_j φ(k_j) v_jᵀ, `[B, H, M, K]`.
        normaliser: Σ_j w_j φ(k_j), `[B, H, M]`.
        count: Σ_j w_j, `[B, H]`.
        level: logarithm of the factor taken out, `[B, H]`.
    """

    outer: Float[Array, "B H M K"]
    normaliser: Float[Array, "B H M"]
    count: Float[Array, "B H"]
    level: Float[Array, "B H"]

    @classmethod
    def zeros(cls, batch: int, heads: int, features: int, width: int, dtype: Any) -> LinearState:
        """The state before the first token."""
        return cls(
            jnp.zeros((batch, heads, features, width), dtype),
            jnp.zeros((batch, heads, features), dtype),
            jnp.zeros((batch, heads), dtype),
            jnp.full((batch, heads), LOG_ZERO, dtype),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What a query has summed, divided by `exp(level)`: of each row, and so without effect on ratios.

    Attributes:
        numerator: Σ_j w_ij φ(q_i)·φ(k_j) v_j.
        denominator: Σ_j w_ij φ(q_i)·φ(k_j).
        count: Σ_j w_ij, between 1 and the number of keys once one is seen.
        level: logarithm of the largest w_ij; `LOG_ZERO` where no key is seen.
    """

    numerator: Float[Array, "*B L K"]
    denominator: Float[Array, "*B L"]
    count: Float[Array, "*B L"]
    level: Float[Array, "*B L"]


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


def segment_sums(x: Float[Array, "*B C"]) -> Float[Array, "*B C C"]:
    """x_{j+1} + … + x_i at [i, j], 0 where j ≥ i.

    Each sum by itself: as a difference of two running sums it would lose what is small beside them.
    """
    size = x.shape[-1]
    below = jnp.tril(jnp.ones((size, size), bool), -1)
    return jnp.where(below, x[..., :, None], 0).cumsum(-2)


def bidirectional(
    query: Float[Array, "B H L M"],
    key: Float[Array, "B H S M"],
    value: Float[Array, "B H S K"],
    mask: Bool[Array, "B S"],
    *,
    log_scale: Float[Array, "B H S"] | None = None,
) -> Sums:
    """φ(q_i)·Σ_j w_j φ(k_j) v_jᵀ and its like (Katharopoulos et al. 2020, arXiv 2006.16236, eq. 5).

    Args:
        query: φ(q).
        key: φ(k).
        value: values.
        mask: True for a real key.
        log_scale: log w_j of each key; None for w_j = 1.
    """
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    shape = (*query.shape[:3],)
    key, value = masked_features(key, value, mask)
    key = key.astype(dtype)
    if log_scale is None:
        count = mask[:, None].sum(-1, dtype=dtype)
        level = jnp.where(mask.any(-1), 0, LOG_ZERO)[:, None]
    else:
        scale = jnp.where(mask[:, None], log_scale, LOG_ZERO)
        level = jax.lax.stop_gradient(scale.max(-1))
        factor = jnp.where(mask[:, None], jnp.exp(scale - level[..., None]), 0)
        key = key * factor[..., None]
        count = factor.sum(-1)
    outer = jnp.einsum("bhsm,bhsk->bhmk", key, value, preferred_element_type=dtype)
    query = query.astype(dtype)
    return Sums(
        jnp.einsum("bhlm,bhmk->bhlk", query, outer),
        jnp.einsum("bhlm,bhm->bhl", query, key.sum(2)),
        jnp.broadcast_to(count[..., None], shape),
        jnp.broadcast_to(level[..., None], shape).astype(dtype),
    )


def causal(
    state: LinearState,
    query: Float[Array, "B H L M"],
    key: Float[Array, "B H L M"],
    value: Float[Array, "B H L K"],
    mask: Bool[Array, "B L"],
    *,
    chunk_size: int,
    log_scale: Float[Array, "B H L"] | None = None,
    log_gate: Float[Array, "B H L"] | None = None,
) -> tuple[LinearState, Sums]:
    """The same sums over j ≤ i, continued from `state`, with a decay between positions.

    The weight of key j for query i is w_ij = exp(c_j + G_i − G_j), c the keys' log scales and G the
    running sum of log gates. It is taken relative to the largest so far, a factor of the row that a
    division cancels: exponents are never positive, and what comes later does not enter what came
    before, not even by rounding.

    Inside a chunk the weights are formed and masked; what came before enters through the state (Hua
    et al. 2022, arXiv 2202.10447, section 3.2). A scan carries it; each chunk's weights are computed
    again in the backward pass, so that what is stored is one state per chunk.

    Args:
        state: what the positions before the first query left.
        query: φ(q).
        key: φ(k).
        value: values.
        mask: True for a real token; a pad leaves the state as it is.
        chunk_size: C, in tokens.
        log_scale: c, each key's; None for 0.
        log_gate: log g ≤ 0, finite, of each position; None for no decay.

    Returns:
        The state after the last position, and the sums.
    """
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    batch, heads, length, _ = query.shape
    key, value = masked_features(key, value, mask)
    size = min(chunk_size, length)
    count = -(-length // size)

    def chunks(x: Array) -> Array:
        """`[B, H, L, …]` to `[N, B, H, C, …]`; zero features add nothing to any sum."""
        pad = ((0, 0), (0, 0), (0, count * size - length), *([(0, 0)] * (x.ndim - 3)))
        x = jnp.pad(x, pad).reshape(batch, heads, count, size, *x.shape[3:])
        return jnp.moveaxis(x, 2, 0)

    real = jnp.broadcast_to(mask[:, None], (batch, heads, length))
    zeros = jnp.zeros((batch, heads, length), dtype)
    extra = []
    if log_scale is not None or log_gate is not None:
        extra = [
            jnp.where(real, zeros if x is None else x, 0).astype(dtype)
            for x in (log_scale, log_gate)
        ]
    lower = jnp.tril(jnp.ones((size, size), bool))

    @jax.checkpoint
    def one_chunk(state: LinearState, chunk: tuple[Array, ...]) -> tuple[LinearState, Sums]:
        q, k, v, real, *rest = chunk
        seen = lower & real[..., None, :]
        if rest:
            scale, gates = rest
            shift = jnp.broadcast_to(scale[..., None, :], seen.shape)
            if log_gate is not None:
                shift = shift + segment_sums(gates)
            shift = jnp.where(seen, shift, LOG_ZERO)
            before = state.level[..., None] + gates.cumsum(-1)
            # The largest weight so far, the past's included.
            level = jax.lax.stop_gradient(jnp.maximum(shift.max(-1), before))
            inside = jnp.where(seen, jnp.exp(shift - level[..., None]), 0)
            past = jnp.exp(before - level)
        else:
            inside = seen.astype(dtype)
            past = jnp.ones_like(real, dtype)
            level = jnp.where(real.cumsum(-1) > 0, 0, state.level[..., None])
        left = inside[..., -1, :]
        weights = jnp.einsum("bhim,bhjm->bhij", q, k, preferred_element_type=dtype) * inside
        q, added = q.astype(dtype), k.astype(dtype) * left[..., None]
        sums = Sums(
            jnp.einsum("bhim,bhmk->bhik", q, state.outer) * past[..., None]
            + jnp.einsum(
                "bhij,bhjk->bhik", weights.astype(v.dtype), v, preferred_element_type=dtype
            ),
            weights.sum(-1) + jnp.einsum("bhim,bhm->bhi", q, state.normaliser) * past,
            inside.sum(-1) + state.count[..., None] * past,
            level,
        )
        keep = past[..., -1]
        after = LinearState(
            state.outer * keep[..., None, None]
            + jnp.einsum("bhjm,bhjk->bhmk", added, v, preferred_element_type=dtype),
            state.normaliser * keep[..., None] + added.sum(2),
            state.count * keep + left.sum(-1),
            level[..., -1],
        )
        return after, sums

    state, sums = jax.lax.scan(
        one_chunk, state, tuple(chunks(x) for x in (query, key, value, real, *extra))
    )

    def joined(x: Array) -> Array:
        """`[N, B, H, C, …]` to `[B, H, L, …]`."""
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(batch, heads, count * size, *x.shape[4:])[:, :, :length]

    return state, jax.tree.map(joined, sums)
