"""LRA Text on a small prepared data set, and on the real one where it is at hand."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from lra.tasks import make_task
from lra.tasks.baselines import majority_label
from lra.tasks.text import Text

SUBDIRECTORY = "imdb_reviews/plain_text/1.0.0"


def _varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _field(number, payload):
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _record(text, label):
    """A tf.train.Example, encoded by hand so that no TensorFlow is needed."""
    features = {
        b"label": _field(3, _field(1, _varint(label))),
        b"text": _field(1, _field(1, text)),
    }
    entries = [_field(1, _field(1, k) + _field(2, v)) for k, v in features.items()]
    return _field(1, b"".join(entries))


def prepare(data_dir, splits, file_format="array_record"):
    """Writes a data set as TFDS prepares it; splits: {name: [(text, label)]}."""
    from array_record.python import array_record_module

    directory = Path(data_dir, SUBDIRECTORY)
    directory.mkdir(parents=True)
    infos = []
    for name, reviews in splits.items():
        path = directory / f"imdb_reviews-{name}.{file_format}-00000-of-00001"
        records = [_record(text, label) for text, label in reviews]
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
        infos.append(
            {
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "name": name,
                "numBytes": str(sum(map(len, records))),
                "shardLengths": [str(len(records))],
            }
        )
    module = "tensorflow_datasets.core.features."
    features = {
        "label": {
            "pythonClassName": module + "class_label_feature.ClassLabel",
            "classLabel": {"numClasses": "2"},
        },
        "text": {"pythonClassName": module + "text_feature.Text", "text": {}},
    }
    (directory / "features.json").write_text(
        json.dumps(
            {
                "pythonClassName": module + "features_dict.FeaturesDict",
                "featuresDict": {"features": features},
            }
        )
    )
    (directory / "label.labels.txt").write_text("neg\npos\n")
    (directory / "dataset_info.json").write_text(
        json.dumps(
            {
                "name": "imdb_reviews",
                "configName": "plain_text",
                "version": "1.0.0",
                "fileFormat": file_format,
                "splits": infos,
            }
        )
    )
    return str(data_dir)


# 60 reviews, each of which stands twice in train; the first also stands in test.
TRAIN = [(f"review {i % 60} ".encode() * (1 + i % 60), i % 60 % 2) for i in range(120)]
TEST = [(b"\x00\xff\xc3\xa9", 1), TRAIN[0], (b"", 0)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("tfds"), {"train": TRAIN, "test": TEST})


def _examples(task, split):
    source = task.source(split)
    return [source[i] for i in range(len(source))]


def _texts(task, split):
    return [bytes((e["inputs"] - 1).astype(np.uint8)) for e in _examples(task, split)]


def test_tokens_are_bytes_plus_one(data_dir):
    task = Text(1000, 0, data_dir)
    every_byte, copy, empty = _examples(task, "test")
    assert every_byte["inputs"].tolist() == [1, 256, 196, 170]
    assert every_byte["inputs"].dtype == np.int32
    assert (every_byte["label"], every_byte["length"]) == (1, 4)
    assert bytes((copy["inputs"] - 1).astype(np.uint8)) == TRAIN[0][0]
    assert (empty["inputs"].shape, empty["label"], empty["length"]) == ((0,), 0, 0)
    assert (task.spec.vocab_size, task.spec.pad_id, task.spec.num_classes) == (257, 0, 2)


def test_truncation_keeps_the_head_and_the_true_length(data_dir):
    short, full = (_examples(Text(20, 0, data_dir).with_length(n), "train") for n in (20, 9999))
    assert max(e["length"] for e in short) > 20
    for cut, whole in zip(short, full, strict=True):
        assert cut["inputs"].tolist() == whole["inputs"][:20].tolist()
        assert cut["length"] == whole["length"] == len(whole["inputs"])
        assert cut["label"] == whole["label"]


def test_hold_out_divides_train_and_keeps_copies_together(data_dir):
    task = Text(9999, 0, data_dir, validation_fraction=0.4)
    train, validation = _texts(task, "train"), _texts(task, "validation")
    assert sorted(train + validation) == sorted(text for text, _ in TRAIN)
    assert not set(train) & set(validation)
    assert 0.2 < len(validation) / 120 < 0.6
    labels = dict(TRAIN)
    for example, text in zip(_examples(task, "train"), train, strict=True):
        assert example["label"] == labels[text]


def test_hold_out_depends_on_its_own_seed_only(data_dir):
    def held_out(**settings):
        return _texts(make_task("text", length=9999, data_dir=data_dir, **settings), "validation")

    assert held_out(seed=0) == held_out(seed=1)
    assert held_out(seed=0) != held_out(seed=0, holdout_seed=1)
    # A larger hold-out contains the smaller one.
    assert set(held_out(seed=0)) < set(held_out(seed=0, validation_fraction=0.5))


def test_hold_out_does_not_depend_on_order_or_chunks(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("lra.tasks.text._CHUNK", 7)
    backwards = prepare(tmp_path, {"train": TRAIN[::-1], "test": TEST})
    task, reordered = Text(9999, 0, data_dir), Text(9999, 0, backwards)
    assert set(_texts(task, "validation")) == set(_texts(reordered, "validation"))
    monkeypatch.undo()
    assert _texts(Text(9999, 0, data_dir), "validation") == _texts(task, "validation")


def test_data_variant_names_the_hold_out(data_dir):
    assert Text(10, 0, data_dir).spec.data == "imdb_reviews/plain_text:1.0.0, hold-out 0.1 (seed 0)"
    assert Text(10, 0, validation_fraction=0.2).spec.data != Text(10, 0).spec.data
    assert Text(10, 0, holdout_seed=1).spec.data != Text(10, 0).spec.data


def test_pickled_source_gives_the_same_examples(data_dir):
    source = Text(50, 0, data_dir).source("train")
    copy = pickle.loads(pickle.dumps(source))
    assert len(copy) == len(source)
    np.testing.assert_array_equal(copy[3]["inputs"], source[3]["inputs"])
    for index in (len(source), -1):
        with pytest.raises(IndexError, match=str(index)):
            source[index]


def test_with_length_does_not_divide_the_data_again(data_dir, monkeypatch):
    task = Text(50, 0, data_dir)
    task.source("train")
    monkeypatch.setattr("lra.tasks.text._open_prepared", None)
    assert len(task.with_length(10).source("validation")) == len(task.source("validation"))


def test_majority_label(data_dir):
    task = Text(10, 0, data_dir)
    source = task.source("train")
    labels = [source[i]["label"] for i in range(len(source))]
    assert majority_label(task) == np.bincount(labels).argmax()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_fraction_must_leave_both_sides(fraction):
    with pytest.raises(ValueError, match=r"validation_fraction must be in \(0, 1\)"):
        Text(10, 0, validation_fraction=fraction)


def test_empty_split_is_reported(data_dir):
    task = Text(10, 0, data_dir, validation_fraction=1e-9)
    assert len(task.source("train")) == 120
    with pytest.raises(ValueError, match=r"'validation'.*empty: 120 published.*hold-out 1e-09"):
        task.source("validation")


def test_missing_data_names_place_and_command(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        Text(10, 0, str(tmp_path)).source("test")
    message = str(error.value)
    assert "\n" not in message
    assert str(tmp_path / SUBDIRECTORY / "dataset_info.json") in message
    assert "download_and_prepare()" in message and f"data_dir='{tmp_path}'" in message


def test_default_directory_is_that_of_tfds(data_dir, monkeypatch):
    from tensorflow_datasets.core import constants

    monkeypatch.setattr(constants, "DATA_DIR", data_dir)
    assert len(Text(10, 0).source("test")) == len(TEST)


def test_tfrecord_is_refused_with_a_reason(tmp_path):
    directory = prepare(tmp_path, {"train": TRAIN, "test": TEST}, file_format="tfrecord")
    with pytest.raises(ValueError, match=r"tfrecord files.*array_record is needed"):
        Text(10, 0, directory).source("test")


@pytest.mark.realdata
def test_published_reviews():
    data = Path(os.environ["LRA_REALDATA"], "tfds_array_record")
    task = Text(1000, 0, str(data))
    train, validation, test = (task.source(s) for s in ("train", "validation", "test"))
    assert len(train) + len(validation) == len(test) == 25_000
    assert 2300 < len(validation) < 2700
    positive = sum(validation[i]["label"] for i in range(len(validation)))
    assert 0.45 < positive / len(validation) < 0.55
    # 96 train reviews are copies of others; all copies are on one side.
    texts = [
        {r["text"] for r in map(train.records.__getitem__, s.indices.tolist())}
        for s in (train, validation)
    ]
    assert not texts[0] & texts[1]
    assert len(texts[0] | texts[1]) == 25_000 - 96
    example = test[0]
    assert example["inputs"].min() >= 1 and example["inputs"].max() <= 256
    assert len(example["inputs"]) == min(1000, example["length"])
