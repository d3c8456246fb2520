"""Random Feature Attention (Peng et al. 2021, arXiv 2103.02143)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from models.attention import chunked
from models.attention.base import Buffer, Features, GateProjection, Past, unit, visible
from models.attention.kernel import KernelAttention

FEATURE_MAPS = ("sincos", "arccos")
#: The least share of Σ_j w_j that a denominator may have. Estimates of kernels with sines and cosines
#: can be negative, and so can their sum; two unit vectors have a Gaussian kernel of at least e^-2.
LEAST_SHARE = 1e-2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatedFeatures(Features):
    """`Features` with a gate of each position and head.

    Attributes:
        gate: the logit of g, `[B, H, L]`.
    """

    gate: Float[Array, "B H L"]


class RFA(KernelAttention):
    """Kernel attention with random features of a Gaussian or arc-cosine kernel of unit vectors.

    Queries and keys have norm 1. W̃ = W diag(s) with W ~ N(0, I), of D rows, and s learned for each
    dimension and head (section 3.1). `feature_map` "sincos" is D^-½ [sin W̃x, cos W̃x], which estimates
    exp(−‖s∘(q − k)‖²/2), the Gaussian kernel that is proportional to softmax's for unit vectors;
    "arccos" is (2/D)^½ relu(W̃x).

    Estimates by sines and cosines, and weights with them, can be negative. A denominator is at least
    1 % of the number of keys (with a gate, of their weights' sum), so that no output exceeds 100
    times the largest value; rows of weights then sum to less than 1.

    With `gate`, S_t = g_t S_{t−1} + (1 − g_t) φ(k_t) v_tᵀ, likewise the denominator, g = σ(w·x + b) a
    number for each position and head (section 3.2). Bidirectional: sums of both directions over one
    denominator, the position itself once.

    Args:
        num_features: D; 0 for K.
        feature_map: "sincos" or "arccos".
        gate: see above.
        redraw_interval: training steps between new random features; 0 keeps the first.
        **common: the arguments of `KernelAttention` and `Attention`.

    Raises:
        ValueError: for an unknown feature map, numbers below 0, `normalise` False, and as
            `KernelAttention`.
    """

    def __init__(
        self,
        *,
        num_features: int = 0,
        feature_map: str = "sincos",
        gate: bool = False,
        redraw_interval: int = 0,
        **common: Any,
    ):
        super().__init__(**common)
        if feature_map not in FEATURE_MAPS:
            raise ValueError(
                f"feature_map must be one of {', '.join(FEATURE_MAPS)}; got {feature_map!r}"
            )
        for name, value in (("num_features", num_features), ("redraw_interval", redraw_interval)):
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if not self.normalise:
            raise ValueError("RFA needs its denominator: normalise must be True")
        self.feature_map = feature_map
        self.redraw_interval = redraw_interval
        self._random = num_features or self.key_dim
        rngs = common["rngs"]
        self.projection = Buffer(self._draw(rngs.params()))
        self.scale = nnx.Param(jnp.ones((self.num_heads, self.key_dim), jnp.float32))
        # A bias that forgets over about a quarter of the training length: b = log of that many tokens.
        bias = math.log(max(common["max_length"] / 4, 1))
        self.gate = (
            GateProjection(common["dim"], self.num_heads, bias=bias, rngs=rngs, dtype=self.dtype)
            if gate
            else None
        )

    def _draw(self, key: Key[Array, ""]) -> Float[Array, "H D K"]:
        shape = (self.num_heads, self._random, self.key_dim)
        return jax.random.normal(key, shape, jnp.float32)

    def redraw(self, key: Key[Array, ""]) -> None:
        """New random features."""
        self.projection[...] = self._draw(key)

    @property
    def num_features(self) -> int:
        """M: 2D for sines and cosines, D else."""
        return self._random * (2 if self.feature_map == "sincos" else 1)

    def project(
        self, x: Float[Array, "B L D"], mask: Bool[Array, "B L"], past: Past | None = None
    ) -> Any:
        """See `Attention.project`."""
        features = super().project(x, mask, past)
        if self.gate is None:
            return features
        gate = self.gate(self.real_tokens(x, mask)).swapaxes(1, 2)
        return GatedFeatures(features.query, features.key, features.value, gate)

    def random_features(self, x: Float[Array, "B H L K"]) -> Float[Array, "B H L M"]:
        """φ(x/‖x‖)."""
        x = unit(x)
        rows = (self.projection[...] * self.scale[...][:, None]).astype(x.dtype)
        projected = jnp.einsum("bhlk,hdk->bhld", x, rows)
        if self.feature_map == "arccos":
            return jax.nn.relu(projected) * (2 / self._random) ** 0.5
        both = jnp.concatenate([jnp.sin(projected), jnp.cos(projected)], axis=-1)
        return both * self._random**-0.5

    def query_features(self, query: Float[Array, "B H L K"]) -> Float[Array, "B H L M"]:
        """See `KernelAttention.query_features`."""
        return self.random_features(query)

    def key_features(self, key: Float[Array, "B H S K"]) -> tuple[Float[Array, "B H S M"], None]:
        """See `KernelAttention.key_features`."""
        return self.random_features(key), None

    def _output(self, sums: chunked.Sums) -> Float[Array, "B H L K"]:
        least = LEAST_SHARE * sums.count
        return chunked.divide(sums.numerator, jnp.maximum(sums.denominator, least))

    def _gates(self, features: GatedFeatures) -> tuple[Array, Array]:
        """log(1 − g) and log g."""
        logit = features.gate.astype(jnp.promote_types(features.gate.dtype, jnp.float32))
        return jax.nn.log_sigmoid(-logit), jax.nn.log_sigmoid(logit)

    def mix(
        self,
        features: Features,
        mask: Bool[Array, "B S"],
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B H L K"]:
        """See `Attention.mix`."""
        if self.causal or not isinstance(features, GatedFeatures):
            return super().mix(features, mask, dropout_key)
        value = features.value
        query, key = self.random_features(features.query), self.random_features(features.key)
        log_scale, log_gate = self._gates(features)
        batch, heads, _, width = value.shape
        state = chunked.LinearState.zeros(batch, heads, self.num_features, width, query.dtype)

        def flip(x: Array) -> Array:
            return jnp.flip(x, axis=2)

        def scan(query: Array, key: Array, value: Array, scale: Array, gate: Array, mask: Array):
            return chunked.causal(
                state, query, key, value, mask,
                chunk_size=self.chunk_size, log_scale=scale, log_gate=gate,
            )[1]  # fmt: skip

        forward = scan(query, key, value, log_scale, log_gate, mask)
        backward = scan(
            flip(query),
            flip(key),
            flip(value),
            flip(log_scale),
            flip(log_gate),
            jnp.flip(mask, axis=1),
        )
        backward = jax.tree.map(flip, backward)
        level = jnp.maximum(forward.level, backward.level)
        ahead, behind = (jnp.exp(s.level - level) for s in (forward, backward))
        # A row of pads alone has no level: masked before the exponential as well as after.
        real = mask[:, None]
        own = jnp.where(real, jnp.exp(jnp.where(real, log_scale - level, 0)), 0)
        own_weight = own * (query * key).sum(-1)
        own_value = jnp.where(mask[:, None, :, None], value, 0)
        sums = chunked.Sums(
            forward.numerator * ahead[..., None]
            + backward.numerator * behind[..., None]
            - own_weight[..., None] * own_value,
            forward.denominator * ahead + backward.denominator * behind - own_weight,
            forward.count * ahead + backward.count * behind - own,
            level,
        )
        return self._output(sums).astype(value.dtype)

    def step(
        self, state: Any, features: Features, mask: Bool[Array, "B L"]
    ) -> tuple[Any, Float[Array, "B H L K"]]:
        """See `KernelAttention.step`."""
        if not isinstance(features, GatedFeatures):
            return super().step(state, features, mask)
        log_scale, log_gate = self._gates(features)
        state, sums = chunked.causal(
            state,
            self.random_features(features.query),
            self.random_features(features.key),
            features.value,
            mask,
            chunk_size=self.chunk_size,
            log_scale=log_scale,
            log_gate=log_gate,
        )
        return state, self._output(sums).astype(features.value.dtype)

    def weights(self, features: Features, mask: Bool[Array, "B S"]) -> Float[Array, "B H L S"]:
        """See `Attention.weights`."""

        def phi(x: Array) -> Array:
            square = (x**2).sum(-1, keepdims=True)
            x = x / jnp.where(square > 0, square, 1) ** 0.5
            rows = (self.projection[...] * self.scale[...][:, None]).astype(x.dtype)
            projected = x @ rows.swapaxes(-1, -2)
            if self.feature_map == "arccos":
                return jnp.where(projected > 0, projected, 0) * (2 / self._random) ** 0.5
            both = [jnp.sin(projected), jnp.cos(projected)]
            return jnp.concatenate(both, -1) / self._random**0.5

        similarity = phi(features.query) @ phi(features.key).swapaxes(-1, -2)
        strength = jnp.ones_like(similarity)
        if isinstance(features, GatedFeatures):
            real = mask[:, None]
            gates = jnp.where(real, jax.nn.log_sigmoid(features.gate), 0)
            # The product of the gates after j up to i; of those before j down to i, if i < j.
            later = chunked.segment_sums(gates)
            earlier = chunked.segment_sums(gates[..., ::-1])[..., ::-1, ::-1]
            strength = jnp.exp(later + earlier) * jax.nn.sigmoid(-features.gate)[..., None, :]
        seen = visible(mask, similarity.shape[2], self.causal)
        strength = jnp.where(seen, strength, 0)
        similarity = similarity * strength
        count = strength.sum(-1, keepdims=True)
        total = jnp.maximum(similarity.sum(-1, keepdims=True), LEAST_SHARE * count)
        return jnp.where(count > 0, similarity / jnp.where(count > 0, total, 1), 0)

    def state_floats(self, length: int) -> int:
        """See `Attention.state_floats`."""
        # count of the weights included
        return super().state_floats(length) + self.num_heads

    def mixing_flops(self, length: int) -> float:
        """See `Attention.mixing_flops`: projections of a query and a key cost 4 D·K a token."""
        features = self.num_heads * 4.0 * self._random * self.key_dim
        both = 2 if isinstance(self.gate, nnx.Module) and not self.causal else 1
        return both * super().mixing_flops(length) + features
