"""tune() with a fake tunable in real worker processes: what hangs, dies or fails costs itself and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_tunable
import pytest
from fake_tunable import candidate

from lowbit.store import Store
from lowbit.tuner import pool
from lowbit.tuner.ahead import compile_all
from lowbit.tuner.pool import Worker, WorkerDied, WorkerHung
from lowbit.tuner.tunable import Candidate
from lowbit.tuner.tune import Tuner

COMMAND = (sys.executable, fake_tunable.__file__)


@pytest.fixture(autouse=True)
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Worker", lambda: Worker(COMMAND))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "gpu.json", "no GPU")


def tuner(store: Store, *problems: tuple[str, list[tuple[str, float]]], **options: Any) -> Tuner:
    pairs = [("fake", (name, tuple(candidates))) for name, candidates in problems]
    options = {"processes": 1, "launch_limit_s": 1.0} | options
    return Tuner(pairs, store=store, worker=lambda: Worker(COMMAND), **options)


def test_the_fastest_wins_and_what_fails_is_counted(store: Store) -> None:
    many = [("run", 10.0), ("hang", 1.0), ("memory", 1.0), ("die", 1.0), ("wrong", 1.0), ("raise", 1.0),
            ("no compile", 1.0), ("run", 7.0), ("run", 8.0)]  # fmt: skip
    report = tuner(store, ("a", many), ("too large", [("run", 1.0)])).run()
    (result,) = report.results
    assert (result.best, result.us, result.default_us) == (candidate("run", 7.0), 7.0, 10.0)
    assert result.measured == 3
    kinds = ("hung", "out of memory", "ended the process", "wrong result", "failed", "not compiled")
    assert report.skipped == dict.fromkeys(kinds, 1)
    assert report.reasons["failed"] == "failed: ValueError: some defect"
    assert report.reasons["hung"] == "hung: nothing was heard for 1 s"
    assert report.reasons["ended the process"].startswith("ended the process: a worker ended with code 3")
    assert [(key["name"], why) for key, why in report.failed] == [("too large", "MemoryError: ")]
    (row,) = store.rows()
    assert (row["family"], row["config"], row["us"]) == ("fake", {"does": "run", "us": 7.0}, 7.0)
    assert not report.has_shipped_table and report.kept and not report.interrupted
    assert report.as_dict()["results"][0]["gain"] == pytest.approx(10 / 7)


def test_winners_are_tried_on_other_problems_and_varied(store: Store) -> None:
    report = tuner(
        store, ("a", [("run", 10.0), ("shared", 5.0)]), ("b", [("run", 9.0), ("run", 8.0)]),
        ("c", [("run", 9.0), ("improvable", 4.0)]),
    ).run()  # fmt: skip
    best = {result.problem["name"]: result.best for result in report.results}
    assert best == {"a": candidate("shared", 5.0), "b": candidate("shared", 5.0), "c": candidate("run", 3.0)}
    assert {row["problem"]["name"]: row["us"] for row in store.rows()} == {"a": 5.0, "b": 5.0, "c": 3.0}


def test_the_untuned_stays_unless_another_is_clearly_faster(store: Store) -> None:
    report = tuner(store, ("a", [("run", 10.0), ("run", 9.95)])).run()
    assert report.results[0].best == candidate("run", 10.0)


def test_what_is_known_is_not_measured_again(store: Store) -> None:
    problem = ("a", [("run", 10.0), ("run", 5.0)])
    assert len(tuner(store, problem).run().results) == 1
    report = tuner(store, problem, ("b", [("run", 2.0)])).run()
    assert (report.known, [r.problem["name"] for r in report.results]) == (1, ["b"])
    assert len(tuner(store, problem, again=True).run().results) == 1


def test_an_interruption_keeps_what_is_done(store: Store) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if what == "measuring" and done == 1:
            raise KeyboardInterrupt

    report = tuner(store, *[(name, [("run", 3.0)]) for name in "abc"], progress=progress).run()
    assert report.interrupted and len(report.results) == 1
    assert [row["problem"]["name"] for row in store.rows()] == [report.results[0].problem["name"]]


def test_nothing_that_runs_is_a_failure(store: Store) -> None:
    report = tuner(store, ("a", [("wrong", 1.0), ("memory", 1.0)]), ("b", [("hang", 1.0)])).run()
    assert sorted((key["name"], why) for key, why in report.failed) == [
        ("a", "no candidate ran"), ("b", "no candidate ran")
    ]  # fmt: skip
    assert store.rows() == []


def test_a_place_that_cannot_be_written_still_gives_results(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="measurements cannot be kept"):
        report = tuner(Store(tmp_path / "file" / "x.json", "no GPU"), ("a", [("run", 1.0)])).run()
    assert len(report.results) == 1 and not report.kept


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = Worker(COMMAND)
    yield found
    found.close()


def ask(worker: Worker, *does: str) -> list[dict[str, Any]]:
    key = fake_tunable.TUNABLE.key(("a", ()))
    request = {"do": "measure", "problem": key, "device": "cpu", "index": 0,
               "candidates": [["fake", {"does": name, "us": 1.0}] for name in does]}  # fmt: skip
    return list(worker.ask(request, 1.0, 60.0))


def test_a_worker_that_was_killed_is_started_again(worker: Worker) -> None:
    with pytest.raises(WorkerHung, match="nothing was heard for 1 s"):
        ask(worker, "hang")
    assert ask(worker, "run")[-1]["winner"] == 0
    with pytest.raises(WorkerDied, match="a worker ended with code 3"):
        ask(worker, "die")
    answers = ask(worker, "run", "run")
    assert [a["at"] for a in answers[:3]] == [0, 1, 0] and answers[-1]["us"] == [1.0, 1.0]


def test_no_worker_outlives_its_owner(worker: Worker) -> None:
    ask(worker, "run")
    assert worker._process is not None
    number = worker._process.pid
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_kernels_are_compiled_once_each_ahead() -> None:
    fake, problem = fake_tunable.TUNABLE, ("a", ())
    wanted = [candidate("run", 1.0), candidate("no compile", 1.0), candidate("run", 1.0)]
    told: list[tuple[int, int]] = []
    count, failed = compile_all([(fake, problem, c) for c in wanted], lambda *done: told.append(done))
    assert (count, failed) == (2, ["ValueError: not for this compiler"])
    assert told == [(0, 2), (1, 2), (2, 2)]


def test_a_search_has_everything_that_was_tried(store: Store) -> None:
    """A tunable itself is taken too, and what each candidate took is kept beside the result."""
    problem = ("a", (("run", 10.0), ("wrong", 1.0), ("run", 4.0)))
    search = Tuner([(fake_tunable.TUNABLE, problem)], store=store, worker=lambda: Worker(COMMAND), processes=1)
    assert search.run().results[0].us == 4.0
    (task,) = search.tasks
    assert [task.tried[candidate(*pair)] for pair in problem[1]] == [10.0, None, 4.0]


def test_candidates_are_the_same_in_any_order() -> None:
    assert Candidate.of("f", {"a": 1, "b": 2}) == Candidate.of("f", {"b": 2, "a": 1})
