"""Softmax attention (Vaswani et al. 2017, arXiv 1706.03762, eq. 1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from models.attention.base import Attention, Features, visible
from models.attention.blockwise import blockwise_softmax


class Softmax(Attention):
    """o_i = Σ_j softmax_j(q_i·k_j / √K) v_j, exact, in blocks.

    Every row of weights sums to 1 over the real keys that the query may see. Time grows with L²,
    memory with L; there is no state of fixed size. Arguments are those of `Attention`.
    """

    has_weights = True

    def mix(
        self,
        features: Features,
        mask: Bool[Array, "B S"],
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B H L K"]:
        """See `Attention.mix`."""
        return blockwise_softmax(
            features.query,
            features.key,
            features.value,
            mask,
            scale=self.head_dim**-0.5,
            causal=self.causal,
            dropout_rate=self.dropout,
            dropout_key=dropout_key,
        )

    def weights(self, features: Features, mask: Bool[Array, "B S"]) -> Float[Array, "B H L S"]:
        """See `Attention.weights`."""
        logits = features.query @ features.key.swapaxes(-1, -2) / self.head_dim**0.5
        seen = visible(mask, features.query.shape[2], self.causal)
        return jnp.where(
            seen, jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1, where=seen), 0
        )
