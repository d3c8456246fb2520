"""Exact softmax attention in blocks: no L×L array forward or backward."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Key, UInt32

from models.dropout import keep_multiplier


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static shape of the computation. Lengths are in tokens."""

    scale: float
    causal: bool
    rate: float
    query_block: int
    key_block: int
    queries: int  # number of query blocks
    keys: int  # number of key blocks

    def key_blocks_seen(self, i: Any) -> Any:
        """How many key blocks, from the first, query block i can see."""
        if not self.causal:
            return self.keys
        last = (i + 1) * self.query_block
        return jnp.minimum((last + self.key_block - 1) // self.key_block, self.keys)

    def first_query_block(self, j: Any) -> Any:
        """The first query block that can see key block j."""
        return (j * self.key_block) // self.query_block if self.causal else 0


def _blocks(length: int, block: int) -> tuple[int, int]:
    """Number of blocks and their size: as even as possible, so that little padding is added."""
    count = -(-length // block)
    size = -(-length // count)
    if count == 1:
        return 1, size
    size = -(-size // 8) * 8
    return -(-length // size), size


def _take(x: Array, index: Any, size: int, axis: int = 2) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _put(x: Array, block: Array, index: Any, size: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, block, index * size, 2)


def _visible(plan: _Plan, mask: Bool[Array, "B S"], i: Any, j: Any) -> Bool[Array, "B 1 q k"]:
    """Which of the keys of block j the queries of block i may see; broadcastable."""
    seen = _take(mask, j, plan.key_block, axis=1)[:, None, None, :]
    if plan.causal:
        rows = i * plan.query_block + jnp.arange(plan.query_block)
        columns = j * plan.key_block + jnp.arange(plan.key_block)
        seen = seen & (rows[:, None] >= columns[None, :])
    return seen


def _forward(
    plan: _Plan, query: Array, key: Array, value: Array, mask: Array, seed: Array
) -> tuple[Array, Array, Array]:
    """Output, and each row's largest logit and one over its normaliser, over padded lengths.

    The two are kept apart: their sum in the log, as one number, would round away what the backward
    pass needs once logits are in the thousands.
    """
    batch, heads, _, _ = query.shape
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    width = value.shape[-1]

    def row(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, tops, inverses = carry
        q = _take(query, i, plan.query_block)

        def column(j: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, acc = state
            k, v = _take(key, j, plan.key_block), _take(value, j, plan.key_block)
            logits = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=dtype) * plan.scale
            logits = jnp.where(_visible(plan, mask, i, j), logits, -jnp.inf)
            new_top = jnp.maximum(top, logits.max(-1))
            # A row that has seen no key yet has top = -inf; exp(-inf - 0) is the 0 it needs.
            base = jnp.where(new_top == -jnp.inf, 0, new_top)
            weights = jnp.exp(logits - base[..., None])
            fade = jnp.exp(top - base)
            total = total * fade + weights.sum(-1)
            if plan.rate:
                weights = weights * keep_multiplier(
                    seed, plan.rate, batch, heads,
                    i * plan.query_block + jnp.arange(plan.query_block),
                    j * plan.key_block + jnp.arange(plan.key_block),
                )  # fmt: skip
            mixed = jnp.einsum(
                "bhqk,bhkd->bhqd", weights.astype(v.dtype), v, preferred_element_type=dtype
            )
            return new_top, total, acc * fade[..., None] + mixed

        shape = (batch, heads, plan.query_block)
        start = (
            jnp.full(shape, -jnp.inf, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((*shape, width), dtype),
        )
        top, total, acc = jax.lax.fori_loop(0, plan.key_blocks_seen(i), column, start)
        # A row without keys: weights 0 · exp(−inf − 0) in the backward pass.
        inverse = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
        block = (acc * inverse[..., None]).astype(out.dtype)
        return (
            _put(out, block, i, plan.query_block),
            _put(tops, jnp.where(total > 0, top, 0), i, plan.query_block),
            _put(inverses, inverse, i, plan.query_block),
        )

    length = query.shape[2]
    out = jnp.zeros((batch, heads, length, width), value.dtype)
    rows = jnp.zeros((batch, heads, length), dtype)
    return jax.lax.fori_loop(0, plan.queries, row, (out, rows, rows))


def _log_total(top: Array, inverse: Array) -> Array:
    """log Σ_j exp(logit) of each row; −∞ for a row without keys."""
    return jnp.where(inverse > 0, top - jnp.log(jnp.where(inverse > 0, inverse, 1)), -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: _Plan, query: Array, key: Array, value: Array, mask: Array, seed: Array
) -> tuple[Array, Array]:
    out, top, inverse = _forward(plan, query, key, value, mask, seed)
    return out, _log_total(top, inverse)


def _attend_fwd(plan: _Plan, query: Array, key: Array, value: Array, mask: Array, seed: Array):
    # Named, so that a checkpointed layer keeps them instead of running this loop once more.
    out, top, inverse = (
        checkpoint_name(x, "attention") for x in _forward(plan, query, key, value, mask, seed)
    )
    return (out, _log_total(top, inverse)), (query, key, value, mask, seed, out, top, inverse)


def _attend_bwd(plan: _Plan, residuals: tuple[Array, ...], grads: tuple[Array, Array]):
    """Key blocks outside, query blocks inside, logits held key-major.

    With P^T = exp(K Q^T − top) / total of shape [k, q], the gradients of K and V are plain products of
    P^T and dS^T with Q and dO: no block is transposed in memory (Dao et al. 2022, arXiv 2205.14135,
    algorithm 4, with rows and columns exchanged).
    """
    query, key, value, mask, seed, out, top, inverse = residuals
    grad, log_total_grad = grads
    batch, heads, _, _ = query.shape
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    # Σ_j P_ij dP_ij = dO_i · O_i, dropout included, because O holds the dropped weights too. The
    # gradient of the row's log Σ exp with respect to its logits is P.
    delta = (grad.astype(dtype) * out.astype(dtype)).sum(-1) - log_total_grad.astype(dtype)

    def column(j: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        d_query, d_key, d_value = carry
        k, v = _take(key, j, plan.key_block), _take(value, j, plan.key_block)

        def row(i: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_k, d_v = state
            q, g = _take(query, i, plan.query_block), _take(grad, i, plan.query_block)
            logits = jnp.einsum("bhkd,bhqd->bhkq", k, q, preferred_element_type=dtype) * plan.scale
            seen = jnp.swapaxes(_visible(plan, mask, i, j), -1, -2)
            # Masked before the exponential: a masked logit may exceed top without bound.
            logits = jnp.where(seen, logits - _take(top, i, plan.query_block)[:, :, None], -jnp.inf)
            weights = jnp.exp(logits) * _take(inverse, i, plan.query_block)[:, :, None]
            d_weights = jnp.einsum("bhkd,bhqd->bhkq", v, g, preferred_element_type=dtype)
            dropped = weights
            if plan.rate:
                keep = keep_multiplier(
                    seed, plan.rate, batch, heads,
                    i * plan.query_block + jnp.arange(plan.query_block),
                    j * plan.key_block + jnp.arange(plan.key_block),
                    key_major=True,
                )  # fmt: skip
                dropped, d_weights = weights * keep, d_weights * keep
            d_logits = weights * (d_weights - _take(delta, i, plan.query_block)[:, :, None])
            d_logits = (d_logits * plan.scale).astype(q.dtype)
            d_v = d_v + jnp.einsum(
                "bhkq,bhqd->bhkd", dropped.astype(g.dtype), g, preferred_element_type=dtype
            )
            d_k = d_k + jnp.einsum("bhkq,bhqd->bhkd", d_logits, q, preferred_element_type=dtype)
            d_q = _take(d_query, i, plan.query_block)
            d_q = d_q + jnp.einsum("bhkq,bhkd->bhqd", d_logits, k, preferred_element_type=dtype)
            return _put(d_query, d_q, i, plan.query_block), d_k, d_v

        zeros = (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
        d_query, d_k, d_v = jax.lax.fori_loop(
            plan.first_query_block(j), plan.queries, row, (d_query, *zeros)
        )
        return (
            d_query,
            _put(d_key, d_k.astype(key.dtype), j, plan.key_block),
            _put(d_value, d_v.astype(value.dtype), j, plan.key_block),
        )

    start = (jnp.zeros(query.shape, dtype), jnp.zeros_like(key), jnp.zeros_like(value))
    d_query, d_key, d_value = jax.lax.fori_loop(0, plan.keys, column, start)
    return d_query.astype(query.dtype), d_key, d_value, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def blockwise_softmax(
    query: Float[Array, "B H L K"],
    key: Float[Array, "B H S K"],
    value: Float[Array, "B H S Kv"],
    mask: Bool[Array, "B S"],
    *,
    scale: float,
    causal: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    query_block: int = 512,
    key_block: int = 256,
) -> tuple[Float[Array, "B H L Kv"], Float[Array, "B H L"]]:
    """softmax(scale · q kᵀ) v, and log Σ exp of each row's logits, computed block by block.

    Online softmax forward (Milakov & Gimelshein 2018, arXiv 1805.02867; Rabe & Staats 2021, arXiv
    2112.05682) and a backward pass of its own that recomputes each block's weights (Dao et al. 2022,
    arXiv 2205.14135). Memory grows with L, not L². The gradient is defined in reverse mode only,
    once. Logits, normalisers and sums are in `promote_types(dtype, float32)`.

    Args:
        query: queries.
        key: keys.
        value: values.
        mask: True for a key that exists. A query that sees no key gets zeros.
        scale: factor on the logits, usually K^-½.
        causal: query i sees keys 0 … i; then L must equal S.
        dropout_rate: share of the weights that is dropped after normalisation.
        dropout_key: decides which, by the position of the weight alone, so that block sizes and
            device counts do not matter. Without it nothing is dropped.
        query_block: queries of a block, in tokens.
        key_block: keys of a block, in tokens.

    Returns:
        The output, and log Σ_j exp(logit_ij), −∞ where a query sees no key.

    Raises:
        ValueError: if causal and L ≠ S, or for block sizes below 1.
    """
    length, keys = query.shape[2], key.shape[2]
    if causal and length != keys:
        raise ValueError(f"causal attention needs as many queries as keys, got {length} and {keys}")
    if query_block < 1 or key_block < 1:
        raise ValueError(f"block sizes must be at least 1 token, got {query_block} and {key_block}")
    # 0 · NaN is NaN: a pad's key or value would reach the gradients of real tokens.
    key = jnp.where(mask[:, None, :, None], key, 0)
    value = jnp.where(mask[:, None, :, None], value, 0)
    queries_count, query_size = _blocks(length, query_block)
    keys_count, key_size = _blocks(keys, key_block)
    rate = dropout_rate if dropout_key is not None else 0.0
    plan = _Plan(scale, causal, rate, query_size, key_size, queries_count, keys_count)
    seed: UInt32[Array, "2"] = (
        jax.random.bits(dropout_key, (2,), jnp.uint32)
        if dropout_key is not None
        else jnp.zeros(2, jnp.uint32)
    )
    query_pad = queries_count * query_size - length
    key_pad = keys_count * key_size - keys
    if query_pad:
        query = jnp.pad(query, ((0, 0), (0, 0), (0, query_pad), (0, 0)))
    if key_pad:
        key, value = (jnp.pad(x, ((0, 0), (0, 0), (0, key_pad), (0, 0))) for x in (key, value))
        mask = jnp.pad(mask, ((0, 0), (0, key_pad)))
    result: Any = _attend(plan, query, key, value, mask, seed)
    out, log_total = result
    return out[:, :, :length], log_total[:, :, :length]
