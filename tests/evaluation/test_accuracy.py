"""Means and their errors against values worked out by hand; every example counts exactly once."""

import jax
import numpy as np
import pytest
from flax import nnx

from lra.devices import data_mesh
from lra.evaluation.accuracy import Examples, evaluate, summarise
from lra.tasks import make_task
from lra.training.state import split_model
from lra.training.step import make_eval_step
from models.encoder import Transformer


def examples(correct, weight, loss=None, length=None):
    number = len(correct)
    return Examples(
        loss=np.asarray(loss if loss is not None else np.ones(number), np.float64),
        correct=np.asarray(correct, np.float64),
        weight=np.asarray(weight, np.float64),
        constant=np.zeros(number, np.float64),
        length=np.asarray(length if length is not None else np.ones(number), np.int32),
    )


def test_one_label_an_example_has_the_binomial_standard_error():
    summary = summarise(examples([1, 0, 1, 1, 0], [1] * 5, loss=[0.1, 2.0, 0.2, 0.3, 0.4]))
    assert summary == {
        "n": 5,
        "labels": 5,
        "accuracy": 0.6,
        "accuracy_se": pytest.approx(np.sqrt(0.6 * 0.4 / 5)),
        "loss": pytest.approx(0.6),
    }


def test_labels_of_one_example_are_not_independent():
    """c = 2, 0, 3 of w = 4, 1, 3 labels: p = 5/8, residuals c − pw = −1/2, −5/8, 9/8."""
    summary = summarise(examples([2, 0, 3], [4, 1, 3], loss=[4.0, 1.0, 3.0]))
    assert (summary["n"], summary["labels"], summary["accuracy"]) == (3, 8, 0.625)
    assert summary["accuracy_se"] == pytest.approx(np.sqrt(16 + 25 + 81) / 8 / 8)
    assert summary["loss"] == pytest.approx(1.0)


@pytest.mark.parametrize("weight", [[], [0, 0]])
def test_where_nothing_counts_there_is_no_accuracy(weight):
    assert summarise(examples([0] * len(weight), weight)) == {
        "n": len(weight),
        "labels": 0,
        "accuracy": None,
        "accuracy_se": None,
        "loss": None,
    }


def test_between_includes_the_lower_edge_and_parts_the_whole():
    whole = examples([1, 0, 1, 1], [1] * 4, loss=[1, 2, 3, 4], length=[5, 10, 15, 20])
    parts = [whole.between(0, 10), whole.between(10, 20), whole.between(20, None)]
    assert [part.length.tolist() for part in parts] == [[5], [10, 15], [20]]
    assert [part.loss.tolist() for part in parts] == [[1], [2, 3], [4]]
    assert sum(part.correct.sum() for part in parts) == whole.correct.sum()


class Documents:
    """Ten classify examples of lengths 1 … 10, longer than the batch's six tokens from the seventh."""

    spec = make_task("text", length=6, seed=0).spec

    def source(self, split):
        rng = np.random.default_rng(1)
        inputs = [rng.integers(1, 257, n).astype(np.int32) for n in range(1, 11)]
        return [{"inputs": ids[:6], "label": int(ids[0] % 2), "length": len(ids)} for ids in inputs]

    def with_length(self, length):
        raise NotImplementedError


def recall():
    return make_task(
        "recall", length=16, seed=0, vocab_size=16, num_pairs=2, validation_examples=10
    )


@pytest.fixture(scope="module", params=["tag", "classify"])
def model(request):
    task = recall() if request.param == "tag" else Documents()
    spec = task.spec
    graph, params, buffers = split_model(
        Transformer(
            kind=spec.kind,
            vocab_size=spec.vocab_size,
            num_classes=spec.num_classes,
            max_length=spec.max_length,
            attention="linear",
            mechanisms={},
            num_layers=1,
            dim=8,
            num_heads=2,
            qkv_dim=0,
            mlp_dim=0,
            head_dim=0,
            match="concat",
            positions="none",
            pool="mean",
            causal=False,
            short_conv=0,
            dropout=0.5,
            attention_dropout=0.0,
            dtype="float32",
            rngs=nnx.Rngs(params=jax.random.key(0)),
        )
    )
    step = make_eval_step(graph)

    def run(batch_size, limit=0):
        return evaluate(
            step,
            params,
            buffers,
            task,
            "validation",
            mesh=data_mesh(),
            batch_size=batch_size,
            limit=limit,
            progress="test",
        )

    return task, run, run(10)


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_the_batch_size_does_not_matter(model, batch_size):
    task, run, whole = model
    parts = run(batch_size)
    assert len(parts.weight) == len(whole.weight) == 10
    np.testing.assert_array_equal(parts.weight, whole.weight)
    np.testing.assert_array_equal(parts.correct, whole.correct)
    np.testing.assert_array_equal(parts.length, whole.length)
    np.testing.assert_allclose(parts.loss, whole.loss, atol=1e-6, rtol=1e-6)
    assert whole.weight.tolist() == [2 if task.spec.kind == "tag" else 1] * 10
    assert len(set(whole.loss)) == 10
    if task.spec.kind == "classify":
        assert whole.length.tolist() == list(range(1, 11))


def test_limit_takes_the_first_examples(model):
    _, run, whole = model
    few = run(4, limit=7)
    np.testing.assert_allclose(few.loss, whole.loss[:7], atol=1e-6, rtol=1e-6)
    np.testing.assert_array_equal(few.length, whole.length[:7])
    assert len(run(10, limit=50).loss) == 10
