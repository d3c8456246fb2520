"""Performer: FAVOR+ (Choromanski et al. 2021, arXiv 2009.14794)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from models.attention.base import Buffer
from models.attention.kernel import KEY_FLOOR, KernelAttention

KERNELS = ("softmax", "relu")
#: Added to the features of the generalised ReLU kernel, as in the original LRA code.
RELU_EPSILON = 1e-3


def orthogonal_features(
    key: Key[Array, ""], heads: int, count: int, width: int
) -> Float[Array, "H M K"]:
    """Rows that are orthogonal within blocks of `width` and have the norms of Gaussian ones.

    Each row by itself is N(0, I), so estimates stay unbiased (section 4, "orthogonal random
    features"); the last block is cut where `width` does not divide `count`.

    Args:
        key: randomness.
        heads: independent matrices.
        count: rows.
        width: columns.
    """
    direction_key, norm_key = jax.random.split(key)
    blocks = -(-count // width)
    square = jax.random.normal(direction_key, (heads, blocks, width, width), jnp.float32)
    q, r = jnp.linalg.qr(square)
    # QR with a positive diagonal of R is uniform over the orthogonal group.
    q = q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
    rows = q.swapaxes(-1, -2).reshape(heads, blocks * width, width)[:, :count]
    norms = jnp.linalg.norm(
        jax.random.normal(norm_key, (heads, count, width), jnp.float32), axis=-1, keepdims=True
    )
    return rows * norms


def log_positive_features(
    x: Float[Array, "B H L K"], projection: Float[Array, "H M K"]
) -> Float[Array, "B H L M"]:
    """log of M^-½ exp(Wx′ − ‖x′‖²/2) with x′ = x K^-¼ (lemma 1): E φ(q)·φ(k) = exp(q·k/√K)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) * x.shape[-1] ** -0.25
    projected = jnp.einsum("bhlk,hmk->bhlm", wide, projection.astype(wide.dtype))
    half_norm = (wide**2).sum(-1, keepdims=True) / 2
    return projected - half_norm - 0.5 * math.log(projection.shape[1])


class Performer(KernelAttention):
    """Kernel attention with positive orthogonal random features that estimate softmax's kernel.

    The estimate is good for small norms only: with independent features its relative error is
    √((e^{‖q+k‖²} − 1)/M), for q and k scaled by K^-¼.

    Each query's and each key's largest feature is taken out in the logarithm, the key's as a weight of
    that key alone: neither a maximum over positions nor an epsilon lets later keys change what came
    before. Features of keys are at least 1e-13 of their largest.

    `kernel` "relu" is what the original LRA code runs under the name Performer on most tasks: φ(x) =
    relu(x) + 1e-3, without random features.

    Args:
        num_features: M; any number, 0 for K ln K.
        kernel: "softmax" or "relu".
        redraw_interval: training steps between new random features; 0 keeps the first.
        **common: the arguments of `KernelAttention` and `Attention`.

    Raises:
        ValueError: for an unknown kernel, numbers below 0, random features' values with "relu", and as
            `KernelAttention`.
    """

    def __init__(
        self,
        *,
        num_features: int = 0,
        kernel: str = "softmax",
        redraw_interval: int = 0,
        **common: Any,
    ):
        super().__init__(**common)
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}; got {kernel!r}")
        for name, value in (("num_features", num_features), ("redraw_interval", redraw_interval)):
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
            if value and kernel == "relu":
                raise ValueError(
                    f"kernel 'relu' has no random features: {name} must be 0, got {value}"
                )
        if not self.normalise and kernel == "softmax":
            raise ValueError("FAVOR+ needs its denominator: normalise must be True")
        self.kernel = kernel
        self.redraw_interval = redraw_interval
        self._features = num_features or max(round(self.key_dim * math.log(self.key_dim)), 1)
        self.projection = (
            Buffer(self._draw(common["rngs"].params())) if kernel == "softmax" else None
        )

    def _draw(self, key: Key[Array, ""]) -> Float[Array, "H M K"]:
        return orthogonal_features(key, self.num_heads, self._features, self.key_dim)

    def redraw(self, key: Key[Array, ""]) -> None:
        """New random features."""
        if self.projection is not None:
            self.projection[...] = self._draw(key)

    @property
    def num_features(self) -> int:
        """M."""
        return self._features if self.kernel == "softmax" else self.key_dim

    def query_features(self, query: Float[Array, "B H L K"]) -> Float[Array, "B H L M"]:
        """See `KernelAttention.query_features`."""
        if self.projection is None:
            return _relu(query)
        logs = log_positive_features(query, self.projection[...])
        return jnp.exp(logs - jax.lax.stop_gradient(logs.max(-1, keepdims=True)))

    def key_features(
        self, key: Float[Array, "B H S K"]
    ) -> tuple[Float[Array, "B H S M"], Float[Array, "B H S"] | None]:
        """See `KernelAttention.key_features`."""
        if self.projection is None:
            return _relu(key), None
        logs = log_positive_features(key, self.projection[...])
        top = logs.max(-1)
        return jnp.maximum(jnp.exp(logs - top[..., None]), KEY_FLOOR), top

    def naive_features(self, x: Float[Array, "B H L K"], role: str) -> Float[Array, "B H L M"]:
        """See `KernelAttention.naive_features`.

        Scaled by e^{−max} of the logarithms over all positions, which no ratio sees.
        """
        if self.projection is None:
            return jnp.where(x > 0, x, 0) + RELU_EPSILON
        scaled = x * self.key_dim**-0.25
        projected = scaled @ self.projection[...].astype(x.dtype).swapaxes(-1, -2)
        logs = projected - (scaled * scaled).sum(-1, keepdims=True) / 2
        if role == "query":
            return jnp.exp(logs - logs.max(-1, keepdims=True))
        features = jnp.exp(logs - logs.max((2, 3), keepdims=True))
        return jnp.maximum(features, KEY_FLOOR * features.max(-1, keepdims=True))

    def mixing_flops(self, length: int) -> float:
        """See `Attention.mixing_flops`: random features of a query and a key cost 4 M·K a token."""
        flops = super().mixing_flops(length)
        if self.projection is None:
            return flops
        return flops + self.num_heads * 4.0 * self.num_features * self.key_dim


def _relu(x: Float[Array, "B H L K"]) -> Float[Array, "B H L K"]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.relu(wide) + RELU_EPSILON
