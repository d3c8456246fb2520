"""Random features: orthogonal, Gaussian, unbiased; no way from later keys to earlier outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import Buffer, Features, build
from models.attention.base import unit
from models.attention.performer import log_positive_features, orthogonal_features
from models.attention.rfa import LEAST_SHARE


def make(name, causal=False, **own):
    return build(name, dim=16, num_heads=2, max_length=64, causal=causal, rngs=nnx.Rngs(0), **own)


@pytest.mark.parametrize(("count", "width"), ((3, 8), (8, 8), (20, 8), (7, 1)))
def test_rows_are_orthogonal_within_blocks_and_as_long_as_gaussian_ones(count, width):
    rows = np.asarray(orthogonal_features(jax.random.key(0), 50, count, width), np.float64)
    assert rows.shape == (50, count, width)
    for first in range(0, count, width):
        block = rows[:, first : first + width]
        gram = block @ block.swapaxes(-1, -2)
        off = gram * (1 - np.eye(gram.shape[-1]))
        np.testing.assert_allclose(off, 0, atol=1e-4)
    square = (rows**2).sum(-1).ravel()
    assert abs(square.mean() - width) < 5 * np.sqrt(2 * width / len(square))
    assert abs(rows.mean()) < 5 / np.sqrt(rows.size)


def test_favor_estimates_the_exponential_without_bias():
    query, key = (unit(jax.random.normal(jax.random.key(i), (1, 1, 10, 8))) for i in (0, 1))
    exact = np.exp(np.asarray(query * key).sum(-1) / 8**0.5)[0, 0]

    def estimate(seed):
        rows = orthogonal_features(jax.random.key(seed), 1, 24, 8)
        phi = [jnp.exp(log_positive_features(x, rows)) for x in (query, key)]
        return (phi[0] * phi[1]).sum(-1)[0, 0]

    found = np.asarray(jax.vmap(estimate)(jnp.arange(400)), np.float64)
    z = (found.mean(0) - exact) / (found.std(0, ddof=1) / 20)
    assert np.abs(z).max() < 4


@pytest.mark.parametrize("feature_map", ("sincos", "arccos"))
def test_rfa_estimates_its_kernel_without_bias(feature_map):
    layer = make("rfa", num_features=16, feature_map=feature_map)
    layer.scale[...] = jnp.full((2, 8), 1.3)
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 2, 10, 8))
    u, v = np.asarray(unit(query), np.float64), np.asarray(unit(key), np.float64)
    if feature_map == "sincos":
        exact = np.exp(-(1.3**2) * ((u - v) ** 2).sum(-1) / 2)
    else:
        angle = np.arccos((u * v).sum(-1))
        exact = 1.3**2 * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / np.pi
    found = []
    for seed in range(300):
        layer.redraw(jax.random.key(seed))
        found.append((layer.query_features(query) * layer.key_features(key)[0]).sum(-1))
    found = np.asarray(found, np.float64)
    z = (found.mean(0) - exact) / (found.std(0, ddof=1) / 300**0.5)
    assert np.abs(z).max() < 4


def test_projections_are_saved_and_not_trained_and_redrawn():
    for name in ("performer", "rfa"):
        layer = make(name)
        _, params, buffers = nnx.split(layer, nnx.Param, Buffer)
        assert "projection" in buffers and "projection" not in params
        before = np.asarray(layer.projection[...])
        layer.redraw(jax.random.key(5))
        assert np.abs(np.asarray(layer.projection[...]) - before).max() > 0.1
    assert make("performer", kernel="relu").projection is None


def test_a_later_key_of_any_size_leaves_favor_outputs_as_they_are():
    """The trap of public implementations: a stabiliser over all positions, an added epsilon."""
    layer = make("performer", causal=True, chunk_size=16)
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 2, 40, 8))
    mask = jnp.ones((1, 40), bool)
    mix = nnx.jit(lambda layer, *parts: layer.mix(Features(*parts), mask))
    before = mix(layer, query, key, value)
    for size in (0.0, 1e-3, 30.0, 1e4):
        after = mix(layer, query, key.at[:, :, 25].multiply(size), value)
        np.testing.assert_array_equal(after[:, :, :25], before[:, :, :25])


def test_rfa_outputs_are_bounded_by_the_values():
    """Weights of both signs may sum to about nothing."""
    layer = make("rfa", num_features=1)
    layer.scale[...] = jnp.full((2, 8), 30.0)
    query, key, value = jax.random.normal(jax.random.key(0), (3, 4, 2, 64, 8))
    mask = jnp.ones((4, 64), bool)
    features = Features(query, key, value)
    phi = layer.query_features(query) @ layer.key_features(key)[0].swapaxes(-1, -2)
    assert phi.sum(-1).min() < 0
    assert np.abs(layer.mix(features, mask)).max() <= np.abs(value).max() / LEAST_SHARE


def test_a_gate_at_either_end():
    """g = 0 sees the token itself alone; a g near 1 averages as without a gate."""
    layer = make("rfa", causal=True, gate=True)
    plain = make("rfa", causal=True)
    x, mask = jax.random.normal(jax.random.key(0), (1, 30, 16)), jnp.ones((1, 30), bool)
    features = layer.project(x, mask)
    closed = type(features)(features.query, features.key, features.value, features.gate * 0 - 1e4)
    opened = type(features)(features.query, features.key, features.value, features.gate * 0 + 12)
    out = layer.mix(closed, mask)
    weight = (layer.query_features(features.query) * layer.key_features(features.key)[0]).sum(-1)
    share = weight / jnp.maximum(weight, LEAST_SHARE)
    np.testing.assert_allclose(out, share[..., None] * features.value, rtol=1e-4, atol=1e-5)
    expected = plain.mix(Features(features.query, features.key, features.value), mask)
    np.testing.assert_allclose(layer.mix(opened, mask), expected, rtol=2e-3, atol=2e-3)
