"""The delta rule: DeltaNet (Yang et al. 2024, arXiv 2406.06484), and gated (2025, arXiv 2412.06464)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from models.attention import decay
from models.attention.base import GateProjection, unit
from models.attention.mamba2 import log_rates, step_projection
from models.attention.recurrent import Recurrent, RecurrentFeatures


def unit_silu(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """SiLU(x) / ‖SiLU(x)‖, in proportion also where every SiLU would underflow."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    logs = jax.nn.log_sigmoid(wide)
    tiny = jnp.finfo(wide.dtype).tiny
    top = (logs + jnp.log(jnp.maximum(jnp.abs(wide), tiny))).max(-1, keepdims=True)
    return unit(wide * jnp.exp(logs - jax.lax.stop_gradient(jnp.maximum(top, -1e30))))


class DeltaNet(Recurrent):
    """The delta rule: a key's old value is taken out before the new one goes in.

    S_t = S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ (Yang et al. 2024, arXiv 2406.06484). Queries and keys
    are SiLU(·) of norm 1; β = σ(w·x) in (0, 1), or twice that with `beta_max` 2, which lets
    eigenvalues be negative (Grazzi et al. 2025, arXiv 2411.12537).

    Args:
        beta_max: 1 or 2.
        **common: the arguments of `Recurrent` and `Attention`.

    Raises:
        ValueError: for another `beta_max`, and as `Recurrent`.
    """

    flops_per_state = 6.0

    def __init__(self, *, beta_max: float = 1.0, output_gate: bool = False, **common: Any):
        super().__init__(output_gate=output_gate, **common)
        if beta_max not in (1, 2):
            raise ValueError(f"beta_max must be 1 or 2, got {beta_max}")
        self.beta_max = float(beta_max)
        self.beta = GateProjection(
            common["dim"], self.num_heads, rngs=common["rngs"], dtype=self.dtype
        )

    def gate_logits(self, x: Float[Array, "B L D"]) -> dict[str, Any]:
        """See `Recurrent.gate_logits`."""
        return {"beta": self.beta(x).swapaxes(1, 2)}

    def log_gate(self, features: RecurrentFeatures, logits: Any) -> Float[Array, "B H L G"]:
        """See `Recurrent.log_gate`: nothing is forgotten."""
        del logits
        dtype = jnp.promote_types(features.value.dtype, jnp.float32)
        return jnp.zeros((*features.value.shape[:3], 1), dtype)

    def strength(self, features: RecurrentFeatures) -> Float[Array, "B H L"]:
        """See `Recurrent.strength`."""
        if features.beta is None:
            raise ValueError("the delta rule's features have no β")
        wide = features.beta.astype(jnp.promote_types(features.beta.dtype, jnp.float32))
        return self.beta_max * jax.nn.sigmoid(wide)

    def sides(self, features: RecurrentFeatures) -> tuple[Array, Array]:
        """See `Recurrent.sides`: of norm 1 after SiLU."""
        return unit_silu(features.query), unit_silu(features.key)

    def scan(
        self, state: Array, features: RecurrentFeatures, mask: Bool[Array, "B L"]
    ) -> tuple[Array, Array]:
        """See `Recurrent.scan`."""
        query, key = self.sides(features)
        gate, back = self.log_gates(features)
        return decay.delta(
            state, query, key, features.value, self.strength(features), gate[..., 0], mask,
            chunk_size=self.chunk_size, log_gate_back=None if back is None else back[..., 0],
        )  # fmt: skip

    def own_weight(self, features: RecurrentFeatures) -> Float[Array, "B H L"]:
        """See `Recurrent.own_weight`."""
        return super().own_weight(features) * self.strength(features)


class GatedDeltaNet(DeltaNet):
    """The delta rule on a state that decays first (Yang et al. 2025, arXiv 2412.06464).

    S_t = α_t S_{t−1} + β_t k_t (v_t − α_t S_{t−1}ᵀ k_t)ᵀ with α_t = e^(−Δ_t a) as in `Mamba2`. Arguments
    are those of `DeltaNet`, `Recurrent` and `Attention`.
    """

    flops_per_state = 7.0

    def __init__(self, *, output_gate: bool = True, **common: Any):
        super().__init__(output_gate=output_gate, **common)
        of = (common["dim"], self.num_heads, common["rngs"], self.dtype)
        self.gate = step_projection(*of)
        self.gate_back = None if self.causal else step_projection(*of)
        self.log_rate = nnx.Param(log_rates(self.num_heads, common["rngs"]))

    def gate_logits(self, x: Float[Array, "B L D"]) -> dict[str, Any]:
        """See `Recurrent.gate_logits`."""
        back = None if self.gate_back is None else self.gate_back(x).swapaxes(1, 2)[..., None]
        gate = self.gate(x).swapaxes(1, 2)[..., None]
        return {**super().gate_logits(x), "gate": gate, "gate_back": back}

    def log_gate(self, features: RecurrentFeatures, logits: Any) -> Float[Array, "B H L G"]:
        """See `Recurrent.log_gate`."""
        del features
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return -jax.nn.softplus(wide) * jnp.exp(self.log_rate[...])[None, :, None, None]
