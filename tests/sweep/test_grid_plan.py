"""What a sweep file may say, and the runs it gives."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from configs.common import ATTENTION_DEFAULTS
from lra.errors import UserError
from lra.sweep import Setting, Sweep, product, zipped
from lra.sweep.plan import check_tasks, expand, load_sweep, planned

RECALL = "configs/recall.py"


def test_product_is_every_combination_with_the_last_varying_fastest():
    settings = product(
        RECALL,
        args={"attention": ["softmax", "linear"], "size": "tiny"},
        values={"data.length": [32, 64], "eval.lengths": (32, 64)},
    )
    assert [s.config for s in settings] == [
        f"{RECALL}:attention={name},size=tiny"
        for name in ("softmax", "softmax", "linear", "linear")
    ]
    assert [dict(s.values)["data.length"] for s in settings] == [32, 64, 32, 64]
    assert all(dict(s.values)["eval.lengths"] == (32, 64) for s in settings)
    assert settings[1].label == f"{RECALL}:attention=softmax,size=tiny, data.length=64"


def test_zipped_goes_side_by_side():
    settings = zipped(
        RECALL,
        args={"attention": ["softmax", "linear"]},
        values={"optim.learning_rate": [1e-3, 1e-2], "data.length": 32},
    )
    assert [(s.config.split("=")[1], *dict(s.values).values()) for s in settings] == [
        ("softmax", 1e-3, 32),
        ("linear", 1e-2, 32),
    ]
    with pytest.raises(ValueError, match=r"of one length, got attention 2, data\.length 3"):
        zipped(RECALL, {"attention": ["a", "b"]}, {"data.length": [1, 2, 3]})


def test_runs_have_names_of_their_own_that_do_not_depend_on_the_rest_of_the_sweep():
    few = expand(Sweep(product(RECALL, values={"data.length": [32, 64]}), seeds=(0,)))
    more = expand(
        Sweep(product(RECALL, values={"data.length": [16, 32, 64]}), seeds=(0, 1), rates=())
    )
    names = [run.name for group in more for run in group]
    assert len(set(names)) == 6
    assert {run.name for group in few for run in group} < set(names)
    run = more[1][1]
    assert run.name.startswith("recall-length32-s1-")
    assert run.train_command(Path("DIR"), {"run.platform": "cpu"}) == [
        "train.py",
        f"--config={RECALL}",
        "--workdir=DIR",
        "--config.data.length=32",
        "--config.seed=1",
        "--config.run.platform=cpu",
    ]
    assert (run.task, run.stack, run.length, run.lengths) == ("recall", "softmax", 32, (32,))


def test_a_search_counts_every_rate_once_and_every_seed_of_the_best():
    sweep = Sweep(product(RECALL), seeds=(0, 1, 2), rates=(1e-3, 1e-2))
    groups = expand(sweep)
    assert [(run.rate, run.seed) for run in groups[0]] == [
        (rate, seed) for rate in (1e-3, 1e-2) for seed in (0, 1, 2)
    ]
    assert planned(sweep, groups) == 2 - 1 + 3
    wide = dataclasses.replace(sweep, search_seeds=2)
    assert planned(wide, expand(wide)) == 2 * 2 + 1
    one = Sweep(product(RECALL), seeds=(0, 1, 2), rates=(1e-3,))
    assert planned(one, expand(one)) == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            Setting(RECALL, (("data.lenght", 3),)),
            "no key 'data.lenght'. Did you mean 'data.length'",
        ),
        (Setting(RECALL, (("data.length", 3.5),)), r"data.length must be of type int, got 3.5"),
        (Setting(RECALL, (("model.causal", 1),)), r"model.causal must be of type bool, got 1"),
        (Setting(RECALL, (("data.length", True),)), r"data.length must be of type int, got True"),
        (Setting(f"{RECALL}:attention=softmx"), "unknown attention mechanism 'softmx'"),
        (Setting(f"{RECALL}:atention=softmax"), "no argument 'atention'"),
        (Setting("configs/recal.py"), "no file configs/recal.py. Did you mean 'configs/recall.py'"),
        (Setting(RECALL, (("optim.learning_rate", 1.0),), (1.0,)), "stands in values and in rates"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(setting, message):
    with pytest.raises(UserError, match=message):
        expand(Sweep([setting]))


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"rates": (float("nan"),)}, "learning_rate=nan: optim.learning_rate must be finite"),
        ({"rates": (-1.0,)}, r"learning_rate=-1\.0: optim.learning_rate must be above 0"),
        ({"split": "tset"}, "split must be one of train, validation, test; got 'tset'"),
        ({"lengths": (-5,)}, r"the sweep's lengths must be .* got \(-5,\)"),
        (
            {"values": {"model.num_layers": -1}},
            "num_layers=-1: model.num_layers must be at least 1",
        ),
        ({"values": {"model.attention": "sofmax"}}, "unknown attention mechanism 'sofmax'"),
        ({"values": {"seed": 7}}, "seed stands in values"),
    ],
)
def test_values_that_training_or_evaluation_would_refuse(sweep, message):
    settings = product(RECALL, values=sweep.pop("values", {}))
    with pytest.raises(UserError, match=message):
        expand(Sweep(settings, **sweep))


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"seeds": 3}, "seeds must be a list of whole numbers, got 3"),
        ({"seeds": ("a",)}, r"seeds must be a list of whole numbers, got \('a',\)"),
        ({"seeds": (-1,)}, r"at least 0 and less than 2\^32, got \(-1,\)"),
        ({"seeds": (1.5,)}, r"whole numbers, got \(1\.5,\)"),
        ({"rates": 1e-3}, r"rates must be a list of numbers, got 0\.001"),
        ({"search_seeds": 0}, r"search_seeds must be from 1 to its 1 seed\(s\), got 0"),
        ({"search_seeds": 2}, r"search_seeds must be from 1 to its 1 seed\(s\), got 2"),
        ({"search_seeds": 1.0}, r"search_seeds must be from 1 .* got 1\.0"),
        ({"rates": ("1e-3",)}, "rates must be a list of numbers"),
        ({"lengths": 64}, "lengths must be a list of whole numbers, got 64"),
        ({"settings": product(RECALL)[0]}, "must be a list of what product and zipped give"),
        ({"settings": ["x"]}, "must be a list of what product and zipped give"),
    ],
)
def test_slips_in_types(sweep, message):
    with pytest.raises(UserError, match=message):
        expand(Sweep(**{"settings": product(RECALL), **sweep}))


def test_arrays_and_ranges_are_lists():
    sweep = Sweep(
        product(RECALL), seeds=np.arange(2), rates=np.array([1e-3, 1e-2]), lengths=range(32, 34)
    )
    assert [(run.rate, run.seed) for run in expand(sweep)[0]] == [
        (1e-3, 0), (1e-3, 1), (1e-2, 0), (1e-2, 1)
    ]  # fmt: skip


def test_a_stack_and_its_layers_are_checked_together():
    deep = {"model.num_layers": 4, "model.attention": "3xlinear/softmax"}
    assert expand(Sweep(product(RECALL, values=deep)))[0][0].stack == "3xlinear/softmax"
    assert expand(
        Sweep(product(RECALL, {"attention": "3xlinear/softmax"}, {"model.num_layers": 4}))
    )
    with pytest.raises(UserError, match=r"3 layers, more than model\.num_layers=2"):
        expand(Sweep(product(RECALL, {"attention": "3xlinear/softmax"})))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data.num_pairs": 16, "data.length": 32}, "32 is below the 64 tokens"),
        ({"model.num_heads": 5}, "num_heads must divide .* got 5 and 64"),
        ({"model.dtype": "float16"}, "model.dtype must be one of"),
        ({"optim.schedule": "cosin"}, "optim.schedule must be one of"),
        ({"attention.softmax.scale": "cubic"}, "scale must be one of"),
        ({"eval.lengths": (4,)}, "below the 32 tokens"),
    ],
)
def test_what_task_model_and_optimizer_refuse_is_told_first(values, message):
    with pytest.raises(UserError, match=message):
        check_tasks(expand(Sweep(product(RECALL, values=values))), {})


def test_keywords_of_mechanisms_with_digits_and_repeats():
    args = {"attention": "3xmamba2/linear"}
    values = {
        "model.num_layers": 4,
        "attention.mamba2.chunk_size": 8,
        "attention.linear.chunk_size": 8,
    }
    assert expand(Sweep(product(RECALL, args, values)))


def test_a_sweep_of_numpy_numbers_is_one_of_plain_numbers(tmp_path):
    file = tmp_path / "sweep.py"
    file.write_text(
        "import numpy as np\nfrom lra.sweep import Sweep, product\n"
        "def get_sweep(arg=None): return Sweep(product('configs/recall.py'), seeds=np.arange(2))"
    )
    assert [type(seed) for seed in load_sweep(str(file)).seeds] == [int, int]


def test_keywords_of_a_mechanism_that_a_setting_lacks():
    args, values = {"attention": ["softmax", "linear"]}, {"attention.softmax.scale": "ssmax"}
    with pytest.raises(UserError, match="has no effect on the stack 'linear'"):
        expand(Sweep(product(RECALL, args, values)))


def test_a_key_that_is_given_twice():
    with pytest.raises(UserError, match=r"run.platform stands in the sweep's values and on the"):
        expand(Sweep(product(RECALL, values={"run.platform": "cpu"})), {"run.platform": "gpu"})


def test_empty_sweeps_and_runs_that_stand_there_twice_are_refused():
    with pytest.raises(UserError, match="has no runs"):
        expand(Sweep([]))
    with pytest.raises(UserError, match="has no runs"):
        expand(Sweep(product(RECALL), seeds=()))
    with pytest.raises(UserError, match=r"seeds hold a value twice: \(0, 0\)"):
        expand(Sweep(product(RECALL), seeds=(0, 0)))
    with pytest.raises(UserError, match="settings 0 and 1 of the sweep give the same run"):
        expand(Sweep(product(RECALL) + product(RECALL)))
    with pytest.raises(UserError, match=r"no key 'run.platfrm'. Did you mean 'run.platform'"):
        expand(Sweep(product(RECALL)), {"run.platfrm": "cpu"})


def test_sweep_files_say_what_is_wrong_with_them(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        load_sweep("configs/sweeps/quickstrt.py")
    with pytest.raises(UserError, match="has no argument, got 'x'"):
        load_sweep("configs/sweeps/quickstart.py:x")
    file = tmp_path / "sweep.py"
    for text, message in (
        ("x = 1", "defines no get_sweep"),
        ("import nothing_of_this_name", "cannot be loaded: ModuleNotFoundError"),
        ("def get_sweep(arg=None): return 3", "must return a Sweep, got int"),
        ("def get_sweep(arg=None): return {}[1]", "KeyError: 1"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            load_sweep(str(file))


def test_the_sweeps_of_the_repository_can_be_run():
    from lra.sweep.plan import ROOT

    files = sorted((ROOT / "configs/sweeps").glob("*.py"))
    assert files
    for file in files:
        assert expand(load_sweep(str(file)))
    assert ATTENTION_DEFAULTS
