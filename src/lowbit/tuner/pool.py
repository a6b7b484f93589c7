"""Worker processes that may hang or die without taking this one with them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lowbit
from lowbit.errors import LowbitError

MODULE = "lowbit.tuner.worker"


class WorkerHung(LowbitError):
    """A worker said nothing for too long; it has been killed."""


class WorkerDied(LowbitError):
    """A worker ended before it answered."""


class Worker:
    """One process of worker.py, started on first use and again after it died or was killed."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", MODULE)) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115

    def start(self) -> None:
        """Begin to load what it needs, without waiting."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        paths = [str(Path(lowbit.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        self._lines = queue.Queue()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,  # Ctrl-C is for us; we end it
        )
        threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        with suppress(ValueError, OSError):
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    def ask(
        self, request: dict[str, Any], limit_s: float, first_limit_s: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """Answers to a request, the last with "end".

        Raises WorkerHung when nothing comes for limit_s seconds (first_limit_s for the first answer), and WorkerDied;
        the next request finds a new process.
        """
        limit = first_limit_s or limit_s
        self.start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None
        while True:
            try:
                line = self._lines.get(timeout=limit)
            except queue.Empty:
                self.close()
                raise WorkerHung(f"nothing was heard for {limit:g} s") from None
            if line is None:
                raise self._died()
            limit = limit_s
            answer = json.loads(line)
            yield answer
            if answer.get("end"):
                return

    def _died(self) -> WorkerDied:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        self.close()
        self._errors.seek(0)
        said = [line for line in self._errors.read().splitlines() if line.strip()]
        return WorkerDied(f"a worker ended with code {code}" + (f": {said[-1]}" if said else ""))

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)


Done = Callable[[int, str | None], None]


def run_all(requests: Sequence[dict[str, Any]], processes: int, limit_s: float, done: Done) -> None:
    """Requests shared by worker processes, each answered once. done(i, reason): i is finished; why it failed, or None.

    done is called in this thread. Processes are ended when this returns or is interrupted.
    """
    waiting: queue.Queue[int] = queue.Queue()
    for i in range(len(requests)):
        waiting.put(i)
    finished: queue.Queue[tuple[int, str | None]] = queue.Queue()
    workers = [Worker() for _ in range(min(processes, len(requests)))]

    def work(worker: Worker) -> None:
        while True:
            try:
                i = waiting.get_nowait()
            except queue.Empty:
                return
            reason: str | None = None
            try:
                for answer in worker.ask(requests[i], limit_s):
                    reason = answer.get("error")
            except (LowbitError, OSError, ValueError) as error:
                reason = str(error)
            finished.put((i, reason))

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        for _ in requests:
            done(*finished.get())
    finally:
        with suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        for worker in workers:
            worker.close()
        for thread in threads:
            thread.join(5)
