"""Softmax attention (Vaswani et al. 2017, arXiv 1706.03762, eq. 1) and scalings of its logits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from models.attention.base import Attention, Features, SpectralLinear, visible
from models.attention.blockwise import blockwise_softmax

SCALES = ("none", "fixed", "learned", "ssmax", "log_base", "adaptive")

#: β(H) of Veličković et al. 2024 (arXiv 2410.01104, appendix): coefficients of H⁴ … 1.
_ADAPTIVE = (-0.037, 0.481, -2.3, 4.917, -1.791)


def seen_keys(mask: Bool[Array, "B S"], causal: bool) -> Float[Array, "B 1 #S"]:
    """Number of real keys that each query may see, at least 1; one number a row if not causal."""
    real = mask.astype(jnp.float32)
    count = real.cumsum(-1) if causal else real.sum(-1, keepdims=True)
    return jnp.maximum(count, 1)[:, None]


class Softmax(Attention):
    """o_i = Σ_j softmax_j(β_i q_i·k_j / √K) v_j, exact, in blocks.

    Every row of weights sums to 1 over the real keys that the query may see. Time grows with L²,
    memory with L; there is no state of fixed size. `scale` says what β is; n is the number of *real*
    keys that the query sees.

    * "none": 1;
    * "fixed": 1/`temperature`;
    * "learned": a positive number for each head, from 1;
    * "ssmax": s·ln n, s learned for each head, from 1/ln max_length, so that training starts at β = 1
      (Nakanishi 2025, arXiv 2501.19399; Chiang & Cholak 2022, arXiv 2202.12172);
    * "log_base": log n / log `log_base` (Su 2021), at least 1/log `log_base` of 2;
    * "adaptive": 1 in training; in inference a polynomial of each row's entropy, at least 1
      (Veličković et al. 2024, arXiv 2410.01104). It does nothing where the entropy is above 5.9.

    Args:
        scale: one of those.
        temperature: for "fixed", above 0.
        log_base: for "log_base", above 1; 0 for max_length.
        sink: a learned logit b for each head that takes weight and gives nothing: weights
            e^l / (e^b + Σ e^l) (as in Agarwal et al. 2025, arXiv 2508.10925).
        sigma_reparam: the projections of queries and keys are γ W/σ(W), σ the spectral norm (Zhai et
            al. 2023, arXiv 2303.06296).
        **common: the arguments of `Attention`.

    Raises:
        ValueError: for an unknown scale, a value that does not belong to it or is out of range, and as
            `Attention`.
    """

    has_weights = True

    def __init__(
        self,
        *,
        scale: str = "none",
        temperature: float = 1.0,
        log_base: float = 0.0,
        sink: bool = False,
        sigma_reparam: bool = False,
        **common: Any,
    ):
        super().__init__(**common)
        if scale not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(SCALES)}; got {scale!r}")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
        if temperature != 1 and scale != "fixed":
            raise ValueError(f"temperature={temperature} has no effect with scale {scale!r}")
        if log_base and not (log_base > 1 and math.isfinite(log_base)):
            raise ValueError(f"log_base must be above 1, or 0 for max_length; got {log_base}")
        if log_base and scale != "log_base":
            raise ValueError(f"log_base={log_base} has no effect with scale {scale!r}")
        length = max(common["max_length"], 2)
        self.scale = scale
        self.temperature = float(temperature)
        self.logit_scale = self.key_dim**-0.5 / self.temperature
        self.log_base = float(log_base or length)
        heads = self.num_heads
        self.log_multiplier: Any = (
            nnx.Param(jnp.zeros(heads, jnp.float32)) if scale == "learned" else None
        )
        self.length_factor: Any = (
            nnx.Param(jnp.full(heads, 1 / math.log(length), jnp.float32))
            if scale == "ssmax"
            else None
        )
        self.sink: Any = nnx.Param(jnp.zeros(heads, jnp.float32)) if sink else None
        if sigma_reparam:
            self.query = SpectralLinear(self.query, dtype=self.dtype)
            self.key = SpectralLinear(self.key, dtype=self.dtype)
            self.redraw_interval = 1

    def redraw(self, key: Key[Array, ""]) -> None:
        """One power iteration of each spectral norm; needs no randomness."""
        del key
        for projection in (self.query, self.key):
            if isinstance(projection, SpectralLinear):
                projection.iterate()

    def multiplier(self, mask: Bool[Array, "B S"]) -> Float[Array, "#B #H #L"] | None:
        """β of each query where it is not one number for all; without the adaptive temperature."""
        if self.log_multiplier is not None:
            return jnp.exp(self.log_multiplier[...])[None, :, None]
        if self.length_factor is not None:
            length = jnp.log(seen_keys(mask, self.causal))
            return self.length_factor[...][None, :, None] * length
        if self.scale == "log_base":
            return jnp.log(jnp.maximum(seen_keys(mask, self.causal), 2)) / math.log(self.log_base)
        return None

    def _scaled(self, query: Array, mask: Array) -> Array:
        """The queries times β, in float32 or better: a rounded β would move large logits by whole units."""
        factor = self.multiplier(mask)
        if factor is None:
            return query
        return query.astype(jnp.promote_types(query.dtype, jnp.float32)) * factor[..., None]

    def adapt(self, features: Features, mask: Bool[Array, "B S"]) -> Features:
        """The adaptive temperature: queries times β(H) of the entropy H, in nats, of their row."""
        if self.scale != "adaptive":
            return features
        scale = self.logit_scale
        # With keys in the place of values the output is the mean key, and q·that the mean logit.
        # In float32 or better, because the entropy is a small difference of large numbers.
        wide = jnp.promote_types(features.query.dtype, jnp.float32)
        query, key = features.query.astype(wide), features.key.astype(wide)
        mean, log_total = blockwise_softmax(query, key, key, mask, scale=scale, causal=self.causal)
        mean_logit = scale * (query * mean).sum(-1)
        entropy = jnp.where(jnp.isfinite(log_total), log_total - mean_logit, 0)
        beta = jnp.maximum(jnp.polyval(jnp.asarray(_ADAPTIVE, entropy.dtype), entropy), 1)
        beta = jnp.where(entropy > 0.5, beta, 1)
        return dataclasses.replace(features, query=query * beta[..., None])

    def mix(
        self,
        features: Features,
        mask: Bool[Array, "B S"],
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B H L K"]:
        """See `Attention.mix`."""
        out, log_total = blockwise_softmax(
            self._scaled(features.query, mask),
            features.key,
            features.value,
            mask,
            scale=self.logit_scale,
            causal=self.causal,
            dropout_rate=self.dropout,
            dropout_key=dropout_key,
        )
        if self.sink is None:
            return out
        share = jax.nn.sigmoid(log_total - jnp.asarray(self.sink[...])[None, :, None])
        return (out * share[..., None]).astype(out.dtype)

    def weights(self, features: Features, mask: Bool[Array, "B S"]) -> Float[Array, "B H L S"]:
        """See `Attention.weights`."""
        logits = features.query @ features.key.swapaxes(-1, -2)
        logits = logits / self.key_dim**0.5 / self.temperature
        if (factor := self.multiplier(mask)) is not None:
            logits = logits * factor[..., None]
        seen = visible(mask, features.query.shape[2], self.causal)
        logits = jnp.where(seen, logits, -jnp.inf)
        if self.sink is None:
            return jnp.where(seen, jax.nn.softmax(logits, axis=-1, where=seen), 0)
        sink = jnp.broadcast_to(
            self.sink[...].astype(logits.dtype)[None, :, None, None], (*logits.shape[:3], 1)
        )
        return jax.nn.softmax(jnp.concatenate([logits, sink], -1), axis=-1)[..., :-1]

    def state_floats(self, length: int) -> int:
        """See `Attention.state_floats`: every key and value."""
        return self.num_heads * length * (self.key_dim + self.head_dim)

    def mixing_flops(self, length: int) -> float:
        """See `Attention.mixing_flops`: half of the pairs if causal."""
        pairs = (length + 1) / 2 if self.causal else length
        return self.num_heads * 2.0 * pairs * (self.key_dim + self.head_dim)


class SSMax(Softmax):
    """Softmax whose logits grow with s·ln n: `Softmax` with `scale` "ssmax" from the start."""

    def __init__(self, *, scale: str = "ssmax", **common: Any):
        super().__init__(scale=scale, **common)
