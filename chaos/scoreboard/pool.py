"""Many jobs on a few processes, with a progress bar; what was done before is not done again.

Starts processes and writes to the terminal; may not know what the jobs mean.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .jobs import Job, Outcome, Store, run

LINES = 10  # of progress where there is no terminal; none for fewer jobs
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass
class Pool:
    """Runs jobs by `work`. `outcomes`: everything so far; `reused` of them were kept, and had taken `reused_cpu_s`."""

    store: Store
    processes: int
    work: Callable[[Job], Outcome] = run
    outcomes: dict[Job, Outcome] = field(default_factory=dict)
    reused: int = 0
    reused_cpu_s: float = 0.0

    def do(self, what: str, jobs: Iterable[Job]) -> dict[Job, Outcome]:
        """The outcome of every job, in order; each is run at most once, whatever was asked before."""
        wanted = list(dict.fromkeys(jobs))
        todo = [job for job in wanted if job not in self.outcomes and not self._kept(job)]
        with _bar(what, len(wanted)) as bar:
            bar.done(len(wanted) - len(todo))
            self._run(todo, bar)
        return {job: self.outcomes[job] for job in wanted}

    def _kept(self, job: Job) -> bool:
        outcome = self.store.get(job)
        if outcome is None:
            return False
        self.outcomes[job] = outcome
        self.reused += 1
        self.reused_cpu_s += outcome.cpu_s
        return True

    def _finish(self, job: Job, outcome: Outcome, bar: _Bar) -> None:
        self.outcomes[job] = outcome
        self.store.put(job, outcome)
        bar.done(1, f"{job.scenario} {job.controller}")

    def _run(self, todo: list[Job], bar: _Bar) -> None:
        """Jobs on the processes; where one dies, those that were with it are run again one by one."""
        if self.processes == 1:
            for job in todo:
                self._finish(job, self.work(job), bar)
            return
        left = list(todo)
        suspects = self._round(left, self.processes, bar) if left else []
        for job in suspects:
            if self._round([job], 1, bar):
                self._finish(job, Outcome(error="its process died (out of memory?)"), bar)
        unfinished = [job for job in left if job not in self.outcomes]
        if unfinished:
            self._run(unfinished, bar)

    def _round(self, jobs: list[Job], processes: int, bar: _Bar) -> list[Job]:
        """Runs jobs until all are done or a process dies; those that were running when it did."""
        waiting = iter(jobs)
        running: dict[Future[Outcome], Job] = {}
        with workers(processes) as executor:
            while True:
                for job in waiting:
                    running[executor.submit(self.work, job)] = job
                    if len(running) >= processes + 1:  # one in reserve, so that none is idle
                        break
                if not running:
                    return []
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    try:
                        self._finish(running[future], future.result(), bar)
                    except BrokenProcessPool:
                        return [job for job in running.values() if job not in self.outcomes]
                    del running[future]


def _end_with_parent() -> None:
    """In a worker: leave when the bench was killed, which a worker that waits for work would never notice. The
    terminal's interrupt is the bench's to act on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def workers(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes (Numba and threads do not survive a fork), one BLAS thread each."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    executor = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    try:
        yield executor
    except BaseException:  # told to stop: what runs is not waited for, it may take minutes
        for process in list(executor._processes.values()):
            process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Bar:
    """A bar on a terminal; elsewhere a line for every tenth."""

    def __init__(self, what: str, total: int, progress: Progress | None) -> None:
        self._what, self._total, self._progress, self._done = what, total, progress, 0
        self._task = progress.add_task(what, total=total) if progress else None

    def done(self, count: int, last: str = "") -> None:
        """So many more are done."""
        tenth = self._done * LINES // max(1, self._total)
        self._done += count
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done, description=f"{self._what}: {last}")
        elif self._total >= LINES and self._done * LINES // self._total > tenth:
            print(f"{self._what}: {self._done} of {self._total}", file=sys.stderr, flush=True)


@contextmanager
def _bar(what: str, total: int) -> Iterator[_Bar]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Bar(what, total, None)
        return
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(what, total, progress)
