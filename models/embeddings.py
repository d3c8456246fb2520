"""Token embeddings and the ways a model can know positions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

POSITIONS = ("none", "sinusoidal", "learned", "rotary")


#: Positions are written in digits of this base, so that tables of a digit's angles are small.
_BASE = 1024
#: With three digits, positions end at 2^30.
_DIGITS = 3


def cos_sin(
    start: int | Int[Array, ""], length: int, frequencies: Float[np.ndarray, "F"], dtype: Any
) -> tuple[Float[Array, "L F"], Float[Array, "L F"]]:
    """cos(t·ω) and sin(t·ω) for t = start … start + length − 1, below 2^30.

    Exact to a few units in the last place of float32; in float64, to about t·10⁻¹⁶.

    A float32 cannot hold the angle of a late position: at t = 2^20 it is off by a sixteenth. So the
    angle is the sum of those of the digits of t to base 1024, whose tables are computed in float64, by
    the addition theorem. A table of all positions would be a constant of L·F numbers in the program.

    Args:
        start: the first position; an array where positions go on from an earlier chunk.
        length: positions L.
        frequencies: ω, radians a position.
        dtype: of the result.

    Raises:
        ValueError: for positions from 2^30 on; where `start` is an array, those count from 0 again.
    """
    last = _BASE**_DIGITS
    end = last if isinstance(start, jax.Array) else int(start) + length
    if end > last:
        raise ValueError(f"positions end at {last}, asked for a sequence of {end}")
    position = start + jnp.arange(length)

    def of_digit(step: int) -> tuple[Array, Array]:
        rows = min(_BASE, -(-end // step))
        angles = np.arange(rows)[:, None] * (step * frequencies)
        index = position // step % _BASE
        return jnp.asarray(np.cos(angles), dtype)[index], jnp.asarray(np.sin(angles), dtype)[index]

    cos, sin = of_digit(1)
    step = _BASE
    while step < end:
        c, s = of_digit(step)
        cos, sin = cos * c - sin * s, sin * c + cos * s
        step *= _BASE
    return cos, sin


def sinusoids(
    length: int, dim: int, start: int | Int[Array, ""] = 0, dtype: Any = jnp.float32
) -> Float[Array, "L D"]:
    """Fixed sinusoidal positions (Vaswani et al. 2017, arXiv 1706.03762, section 3.5).

    Channel c < D/2 holds sin(t·ω_c), channel D/2 + c holds cos(t·ω_c), with ω falling
    geometrically from 1 to 1e-4. An odd last channel is 0.

    Args:
        length: positions t = start … start + length − 1.
        dim: channels D.
        start: the first position.
        dtype: of the result.
    """
    half = dim // 2
    frequencies = np.exp(-np.log(1e4) * np.arange(half) / max(half - 1, 1))
    cos, sin = cos_sin(start, length, frequencies, dtype)
    return jnp.concatenate([sin, cos, jnp.zeros((length, dim % 2), dtype)], axis=-1)


def rotate(x: Float[Array, "B H L K"], start: int | Int[Array, ""] = 0) -> Float[Array, "B H L K"]:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864, eq. 34).

    The pair of channels (c, c + K/2) turns by the angle t·10000^(−2c/K) at position t, so that a
    dot product of two rotated vectors depends on their distance only.

    Args:
        x: queries or keys; K even.
        start: position of the first along L.
    """
    length, width = x.shape[-2:]
    half = width // 2
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = cos_sin(start, length, 1e4 ** (-np.arange(half) / half), accumulate)
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

    def add_positions(
        self, x: Float[Array, "B L D"], start: int | Int[Array, ""] = 0
    ) -> Float[Array, "B L D"]:
        """Adds the additive positions to vectors of which the first stands at position `start`.

        Raises:
            ValueError: if start + L exceeds the learned table; where `start` is an array, what lies
                beyond the table is NaN instead.
        """
        length, dim = x.shape[1:]
        if self.position_table is not None:
            if isinstance(start, jax.Array):
                rows = self.position_table[...].at[start + jnp.arange(length)]
                return x + rows.get(mode="fill", fill_value=jnp.nan).astype(self.dtype)
            end = int(start) + length
            if end > self.max_length:
                raise ValueError(
                    f"learned positions end at {self.max_length}, asked for a sequence of {end}; "
                    "evaluate at shorter lengths or train with positions none, sinusoidal or rotary"
                )
            return x + self.position_table[...][end - length : end].astype(self.dtype)
        if self.positions == "sinusoidal":
            wide = jnp.promote_types(self.dtype, jnp.float32)
            return x + sinusoids(length, dim, start, wide).astype(self.dtype)
        return x
