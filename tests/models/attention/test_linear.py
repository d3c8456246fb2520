"""Linear attention's features, and its rows of weights at the ends of the range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import Features, build
from models.attention.kernel import KEY_FLOOR, HeadNorm
from models.attention.linear import log_elu_plus_one, over_largest

X = jnp.array([-20.0, -3.0, -1e-3, 0.0, 1e-3, 2.0, 50.0, 1e4])


def elu_plus_one(x):
    x = np.asarray(x, np.float64)
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def make(causal, **own):
    return build("linear", dim=8, num_heads=2, max_length=9, causal=causal, rngs=nnx.Rngs(0), **own)


def key_features(x):
    return make(True).key_features(x)[0]


def query_features(x):
    return make(True).query_features(x)


class TestFeatures:
    def test_keys_are_elu_plus_one(self):
        np.testing.assert_allclose(
            key_features(X[None, None, None])[0, 0, 0], elu_plus_one(X), 1e-6
        )

    def test_keys_do_not_fall_below_the_floor(self):
        keys = key_features(jnp.array([-29.0, -31.0, -1e3, -1e30])[None, None, None])[0, 0, 0]
        np.testing.assert_allclose(keys, [np.exp(-29.0), *[KEY_FLOOR] * 3], rtol=1e-5)

    def test_queries_are_elu_plus_one_over_the_largest(self):
        rows = jax.random.normal(jax.random.key(0), (2, 3, 4, 5)) * 5
        expected = elu_plus_one(rows)
        expected /= expected.max(-1, keepdims=True)
        np.testing.assert_allclose(query_features(rows), expected, rtol=1e-5)

    def test_very_negative_queries_keep_their_proportions(self):
        row = query_features(jnp.array([-1e3, -1001.0, -1002.0])[None, None, None])[0, 0, 0]
        np.testing.assert_allclose(row, np.exp([0.0, -1, -2]), rtol=1e-5)

    def test_logarithm(self):
        np.testing.assert_allclose(log_elu_plus_one(X), np.log(elu_plus_one(X)), 1e-6, 1e-7)

    @pytest.mark.parametrize("feature", (key_features, log_elu_plus_one))
    def test_gradients_around_zero(self, feature):
        for x in (-1.0, -1e-6, 0.0, 1e-6, 1.0):
            slope = jax.grad(lambda x: feature(jnp.full((1, 1, 1, 1), x)).sum())(x)
            inner = 1.0 if x > 0 else np.exp(x)
            expected = inner if feature is key_features else inner / elu_plus_one(x)
            np.testing.assert_allclose(slope, expected, rtol=1e-5)

    def test_bfloat16_is_read_in_float32(self):
        x = jnp.full((1, 1, 1, 2), -1.0, jnp.bfloat16)
        assert key_features(x).dtype == query_features(x).dtype == jnp.float32


class TestRows:
    @pytest.mark.parametrize("causal", (False, True))
    def test_sum_to_1_wherever_queries_and_keys_lie(self, causal):
        layer = make(causal, chunk_size=4)
        graph, state = nnx.split(layer)
        mask = jnp.ones((1, 9), bool)

        @jax.jit
        def row_sums(query, key):
            value = jnp.ones((1, 2, 9, 4))

            def total(query, key):
                out = nnx.merge(graph, state).mix(Features(query, key, value), mask)
                return out[..., 0].sum(), out

            gradients, out = jax.grad(total, argnums=(0, 1), has_aux=True)(query, key)
            return out, gradients

        noise = jax.random.normal(jax.random.key(0), (2, 1, 2, 9, 4))
        for query_at in (-1e4, -100.0, 0.0, 1e4):
            for key_at in (-1e4, -100.0, -25.0, 0.0, 1e4):
                out, gradients = row_sums(query_at + noise[0], key_at + noise[1])
                np.testing.assert_allclose(out, 1, atol=1e-5)
                # A sum of 1 whatever the features: nothing pulls on them.
                for gradient in gradients:
                    np.testing.assert_allclose(gradient, 0, atol=1e-5)

    def test_weights_by_hand(self):
        layer = make(True)
        query, key = jax.random.normal(jax.random.key(1), (2, 1, 2, 9, 4))
        value = jax.random.normal(jax.random.key(2), (1, 2, 9, 4))
        mask = jnp.arange(9)[None] < 7
        weights = np.einsum("bhqd,bhkd->bhqk", elu_plus_one(query), elu_plus_one(key))
        weights *= np.tril(np.ones((9, 9))) * np.asarray(mask)
        weights /= weights.sum(-1, keepdims=True)
        features = Features(query, key, value)
        np.testing.assert_allclose(layer.weights(features, mask), weights, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(layer.mix(features, mask), weights @ value, atol=1e-5)


class TestOtherMaps:
    @pytest.mark.parametrize(
        ("name", "formula"),
        [
            ("relu", lambda x: np.maximum(x, 0)),
            ("relu2", lambda x: np.maximum(x, 0) ** 2),
            ("exp", lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
        ],
    )
    def test_formulas(self, name, formula):
        layer = make(False, feature_map=name)
        x = np.asarray(jax.random.normal(jax.random.key(0), (2, 2, 5, 4)))
        expected = formula(x)
        np.testing.assert_allclose(
            layer.key_features(jnp.asarray(x))[0], np.maximum(expected, KEY_FLOOR), rtol=1e-5
        )
        top = expected.max(-1, keepdims=True)
        np.testing.assert_allclose(
            layer.query_features(jnp.asarray(x)), expected / np.where(top > 0, top, 1), rtol=1e-5
        )

    def test_over_largest_keeps_zeros(self):
        rows = over_largest(jnp.array([[0.0, 0.0], [-4.0, 2.0]]))
        np.testing.assert_array_equal(rows, [[0, 0], [-1, 0.5]])

    def test_unknown_map(self):
        with pytest.raises(ValueError, match="one of elu, relu, relu2, exp; got 'cos'"):
            make(False, feature_map="cos")

    def test_taylor_is_the_exponential_to_second_order(self):
        layer = build(
            "taylor", dim=8, num_heads=2, max_length=9, causal=False, rngs=nnx.Rngs(0),
            feature_dim=6, normalise=False,
        )  # fmt: skip
        query, key = jax.random.normal(jax.random.key(0), (2, 1, 2, 9, 6))
        dots = jnp.einsum(
            "bhlm,bhsm->bhls", layer.query_features(query), layer.key_features(key)[0]
        )
        s = query @ key.swapaxes(-1, -2) / 6**0.5
        np.testing.assert_allclose(dots, 1 + s + s**2 / 2, rtol=1e-5, atol=1e-5)
        assert layer.num_features == 1 + 6 + 21
        assert layer.query.out_features == 12 and layer.value.out_features == 8

    def test_hedgehog_starts_at_the_softmax_of_plus_and_minus_x(self):
        layer = build("hedgehog", dim=8, num_heads=2, max_length=9, causal=False, rngs=nnx.Rngs(0))
        key = jax.random.normal(jax.random.key(0), (1, 2, 9, 4))
        expected = jax.nn.softmax(jnp.concatenate([key, -key], -1))
        np.testing.assert_allclose(layer.key_features(key)[0], expected, rtol=1e-6)

    def test_without_a_denominator_heads_are_normalised(self):
        layer = make(False, normalise=False)
        mixed = jax.random.normal(jax.random.key(0), (1, 2, 9, 4)) * 1e3
        norm = HeadNorm(4)
        np.testing.assert_allclose((norm(mixed) ** 2).mean(-1), 1, rtol=1e-5)
        np.testing.assert_allclose(norm(mixed * 1e25), norm(mixed), rtol=1e-5)
        np.testing.assert_array_equal(norm(jnp.zeros((1, 2, 9, 4))), 0)
        expected = layer.out(layer.merge_heads(norm(mixed)))
        np.testing.assert_array_equal(layer.finish(mixed, None), expected)


class TestState:
    def test_size(self):
        state = make(True).init_state(3)
        assert state.outer.shape == (3, 2, 4, 4) and state.normaliser.shape == (3, 2, 4)
        assert not state.outer.any() and state.outer.dtype == jnp.float32

    def test_a_bidirectional_layer_has_none(self):
        with pytest.raises(ValueError, match="causal=True"):
            make(False).init_state(3)
