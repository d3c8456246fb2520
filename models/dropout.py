"""Dropout whose mask is a function of a number's position, not of how it is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from models.recompute import recomputed


def _scramble(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32-bit words in which every input bit moves every output bit.

    Two multiplications by odd constants between three xor-shifts, the form of the finaliser of
    MurmurHash3 with constants found by search for low avalanche bias (C. Wellons' hash-prospector).
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def keep_multiplier(
    seed: UInt32[Array, "2"],
    rate: float,
    batch: int,
    heads: int,
    rows: Int[Array, "q"],
    columns: Int[Array, "k"],
    *,
    key_major: bool = False,
) -> Float[Array, "B H _ _"]:
    """0 for a dropped attention weight, 1/(1 − rate) for a kept one.

    A counter-based generator: the word of weight (b, h, i, j) is a hash of the seed and the four
    numbers. Forward and backward passes with other block sizes and layouts, and any number of
    devices, see the same mask, and nothing of it is stored. Ten integer operations a weight, about a
    tenth of Threefry.

    Args:
        seed: two random words, fresh each step and layer.
        rate: probability that a weight is dropped, in [0, 1).
        batch: B.
        heads: H.
        rows: positions i of the queries.
        columns: positions j of the keys.
        key_major: return `[B, H, k, q]` instead of `[B, H, q, k]`.
    """
    sequence = jnp.arange(batch * heads, dtype=jnp.uint32).reshape(batch, heads, 1)
    sequence = _scramble(_scramble(sequence ^ seed[0]) + seed[1])
    row_word = _scramble(sequence + rows.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))
    column_word = columns.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    if key_major:
        word = _scramble(row_word[..., None, :] ^ column_word[:, None])
    else:
        word = _scramble(row_word[..., None] ^ column_word)
    kept = word >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(kept, jnp.float32(1 / (1 - rate)), jnp.float32(0))


class Dropout(nnx.Module):
    """Zeroes each number with a probability and multiplies the rest by 1/(1 − rate).

    The mask is computed again in the backward pass: nothing of it is stored, and it costs less than
    reading it would.

    Args:
        rate: in [0, 1).
    """

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(
        self,
        x: Float[Array, "B L D"],
        *,
        deterministic: bool,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B L D"]:
        """Drops where `deterministic` is False.

        Raises:
            ValueError: if dropout is on and `rngs`, stream `dropout`, is missing.
        """
        if deterministic or not self.rate:
            return x
        if rngs is None:
            raise ValueError("dropout needs rngs when deterministic is False")
        seed = jax.random.bits(rngs.dropout(), (2,), jnp.uint32)
        batch, length, width = x.shape

        def drop(x: Array, seed: Array) -> Array:
            rows, columns = jnp.arange(length), jnp.arange(width)
            keep = keep_multiplier(seed, self.rate, batch, 1, rows, columns)
            return x * keep[:, 0].astype(x.dtype)

        return recomputed(drop, (), x, seed)
