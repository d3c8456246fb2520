"""Decays by token: Mamba-2 (Dao & Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.attention.base import GateProjection
from models.attention.recurrent import Recurrent, RecurrentFeatures


def step_projection(dim: int, heads: int, rngs: nnx.Rngs, dtype: Any) -> GateProjection:
    """w·x + b of Δ = softplus(w·x + b): b such that Δ starts log-uniform in [0.001, 0.1] over heads."""
    low, high = math.log(1e-3), math.log(1e-1)
    steps = jnp.exp(jax.random.uniform(rngs.params(), (heads,), minval=low, maxval=high))
    return GateProjection(dim, heads, bias=jnp.log(jnp.expm1(steps)), rngs=rngs, dtype=dtype)


def log_rates(heads: int, rngs: nnx.Rngs) -> Float[Array, "H"]:
    """log a, a uniform in [1, 16]."""
    return jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0))


class Mamba2(Recurrent):
    """Mamba-2's decay as attention: S_t = e^(−Δ_t a) S_{t−1} + Δ_t k_t v_tᵀ.

    After Dao & Gu 2024 (arXiv 2405.21060). Δ_t = softplus(w·x_t + b), a number for each head and
    token, starts log-uniform in [0.001, 0.1] over heads, and a > 0, one for each head, uniform in
    [1, 16]. Arguments are those of `Recurrent` and `Attention`.
    """

    def __init__(self, **common: Any):
        super().__init__(**common)
        self.steps = step_projection(common["dim"], self.num_heads, common["rngs"], self.dtype)
        self.log_rate = nnx.Param(log_rates(self.num_heads, common["rngs"]))

    def gate_logits(self, x: Float[Array, "B L D"]) -> dict[str, Any]:
        """See `Recurrent.gate_logits`; one Δ for both directions, because it scales the keys."""
        steps = self.steps(x).swapaxes(1, 2)[..., None]
        return {"gate": steps, "gate_back": None if self.causal else steps}

    def log_gate(self, features: RecurrentFeatures, logits: Any) -> Float[Array, "B H L G"]:
        """See `Recurrent.log_gate`."""
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        rate = jnp.exp(self.log_rate[...])[None, :, None, None]
        return -jax.nn.softplus(wide) * rate

    def sides(self, features: RecurrentFeatures) -> tuple[Array, Array]:
        """See `Recurrent.sides`: keys times Δ."""
        query, key = super().sides(features)
        if features.gate is None:
            raise ValueError("Mamba-2's features have no Δ")
        return query, key * jax.nn.softplus(features.gate.astype(key.dtype))
