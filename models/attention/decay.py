"""Linear attention that forgets: the recurrence with gates and with the delta rule, over chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

#: (state, chunks of the arrays) → (state after them, outputs `[B, H, C, V]`).
_OneChunk = Callable[[Array, tuple[Array, ...]], tuple[Array, Array]]


def segment_decays(log_gate: Float[Array, "B H C G"]) -> Float[Array, "B H C C G"]:
    """exp(g_{j+1} + … + g_i) at [i, j], 1 on the diagonal, 0 above it.

    Each sum is taken by itself: a difference of two running sums loses what is small beside them, and
    is no number where a gate is exactly 0 (its logarithm −∞).
    """
    size = log_gate.shape[2]
    rows, columns = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    below = (rows > columns)[..., None]
    sums = jnp.where(below, log_gate[:, :, :, None], 0).cumsum(2)
    return jnp.exp(jnp.where((rows >= columns)[..., None], sums, -jnp.inf))


def unit_lower_inverse(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """(I + A)⁻¹ for a strictly lower triangular A.

    By blocks that double: the inverse of [[P, 0], [R, Q]] is [[P⁻¹, 0], [−Q⁻¹ R P⁻¹, Q⁻¹]]. As stable
    as substitution and log₂ C products of matrices, where substitution goes row by row (and XLA's
    batched triangular solve on the CPU is a hundred times slower backward). Up to blocks of 16 the
    doubling is written X − X R X on the whole block: joining blocks of 1, 2, 4, … would nest
    concatenations that XLA fuses into each other, which takes it a minute to compile.

    Args:
        lower: A; what stands on and above its diagonal is not read.
    """
    size = lower.shape[-1]
    full = 1 << max(size - 1, 0).bit_length()
    batch = lower.shape[:-2]
    pad = [(0, 0)] * len(batch) + [(0, full - size)] * 2
    lower = jnp.pad(lower, pad).reshape(-1, full, full)
    base = min(16, full)
    count = full // base
    diagonal = jnp.einsum("zpipj->zpij", lower.reshape(-1, count, base, count, base))
    inverse = jnp.broadcast_to(jnp.eye(base, dtype=lower.dtype), diagonal.shape)
    rows, columns = jnp.arange(base)[:, None], jnp.arange(base)[None, :]
    width = 1
    while width < base:
        same_pair = rows // (2 * width) == columns // (2 * width)
        corner = same_pair & (rows // width > columns // width)
        inverse = inverse - inverse @ jnp.where(corner, diagonal, 0) @ inverse
        width *= 2
    while width < full:
        pairs = full // (2 * width)
        blocks = lower.reshape(-1, pairs, 2, width, pairs, 2, width)[:, :, 1, :, :, 0]
        below = jnp.einsum("zpipj->zpij", blocks)
        first, second = inverse[:, 0::2], inverse[:, 1::2]
        corner = -(second @ below @ first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        bottom = jnp.concatenate([corner, second], -1)
        inverse = jnp.concatenate([top, bottom], -2)
        width *= 2
    return inverse.reshape(*batch, full, full)[..., :size, :size]


def _take(parts: tuple[Array, ...], n: Any, size: int) -> tuple[Array, ...]:
    return tuple(jax.lax.dynamic_slice_in_dim(x, n * size, size, 2) for x in parts)


def _add(whole: Array, chunk: Array, n: Any, size: int) -> Array:
    there = jax.lax.dynamic_slice_in_dim(whole, n * size, size, 2)
    there += chunk.astype(whole.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, there, n * size, 2)


def _flipped(one_chunk: _OneChunk) -> _OneChunk:
    """From the last position of the chunk to the first."""

    def reverse(state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        state, out = one_chunk(state, tuple(jnp.flip(x, axis=2) for x in parts))
        return state, jnp.flip(out, axis=2)

    return reverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fold(
    one_chunk: _OneChunk,
    size: int,
    state: Array,
    parts: tuple[Array, ...],
    gates: tuple[Array, ...],
) -> tuple[Array, Array]:
    return _fold_fwd(one_chunk, size, state, parts, gates)[0]


def _fold_fwd(
    one_chunk: _OneChunk,
    size: int,
    state: Array,
    parts: tuple[Array, ...],
    gates: tuple[Array, ...],
):
    count = parts[0].shape[2] // size
    cut = jax.eval_shape(lambda: _take((*parts, gates[0]), 0, size))
    first = jax.eval_shape(one_chunk, state, cut)[1]
    out = jnp.zeros((*first.shape[:2], count * size, *first.shape[3:]), first.dtype)
    ends, kept = [], []
    for backward, gate in enumerate(gates):
        start = jnp.zeros_like(state) if backward else state
        form = _flipped(one_chunk) if backward else one_chunk

        def step(
            turn: Any, carry: Any, form: Any = form, gate: Any = gate, backward: int = backward
        ) -> Any:
            state, states, out = carry
            n = count - 1 - turn if backward else turn
            states = jax.lax.dynamic_update_index_in_dim(states, state, n, 0)
            state, chunk = form(state, _take((*parts, gate), n, size))
            return state, states, _add(out, chunk, n, size)

        states = jnp.zeros((count, *state.shape), state.dtype)
        end, states, out = jax.lax.fori_loop(0, count, step, (start, states, out))
        ends.append(end)
        kept.append(states)
    return (ends[0], out), (kept, parts, gates)


def _fold_bwd(one_chunk: _OneChunk, size: int, residuals: Any, grads: tuple[Array, Array]):
    kept, parts, gates = residuals
    d_end, d_out = grads
    d_parts = tuple(map(jnp.zeros_like, parts))
    d_starts, d_gates = [], []
    for backward, (gate, states) in enumerate(zip(gates, kept, strict=True)):
        form = _flipped(one_chunk) if backward else one_chunk
        count = len(states)

        def step(
            turn: Any,
            carry: Any,
            form: Any = form,
            gate: Any = gate,
            states: Any = states,
            backward: int = backward,
            count: int = count,
        ) -> Any:
            d_state, d_parts = carry
            n = turn if backward else count - 1 - turn
            _, pull = jax.vjp(form, states[n], _take((*parts, gate), n, size))
            d_state, d_chunks = pull((d_state, _take((d_out,), n, size)[0]))
            return d_state, tuple(
                _add(whole, chunk, n, size) for whole, chunk in zip(d_parts, d_chunks, strict=True)
            )

        last = jnp.zeros_like(d_end) if backward else d_end
        d_start, (*d_shared, d_gate) = jax.lax.fori_loop(
            0, count, step, (last, (*d_parts, jnp.zeros_like(gate)))
        )
        d_parts = tuple(d_shared)
        d_starts.append(d_start)
        d_gates.append(d_gate)
    return d_starts[0], d_parts, tuple(d_gates)


_fold.defvjp(_fold_fwd, _fold_bwd)


def _scan(
    one_chunk: _OneChunk,
    state: Array,
    parts: tuple[Array, ...],
    gates: tuple[Array, ...],
    chunk_size: int,
) -> tuple[Array, Array]:
    """Carries the state over chunks of `[B, H, L, …]` arrays; zeros fill up the last chunk.

    With a second gate the recurrence also runs from the last position to the first, from a state of
    zeros, and the outputs are added: in one function, because the gradients of what the two share are
    then added up in one array. Each chunk is computed again in the backward pass, so that one state a
    chunk is stored. Chunks are cut out of the arrays and gradients written into them where they lie: a
    scan would make a copy of each array with the chunks in front, which takes more memory than the
    states. The gradient is defined in reverse mode only, once.
    """
    length = parts[0].shape[2]
    size = min(chunk_size, length)

    def filled(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        room = ((0, 0), (0, 0), (0, -length % size))
        return tuple(jnp.pad(x, (*room, *([(0, 0)] * (x.ndim - 3)))) for x in arrays)

    result: Any = _fold(one_chunk, size, state, filled(parts), filled(gates))
    state, out = result
    return state, out[:, :, :length]


def _real(mask: Bool[Array, "B L"], heads: int, dtype: Any) -> Float[Array, "B H L"]:
    """The mask as a part of chunks, which are differentiated with respect to all of their parts."""
    return jnp.broadcast_to(mask[:, None], (mask.shape[0], heads, mask.shape[1])).astype(dtype)


def gated(
    state: Float[Array, "B H K V"],
    query: Float[Array, "B H L K"],
    key: Float[Array, "B H L K"],
    value: Float[Array, "B H L V"],
    log_gate: Float[Array, "B H L G"],
    mask: Bool[Array, "B L"],
    *,
    chunk_size: int,
    log_gate_back: Float[Array, "B H L G"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H L V"]]:
    """S_t = diag(α_t) S_{t−1} + k_t v_tᵀ, o_t = S_tᵀ q_t (Yang et al. 2024, arXiv 2312.06635, eq. 3).

    Inside a chunk the weights A_ij = Σ_k q_ik k_jk exp(g_{j+1,k} + … + g_ik) are formed with every
    exponent a sum of its own and never positive: nothing is divided by a running product of gates,
    and gates may be anything from 1 to exactly 0. What came before enters through the state.

    Args:
        state: what the positions before the first left.
        query: queries.
        key: keys.
        value: values.
        log_gate: log α ≤ 0, −∞ allowed; G is K, or 1 for one gate a head.
        mask: True for a real token; a pad leaves the state as it is.
        chunk_size: C, in tokens; with G = K the weights take C²·K numbers a head while they are made.
        log_gate_back: adds the outputs of the recurrence with these gates from the last position to the
            first, from a state of zeros.

    Returns:
        The state after the last position, and the outputs, in `promote_types(value, float32)`.
    """
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    parts = (_real(mask, query.shape[1], dtype), query, key, value)

    def one_chunk(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        real, q, *arrays = chunk
        q = q.astype(dtype)
        k, v, g = (jnp.where(real[..., None] > 0, x, 0).astype(dtype) for x in arrays)
        decays = segment_decays(g)
        if g.shape[-1] == 1:
            weights = jnp.einsum("bhik,bhjk->bhij", q, k) * decays[..., 0]
        else:
            weights = (q[:, :, :, None] * k[:, :, None] * decays).sum(-1)
        since = jnp.exp(g.cumsum(2))
        out = jnp.einsum("bhij,bhjv->bhiv", weights, v)
        out += jnp.einsum("bhik,bhkv->bhiv", q * since, state)
        kept = jnp.einsum("bhjk,bhjv->bhkv", k * decays[:, :, -1], v)
        return state * since[:, :, -1, :, None] + kept, out

    gates = (log_gate,) if log_gate_back is None else (log_gate, log_gate_back)
    return _scan(one_chunk, state, parts, gates, chunk_size)


def delta(
    state: Float[Array, "B H K V"],
    query: Float[Array, "B H L K"],
    key: Float[Array, "B H L K"],
    value: Float[Array, "B H L V"],
    beta: Float[Array, "B H L"],
    log_gate: Float[Array, "B H L"],
    mask: Bool[Array, "B L"],
    *,
    chunk_size: int,
    log_gate_back: Float[Array, "B H L"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H L V"]]:
    """S_t = α_t S_{t−1} + β_t k_t (v_t − α_t S_{t−1}ᵀ k_t)ᵀ, o_t = S_tᵀ q_t.

    The delta rule (Yang et al. 2024, arXiv 2406.06484), with α its gated form (Yang et al. 2025, arXiv
    2412.06464). The corrections u_t of a chunk solve one triangular system,
    (I + tril(diag(β) K Kᵀ ∘ D, −1)) u = diag(β)(V − (K ∘ e^G) S), with D the decays between positions
    and G since the chunk's start; then O = (Q ∘ e^G) S + tril(Q Kᵀ ∘ D) u.

    Args:
        state: what the positions before the first left.
        query: queries.
        key: keys, of norm at most 1 for a state that stays bounded.
        value: values.
        beta: strength of each correction.
        log_gate: log α ≤ 0, −∞ allowed; 0 for the rule without gates.
        mask: True for a real token; a pad leaves the state as it is.
        chunk_size: C, in tokens.
        log_gate_back: as in `gated`.

    Returns:
        The state after the last position, and the outputs, in `promote_types(value, float32)`.
    """
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    parts = (_real(mask, query.shape[1], dtype), query, key, value, beta)

    def one_chunk(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        real, q, *arrays = chunk
        q, real = q.astype(dtype), real > 0
        k, v = (jnp.where(real[..., None], x, 0).astype(dtype) for x in arrays[:2])
        b, g = (jnp.where(real, x, 0).astype(dtype) for x in arrays[2:])
        decays = segment_decays(g[..., None])[..., 0]
        since = jnp.exp(g.cumsum(-1))[..., None]
        inverse = unit_lower_inverse(jnp.einsum("bhik,bhjk->bhij", k, k) * decays * b[..., None])
        wanted = b[..., None] * (v - jnp.einsum("bhik,bhkv->bhiv", k * since, state))
        corrections = jnp.einsum("bhij,bhjv->bhiv", inverse, wanted)
        weights = jnp.einsum("bhik,bhjk->bhij", q, k) * decays
        out = jnp.einsum("bhij,bhjv->bhiv", weights, corrections)
        out += jnp.einsum("bhik,bhkv->bhiv", q * since, state)
        left = decays[:, :, -1, :, None]
        kept = jnp.einsum("bhjk,bhjv->bhkv", k * left, corrections)
        return state * since[:, :, -1, :, None] + kept, out

    gates = (log_gate,) if log_gate_back is None else (log_gate, log_gate_back)
    return _scan(one_chunk, state, parts, gates, chunk_size)
