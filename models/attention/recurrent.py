"""Attention by a recurrence: GLA, RetNet, Lightning, Mamba-2's decay, DeltaNet and Gated DeltaNet."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from models.attention import decay
from models.attention.base import Attention, Features, GateProjection, unit
from models.attention.kernel import HeadNorm

GATE_STARTS = ("paper", "spread")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentFeatures(Features):
    """`Features` with what a recurrence needs beside them; what a mechanism lacks is None.

    Attributes:
        gate: logits of the gates of the forward scan, `[B, H, L, G]`.
        gate_back: those of the backward scan of a bidirectional layer.
        beta: logits of the delta rule's strengths, `[B, H, L]`.
        swish: what the output gate is made of, `[B, H, L, V]`.
    """

    gate: Float[Array, "B H L G"] | None = None
    gate_back: Float[Array, "B H L G"] | None = None
    beta: Float[Array, "B H L"] | None = None
    swish: Float[Array, "B H L V"] | None = None


class Recurrent(Attention):
    """Base of the recurrences o_t = S_tᵀ q_t without a denominator.

    Bidirectional layers run the recurrence both ways, with queries, keys and values shared and gates of
    their own, and add: forward + backward − the position itself, which both have seen. The sum goes
    through an RMS norm of each head and, with `output_gate`, is multiplied by swish(W x).

    Args:
        chunk_size: tokens of a chunk; affects speed and memory, not results.
        output_gate: see above.
        **common: the arguments of `Attention`.

    Raises:
        ValueError: for a chunk size below 1, and as `Attention`.
    """

    def __init__(self, *, chunk_size: int = 64, output_gate: bool = True, **common: Any):
        if not common.get("key_dim") and output_gate:
            # Half as wide as values: with the gate's matrix, as many parameters as softmax attention.
            width = (common.get("qkv_dim") or common["dim"]) // max(common["num_heads"], 1)
            common["key_dim"] = max(width // 2, 1)
        super().__init__(**common)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
        self.chunk_size = chunk_size
        self.head_norm = HeadNorm(self.head_dim)
        self.swish = (
            nnx.Linear(
                common["dim"],
                self.num_heads * self.head_dim,
                use_bias=False,
                dtype=self.dtype,
                kernel_init=nnx.initializers.xavier_uniform(),
                rngs=common["rngs"],
            )
            if output_gate
            else None
        )

    def gate_logits(self, x: Float[Array, "B L D"]) -> dict[str, Float[Array, "B H L ..."] | None]:
        """Gates and strengths that depend on the tokens: fields of `RecurrentFeatures`."""
        del x
        return {}

    def log_gate(self, features: RecurrentFeatures, logits: Any) -> Float[Array, "B H L G"]:
        """log α of each position from `features.gate` or `features.gate_back`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement log_gate")

    def sides(self, features: RecurrentFeatures) -> tuple[Array, Array]:
        """Queries and keys as the recurrence uses them, in float32 or better."""
        dtype = jnp.promote_types(features.query.dtype, jnp.float32)
        return features.query.astype(dtype) * self.key_dim**-0.5, features.key.astype(dtype)

    def scan(
        self, state: Array, features: RecurrentFeatures, logits: Any, mask: Bool[Array, "B L"]
    ) -> tuple[Array, Array]:
        """The recurrence from a state on."""
        query, key = self.sides(features)
        return decay.gated(
            state,
            query,
            key,
            features.value,
            self.log_gate(features, logits),
            mask,
            chunk_size=self.chunk_size,
        )

    def own_weight(self, features: RecurrentFeatures) -> Float[Array, "B H L"]:
        """A_ii, the weight of a position for itself."""
        query, key = self.sides(features)
        return (query * key).sum(-1)

    def project(self, x: Float[Array, "B L D"], mask: Bool[Array, "B L"]) -> RecurrentFeatures:
        """See `Attention.project`."""
        plain = super().project(x, mask)
        x = jnp.where(mask[..., None], x, 0).astype(self.dtype)
        swish = None if self.swish is None else self.split_heads(self.swish(x))
        return RecurrentFeatures(
            plain.query, plain.key, plain.value, swish=swish, **self.gate_logits(x)
        )

    def init_state(self, batch: int) -> Float[Array, "B H K V"]:
        """The state before the first token, for `step`.

        Raises:
            ValueError: if the layer is bidirectional: it has no recurrent form.
        """
        if not self.causal:
            raise ValueError(
                "a bidirectional layer has no recurrent form: build it with causal=True"
            )
        return self._zeros(batch)

    def _zeros(self, batch: int) -> Array:
        dtype = jnp.promote_types(self.dtype, jnp.float32)
        return jnp.zeros((batch, self.num_heads, self.key_dim, self.head_dim), dtype)

    def step(
        self, state: Array, features: RecurrentFeatures, mask: Bool[Array, "B L"]
    ) -> tuple[Array, Float[Array, "B H L K"]]:
        """The next L ≥ 1 tokens, given the state the ones before them left.

        Returns:
            The state after them, and `mix`'s output for them.
        """
        state, out = self.scan(state, features, features.gate, mask)
        return state, out.astype(features.value.dtype)

    def mix(
        self,
        features: RecurrentFeatures,
        mask: Bool[Array, "B S"],
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B H L K"]:
        """See `Attention.mix`; there are no weights to drop, `dropout_key` is not used."""
        del dropout_key
        start = self._zeros(features.value.shape[0])
        if self.causal:
            return self.step(start, features, mask)[1]
        forward = self.scan(start, features, features.gate, mask)[1]
        flipped = jax.tree.map(lambda a: jnp.flip(a, axis=2), features)
        backward = self.scan(start, flipped, flipped.gate_back, jnp.flip(mask, axis=1))[1]
        real = mask[:, None, :, None]
        own = self.own_weight(features)[..., None] * features.value
        out = forward + jnp.flip(backward, axis=2) - jnp.where(real, own, 0)
        return out.astype(features.value.dtype)

    def weights(
        self, features: RecurrentFeatures, mask: Bool[Array, "B S"]
    ) -> Float[Array, "B H L S"]:
        """See `Attention.weights`: the recurrence token by token, with the unit vectors as values."""
        forward = self.rows(features, features.gate, mask)
        if self.causal:
            return forward
        flipped = jax.tree.map(lambda a: jnp.flip(a, axis=2), features)
        backward = self.rows(flipped, flipped.gate_back, jnp.flip(mask, axis=1))
        backward = jnp.flip(backward, axis=(2, 3))
        length = features.value.shape[2]
        return forward + jnp.where(jnp.eye(length, dtype=bool), 0, backward)

    def rows(
        self, features: RecurrentFeatures, logits: Any, mask: Bool[Array, "B S"]
    ) -> Float[Array, "B H L S"]:
        """The weights of the forward recurrence, by the recurrence itself."""
        query, key = self.sides(features)
        gate = jnp.broadcast_to(self.log_gate(features, logits), key.shape)
        beta = self.strength(features)

        def one(state: Array, now: Any) -> tuple[Array, Array]:
            q, k, g, b, unit_vector, real = now
            decayed = jnp.exp(g)[..., None] * state
            if b is None:
                target = jnp.broadcast_to(unit_vector, (*k.shape[:-1], unit_vector.shape[-1]))
            else:
                told = jnp.einsum("bhks,bhk->bhs", decayed, k)
                target = b[..., None] * (unit_vector - told)
            after = decayed + k[..., None] * target[:, :, None]
            state = jnp.where(real[:, None, None, None], after, state)
            return state, jnp.einsum("bhks,bhk->bhs", state, q)

        batch, heads, length, width = key.shape
        time = [jnp.moveaxis(a, 2, 0) for a in (query, key, gate)]
        strengths = None if beta is None else jnp.moveaxis(beta, 2, 0)
        start = jnp.zeros((batch, heads, width, length), query.dtype)
        xs: Any = (*time, strengths, jnp.eye(length, dtype=query.dtype), mask.T)
        return jnp.moveaxis(jax.lax.scan(one, start, xs)[1], 0, 2)

    def strength(self, features: RecurrentFeatures) -> Float[Array, "B H L"] | None:
        """β of the delta rule; None for a plain outer product."""
        del features
        return None

    def finish(self, mixed: Float[Array, "B H L K"], features: Any) -> Float[Array, "B L D"]:
        """See `Attention.finish`."""
        mixed = self.head_norm(mixed)
        if features.swish is not None:
            mixed = mixed * jax.nn.silu(features.swish)
        return super().finish(mixed, features)

    def state_floats(self, length: int) -> int:
        """See `Attention.state_floats`."""
        del length
        return self.num_heads * self.key_dim * self.head_dim

    #: Operations for each number of the state and token.
    flops_per_state = 5.0

    def mixing_flops(self, length: int) -> float:
        """See `Attention.mixing_flops`; both directions of a bidirectional layer count."""
        return (1 if self.causal else 2) * self.flops_per_state * self.state_floats(length)


class GLA(Recurrent):
    """Gated Linear Attention (Yang et al. 2024, arXiv 2312.06635): a gate for each key channel.

    log α = log σ(W₂ W₁ x + b)/`gate_divisor`, W₁ of `gate_rank` columns. `gate_start` "paper" has b = 0,
    which forgets within 1/(1 − σ(0)^(1/16)) = 23 tokens; "spread" starts the channels of each head at
    time constants of 1 to `max_length` tokens, evenly in the logarithm.

    Args:
        gate_rank: see above.
        gate_divisor: see above.
        gate_start: see above.
        **common: the arguments of `Recurrent` and `Attention`.

    Raises:
        ValueError: for an unknown start, values out of range, and as `Recurrent`.
    """

    def __init__(
        self,
        *,
        chunk_size: int = 16,
        gate_rank: int = 16,
        gate_divisor: float = 16.0,
        gate_start: str = "paper",
        **common: Any,
    ):
        super().__init__(chunk_size=chunk_size, **common)
        if gate_start not in GATE_STARTS:
            raise ValueError(
                f"gate_start must be one of {', '.join(GATE_STARTS)}; got {gate_start!r}"
            )
        if gate_rank < 1 or not gate_divisor > 0:
            raise ValueError(
                f"gate_rank must be at least 1 and gate_divisor above 0, got {gate_rank} and {gate_divisor}"
            )
        self.gate_divisor = float(gate_divisor)
        bias: Any = 0.0
        if gate_start == "spread":
            share = (np.arange(self.key_dim) + 0.5) / self.key_dim
            tokens = common["max_length"] ** share
            # σ(b)^(1/divisor) = e^(−1/T).
            bias = np.tile(-np.log(np.expm1(self.gate_divisor / tokens)), self.num_heads)

        def projection() -> GateProjection:
            return GateProjection(
                common["dim"],
                self.num_heads * self.key_dim,
                bias=bias,
                rank=gate_rank,
                rngs=common["rngs"],
                dtype=self.dtype,
            )

        self.gate = projection()
        self.gate_back = None if self.causal else projection()

    def gate_logits(self, x: Float[Array, "B L D"]) -> dict[str, Any]:
        """See `Recurrent.gate_logits`."""
        back = None if self.gate_back is None else self.split_heads(self.gate_back(x))
        return {"gate": self.split_heads(self.gate(x)), "gate_back": back}

    def log_gate(self, features: RecurrentFeatures, logits: Any) -> Float[Array, "B H L G"]:
        """See `Recurrent.log_gate`."""
        del features
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return jax.nn.log_sigmoid(wide) / self.gate_divisor


class RetNet(Recurrent):
    """Fixed decays γ_h = 1 − 2^(−5−h) (Sun et al. 2023, arXiv 2307.08621).

    Use `model.positions=rotary` for the rotation of queries and keys that the paper has. Arguments are
    those of `Recurrent` and `Attention`.
    """

    def head_decays(self) -> np.ndarray:
        """log γ of each head."""
        return np.log1p(-(2.0 ** (-5 - np.arange(self.num_heads))))

    def log_gate(self, features: RecurrentFeatures, logits: Any) -> Float[Array, "B H L G"]:
        """See `Recurrent.log_gate`."""
        del logits
        dtype = jnp.promote_types(features.value.dtype, jnp.float32)
        decays = jnp.asarray(self.head_decays(), dtype)[None, :, None, None]
        return jnp.broadcast_to(decays, (*features.value.shape[:3], 1))


class Lightning(RetNet):
    """Fixed decays log γ_h = −(8/H)(1 − l/L) h of head h = 1 … H in layer l of L.

    Qin et al. 2024 (arXiv 2401.04658, Lightning Attention-2): upper layers remember for longer.
    Arguments are those of `Recurrent` and `Attention`.
    """

    def head_decays(self) -> np.ndarray:
        """log γ of each head."""
        heads = np.arange(1, self.num_heads + 1)
        return -8.0 / self.num_heads * (1 - self.depth) * heads


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
        self, state: Array, features: RecurrentFeatures, logits: Any, mask: Bool[Array, "B L"]
    ) -> tuple[Array, Array]:
        """See `Recurrent.scan`."""
        query, key = self.sides(features)
        return decay.delta(
            state,
            query,
            key,
            features.value,
            self.strength(features),
            mask,
            chunk_size=self.chunk_size,
            log_gate=None if logits is None else self.log_gate(features, logits)[..., 0],
        )

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
