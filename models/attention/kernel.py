"""Attention by a kernel φ(q)·φ(k): what the Linear Transformer's relatives share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from models.attention import chunked
from models.attention.base import Attention, Features, visible

#: The smallest feature of a key. Where no feature of a key is left in float32, there would be nothing
#: to divide by; with the floor the denominator stays above 1e-13, and its square, which the gradient
#: divides by, is far from underflow.
KEY_FLOOR = 1e-13


class HeadNorm(nnx.Module):
    """RMS norm of each head's output (Zhang & Sennrich 2019, arXiv 1910.07467), with a scale.

    Args:
        width: channels of a head.
    """

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))

    def __call__(self, x: Float[Array, "B H L K"]) -> Float[Array, "B H L K"]:
        """Normalises the last axis."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        # Relative to the largest entry: the square of a sum over a long sequence may overflow.
        top = jax.lax.stop_gradient(jnp.maximum(jnp.abs(wide).max(-1, keepdims=True), 1))
        wide = wide / top
        mean = (wide**2).mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + 1e-5 / top**2) * self.scale[...]).astype(x.dtype)


class KernelAttention(Attention):
    """o_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j): O(L) time and memory.

    A subclass gives the features in two ways: `query_features` and `key_features`, with factors taken
    out so that nothing leaves the range, and `naive_features`, the formula as it is written. The
    causal form carries a state of M·(K + 1) floats a head. Denominators have no epsilon: rows of
    weights sum to 1, and a row without a real key gives zeros.

    Args:
        chunk_size: tokens of a chunk in the causal form; affects speed, not results.
        normalise: False leaves the denominator out and puts an RMS norm on each head's output
            instead (Qin et al. 2022, arXiv 2210.10340).
        **common: the arguments of `Attention`.

    Raises:
        ValueError: for a chunk size below 1, and as `Attention`.
    """

    def __init__(self, *, chunk_size: int = 128, normalise: bool = True, **common: Any):
        super().__init__(**common)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
        self.chunk_size = chunk_size
        self.normalise = normalise
        self.head_norm = None if normalise else HeadNorm(self.head_dim)

    @property
    def num_features(self) -> int:
        """M, the width of φ."""
        return self.key_dim

    def query_features(self, query: Float[Array, "B H L K"]) -> Float[Array, "B H L M"]:
        """φ(q) in float32 or better, up to a factor of each query if `normalise`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement query_features")

    def key_features(
        self, key: Float[Array, "B H S K"]
    ) -> tuple[Float[Array, "B H S M"], Float[Array, "B H S"] | None]:
        """φ(k) in float32 or better, and the logarithm of a factor of each key taken out of it."""
        raise NotImplementedError(f"{type(self).__name__} does not implement key_features")

    def naive_features(self, x: Float[Array, "B H L K"], role: str) -> Float[Array, "B H L M"]:
        """φ as the paper writes it; `role` is "query" or "key"."""
        raise NotImplementedError(f"{type(self).__name__} does not implement naive_features")

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
        key, log_scale = self.key_features(features.key)
        query = self.query_features(features.query)
        sums = chunked.bidirectional(query, key, features.value, mask, log_scale=log_scale)
        return self._output(sums).astype(features.value.dtype)

    def _output(self, sums: chunked.Sums) -> Float[Array, "B H L K"]:
        if not self.normalise:
            return sums.numerator
        return chunked.divide(sums.numerator, sums.denominator)

    def init_state(self, batch: int) -> Any:
        """The state before the first token, for `step`.

        Raises:
            ValueError: if the layer is bidirectional: it has no recurrent form.
        """
        if not self.causal:
            raise ValueError(
                "a bidirectional layer has no recurrent form: build it with causal=True"
            )
        dtype = jnp.promote_types(self.dtype, jnp.float32)
        return chunked.LinearState.zeros(
            batch, self.num_heads, self.num_features, self.head_dim, dtype
        )

    def step(
        self, state: Any, features: Features, mask: Bool[Array, "B L"]
    ) -> tuple[Any, Float[Array, "B H L K"]]:
        """The next L ≥ 1 tokens, given the state the ones before them left.

        Returns:
            The state after them, and `mix`'s output for them.
        """
        key, log_scale = self.key_features(features.key)
        state, sums = chunked.causal(
            state,
            self.query_features(features.query),
            key,
            features.value,
            mask,
            chunk_size=self.chunk_size,
            log_scale=log_scale,
        )
        return state, self._output(sums).astype(features.value.dtype)

    def weights(self, features: Features, mask: Bool[Array, "B S"]) -> Float[Array, "B H L S"]:
        """See `Attention.weights`."""
        query = self.naive_features(features.query, "query")
        key = self.naive_features(features.key, "key")
        return self.normalised(query @ key.swapaxes(-1, -2), mask)

    def normalised(
        self, similarity: Float[Array, "B H L S"], mask: Bool[Array, "B S"]
    ) -> Float[Array, "B H L S"]:
        """The kernel's values over what a query may see, divided by their sum; for references."""
        similarity = jnp.where(visible(mask, similarity.shape[2], self.causal), similarity, 0)
        if not self.normalise:
            return similarity
        total = similarity.sum(-1, keepdims=True)
        return jnp.where(total > 0, similarity / jnp.where(total > 0, total, 1), 0)

    def finish(self, mixed: Float[Array, "B H L K"], features: Any) -> Float[Array, "B L D"]:
        """See `Attention.finish`; without a denominator, the norm of each head comes first."""
        if self.head_norm is not None:
            mixed = self.head_norm(mixed)
        return super().finish(mixed, features)

    def state_floats(self, length: int) -> int:
        """See `Attention.state_floats`."""
        del length
        return self.num_heads * self.num_features * (self.head_dim + 1)

    def mixing_flops(self, length: int) -> float:
        """See `Attention.mixing_flops`: 2 M·K to add a token to the state, 2 M·K to read it."""
        del length
        return self.num_heads * 4.0 * self.num_features * self.head_dim
