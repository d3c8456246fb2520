"""The Linear Transformer's attention (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from models.attention import chunked
from models.attention.base import Attention, Features, visible

#: The smallest feature of a key. Where every key of a row is below about −30, elu + 1 would leave
#: nothing to divide by in float32; with the floor the denominator stays above 1e-13, and its square,
#: which the gradient divides by, is far from underflow.
KEY_FLOOR = 1e-13


def log_elu_plus_one(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """log(elu(x) + 1): x up to 0, log(1 + x) above."""
    return jnp.where(x > 0, jnp.log1p(jnp.maximum(x, 0)), x)


def query_features(query: Float[Array, "B H L K"]) -> Float[Array, "B H L K"]:
    """elu(q) + 1, each query divided by its largest feature.

    The factor cancels between numerator and denominator, so the weights are those of elu + 1; taken
    out in log space it lets a very negative query keep its proportions instead of becoming 0/0.
    """
    x = query.astype(jnp.promote_types(query.dtype, jnp.float32))
    logs = log_elu_plus_one(x)
    top = logs.max(-1, keepdims=True)
    return jnp.exp(logs - jax.lax.stop_gradient(top))


def key_features(key: Float[Array, "B H S K"]) -> Float[Array, "B H S K"]:
    """max(elu(k) + 1, 1e-13)."""
    x = key.astype(jnp.promote_types(key.dtype, jnp.float32))
    return jnp.maximum(jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x))), KEY_FLOOR)


class Linear(Attention):
    """o_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j) with φ = elu + 1.

    O(L) time and memory; the causal form carries a state of K·(K + 1) floats a head. The denominator
    has no epsilon: rows of weights sum to 1, and a row without a real key gives zeros.

    Args:
        chunk_size: tokens of a chunk in the causal form; affects speed, not results.
        **common: the arguments of `Attention`.

    Raises:
        ValueError: for a chunk size below 1, and as `Attention`.
    """

    def __init__(self, *, chunk_size: int = 128, **common: Any):
        super().__init__(**common)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
        self.chunk_size = chunk_size

    def mix(
        self,
        features: Features,
        mask: Bool[Array, "B S"],
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B H L K"]:
        """See `Attention.mix`; there are no weights to drop, `dropout_key` is not used."""
        del dropout_key
        if self.causal:
            return self.step(self.init_state(features.value.shape[0]), features, mask)[1]
        return chunked.bidirectional(
            query_features(features.query), key_features(features.key), features.value, mask
        ).astype(features.value.dtype)

    def init_state(self, batch: int) -> chunked.LinearState:
        """The state before the first token, for `step`.

        Raises:
            ValueError: if the layer is bidirectional: it has no recurrent form.
        """
        if not self.causal:
            raise ValueError(
                "a bidirectional layer has no recurrent form: build it with causal=True"
            )
        dtype = jnp.promote_types(self.dtype, jnp.float32)
        return chunked.LinearState.zeros(batch, self.num_heads, self.head_dim, self.head_dim, dtype)

    def step(
        self, state: chunked.LinearState, features: Features, mask: Bool[Array, "B L"]
    ) -> tuple[chunked.LinearState, Float[Array, "B H L K"]]:
        """The next L ≥ 1 tokens, given the state the ones before them left.

        Returns:
            The state after them, and `mix`'s output for them.
        """
        state, mixed = chunked.causal(
            state,
            query_features(features.query),
            key_features(features.key),
            features.value,
            mask,
            chunk_size=self.chunk_size,
        )
        return state, mixed.astype(features.value.dtype)

    def weights(self, features: Features, mask: Bool[Array, "B S"]) -> Float[Array, "B H L S"]:
        """See `Attention.weights`."""
        query = jax.nn.elu(features.query) + 1
        key = jnp.maximum(jax.nn.elu(features.key) + 1, KEY_FLOOR)
        similarity = query @ key.swapaxes(-1, -2)
        similarity = jnp.where(visible(mask, query.shape[2], self.causal), similarity, 0)
        total = similarity.sum(-1, keepdims=True)
        return jnp.where(total > 0, similarity / jnp.where(total > 0, total, 1), 0)
