"""tune(): the fastest kernel for each problem, found by measuring few of many, kept as soon as it is found.

    problems -> candidates, ranked by an estimate -> compiled once each, in parallel processes
             -> measured in turns, in a process that may be killed -> winners tried on each other's problems -> store

A row is written after every problem, so what is done is done. A candidate that hangs, breaks the process, takes too
much memory or computes something else is left out and counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lowbit.dispatch.tuned import compiler, device_name, forget, shipped_table, user_store
from lowbit.errors import LowbitError
from lowbit.hardware import usable_cores
from lowbit.store import Row, Store, identity
from lowbit.tuner.ahead import COMPILE_LIMIT_S, compile_request
from lowbit.tuner.pool import Worker, WorkerDied, WorkerHung, run_all
from lowbit.tuner.tunable import Candidate, Key, Tunable, get_tunable

MOST = 16  # candidates of a problem in the first round
MOST_SHARED = 6  # winners of other problems tried in the second
LAUNCH_LIMIT_S = 20.0  # for one candidate, loading included
FIRST_LIMIT_S = 120.0  # for the first word of a process, which loads torch and makes weights
Progress = Callable[[str, int, int], None]  # (what, done, total)


@dataclass
class Result:
    """What was found for one problem."""

    problem: Key
    best: Candidate
    us: float
    default: Candidate
    default_us: float
    measured: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "problem": self.problem, "family": self.best.family, "config": self.best.values, "us": self.us,
            "default_family": self.default.family, "default_config": self.default.values,
            "default_us": self.default_us, "gain": self.default_us / self.us, "measured": self.measured,
        }  # fmt: skip


@dataclass
class Report:
    """A whole run. `known` problems were in the store already; `failed` have a reason each."""

    device: str
    has_shipped_table: bool
    results: list[Result] = field(default_factory=list)
    known: int = 0
    failed: list[tuple[Key, str]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # candidates by kind of reason
    reasons: dict[str, str] = field(default_factory=dict)  # the first of each kind, in full
    kernels: int = 0  # compiled
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    interrupted: bool = False
    kept: bool = True  # rows reached the store

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        data = asdict(self) | {"results": [result.as_dict() for result in self.results]}
        return data | {"skipped": dict(self.skipped), "failed": [{"problem": p, "why": w} for p, w in self.failed]}


@dataclass
class Task:
    """One problem on its way, with what was tried: microseconds, or None for what was left out."""

    tunable: Tunable[Any]
    problem: Any
    key: Key
    candidates: list[Candidate]
    tried: dict[Candidate, float | None] = field(default_factory=dict)
    result: Result | None = None


class Tuner:
    """See the module's text. worker: what measures, for tests; gpu: the row of a GPU to compile for where none is."""

    def __init__(
        self,
        problems: Iterable[tuple[str | Tunable[Any], Any]],  # (a tunable or its name, problem)
        *,
        most: int = MOST,
        again: bool = False,
        store: Store | None = None,
        processes: int | None = None,
        launch_limit_s: float = LAUNCH_LIMIT_S,
        progress: Progress = lambda what, done, total: None,
        worker: Callable[[], Worker] = Worker,
    ) -> None:
        self.problems = [(get_tunable(t) if isinstance(t, str) else t, problem) for t, problem in problems]
        self.tasks: list[Task] = []
        self.most, self.again, self.progress = most, again, progress
        self.launch_limit_s = launch_limit_s
        self.processes = processes or usable_cores()
        self.worker = worker()
        device, index = ("cpu", 0)
        if self.problems:
            first, problem = self.problems[0]
            device, index = first.device(problem)
        self.device, self.index = device, index
        self.name = device_name(device, index)
        self.store = store or user_store(self.name)
        self.report = Report(self.name, shipped_table(self.name))

    def run(self) -> Report:
        """Tune everything. Ctrl-C ends it early: the report says so, and what was found is kept."""
        start = time.perf_counter()
        try:
            tasks = self._tasks()
            if tasks:
                self.worker.start()  # loads while others compile
                self._compile(tasks)
                self._measure(tasks, "measuring", lambda task: task.candidates)
                self._measure(tasks, "comparing winners", lambda task: self._shared(task, tasks))
        except KeyboardInterrupt:
            self.report.interrupted = True
        finally:
            self.worker.close()
            forget()
        self.report.results = [task.result for task in self.tasks if task.result is not None]
        self.report.seconds["all"] = time.perf_counter() - start
        return self.report

    def _tasks(self) -> list[Task]:
        start = time.perf_counter()
        known = {identity(row) for row in self.store.rows()} if not self.again else set()
        for tunable, problem in self.problems:
            key = tunable.key(problem)
            try:
                candidates = tunable.candidates(problem, self.most)
            except LowbitError as error:
                self.report.failed.append((key, str(error)))
                continue
            if any(identity(self._row(tunable, key, c, 0, 0)) in known for c in candidates):
                self.report.known += 1
                continue
            self.tasks.append(Task(tunable, problem, key, candidates))
        self.tasks.sort(key=lambda task: [str(v) for k, v in sorted(task.key.items()) if k != "m"])  # weights stay
        self.report.seconds["ranking"] = time.perf_counter() - start
        return self.tasks

    def _row(self, tunable: Tunable[Any], key: Key, best: Candidate, us: float, default_us: float) -> Row:
        return {
            "problem": key, "source": tunable.source(best), "compiler": compiler(self.device), "family": best.family,
            "config": best.values, "us": round(us, 3), "default_us": round(default_us, 3),
        }  # fmt: skip

    # -------------------------------------------------------------------------------------------------- compiling
    def _compile(self, tasks: Sequence[Task]) -> None:
        start = time.perf_counter()
        if self.device == "cpu":
            return
        kernels: dict[tuple[str, Candidate], tuple[Task, list[tuple[Task, Candidate]]]] = {}
        for task in tasks:
            for candidate in task.candidates:
                key = (task.tunable.kernel_scope(task.problem), task.tunable.kernel(task.problem, candidate))
                kernels.setdefault(key, (task, []))[1].append((task, candidate))
        jobs = [compile_request(task.tunable, task.problem, kernel) for (_, kernel), (task, _) in kernels.items()]
        users = [users for _, users in kernels.values()]
        count = 0

        def done(i: int, reason: str | None) -> None:
            nonlocal count
            count += 1
            self.progress("compiling", count, len(jobs))
            if reason is not None:
                for task, candidate in users[i]:
                    self._skip(task, candidate, f"not compiled: {reason.splitlines()[0][:120]}")

        self.progress("compiling", 0, len(jobs))
        run_all(jobs, self.processes, COMPILE_LIMIT_S, done)
        self.report.kernels = len(jobs)
        self.report.seconds["compiling"] = time.perf_counter() - start

    def _skip(self, task: Task, candidate: Candidate, reason: str) -> None:
        if candidate not in task.tried:
            task.tried[candidate] = None
            kind = reason.partition(":")[0]
            self.report.skipped[kind] += 1
            self.report.reasons.setdefault(kind, reason)

    # -------------------------------------------------------------------------------------------------- measuring
    def _measure(self, tasks: Sequence[Task], what: str, choose: Callable[[Task], list[Candidate]]) -> None:
        start = time.perf_counter()
        for count, task in enumerate(tasks):
            self.progress(what, count, len(tasks))
            candidates = [c for c in choose(task) if task.tried.get(c, 0.0) is not None]
            if len(candidates) > 1 or (candidates and task.result is None):
                self._contest(task, candidates)
        self.progress(what, len(tasks), len(tasks))
        self.report.seconds[what] = time.perf_counter() - start

    def _contest(self, task: Task, candidates: list[Candidate]) -> None:
        """One problem's candidates, until those that are left get to the end; then its row."""
        while candidates:
            at = -1
            request = {
                "do": "measure", "problem": task.key, "device": self.device, "index": self.index,
                "candidates": [[c.family, c.values] for c in candidates],
            }  # fmt: skip
            answer: dict[str, Any] = {}
            try:
                for answer in self._ask(request):
                    at = answer.get("at", at)
            except (WorkerHung, WorkerDied) as error:
                if at < 0:
                    self.report.failed.append((task.key, str(error)))
                    return
                kind = "hung" if isinstance(error, WorkerHung) else "ended the process"
                self._skip(task, candidates.pop(at), f"{kind}: {error}")
                continue
            if "error" in answer:
                if at < 0 or answer["kind"] == "out of memory":
                    self.report.failed.append((task.key, answer["error"]))
                    return
                self._skip(task, candidates.pop(at), f"failed: {answer['error']}")
                continue
            for i, reason in answer["skipped"].items():
                self._skip(task, candidates[int(i)], reason)
            self._keep(task, candidates, answer)
            return
        self.report.failed.append((task.key, "no candidate ran"))

    def _ask(self, request: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """The measuring process's answers; its first word may take longer, because it loads and allocates."""
        return self.worker.ask(request, self.launch_limit_s, FIRST_LIMIT_S)

    def _keep(self, task: Task, candidates: list[Candidate], answer: dict[str, Any]) -> None:
        us: list[float | None] = answer["us"]
        task.tried |= {c: t for c, t in zip(candidates, us, strict=True) if t is not None}
        if answer["winner"] is None:
            self.report.failed.append((task.key, "no candidate ran"))
            return
        best = candidates[answer["winner"]]
        found, default_us = us[answer["winner"]], us[0]
        assert found is not None
        default = task.candidates[0]
        if candidates[0] != default or default_us is None:  # it did not run
            default_us = found
        task.result = Result(
            task.key, best, found, default, default_us, sum(t is not None for t in task.tried.values())
        )
        self.report.kept &= self.store.add([self._row(task.tunable, task.key, best, found, default_us)])

    def _shared(self, task: Task, tasks: Sequence[Task]) -> list[Candidate]:
        """What runs untuned, the winner, its variants, and winners of other problems, the frequent ones first."""
        if task.result is None:
            return []
        scope = task.tunable.kernel_scope(task.problem)
        others = Counter(
            other.result.best for other in tasks
            if other.result is not None and other.tunable is task.tunable
            and other.tunable.kernel_scope(other.problem) == scope
        )  # fmt: skip
        more = [*task.tunable.related(task.problem, task.result.best)]
        more += [c for c, _ in others.most_common() if task.tunable.fits(task.problem, c)][:MOST_SHARED]
        fresh = [c for c in dict.fromkeys(more) if c not in task.tried]
        return list(dict.fromkeys([task.candidates[0], task.result.best, *fresh])) if fresh else []


def tune(problems: Iterable[tuple[str | Tunable[Any], Any]], **options: Any) -> Report:
    """Tune (tunable or its name, problem) pairs of one device. options: of Tuner."""
    return Tuner(problems, **options).run()
