"""Configs: argument strings, locked keys, names of settings, and that no key is decoration."""

from pathlib import Path

import jax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from configs import common, recall, text
from lra import config as configs
from lra.errors import UserError
from lra.evaluation import run as evaluation
from lra.training import loop
from models.attention import ATTENTION, keywords

ROOT = Path(__file__).parents[1]
CONFIGS = {"recall": recall, "text": text}


def leaves(config, prefix=""):
    """Dotted names of a config's values."""
    names = set()
    for key, value in config.items():
        inside = isinstance(value, ConfigDict)
        names |= leaves(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}"}
    return names


# Argument strings


def test_arguments_are_read_as_the_type_of_their_default():
    args = common.parse_argument("b=2,c=0.5,d=true", a="x", b=1, c=1.0, d=False)
    assert args.to_dict() == {"a": "x", "b": 2, "c": 0.5, "d": True}
    assert type(args.b) is int
    assert common.parse_argument("d=False", d=True).d is False
    assert common.parse_argument(None, a="x").a == common.parse_argument("", a="x").a == "x"
    assert common.parse_argument("a=3xlinear/softmax", a="x").a == "3xlinear/softmax"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sise=tiny", "no argument 'sise'; it has: size, layers, causal. Did you mean 'size'?"),
        ("zzzz=1", r"no argument 'zzzz'; it has: size, layers, causal\.$"),
        ("size", "'size' is not of the form key=value"),
        ("size=a,size=b", "'size' is given twice"),
        ("layers=two", "layers must be of type int, got 'two'"),
        ("layers=1.5", "layers must be of type int, got '1.5'"),
        ("causal=1", "causal must be true or false, got '1'"),
    ],
)
def test_bad_argument_strings(given, message):
    with pytest.raises(ValueError, match=message):
        common.parse_argument(given, size="tiny", layers=1, causal=False)


@pytest.mark.parametrize("module", CONFIGS.values(), ids=CONFIGS)
def test_an_unknown_size_lists_the_sizes_and_suggests_the_nearest(module):
    with pytest.raises(ValueError, match=r"unknown size 'tinny'; .*Did you mean 'tiny'"):
        module.get_config("size=tinny")


@pytest.mark.parametrize("module", CONFIGS.values(), ids=CONFIGS)
def test_every_size_and_mechanism_resolves(module):
    for size in module.SIZES:
        for name in ATTENTION:
            config = configs.resolve(module.get_config(f"attention={name},size={size}"))
            assert list(config.attention) == [name]


# Resolving


def refused(message, **changes):
    config = recall.get_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    with pytest.raises(UserError, match=message):
        configs.resolve(config)


@pytest.mark.parametrize("key", [".".join(row[:2]) for row in configs._AT_LEAST])
def test_numbers_have_a_lower_end(key):
    least = {".".join(row[:2]): row[2] for row in configs._AT_LEAST}[key]
    refused(rf"{key} must be at least {least}, got {least - 1}", **{key: least - 1})


def test_values_out_of_range_are_refused():
    refused("seed must be at least 0 and less than 2\\^32, got -1", seed=-1)
    refused("learning_rate must be above 0", optim__learning_rate=0.0)
    refused("learning_rate must be finite, got nan", optim__learning_rate=float("nan"))
    refused(r"optim\.b2 must be in \[0, 1\), got 1\.0", optim__b2=1.0)
    refused("eval.bins must be rising", eval__bins=(5, 3))
    refused("eval.bins must be different whole numbers of at least 1", eval__bins=(0, 3))
    refused("eval.lengths must be different whole numbers", eval__lengths=(8, 8))


@pytest.mark.parametrize("key", ["eval__lengths", "eval__bins"])
@pytest.mark.parametrize("value", [("a", "b"), (1.5, 2)])
def test_lengths_that_are_no_whole_numbers_are_refused(key, value):
    refused(key.replace("__", "."), **{key: value})


def test_a_seed_beyond_64_bits_is_refused():
    refused("seed", seed=10**20)


def test_an_unknown_mechanism_lists_those_there_are():
    refused(
        r"unknown attention mechanism 'softmx'; .*Did you mean 'softmax'", model__attention="softmx"
    )
    refused(r"model\.num_layers=2", model__attention="3xlinear")
    refused("empty layer", model__attention="linear//softmax")


def test_resolve_fills_the_schedule_and_leaves_its_argument_alone():
    config = recall.get_config()
    resolved = configs.resolve(config)
    assert resolved.optim.schedule_steps == config.train.steps - config.optim.warmup_steps
    assert config.optim.schedule_steps == 0
    assert set(config.attention) == set(common.ATTENTION_DEFAULTS)
    config.optim.schedule_steps = 77
    assert configs.resolve(config).optim.schedule_steps == 77


def test_values_keep_the_type_of_their_default():
    with pytest.raises(TypeError):
        recall.get_config().train.batch_size = "many"


def test_an_unknown_task_or_setting_is_refused():
    config = recall.get_config()
    config.task = "recal"
    with pytest.raises(ValueError, match=r"unknown task 'recal'.*Did you mean 'recall'\?"):
        configs.build_task(config)
    config = text.get_config()
    config.task = "recall"
    with pytest.raises(TypeError, match=r"no setting .*'validation_fraction'"):
        configs.build_task(config)


# Names of settings


def hash_of(argument="attention=linear", **changes):
    config = recall.get_config(argument)
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return configs.config_hash(configs.resolve(config))


def test_the_hash_names_a_setting_over_all_seeds_and_machines():
    one = hash_of()
    assert len(one) == 12
    assert int(one, 16) >= 0
    same = (
        {"seed": 3},
        {"run__workers": 4, "run__data_dir": "/data", "run__platform": "cpu"},
        {"attention__softmax__dropout": 0.5},
        {"eval__lengths": []},
    )
    for changes in same:
        assert hash_of(**changes) == one, changes
    other = (
        {"argument": "attention=softmax"},
        {"optim__learning_rate": 0.1},
        {"attention__linear__chunk_size": 64},
        {"data__length": 65},
        {"train__steps": 601},
    )
    assert len({one, *(hash_of(**changes) for changes in other)}) == len(other) + 1


def test_the_hash_survives_the_file(tmp_path):
    config = configs.resolve(text.get_config("size=tiny"))
    configs.write_config(config, tmp_path)
    stored = configs.read_config(tmp_path)
    assert configs.config_hash(stored) == configs.config_hash(config)
    assert configs.differences(configs.to_plain(config), configs.to_plain(stored)) == []
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"task": "recall"}'])
def test_a_damaged_config_is_named(tmp_path, damage):
    (tmp_path / "config.json").write_text(damage)
    with pytest.raises(UserError, match=r"config\.json"):
        configs.read_config(tmp_path)


def test_differences_name_leaves_by_their_dotted_key():
    stored = {"a": 1, "b": {"c": [1, 2], "d": 3}, "gone": 0}
    given = {"a": 1.0, "b": {"c": [1, 3], "d": 3}, "new": {"x": 1}}
    assert configs.differences(stored, given) == [
        "b.c: [1, 2] → [1, 3]",
        "gone: 0 → (none)",
        "new: (none) → {'x': 1}",
    ]


# Every key has a reader


class Recorded:
    """A config that notes which leaves are read.

    A section that is handed on whole, as keywords of a task, a model or a mechanism, counts as
    read: those constructors take no keyword that they do not name.
    """

    def __init__(self, config, seen, prefix=""):
        self._config, self._seen, self._prefix = config, seen, prefix

    def __getattr__(self, key):
        value = self._config[key]
        if isinstance(value, ConfigDict):
            return Recorded(value, self._seen, f"{self._prefix}{key}.")
        self._seen.add(f"{self._prefix}{key}")
        return value

    __getitem__ = __getattr__

    def to_dict(self):
        if self._prefix:
            self._seen |= {self._prefix + name for name in leaves(self._config)}
        return self._config.to_dict()


def test_every_key_is_read(monkeypatch, tmp_path):
    """Training and evaluation read every key after the config is resolved and checked."""
    config = recall.get_config()
    every = leaves(config)
    small = {
        "model.attention": "/".join(ATTENTION),
        "model.num_layers": len(ATTENTION),
        "model.dim": 8,
        "data.length": 40,
        "train.steps": 1,
        "train.batch_size": 4,
        "train.eval_examples": 2,
        "data.test_examples": 2,
        "eval.batch_size": 2,
        "run.tensorboard": False,
    }
    config.update_from_flattened_dict(small)
    seen = set()
    settle, read = loop.settle, configs.read_config
    with monkeypatch.context() as patch:
        patch.setattr(loop, "settle", lambda *args: Recorded(settle(*args), seen))
        loop.train(config, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(configs, "read_config", lambda path: Recorded(read(path), seen))
        evaluation.evaluate_run(tmp_path)
    assert every - seen == set()
    assert seen - every == set()


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_differ_in_their_tasks_settings_alone_and_those_are_read(name):
    config = CONFIGS[name].get_config()
    own = {key for key in leaves(config) if key.startswith("data.")}
    assert leaves(config) - own == leaves(common.base(name, "softmax")) - {"data.length"}
    seen = set()
    configs.build_task(Recorded(config, seen))
    assert own <= seen


def test_constructors_of_mechanisms_name_every_default():
    assert set(common.ATTENTION_DEFAULTS) == set(ATTENTION)
    for name, defaults in common.ATTENTION_DEFAULTS.items():
        assert set(defaults) <= set(keywords(name))


def test_the_mechanisms_defaults_are_not_shared_between_configs():
    first = recall.get_config()
    first.attention.linear.chunk_size = 7
    assert recall.get_config().attention.linear.chunk_size == 128
    assert common.ATTENTION_DEFAULTS["linear"]["chunk_size"] == 128


@pytest.mark.parametrize(
    "changes",
    [{"model.num_heads": 3}, {"model.positions": "rotary", "model.dim": 6}, {"model.dropout": 1.0}],
)
def test_models_that_cannot_be_are_refused_when_they_are_built(changes):
    config = recall.get_config("attention=linear")
    config.update_from_flattened_dict(changes)
    spec = configs.build_task(config).spec
    with pytest.raises(ValueError, match=r"num_heads|rotary|dropout"):
        configs.build_model(config, spec, nnx.Rngs(params=jax.random.key(0)))


@pytest.mark.parametrize("command", ["train.py", "eval.py"])
def test_commands_are_short(command):
    assert len((ROOT / command).read_text().splitlines()) < 80
