"""From token vectors to logits: pooling over real tokens, and the heads of the three task kinds."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

KINDS = ("classify", "match", "tag")
POOLS = ("cls", "mean", "max", "last")
MATCHES = ("concat", "nli")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pooled:
    """The real tokens of a sequence so far, pooled.

    Attributes:
        vector: their sum, in float32 or better ("mean"), largest entries ("max"), or the one kept.
        count: how many they are.
    """

    vector: Float[Array, "B D"]
    count: Int[Array, "B"]


def pool_more(
    before: Pooled | None, x: Float[Array, "B L D"], mask: Bool[Array, "B L"], how: str
) -> tuple[Pooled, Float[Array, "B D"]]:
    """One vector a sequence, from its real tokens alone. A row of pads alone gives zeros.

    Args:
        before: of the tokens that came before; None if these are the first. Not with "cls", which
            is the first position of all.
        x: token vectors.
        mask: True for a real token.
        how: "mean", "max", "last" (the last real token) or "cls" (the first position).

    Returns:
        What to go on with, and the vector.

    Raises:
        ValueError: for another name, or "cls" with `before`.
    """
    if how not in POOLS:
        raise ValueError(f"model.pool must be one of {', '.join(POOLS)}; got {how!r}")
    if how == "cls" and before is not None:
        raise ValueError("pool 'cls' takes the first position: there is nothing to go on with")
    real = mask[..., None]
    some = mask.any(1)[:, None]
    count = mask.sum(1, dtype=jnp.int32) + (0 if before is None else before.count)
    if how == "cls":
        vector = jnp.where(mask[:, :1], x[:, 0], 0)
    elif how == "mean":
        accumulate = jnp.promote_types(x.dtype, jnp.float32)
        vector = jnp.where(real, x, 0).astype(accumulate).sum(1)
        vector = vector if before is None else before.vector + vector
        mean = vector / jnp.maximum(count, 1).astype(accumulate)[:, None]
        return Pooled(vector, count), mean.astype(x.dtype)
    elif how == "max":
        vector = jnp.where(some, jnp.where(real, x, -jnp.inf).max(1), 0)
        if before is not None:
            both = jnp.where(some, jnp.maximum(vector, before.vector), before.vector)
            vector = jnp.where(before.count[:, None] > 0, both, vector)
    else:
        index = (x.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1))[:, None, None]
        last = jnp.take_along_axis(x, index, axis=1)[:, 0]
        vector = jnp.where(some, last, 0 if before is None else before.vector)
    return Pooled(vector, count), vector


def pool(x: Float[Array, "B L D"], mask: Bool[Array, "B L"], how: str) -> Float[Array, "B D"]:
    """One vector a sequence; see `pool_more`."""
    return pool_more(None, x, mask, how)[1]


class Head(nnx.Module):
    """Logits from the encoder's output.

    * classify: Dense(hidden) – relu – Dense(classes) on the pooled vector;
    * match: the pooled vectors of two documents as concat(a, b), or "nli" concat(a, b, a·b, a−b),
      then Dense(hidden) – relu – Dense(hidden/2) – relu – Dense(classes);
    * tag: Dense(classes) at every position.

    Args:
        kind: one of `KINDS`.
        dim: width of the encoder.
        hidden: width of the hidden layer; 0 leaves it out (classify).
        num_classes: C.
        match: "concat" or "nli", for kind match.
        rngs: stream `params`.
        dtype: compute type; logits come out in `promote_types(dtype, float32)`.

    Raises:
        ValueError: for an unknown kind or match, or a match head without a hidden layer.
    """

    def __init__(
        self,
        kind: str,
        *,
        dim: int,
        hidden: int,
        num_classes: int,
        match: str,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
    ):
        if kind not in KINDS:
            raise ValueError(f"a task's kind must be one of {', '.join(KINDS)}; got {kind!r}")
        if match not in MATCHES:
            raise ValueError(f"model.match must be one of {', '.join(MATCHES)}; got {match!r}")
        if hidden < 0 or (kind == "match" and hidden < 2):
            raise ValueError(f"a {kind} head cannot have a hidden width of {hidden}")
        self.kind = kind
        self.match = match
        self.dtype = jnp.promote_types(dtype, jnp.float32)
        if kind == "classify":
            widths = [dim, hidden, num_classes] if hidden else [dim, num_classes]
        elif kind == "match":
            widths = [dim * (4 if match == "nli" else 2), hidden, hidden // 2, num_classes]
        else:
            widths = [dim, num_classes]
        self.layers = nnx.List(
            nnx.Linear(
                fan_in,
                fan_out,
                dtype=dtype,
                kernel_init=nnx.initializers.xavier_uniform(),
                rngs=rngs,
            )
            for fan_in, fan_out in itertools.pairwise(widths)
        )

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Logits: `[B, C]` from `[B, D]` (classify) or `[B, 2, D]` (match), `[B, L, C]` from `[B, L, D]`."""
        if self.kind == "match":
            a, b = x[:, 0], x[:, 1]
            x = jnp.concatenate([a, b, a * b, a - b] if self.match == "nli" else [a, b], axis=-1)
        for layer in list(self.layers)[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x).astype(self.dtype)
