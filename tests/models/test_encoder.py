"""The whole model: padding, causality, dropout, types, sizes, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.training.state import count_parameters, merge_model, split_model
from models.attention import ATTENTION, Buffer
from models.attention.linear import Linear
from models.attention.softmax import Softmax
from models.embeddings import POSITIONS
from models.encoder import Transformer
from models.heads import pool

VOCAB, CLASSES = 11, 3
#: Real tokens of each row.
COUNTS = (9, 1, 4)


def make(seed=0, **changes):
    """A tiny classifier with both mechanisms."""
    settings = {
        "kind": "classify", "vocab_size": VOCAB, "num_classes": CLASSES, "max_length": 14,
        "attention": "linear/softmax", "mechanisms": {}, "num_layers": 2, "dim": 8,
        "num_heads": 2, "qkv_dim": 0, "mlp_dim": 12, "head_dim": 6, "match": "concat",
        "positions": "sinusoidal", "pool": "mean", "causal": False, "short_conv": 0,
        "dropout": 0.0, "attention_dropout": 0.0, "dtype": "float32",
    }  # fmt: skip
    return Transformer(**{**settings, **changes}, rngs=nnx.Rngs(seed))


def jitted(model, method=None):
    """The model (or `method(model, …)`) compiled, its parameters an argument, evaluating."""
    graph, params, buffers = split_model(model)
    method = method or (lambda m, inputs, mask: m(inputs, mask=mask, deterministic=True))
    compiled = jax.jit(lambda p, b, *args: method(merge_model(graph, p, b), *args))
    return lambda *args: compiled(params, buffers, *args)


def tokens(length, rows=3, pad_id=0):
    """Ids and mask; row 0 starts with token 0, a token like any other."""
    ids = np.random.default_rng(0).integers(VOCAB, size=(3, max(COUNTS)))
    ids[0, 0] = 0
    mask = np.arange(length) < np.array(COUNTS)[:, None]
    padded = np.full((3, length), pad_id)
    padded[:, : ids.shape[1]] = ids
    padded = np.where(mask, padded, pad_id)
    return jnp.asarray(padded[:rows], jnp.int32), jnp.asarray(mask[:rows])


class TestPadding:
    @pytest.mark.parametrize("positions", POSITIONS)
    def test_pads_change_no_pooled_logits(self, positions):
        model = make(positions=positions, short_conv=2, mlp_dim=0)

        def every_pool(model, inputs, mask):
            x, seen = model.encode(inputs, mask, deterministic=True)
            return {how: model.head(pool(x, seen, how)) for how in ("mean", "max", "last")}

        run = jitted(model, every_pool)
        short = run(*tokens(9))
        for pad_id in (0, 7):
            for how, logits in run(*tokens(14, pad_id=pad_id)).items():
                np.testing.assert_allclose(logits, short[how], atol=2e-6, err_msg=how)
        assert np.abs(short["mean"] - short["max"]).max() > 1e-3

    @pytest.mark.parametrize("positions", POSITIONS)
    def test_pads_change_no_cls_logits(self, positions):
        run = jitted(make(positions=positions, pool="cls", mlp_dim=0))
        short = run(*tokens(9))
        for pad_id in (0, 7):
            np.testing.assert_allclose(run(*tokens(14, pad_id=pad_id)), short, atol=2e-6)

    def test_cls_sees_the_first_token_even_if_its_id_is_0(self):
        run = jitted(make(pool="cls"))
        inputs, mask = tokens(9)
        assert inputs[0, 0] == 0
        moved = run(inputs.at[0, 0].set(5), mask)
        assert np.abs(moved[0] - run(inputs, mask)[0]).max() > 1e-4

    def test_cls_is_a_real_token_of_every_row(self):
        inputs, mask = tokens(9)
        mask = mask.at[1].set(False)
        encode = jitted(make(pool="cls"), lambda m, i, k: m.encode(i, k, deterministic=True)[1])
        np.testing.assert_array_equal(
            encode(inputs, mask), np.pad(mask, ((0, 0), (1, 0)), constant_values=True)
        )

    def test_a_row_of_pads_alone_is_finite(self):
        inputs, mask = tokens(9)
        mask = mask.at[1].set(False)

        def gradient(model, inputs, mask):
            graph, params, buffers = split_model(model)

            def loss(params):
                model = merge_model(graph, params, buffers)
                x, seen = model.encode(inputs, mask, deterministic=True)
                logits = [model.head(pool(x, seen, how)) for how in ("mean", "max", "last")]
                return sum((x**2).sum() for x in logits), logits

            return jax.grad(loss, has_aux=True)(params)

        for leaf in jax.tree.leaves(jitted(make(), gradient)(inputs, mask)):
            assert np.isfinite(leaf).all()


class TestMatch:
    def test_one_encoder_for_both_documents(self):
        model = make(kind="match", match="nli")

        def by_hand(model, first, second, first_mask, second_mask):
            pooled = []
            for inputs, mask in ((first, first_mask), (second, second_mask)):
                x, seen = model.encode(inputs, mask, deterministic=True)
                pooled.append(jnp.where(seen[..., None], x, 0).sum(1) / seen.sum(1)[:, None])
            return model.head(jnp.stack(pooled, 1))

        inputs, mask = tokens(9)
        other, other_mask = inputs[::-1], mask[::-1]
        pair, pair_mask = jnp.stack([inputs, other], 1), jnp.stack([mask, other_mask], 1)
        run, hand = jitted(model), jitted(model, by_hand)
        straight = run(pair, pair_mask)
        np.testing.assert_allclose(
            straight, hand(inputs, other, mask, other_mask), rtol=1e-5, atol=1e-6
        )
        swapped = run(pair[:, ::-1], pair_mask[:, ::-1])
        np.testing.assert_allclose(
            swapped, hand(other, inputs, other_mask, mask), rtol=1e-5, atol=1e-6
        )
        # Row 1 pairs a document with itself; the others are different pairs when swapped.
        np.testing.assert_allclose(swapped[1], straight[1], rtol=1e-5, atol=1e-6)
        assert np.abs(swapped - straight)[0].max() > 1e-3


class TestCausal:
    def test_the_future_does_not_leak_into_tags(self):
        model = make(kind="tag", causal=True, short_conv=3, positions="rotary", pool="cls")
        run = jitted(model)
        inputs = tokens(9)[0]
        mask = jnp.ones((3, 9), bool)
        before = run(inputs, mask)
        assert before.shape == (3, 9, CLASSES)
        for cut in (1, 4, 8):
            moved = run(inputs.at[:, cut].set((inputs[:, cut] + 1) % VOCAB), mask)
            np.testing.assert_allclose(moved[:, :cut], before[:, :cut], atol=1e-6)
            assert np.abs(moved[:, cut:] - before[:, cut:]).max() > 1e-4

    def test_bidirectional_tags_see_the_future(self):
        run = jitted(make(kind="tag"))
        inputs = tokens(9)[0]
        mask = jnp.ones((3, 9), bool)
        moved = run(inputs.at[:, 8].set((inputs[:, 8] + 1) % VOCAB), mask)
        assert np.abs(moved - run(inputs, mask))[:, :8].max() > 1e-4


class TestDropout:
    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls):
        """Logits of a model with dropout, evaluating and training, from a dropout key."""
        model = make(dropout=0.5, mechanisms={"softmax": {"dropout": 0.5}})

        def both(model, inputs, mask, key):
            rngs = nnx.Rngs(dropout=key)
            return {
                mode: model(inputs, mask=mask, deterministic=mode == "evaluate", rngs=rngs)
                for mode in ("evaluate", "train")
            }

        run = jitted(model, both)
        return lambda seed: run(*tokens(9), jax.random.key(seed))

    def test_evaluation_drops_nothing(self, runs):
        plain = jitted(make())(*tokens(9))
        np.testing.assert_allclose(runs(0)["evaluate"], plain, atol=1e-6)
        np.testing.assert_array_equal(runs(0)["evaluate"], runs(1)["evaluate"])

    def test_the_key_decides(self, runs):
        np.testing.assert_array_equal(runs(0)["train"], runs(0)["train"])
        assert np.abs(runs(0)["train"] - runs(1)["train"]).max() > 1e-3
        assert np.abs(runs(0)["train"] - runs(0)["evaluate"]).max() > 1e-3

    @pytest.mark.parametrize(
        "changes", ({"dropout": 0.5}, {"mechanisms": {"softmax": {"dropout": 0.5}}})
    )
    def test_training_needs_rngs(self, changes):
        model = make(attention="softmax", num_layers=1, **changes)
        inputs, mask = tokens(9)
        with pytest.raises(ValueError, match="rngs"):
            model(inputs, mask=mask, deterministic=False)

    def test_no_generator_state_in_the_model(self):
        _, _, buffers = split_model(make(dropout=0.5))
        assert not jax.tree.leaves(buffers)


class TestTypes:
    def test_bfloat16(self):
        model = make(dtype="bfloat16", positions="learned")

        def gradient(model, inputs, mask):
            graph, params, buffers = split_model(model)

            def loss(params):
                logits = merge_model(graph, params, buffers)(inputs, mask=mask, deterministic=True)
                return (logits**2).sum(), logits

            return jax.grad(loss, has_aux=True)(params)

        gradients, logits = jitted(model, gradient)(*tokens(9))
        assert logits.dtype == jnp.float32
        for leaf in jax.tree.leaves(gradients):
            assert leaf.dtype == jnp.float32
            assert np.isfinite(leaf).all() and np.abs(leaf).sum() > 0

    def test_jit_is_no_jit(self):
        model = make(attention="linear", num_layers=1, positions="rotary")
        inputs, mask = tokens(9)
        eager = model(inputs, mask=mask, deterministic=True)
        np.testing.assert_allclose(jitted(model)(inputs, mask), eager, rtol=1e-6, atol=1e-6)


class TestStructure:
    def test_parameter_count(self):
        dim, mlp, hidden, width, layers, taps = 8, 12, 6, 4, 2, 3
        model = make(qkv_dim=width, short_conv=taps, pool="cls", positions="learned")
        norm = 2 * dim
        attention = 4 * dim * width + taps * dim
        block = 2 * norm + attention + (dim * mlp + mlp) + (mlp * dim + dim)
        head = (dim * hidden + hidden) + (hidden * CLASSES + CLASSES)
        embedding = VOCAB * dim + dim + (14 + 1) * dim  # tokens, CLS, positions with CLS
        expected = embedding + layers * block + norm + head
        assert count_parameters(split_model(model)[1]) == expected

    def test_without_mlp_and_hidden_layer(self):
        model = make(mlp_dim=0, head_dim=0)
        norm, dim = 16, 8
        expected = VOCAB * dim + 2 * (norm + 4 * dim * dim) + norm + dim * CLASSES + CLASSES
        assert count_parameters(split_model(model)[1]) == expected

    @pytest.mark.parametrize(
        ("stack", "layers", "expected"),
        [
            ("linear/softmax", 4, [Linear, Softmax, Linear, Softmax]),
            ("2xlinear/softmax", 3, [Linear, Linear, Softmax]),
            ("softmax", 2, [Softmax, Softmax]),
        ],
    )
    def test_stack(self, stack, layers, expected):
        mechanisms = {"softmax": {"dropout": 0.25}, "linear": {"chunk_size": 3}}
        model = make(attention=stack, num_layers=layers, mechanisms=mechanisms, causal=True)
        made = [block.attention for block in model.blocks]
        assert [type(layer) for layer in made] == expected
        assert all(layer.causal for layer in made)
        for layer in made:
            assert layer.dropout == (0.25 if isinstance(layer, Softmax) else 0)
            assert not isinstance(layer, Linear) or layer.chunk_size == 3

    def test_layers_start_different(self):
        first, second = (b.attention.query.kernel[...] for b in make(attention="softmax").blocks)
        assert np.abs(first - second).max() > 1e-3

    def test_buffers_are_saved_and_not_trained(self, monkeypatch):
        class Noted(Linear):
            def __init__(self, **common):
                super().__init__(**common)
                self.noted = Buffer(jnp.full((5,), 2.0))

        monkeypatch.setitem(ATTENTION, "noted", Noted)
        graph, params, buffers = split_model(make(attention="noted"))
        plain = split_model(make(attention="linear"))[1]
        assert count_parameters(params) == count_parameters(plain)
        assert [leaf.tolist() for leaf in jax.tree.leaves(buffers)] == [[2.0] * 5] * 2
        again = merge_model(graph, params, buffers)
        assert isinstance(again.blocks[1].attention.noted, Buffer)


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dtype": "float8"}, r"float32, bfloat16, float64; got 'float8'"),
            ({"dropout": 1.0}, r"at least 0 and less than 1, got 1\.0"),
            ({"dropout": -0.1}, r"got -0\.1"),
            ({"mlp_dim": -4}, r"got -4"),
            ({"causal": True, "pool": "cls"}, r"causal.* CLS"),
            ({"positions": "sines"}, r"got 'sines'"),
            ({"pool": "median"}, r"cls, mean, max, last; got 'median'"),
            ({"kind": "rank"}, r"classify, match, tag; got 'rank'"),
            ({"kind": "match", "match": "sum"}, r"concat, nli; got 'sum'"),
            ({"num_heads": 3}, r"got 3 and 8"),
            ({"qkv_dim": 7}, r"got 2 and 7"),
            ({"qkv_dim": 6, "positions": "rotary"}, r"even head width, got 3"),
            ({"attention": "linear/softmax", "num_layers": 3}, r"lists 2 layers, .*num_layers=3"),
            ({"attention": "softmx"}, r"'softmx'.* softmax, ssmax, linear.* mean 'softmax'"),
            ({"mechanisms": {"linear": {"dropout": 0.1}}}, r"Linear has no .*got 0\.1"),
        ],
    )
    def test_values(self, changes, message):
        with pytest.raises(ValueError, match=message):
            make(**changes)

    def test_keyword_of_a_mechanism(self):
        with pytest.raises(TypeError, match=r"'linear' has no keyword 'chunk'.* chunk_size"):
            make(mechanisms={"linear": {"chunk": 3}})
