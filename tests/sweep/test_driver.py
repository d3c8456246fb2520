"""Search, choice, all seeds, test: with runs that only pretend to train."""

import json

import pytest

from lra.jsonl import write_rows
from lra.signals import StopRequest
from lra.sweep import Sweep, product
from lra.sweep.driver import PREEMPTIONS, SWEEP_FILE, Driver
from lra.sweep.job import Outcome, is_done
from lra.sweep.plan import expand

RECALL = "configs/recall.py"


class Pretend:
    """Ends each job at once: with the accuracy that is given for its rate, or a failure.

    Args:
        accuracy: of each rate on validation (`r0.01`), or of one seed of it (`r0.01-s3`); an Outcome
            for one that does not get there.
    """

    def __init__(self, slots=2, **accuracy):
        self.slots, self.accuracy = slots, accuracy
        self.seen, self.outcomes, self.stopped = [], {}, False

    def submit(self, job):
        from pathlib import Path

        rate = next((w.split("=")[-1] for w in job.train if "learning_rate" in w), "none")
        seed = next(w for w in job.train if "seed" in w)[-1]
        self.seen.append((rate, seed, bool(job.evaluate)))
        given = self.accuracy.get(f"r{rate}-s{seed}", self.accuracy.get(f"r{rate}", 0.5))
        if isinstance(given, list):
            given = given.pop(0) if len(given) > 1 else given[0]
        if isinstance(given, Outcome):
            self.outcomes[job.name] = given
            return
        workdir = Path(job.workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        row = {"step": 1, "split": "validation", "loss": 1.0, "accuracy": given}
        write_rows(workdir / "metrics.jsonl", [{**row, "accuracy_se": 0.1, "n": 10}])
        (workdir / "finished.json").write_text("{}")
        if job.evaluate:
            rows = [
                {"eval_length": length, "split": job.split, "checkpoint": "best"}
                for length in job.lengths
            ]
            write_rows(workdir / "results.jsonl", rows)
        assert is_done(job)
        self.outcomes[job.name] = Outcome(0, 1.0)

    def outcome(self, name):
        return self.outcomes[name]

    def stop(self):
        self.stopped = True


@pytest.fixture
def drive(tmp_path):
    """Runs a sweep of one setting; returns the driver and what sweep.json says."""

    def run(executor, retries=0, **sweep):
        grid = Sweep(product(RECALL), lengths=(32, 64), **sweep)
        driver = Driver(grid, expand(grid), tmp_path, {}, retries, {"file": "f"})
        with StopRequest() as stop:
            driver.run(executor, stop)
        return driver, json.loads((tmp_path / SWEEP_FILE).read_text())

    return run


def test_without_a_choice_of_rates_every_seed_is_trained_and_tested(drive):
    executor = Pretend()
    driver, stored = drive(executor, seeds=(0, 1))
    assert executor.seen == [("none", "0", True), ("none", "1", True)]
    assert driver.counts() == {"done": 2, "running": 0, "failed": 0, "left": 0}
    assert stored["selection"] == []
    assert {run["state"] for run in stored["runs"]} == {"done"}


def test_the_rate_that_is_best_on_validation_is_run_with_all_seeds_and_alone_is_tested(drive):
    accuracy = {"r0.001": 0.6, "r0.01": 0.9, "r0.1": 0.3}
    executor = Pretend(**accuracy)
    driver, stored = drive(executor, seeds=(3, 4), rates=(1e-3, 1e-2, 1e-1))
    assert executor.seen == [
        ("0.001", "3", False),
        ("0.01", "3", False),
        ("0.1", "3", False),
        ("0.01", "3", True),
        ("0.01", "4", True),
    ]
    assert driver.counts() == {"done": 4, "running": 0, "failed": 0, "left": 0}
    (choice,) = stored["selection"]
    assert (choice["chosen"], choice["seeds"], choice["stack"]) == (0.01, [3], "softmax")
    assert [(c["rate"], c["accuracy"]) for c in choice["candidates"]] == [
        (0.001, 0.6),
        (0.01, 0.9),
        (0.1, 0.3),
    ]
    assert "rate 0.01 of 0.001 → 60.00 %, 0.01 → 90.00 %, 0.1 → 30.00 %" in driver.summary()
    again = Pretend()
    drive(again, seeds=(3, 4), rates=(1e-3, 1e-2, 1e-1))
    assert again.seen == []


def test_the_rate_with_the_best_mean_over_the_seeds_of_the_search_is_run(drive):
    """One of the two seeds learns nothing at the rate that is best with the other."""
    executor = Pretend(**{"r0.001": 0.8, "r0.01-s3": 0.9, "r0.01-s4": 0.1})
    sweep = {"seeds": (3, 4, 5), "rates": (1e-3, 1e-2), "search_seeds": 2}
    driver, stored = drive(executor, **sweep)
    assert executor.seen == [
        ("0.001", "3", False),
        ("0.001", "4", False),
        ("0.01", "3", False),
        ("0.01", "4", False),
        ("0.001", "3", True),
        ("0.001", "4", True),
        ("0.001", "5", True),
    ]
    assert driver.planned == 5
    assert driver.counts() == {"done": 5, "running": 0, "failed": 0, "left": 0}
    (choice,) = stored["selection"]
    assert (choice["chosen"], choice["seeds"]) == (0.001, [3, 4])
    assert [c["accuracy"] for c in choice["candidates"]] == pytest.approx([0.8, 0.5])
    assert [c["accuracy_se"] for c in choice["candidates"]] == pytest.approx([0.0, 0.4])
    assert "(validation, mean of seeds 3, 4)" in driver.summary()
    again = Pretend()
    drive(again, **sweep)
    assert again.seen == []


def test_a_rate_of_which_one_seed_fails_is_no_candidate(drive):
    failed = Outcome(2, 1.0, ("boom",))
    executor = Pretend(**{"r0.001": 0.2, "r0.01-s0": 0.9, "r0.01-s1": failed})
    driver, stored = drive(executor, seeds=(0, 1), rates=(1e-3, 1e-2), search_seeds=2)
    assert stored["selection"][0]["chosen"] == 0.001
    assert stored["selection"][0]["candidates"][1]["failed"] == "boom"
    assert driver.counts() == {"done": 3, "running": 0, "failed": 1, "left": 0}


def test_a_rate_that_fails_is_no_candidate_and_stops_nothing(drive):
    nan = Outcome(2, 1.0, ("error: the loss is nan at step 3",))
    executor = Pretend(**{"r0.001": nan, "r0.01": 0.4})
    driver, stored = drive(executor, retries=1, seeds=(0,), rates=(1e-3, 1e-2))
    # Status 2 says what is wrong: trying again would say it again.
    assert executor.seen.count(("0.001", "0", False)) == 1
    assert stored["selection"][0]["chosen"] == 0.01
    assert stored["selection"][0]["candidates"][0]["failed"] == "error: the loss is nan at step 3"
    assert driver.counts() == {"done": 1, "running": 0, "failed": 1, "left": 0}
    assert "(attempt 1): error: the loss is nan at step 3" in driver.summary()


def test_where_every_rate_fails_nothing_is_chosen(drive):
    failed = Outcome(1, 1.0, ("boom",))
    driver, stored = drive(
        Pretend(**{"r0.001": failed, "r0.01": failed}), seeds=(0, 1), rates=(1e-3, 1e-2)
    )
    assert stored["selection"][0]["chosen"] is None
    assert driver.counts() == {"done": 0, "running": 0, "failed": 2, "left": 0}
    assert "no rate, every one failed" in driver.summary()


def test_a_failure_that_passes_is_tried_again_and_forgotten(drive):
    driver, stored = drive(Pretend(rnone=[Outcome(-9, 1.0), 0.5]), retries=1)
    assert driver.failed == []
    assert stored["runs"][0]["attempts"] == 1
    assert stored["runs"][0]["state"] == "done"


def test_a_run_that_something_else_stopped_goes_on(drive):
    driver, _ = drive(Pretend(rnone=[Outcome(143, 1.0), Outcome(143, 1.0), 0.5]))
    assert driver.counts()["done"] == 1


def test_a_run_that_is_stopped_again_and_again_has_failed(drive):
    executor = Pretend(rnone=[Outcome(143, 1.0)])
    driver, stored = drive(executor)
    assert len(executor.seen) == PREEMPTIONS + 1
    assert driver.counts() == {"done": 0, "running": 0, "failed": 1, "left": 0}
    assert stored["runs"][0]["reason"] == f"stopped {PREEMPTIONS} times by something else"


def test_stops_do_not_use_up_retries(drive):
    outcomes = [Outcome(143, 1.0), Outcome(1, 1.0, ("boom",)), Outcome(143, 1.0), 0.5]
    driver, _ = drive(Pretend(rnone=outcomes), retries=1)
    assert driver.failed == []


class Hasty(Pretend):
    """Says that a job is done which has only been trained, the first time."""

    def submit(self, job):
        super().submit(job)
        if len(self.seen) == 1:
            from pathlib import Path

            (Path(job.workdir) / "results.jsonl").unlink()


def test_a_job_that_did_less_than_asked_is_handed_in_again(drive):
    executor = Hasty()
    driver, _ = drive(executor)
    assert len(executor.seen) == 2
    assert driver.counts()["done"] == 1


def test_a_rate_that_was_tested_stays_when_another_recovers(drive):
    """Test is read at one rate, whatever a later command finds."""
    rates = (1e-3, 1e-2)
    drive(Pretend(**{"r0.001": Outcome(1, 1.0), "r0.01": 0.4}), rates=rates)
    executor = Pretend(**{"r0.001": 0.9, "r0.01": 0.4})
    _, stored = drive(executor, rates=rates)
    assert executor.seen == [("0.001", "0", False)]
    assert stored["selection"][0]["chosen"] == 0.01
    assert [c["accuracy"] for c in stored["selection"][0]["candidates"]] == [0.9, 0.4]


def test_what_is_cut_off_by_the_end_of_the_sweep_is_left_and_chooses_nothing(tmp_path):
    grid = Sweep(product(RECALL), rates=(1e-3, 1e-2))
    driver = Driver(grid, expand(grid), tmp_path, {}, 0, {})
    executor = Pretend(slots=2, **{"r0.001": 0.5, "r0.01": Outcome(1, 1.0, ("CANCELLED",))})
    with StopRequest() as stop:
        submit = executor.submit

        def submit_then_stop(job):
            submit(job)
            stop.signal = 15 if len(executor.seen) == 2 else None

        executor.submit = submit_then_stop
        driver.run(executor, stop)
    stored = json.loads((tmp_path / SWEEP_FILE).read_text())
    assert stored["selection"] == []
    assert {run["state"] for run in stored["runs"]} == {"done", "left"}
    assert driver.unfinished == 1


def test_a_stop_lets_nothing_new_begin(tmp_path):
    grid = Sweep(product(RECALL), seeds=(0, 1, 2))
    driver = Driver(grid, expand(grid), tmp_path, {}, 0, {})
    executor = Pretend(slots=1)
    with StopRequest() as stop:
        submit = executor.submit

        def submit_then_stop(job):
            submit(job)
            stop.signal = 15

        executor.submit = submit_then_stop
        driver.run(executor, stop)
    assert len(executor.seen) == 1
    assert driver.unfinished == 2


def test_a_search_without_anything_to_choose_from_has_failed(drive, tmp_path):
    rates = (1e-3, 1e-2)
    drive(Pretend(), rates=rates)
    for path in tmp_path.glob("*/metrics.jsonl"):
        path.unlink()
    for path in tmp_path.glob("*/results.jsonl"):
        path.unlink()
    driver, stored = drive(Pretend(), rates=rates)
    assert driver.counts() == {"done": 0, "running": 0, "failed": 2, "left": 0}
    assert all(run["tested"] for run in stored["runs"])
