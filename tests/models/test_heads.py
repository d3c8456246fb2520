"""Pooling over real tokens, and the heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.heads import POOLS, Head, pool

#: Real tokens of each row; the last row has none.
COUNTS = (5, 3, 1, 0)
MASK = np.arange(5) < np.array(COUNTS)[:, None]


def vectors(dtype=jnp.float32):
    # Below zero throughout, so that a 0 in a pad's place would be the maximum.
    return -1 - jnp.abs(jax.random.normal(jax.random.key(0), (4, 5, 3))).astype(dtype)


class TestPool:
    @pytest.mark.parametrize("how", POOLS)
    def test_ragged_rows(self, how):
        x = vectors()
        out = pool(x, jnp.asarray(MASK), how)
        for row, count in zip(range(3), COUNTS, strict=False):
            tokens = np.asarray(x[row, :count])
            expected = {
                "mean": tokens.mean(0),
                "max": tokens.max(0),
                "last": tokens[-1],
                "cls": tokens[0],
            }
            np.testing.assert_allclose(out[row], expected[how], rtol=1e-6)

    @pytest.mark.parametrize("how", POOLS)
    def test_a_row_of_pads_alone_gives_zeros(self, how):
        out = pool(vectors(), jnp.asarray(MASK), how)
        np.testing.assert_array_equal(out[3], 0)

    @pytest.mark.parametrize("how", POOLS)
    @pytest.mark.parametrize("fill", (0.0, 1e4, np.nan, np.inf))
    def test_pads_do_not_matter_and_get_no_gradient(self, how, fill):
        mask = jnp.asarray(MASK)
        x = jnp.where(mask[..., None], vectors(), fill)

        def loss(x):
            out = pool(x, mask, how)
            return (out[:3] ** 2).sum() + out[3].sum(), out

        gradient, out = jax.grad(loss, has_aux=True)(x)
        np.testing.assert_array_equal(out[:3], pool(vectors(), mask, how)[:3])
        if how != "cls":
            np.testing.assert_array_equal(out[3], 0)
            np.testing.assert_array_equal(gradient[3], 0)
        np.testing.assert_array_equal(np.where(MASK[..., None], 0, gradient)[:3], 0)
        assert np.isfinite(gradient).all()
        assert np.abs(gradient[:3]).sum() > 0

    def test_last_is_the_last_real_token_behind_a_gap(self):
        x = vectors()
        mask = jnp.array([[True, False, True, False, False]] * 4)
        np.testing.assert_array_equal(pool(x, mask, "last"), x[:, 2])

    def test_mean_of_bfloat16_sums_in_float32(self):
        x = jnp.ones((1, 1000, 1), jnp.bfloat16)
        out = pool(x, jnp.ones((1, 1000), bool), "mean")
        # A sum in bfloat16 sticks at 256.
        assert out.dtype == jnp.bfloat16 and out[0, 0] == 1

    def test_unknown_name(self):
        with pytest.raises(ValueError, match=r"cls, mean, max, last; got 'median'"):
            pool(vectors(), jnp.asarray(MASK), "median")


def head(kind, hidden=4, match="concat", dtype=jnp.float32):
    return Head(
        kind, dim=3, hidden=hidden, num_classes=2, match=match, rngs=nnx.Rngs(0), dtype=dtype
    )


def dense(layer, x):
    return np.asarray(x) @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])


def hand_built(layers, x):
    for layer in list(layers)[:-1]:
        x = np.maximum(dense(layer, x), 0)
    return dense(layers[-1], x)


class TestHead:
    @pytest.mark.parametrize("hidden", (0, 4))
    def test_classify(self, hidden):
        layer = head("classify", hidden)
        for dense_layer in layer.layers:
            dense_layer.bias[...] += 0.1
        x = jax.random.normal(jax.random.key(1), (5, 3))
        assert [d.kernel.shape for d in layer.layers] == ([(3, 4), (4, 2)] if hidden else [(3, 2)])
        np.testing.assert_allclose(layer(x), hand_built(layer.layers, x), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("match", ("concat", "nli"))
    def test_match(self, match):
        layer = head("match", match=match)
        for dense_layer in layer.layers:
            dense_layer.bias[...] += 0.1
        x = np.asarray(jax.random.normal(jax.random.key(1), (5, 2, 3)))
        a, b = x[:, 0], x[:, 1]
        joined = np.concatenate([a, b, a * b, a - b] if match == "nli" else [a, b], -1)
        assert [d.kernel.shape for d in layer.layers] == [(joined.shape[1], 4), (4, 2), (2, 2)]
        expected = hand_built(layer.layers, joined)
        np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)

    def test_tag_is_one_dense_layer_at_every_position(self):
        layer = head("tag")
        x = jax.random.normal(jax.random.key(1), (5, 7, 3))
        assert len(layer.layers) == 1
        np.testing.assert_allclose(layer(x), dense(layer.layers[0], x), rtol=1e-5, atol=1e-6)

    def test_bfloat16_gives_float32_logits(self):
        assert head("classify", dtype=jnp.bfloat16)(jnp.ones((1, 3), jnp.bfloat16)).dtype == "f4"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("rank",), r"classify, match, tag; got 'rank'"),
            (("match", 4, "sum"), r"concat, nli; got 'sum'"),
            (("match", 0), r"match head cannot have a hidden width of 0"),
            (("match", 1), r"match head cannot have a hidden width of 1"),
            (("classify", -1), r"classify head cannot have a hidden width of -1"),
        ],
    )
    def test_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            head(*arguments)
