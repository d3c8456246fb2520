"""Blockwise softmax against the softmax written down, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention.base import visible
from models.attention.blockwise import blockwise_softmax
from models.dropout import keep_multiplier

SCALE = 0.7


def naive(query, key, value, mask, causal, keep=1.0):
    """softmax(scale · q kᵀ) ∘ keep · v and log Σ exp; a query without keys gets zeros and −∞."""
    logits = jnp.einsum("bhqd,bhkd->bhqk", query, key) * SCALE
    seen = visible(mask, query.shape[2], causal)
    top = jnp.where(seen, logits, jnp.finfo(logits.dtype).min).max(-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits - top, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1)
    log_total = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)[..., 0]
    return (weights / safe * keep) @ value, log_total


def mask_of(key_dropout, rate, batch, heads, length, keys):
    """The multiplier of every weight that `blockwise_softmax` uses with this key."""
    seed = jax.random.bits(key_dropout, (2,), jnp.uint32)
    return keep_multiplier(seed, rate, batch, heads, jnp.arange(length), jnp.arange(keys))


def arrays(length, keys, *, batch=3, heads=2, width=3, value_width=5, dtype=jnp.float64):
    """Queries, keys, values, cotangent, mask: row 1 is half padding, row 2 has one key or none."""
    rng = np.random.default_rng(length + 100 * keys)

    def draw(length, width, size=1.0):
        return jnp.asarray(size * rng.standard_normal((batch, heads, length, width)), dtype)

    counts = np.array([keys, (keys + 1) // 2, keys % 2])
    mask = jnp.asarray(np.arange(keys) < counts[:batch, None])
    return (
        draw(length, width, 2),
        draw(keys, width, 2),
        draw(keys, value_width),
        draw(length, value_width),
        mask,
    )


def with_gradients(attend, query, key, value, cotangent):
    """Outputs and the three gradients of Σ cotangent ∘ output + Σ rows of it ∘ log Σ exp."""
    (out, log_total), pull = jax.vjp(attend, query, key, value)
    return out, log_total, *pull((cotangent, cotangent.sum(-1).astype(log_total.dtype)))


@functools.partial(jax.jit, static_argnames=("causal", "rate", "query_block", "key_block"))
def fast_and_naive(
    query, key, value, cotangent, mask, dropout_key, *, causal, rate, query_block, key_block
):
    """Both forms, forward and backward, in one program."""
    batch, heads, length, _ = query.shape
    keep = mask_of(dropout_key, rate, batch, heads, length, key.shape[2]) if rate else 1.0
    fast = functools.partial(
        blockwise_softmax, mask=mask, scale=SCALE, causal=causal, dropout_rate=rate,
        dropout_key=dropout_key, query_block=query_block, key_block=key_block,
    )  # fmt: skip
    reference = functools.partial(naive, mask=mask, causal=causal, keep=keep)
    return tuple(with_gradients(f, query, key, value, cotangent) for f in (fast, reference))


def check(length, keys, *, causal, rate=0.0, query_block=8, key_block=4):
    fast, reference = fast_and_naive(
        *arrays(length, keys), jax.random.key(5),
        causal=causal, rate=rate, query_block=query_block, key_block=key_block,
    )  # fmt: skip
    for name, a, b in zip(
        ("out", "log_total", "d_query", "d_key", "d_value"), fast, reference, strict=True
    ):
        assert a.dtype == jnp.float64
        np.testing.assert_allclose(a, b, atol=1e-10, err_msg=name)
    return fast


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("length", (1, 9, 40))
def test_exact(length, causal, x64):
    check(length, length, causal=causal)


@pytest.mark.parametrize(("length", "keys"), ((5, 33), (33, 5)))
def test_other_number_of_keys(length, keys, x64):
    check(length, keys, causal=False)


def test_key_blocks_larger_than_query_blocks(x64):
    check(40, 40, causal=True, query_block=8, key_block=24)


@pytest.mark.parametrize("causal", (False, True))
def test_dropout_is_the_mask_times_the_weights(causal, x64):
    dropped = check(40, 40, causal=causal, rate=0.3)
    # Another partition of the same weights: one block.
    whole = check(40, 40, causal=causal, rate=0.3, query_block=64, key_block=64)
    for a, b in zip(dropped, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


def test_dropout_needs_key_and_rate_and_follows_the_key(x64):
    query, key, value, _, mask = arrays(17, 17)

    @jax.jit
    def run(dropout_key):
        return [
            blockwise_softmax(
                query, key, value, mask, scale=SCALE, dropout_rate=rate, dropout_key=used
            )[0]
            for rate, used in ((0.0, None), (0.5, None), (0.0, dropout_key), (0.5, dropout_key))
        ]

    plain, without_key, without_rate, dropped = run(jax.random.key(1))
    np.testing.assert_array_equal(without_key, plain)
    np.testing.assert_array_equal(without_rate, plain)
    np.testing.assert_array_equal(run(jax.random.key(1))[3], dropped)
    assert np.abs(run(jax.random.key(2))[3] - dropped).max() > 0.1


def test_what_masked_keys_hold_does_not_matter(x64):
    query, key, value, cotangent, mask = arrays(17, 17)
    real = mask[:, None, :, None]

    @jax.jit
    def run(key, value):
        attend = functools.partial(blockwise_softmax, mask=mask, scale=SCALE, key_block=8)
        return with_gradients(attend, query, key, value, cotangent)

    expected = run(jnp.where(real, key, 0), jnp.where(real, value, 0))
    assert np.abs(expected[0]).max() > 0.1
    for fill in (np.nan, np.inf, 1e30):
        found = run(jnp.where(real, key, fill), jnp.where(real, value, fill))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    for gradient in expected[3:]:
        np.testing.assert_array_equal(jnp.where(real, 0, gradient), 0)


def test_a_query_without_keys_gets_zeros_and_gives_none(x64):
    assert not arrays(40, 40)[-1][2].any()
    out, log_total, *gradients = check(40, 40, causal=False)
    assert np.isneginf(log_total[2]).all()
    for array in (out, *gradients):
        np.testing.assert_array_equal(array[2], 0)
        assert np.abs(array[0]).max() > 0


@pytest.mark.parametrize("causal", (False, True))
def test_extreme_logits(causal, x64):
    """In float32 as the float64 softmax of the same numbers, where exp would long be 0 or inf."""
    query, key, value, cotangent, mask = arrays(33, 33, dtype=jnp.float32)
    # Whole numbers, whose products float32 holds exactly.
    query, key = (jnp.round(30 * x) for x in (query, key))
    run = functools.partial(blockwise_softmax, mask=mask, scale=0.5, causal=causal, key_block=8)
    found = jax.jit(functools.partial(with_gradients, run))(query, key, value, cotangent)
    wide = [x.astype(jnp.float64) for x in (query, key, value, cotangent)]
    # naive multiplies by SCALE.
    wide[0] = wide[0] * (0.5 / SCALE)
    out, log_total, d_query, d_key, d_value = with_gradients(
        functools.partial(naive, mask=mask, causal=causal), *wide
    )
    expected = out, log_total, d_query * (0.5 / SCALE), d_key, d_value
    assert np.abs(np.einsum("bhqd,bhkd->bhqk", query, key)).max() > 1e4
    # The gradients of q and k are sums of k or q times differences of cotangent · value that cancel
    # where one weight is 1: a few roundings of those, not of the result.
    rounding = 2.0**-22 * np.abs(cotangent @ value.swapaxes(-1, -2)).max()
    largest = np.abs(np.where(np.isfinite(log_total), log_total, 0)).max()
    bounds = (
        1e-5,
        2.0**-22 * largest,
        rounding * np.abs(key).max(),
        rounding * np.abs(query).max(),
        1e-5,
    )
    for a, b, bound in zip(found, expected, bounds, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=bound)


def test_first_blocks_without_a_visible_key():
    """The running maximum starts at −inf, and what follows may lie anywhere."""
    query, key, value, cotangent, _ = arrays(9, 32, dtype=jnp.float32)
    mask = jnp.broadcast_to(jnp.arange(32) >= 30, (3, 32))
    key = key.at[:, :, 30:].add(-100)
    run = functools.partial(blockwise_softmax, mask=mask, scale=SCALE, key_block=8)
    found = jax.jit(functools.partial(with_gradients, run))(query, key, value, cotangent)
    tail = functools.partial(naive, mask=mask[:, 30:], causal=False)
    expected = with_gradients(tail, query, key[:, :, 30:], value[:, :, 30:], cotangent)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-3)
    # Logits in the hundreds carry a rounding of 3e-5, and the gradient of q multiplies it by k.
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    for a, b in zip(found[2:], expected[2:], strict=True):
        a = a if a.shape == b.shape else a[:, :, 30:]
        np.testing.assert_allclose(a, b, atol=5e-3 * np.abs(b).max())


def test_refused():
    query, key, value = (jnp.zeros((1, 1, n, 2)) for n in (5, 7, 7))
    mask = jnp.ones((1, 7), bool)
    with pytest.raises(ValueError, match="got 5 and 7"):
        blockwise_softmax(query, key, value, mask, scale=1.0, causal=True)
    for blocks in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match=f"at least 1 token, got {blocks[0]} and {blocks[1]}"):
            blockwise_softmax(
                query, key, value, mask, scale=1.0, query_block=blocks[0], key_block=blocks[1]
            )
