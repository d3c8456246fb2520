"""Token embeddings and the ways a model can know positions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

POSITIONS = ("none", "sinusoidal", "learned", "rotary")


def sinusoids(length: int, dim: int) -> Float[np.ndarray, "L D"]:
    """Fixed sinusoidal positions (Vaswani et al. 2017, arXiv 1706.03762, section 3.5).

    Channel c < D/2 holds sin(t·ω_c), channel D/2 + c holds cos(t·ω_c), with ω falling
    geometrically from 1 to 1e-4. An odd last channel is 0.

    Args:
        length: positions t = 0 … length − 1.
        dim: channels D.
    """
    half = dim // 2
    frequencies = np.exp(-np.log(1e4) * np.arange(half) / max(half - 1, 1))
    angles = np.arange(length)[:, None] * frequencies
    table = np.zeros((length, dim), np.float32)
    table[:, :half] = np.sin(angles)
    table[:, half : 2 * half] = np.cos(angles)
    return table


def rotate(x: Float[Array, "B H L K"]) -> Float[Array, "B H L K"]:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864, eq. 34).

    The pair of channels (c, c + K/2) turns by the angle t·10000^(−2c/K) at position t, so that a
    dot product of two rotated vectors depends on their distance only.

    Args:
        x: queries or keys, positions along L counted from 0; K even.
    """
    length, width = x.shape[-2:]
    half = width // 2
    angles = np.arange(length)[:, None] * 1e4 ** (-np.arange(half) / half)
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = jnp.asarray(np.cos(angles), accumulate), jnp.asarray(np.sin(angles), accumulate)
    first, second = jnp.split(x.astype(accumulate), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.astype(x.dtype)


class Embedding(nnx.Module):
    """Tokens to vectors, with positions added where they are of the additive kinds.

    Token vectors start N(0, 1), learned positions N(0, 0.02²).

    Args:
        vocab_size: V.
        dim: D.
        positions: "none", "sinusoidal", "learned" or "rotary" (which the attention layers apply).
        max_length: positions in a learned table.
        rngs: stream `params`.
        dtype: compute type.

    Raises:
        ValueError: for an unknown kind of positions.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        positions: str,
        max_length: int,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
    ):
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}; got {positions!r}")
        self.positions = positions
        self.max_length = max_length
        self.dtype = dtype
        self.tokens = nnx.Embed(
            vocab_size, dim, embedding_init=nnx.initializers.normal(1.0), dtype=dtype, rngs=rngs
        )
        self.position_table = (
            nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (max_length, dim), jnp.float32))
            if positions == "learned"
            else None
        )

    def __call__(self, inputs: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """Vectors of the tokens, before positions."""
        return self.tokens(inputs)

    def add_positions(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Adds the additive positions to vectors that start at position 0.

        Raises:
            ValueError: if L exceeds the learned table.
        """
        length, dim = x.shape[1:]
        if self.position_table is not None:
            if length > self.max_length:
                raise ValueError(
                    f"learned positions end at {self.max_length}, asked for a sequence of {length}; "
                    "evaluate at shorter lengths or train with positions none, sinusoidal or rotary"
                )
            return x + self.position_table[...][:length].astype(self.dtype)
        if self.positions == "sinusoidal":
            return x + jnp.asarray(sinusoids(length, dim), self.dtype)
        return x
