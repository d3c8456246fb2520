"""The optimizer step against a gradient written down directly; the evaluation step against numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lra.training.state import initial_state, merge_model, split_model
from lra.training.step import make_eval_step, make_train_step
from models.attention import Buffer
from models.encoder import Transformer

LENGTH, VOCAB, CLASSES = 8, 11, 5
RATE = 0.1
#: Of dropout, and of redraws.
KEYS = (jax.random.key(0), jax.random.key(1))


def make_model(
    kind="tag", *, dropout=0.0, pool="mean", attention="linear", mechanisms=None, causal=False
):
    model = Transformer(
        kind=kind,
        vocab_size=VOCAB,
        num_classes=CLASSES,
        max_length=LENGTH,
        attention=attention,
        mechanisms=mechanisms or {},
        num_layers=attention.count("/") + 1,
        dim=8,
        num_heads=2,
        qkv_dim=0,
        mlp_dim=8,
        head_dim=4,
        match="concat",
        positions="none",
        pool=pool,
        causal=causal,
        short_conv=0,
        dropout=dropout,
        attention_dropout=0.0,
        dtype="float32",
        rngs=nnx.Rngs(params=jax.random.key(3)),
    )
    model.features = Buffer(jnp.arange(3.0))
    return model


def make_batch(kind="tag", rows=8, seed=0):
    """Rows of different lengths and numbers of labels; the last (tag: and each fourth) has none."""
    rng = np.random.default_rng(seed)
    shape = (rows, 2, LENGTH) if kind == "match" else (rows, LENGTH)
    lengths = rng.integers(2, LENGTH + 1, shape[:-1])
    mask = np.arange(LENGTH) < lengths[..., None]
    label_shape = (rows, LENGTH) if kind == "tag" else (rows,)
    weight = np.ones(label_shape, np.float32)
    if kind == "tag":
        weight = (mask & (rng.random(label_shape) < 0.5)).astype(np.float32)
        weight[::4] = 0
    weight[-1] = 0
    return {
        "inputs": jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32),
        "mask": jnp.asarray(mask),
        "label": jnp.asarray(rng.integers(0, CLASSES, label_shape), jnp.int32),
        "weight": jnp.asarray(weight),
    }


def copied(state):
    """Steps donate the state they are given."""
    return jax.tree.map(jnp.copy, state)


@pytest.fixture(scope="module")
def tagger():
    graph, params, buffers = split_model(make_model())
    return graph, initial_state(params, buffers, optax.sgd(RATE)), make_batch()


@pytest.fixture(scope="module")
def by_hand(tagger):
    """Loss and gradient of the mean over labels that count, as the definition says."""
    graph, state, batch = tagger

    def mean_loss(params):
        model = merge_model(graph, params, state.buffers)
        logits = model(batch["inputs"], mask=batch["mask"], deterministic=True)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][..., None], -1)
        return -(chosen[..., 0] * batch["weight"]).sum() / batch["weight"].sum()

    return jax.jit(jax.value_and_grad(mean_loss))(state.params)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_step_follows_the_gradient_of_the_mean_over_labels(tagger, by_hand, accumulate):
    graph, state, batch = tagger
    loss, gradient = by_hand
    step = make_train_step(graph, optax.sgd(RATE), lambda count: 7.0 + count, accumulate=accumulate)
    new, metrics = step(copied(state), batch, *KEYS)
    weight = float(batch["weight"].sum())
    assert float(metrics["weight"]) == weight
    np.testing.assert_allclose(metrics["loss_sum"] / weight, loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)
    assert float(metrics["learning_rate"]) == 7
    assert 0 <= float(metrics["correct"]) <= weight
    expected = jax.tree.map(lambda p, g: p - RATE * g, state.params, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), new.params, expected)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), new.params, state.params)
    assert all(jax.tree.leaves(moved))
    assert int(new.step) == 1
    jax.tree.map(np.testing.assert_array_equal, new.buffers, state.buffers)
    assert jax.tree.leaves(new.buffers)[0].shape == (3,)


def test_a_batch_without_a_label_changes_nothing(tagger):
    graph, state, batch = tagger
    step = make_train_step(graph, optax.sgd(RATE), lambda count: RATE, accumulate=1)
    empty = {**batch, "weight": jnp.zeros_like(batch["weight"])}
    new, metrics = step(copied(state), empty, *KEYS)
    assert float(metrics["loss_sum"]) == 0
    jax.tree.map(np.testing.assert_array_equal, new.params, state.params)


@pytest.fixture(scope="module")
def dropping():
    return split_model(make_model(dropout=0.5))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_dropout_depends_on_the_key_and_on_the_step(dropping, accumulate):
    graph, params, buffers = dropping
    state = initial_state(params, buffers, optax.sgd(RATE))
    step = make_train_step(graph, optax.sgd(RATE), lambda count: RATE, accumulate=accumulate)
    batch = make_batch()

    def loss(at, key):
        here = copied(state)
        here = type(here)(jnp.int32(at), here.params, here.buffers, here.opt_state)
        return float(step(here, batch, key, KEYS[1])[1]["loss_sum"])

    first = loss(0, jax.random.key(0))
    assert loss(0, jax.random.key(0)) == first
    assert loss(1, jax.random.key(0)) != first
    assert loss(0, jax.random.key(1)) != first


@pytest.fixture(scope="module")
def redrawing():
    """Runs steps of a model with layers that redraw: their buffers after each, and the last state."""
    mechanisms = {
        "performer": {"num_features": 5, "redraw_interval": 3},
        "softmax": {"sigma_reparam": True},
    }
    graph, params, buffers = split_model(
        make_model(attention="performer/softmax/performer", mechanisms=mechanisms)
    )
    state = initial_state(params, buffers, optax.sgd(RATE))
    step = make_train_step(graph, optax.sgd(RATE), lambda count: RATE, accumulate=1)

    def run(steps, start=None, keys=KEYS):
        here, seen = copied(start or state), []
        for _ in range(steps):
            here = step(here, make_batch(), *keys)[0]
            seen.append(copied(here).buffers)
        return seen, here

    return run


class TestRedraw:
    """New random features: at whole intervals, for each layer, and as a function of step and key."""

    @staticmethod
    def projection(buffers, layer=0):
        return np.asarray(buffers["blocks"][layer]["attention"]["projection"])

    def test_at_whole_intervals(self, redrawing):
        drawn = [self.projection(buffers) for buffers in redrawing(7)[0]]
        same = [np.array_equal(a, b) for a, b in itertools.pairwise(drawn)]
        assert same == [True, True, False, True, True, False]

    def test_layers_and_runs_draw_their_own(self, redrawing):
        (*_, last), _ = redrawing(4)
        assert not np.array_equal(self.projection(last, 0), self.projection(last, 2))
        (*_, other), _ = redrawing(4, keys=(KEYS[0], jax.random.key(7)))
        assert not np.array_equal(self.projection(last), self.projection(other))

    def test_an_interrupted_run_draws_the_same(self, redrawing):
        whole = redrawing(7)[0][-1]
        seen, _ = redrawing(4, redrawing(3)[1])
        jax.tree.map(np.testing.assert_array_equal, seen[-1], whole)

    def test_the_spectral_norm_follows_the_matrix(self, redrawing):
        _, state = redrawing(7)
        query = state.params["blocks"][1]["attention"]["query"]
        left = np.linalg.svd(np.asarray(query["kernel"]))[0][:, 0]
        kept = state.buffers["blocks"][1]["attention"]["query"]["left"]
        assert abs(left @ np.asarray(kept)) > 0.99


@pytest.mark.parametrize("kind", ["classify", "tag", "match"])
def test_eval_step_sums_over_each_example(kind):
    graph, params, buffers = split_model(make_model(kind, dropout=0.5))
    batch = make_batch(kind, rows=4)
    sums = make_eval_step(graph)(params, buffers, batch)

    @jax.jit
    def model(params, batch):
        merged = merge_model(graph, params, buffers)
        return merged(batch["inputs"], mask=batch["mask"], deterministic=True)

    logits = np.asarray(model(params, batch), np.float64)
    label, weight = np.asarray(batch["label"]), np.asarray(batch["weight"])
    log_sum = np.log(np.exp(logits).sum(-1))
    loss = (log_sum - np.take_along_axis(logits, label[..., None], -1)[..., 0]) * weight
    hit = (logits.argmax(-1) == label) * weight
    expected = {"loss": loss, "correct": hit, "weight": weight}
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        assert sums[name].shape == (4,)
        np.testing.assert_allclose(sums[name], value.reshape(4, -1).sum(1), rtol=2e-5, err_msg=name)
    assert float(sums["weight"][-1]) == float(sums["loss"][-1]) == 0


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize(
    ("kind", "pool"), [("tag", "mean"), ("classify", "max"), ("match", "last"), ("match", "mean")]
)
def test_an_evaluation_in_chunks_gives_the_same_sums(kind, pool, chunk):
    graph, params, buffers = split_model(make_model(kind, pool=pool, causal=True))
    batch = make_batch(kind, rows=4)
    whole = make_eval_step(graph)(params, buffers, batch)
    found = make_eval_step(graph, chunk=chunk)(params, buffers, batch)
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("kind", "token"), [("tag", 13), ("classify", 5)])
def test_memory_of_an_evaluation_in_chunks_does_not_grow(kind, token):
    """But for the tokens, copied once into chunks: an id of 4 bytes and a mask of 1, and for kind tag
    a label and a weight of 4 bytes each."""
    graph, params, buffers = split_model(make_model(kind, pool="last", causal=True))

    def temporary(length):
        label = (1, length) if kind == "tag" else (1,)
        batch = {
            "inputs": jax.ShapeDtypeStruct((1, length), "int32"),
            "mask": jax.ShapeDtypeStruct((1, length), "bool"),
            "label": jax.ShapeDtypeStruct(label, "int32"),
            "weight": jax.ShapeDtypeStruct(label, "float32"),
        }
        step = make_eval_step(graph, chunk=4)
        return step.lower(params, buffers, batch).compile().memory_analysis().temp_size_in_bytes

    grown = (temporary(2**14) - temporary(2**10)) / (2**14 - 2**10)
    assert grown <= 1.2 * token
    assert 1.2 * token < 8 * 4, "the vectors of the tokens alone would take more"
