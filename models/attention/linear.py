"""The Linear Transformer's attention (Katharopoulos et al. 2020, arXiv 2006.16236) and its feature maps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.attention.kernel import KEY_FLOOR, KernelAttention


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def log_elu_plus_one(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """log(elu(x) + 1): x up to 0, log(1 + x) above."""
    return jnp.where(x > 0, jnp.log1p(jnp.maximum(x, 0)), x)


def over_largest(features: Float[Array, "*B M"]) -> Float[Array, "*B M"]:
    """Each row divided by its largest magnitude; zeros stay zeros."""
    top = jax.lax.stop_gradient(jnp.abs(features).max(-1, keepdims=True))
    return features / jnp.where(top > 0, top, 1)


def elu_plus_one(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """elu(x) + 1, without the cancellation of e^x − 1 + 1."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


def softmax_features(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """Softmax over the channels of each token."""
    return jax.nn.softmax(x, axis=-1)


#: Elementwise or row-wise maps with features ≥ 0.
POSITIVE = {
    "elu": elu_plus_one,
    "relu": jax.nn.relu,
    "relu2": lambda x: jax.nn.relu(x) ** 2,
    "exp": softmax_features,
}


class Linear(KernelAttention):
    """Kernel attention with a fixed, positive feature map.

    `feature_map`: "elu", elu(x) + 1 (the Linear Transformer's); "relu" and "relu2", its square; "exp",
    a softmax over the channels of each token (Shen et al. 2021, arXiv 1812.01243, and the
    normalised form of Zhang et al. 2024, arXiv 2402.04347). Features of keys are at least 1e-13.

    Args:
        feature_map: one of those.
        **common: the arguments of `KernelAttention` and `Attention`.

    Raises:
        ValueError: for an unknown feature map, and as `KernelAttention`.
    """

    def __init__(self, *, feature_map: str = "elu", **common: Any):
        super().__init__(**common)
        if feature_map not in POSITIVE:
            raise ValueError(
                f"feature_map must be one of {', '.join(POSITIVE)}; got {feature_map!r}"
            )
        self.feature_map = feature_map

    def query_features(self, query: Float[Array, "B H L K"]) -> Float[Array, "B H L K"]:
        """See `KernelAttention.query_features`.

        elu + 1 is divided by its largest feature in log space: a very negative query keeps its
        proportions instead of becoming 0/0.
        """
        x = _wide(query)
        if not self.normalise:
            return POSITIVE[self.feature_map](x)
        if self.feature_map == "elu":
            logs = log_elu_plus_one(x)
            return jnp.exp(logs - jax.lax.stop_gradient(logs.max(-1, keepdims=True)))
        return over_largest(POSITIVE[self.feature_map](x))

    def key_features(self, key: Float[Array, "B H S K"]) -> tuple[Float[Array, "B H S K"], None]:
        """See `KernelAttention.key_features`."""
        return jnp.maximum(POSITIVE[self.feature_map](_wide(key)), KEY_FLOOR), None

    def naive_features(self, x: Float[Array, "B H L K"], role: str) -> Float[Array, "B H L K"]:
        """See `KernelAttention.naive_features`."""
        relu = jnp.where(x > 0, x, 0)
        features = {
            "elu": jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x))),
            "relu": relu,
            "relu2": relu * relu,
            "exp": jnp.exp(x - x.max(-1, keepdims=True))
            / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True),
        }[self.feature_map]
        return jnp.maximum(features, KEY_FLOOR) if role == "key" else features


class Taylor(KernelAttention):
    """Based's second-order Taylor features (Arora et al. 2024, arXiv 2402.18668).

    φ(x) = [1, x/d^¼, x_i²/√(2d), x_i x_j/√d (i < j)], so that φ(q)·φ(k) = 1 + s + s²/2 with
    s = q·k/√d: the exponential to second order, at least ½. Queries and keys are d = `feature_dim`
    wide, because M = 1 + d + d(d + 1)/2 grows with its square.

    Args:
        feature_dim: d.
        **common: the arguments of `KernelAttention` and `Attention`.

    Raises:
        ValueError: for a width below 1, and as `KernelAttention`.
    """

    def __init__(self, *, feature_dim: int = 16, **common: Any):
        if feature_dim < 1:
            raise ValueError(f"feature_dim must be at least 1, got {feature_dim}")
        super().__init__(key_dim=feature_dim, **common)

    @property
    def num_features(self) -> int:
        """1 + d + d(d + 1)/2."""
        return 1 + self.key_dim + self.key_dim * (self.key_dim + 1) // 2

    def _features(self, x: Float[Array, "B H L K"]) -> Float[Array, "B H L M"]:
        d = x.shape[-1]
        rows, columns = jnp.triu_indices(d)
        factor = jnp.where(rows == columns, (2 * d) ** -0.5, d**-0.5).astype(x.dtype)
        ones = jnp.ones((*x.shape[:-1], 1), x.dtype)
        return jnp.concatenate([ones, x / d**0.25, x[..., rows] * x[..., columns] * factor], -1)

    def query_features(self, query: Float[Array, "B H L K"]) -> Float[Array, "B H L M"]:
        """See `KernelAttention.query_features`."""
        features = self._features(_wide(query))
        return over_largest(features) if self.normalise else features

    def key_features(self, key: Float[Array, "B H S K"]) -> tuple[Float[Array, "B H S M"], None]:
        """See `KernelAttention.key_features`."""
        return self._features(_wide(key)), None

    def weights(self, features: Any, mask: Any) -> Float[Array, "B H L S"]:
        """1 + s + s²/2, normalised; see `Attention.weights`."""
        s = features.query @ features.key.swapaxes(-1, -2) / self.key_dim**0.5
        return self.normalised(1 + s + s**2 / 2, mask)


class Hedgehog(KernelAttention):
    """Learned features φ(x) = softmax([Wx, −Wx]) (Zhang et al. 2024, arXiv 2402.04347, eq. 6).

    W is one matrix for each head and for queries and keys, and starts at the identity. Features of
    keys are at least 1e-13. Arguments are those of `KernelAttention` and `Attention`.
    """

    def __init__(self, **common: Any):
        super().__init__(**common)
        # Two arrays: a step that is given its state as donated may not meet one twice.
        self.query_map, self.key_map = (
            nnx.Param(jnp.tile(jnp.eye(self.key_dim, dtype=jnp.float32), (self.num_heads, 1, 1)))
            for _ in range(2)
        )

    @property
    def num_features(self) -> int:
        """2K."""
        return 2 * self.key_dim

    def query_features(self, query: Float[Array, "B H L K"]) -> Float[Array, "B H L M"]:
        """See `KernelAttention.query_features`."""
        features = self._features(query, self.query_map)
        return over_largest(features) if self.normalise else features

    def key_features(self, key: Float[Array, "B H S K"]) -> tuple[Float[Array, "B H S M"], None]:
        """See `KernelAttention.key_features`."""
        return jnp.maximum(self._features(key, self.key_map), KEY_FLOOR), None

    def _features(self, x: Float[Array, "B H L K"], maps: Any) -> Float[Array, "B H L M"]:
        x = _wide(x)
        mapped = jnp.einsum("bhlk,hmk->bhlm", x, maps[...].astype(x.dtype))
        return softmax_features(jnp.concatenate([mapped, -mapped], axis=-1))

    def naive_features(self, x: Float[Array, "B H L K"], role: str) -> Float[Array, "B H L M"]:
        """See `KernelAttention.naive_features`."""
        maps = (self.query_map if role == "query" else self.key_map)[...].astype(x.dtype)
        mapped = x @ maps.swapaxes(-1, -2)
        both = jnp.concatenate([mapped, -mapped], -1)
        top = jnp.abs(mapped).max(-1, keepdims=True)
        features = jnp.exp(both - top) / jnp.exp(both - top).sum(-1, keepdims=True)
        return jnp.maximum(features, KEY_FLOOR) if role == "key" else features

    def mixing_flops(self, length: int) -> float:
        """See `Attention.mixing_flops`: the features cost 4K² a token."""
        return super().mixing_flops(length) + self.num_heads * 4.0 * self.key_dim**2
