"""Does a runtime last: 100,000 answers by 8 threads at once, and nothing lost, hung or left behind.

    python benchmarks/stress.py --json results/stress-cpu.json            # width-digits; --answers 10000 is a tenth
    python benchmarks/stress.py NETWORK_OR_RUN [--portable]               # with --portable a folder of exported stages

Deadlines, refining, interrupts (from other threads, and in the main thread by a signal), batches, loops that stop,
coroutines, forks (which must be refused in words), and other runtimes closed while callers wait for them. Fails where an
answer is missing, was promised and did not come, or took a minute. Then 8 threads ask at the same moment, again and again,
with eight times what stage 1 usually takes: how often there was no answer (`together`). Times are only worth anything on a
machine that does nothing else.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from deadlines import Subject, resident, where

HUNG = 60.0  # seconds
ROUNDS = 200  # in which all ask at the same moment
IN_TIME = 0.99  # what stage 1 usually takes: this quantile


class Asked:
    """What one thread asks: a runtime, images for it, its full latency, and the answers it still holds."""

    def __init__(self, open_one: Callable[[], Any], runtime: Any, images: Any, full: float, seed: int) -> None:
        self.open, self.runtime, self.images, self.full = open_one, runtime, images, full
        self.chance = random.Random(seed)
        self.kept: list[Any] = []

    def image(self) -> Any:
        return self.images[self.chance.randrange(len(self.images))]

    def within(self, most: float, least: float = 0.0) -> float:
        return self.full * self.chance.uniform(least, most)

    def plain(self) -> None:
        deadline = self.within(4, -0.1) if self.chance.random() < 0.9 else None
        answer = self.runtime.answer(self.image(), deadline=deadline)
        assert answer.final or deadline is not None, f"no deadline, and {answer}"
        self.kept = [*self.kept[-4:], answer]

    def refined(self) -> None:
        if not self.kept:
            return self.plain()
        place = self.chance.randrange(len(self.kept))
        before, self.kept[place] = self.kept[place], self.kept[place].refine(deadline=self.within(4))
        assert self.kept[place].stage >= before.stage, f"refined from {before} to {self.kept[place]}"

    def interrupted(self) -> None:
        question = self.runtime.ask(self.image())
        timer = threading.Timer(self.within(2), question.stop)
        timer.start()
        question.result()
        timer.join()

    def batch(self) -> None:
        count = self.chance.randrange(1, 9)
        answers = self.runtime.answer_batch(self.images[:count], deadline=[self.within(8) for _ in range(count)])
        assert len(answers) == count, f"{len(answers)} answers to {count} images"

    def loop(self) -> None:
        stages = []
        for answer in self.runtime.answers(self.image()):
            stages.append(answer.stage)
            if self.chance.random() < 0.5:
                break
        assert stages == list(range(1, len(stages) + 1)) and stages, f"stages {stages}"

    def coroutines(self) -> None:
        async def several() -> list[Any]:
            asked = [self.runtime.answer_async(self.image(), deadline=self.within(8)) for _ in range(3)]
            return await asyncio.gather(*asked)

        assert len(asyncio.run(several())) == 3

    def forked(self) -> None:
        """Another process has the runtime's memory and not its thread."""
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(HUNG))  # whoever hangs is killed, and is seen by its status
            try:
                self.runtime.answer(self.images[0])
                os._exit(3)
            except BaseException as error:
                os._exit(0 if "was made by process" in str(error) else 4)
        status = os.waitpid(child, 0)[1]
        assert status == 0, f"a fork ended with status {status}"

    def closing(self) -> None:
        """Another runtime is closed while callers wait for it: they come back with what there is, or are refused."""
        said: list[str] = []

        def wait() -> None:
            try:
                while True:
                    other.answer(self.images[0])
            except Exception as error:
                said.append(str(error))

        other = self.open()
        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(self.within(8))
        other.close()
        for thread in threads:
            thread.join(HUNG)
        assert len(said) == 3 and all("is closed" in each for each in said), f"closing: {said}"


KINDS = {  # of ten thousand questions
    "plain": 6760, "refined": 1200, "interrupted": 600, "batch": 600, "loop": 600, "coroutines": 200, "forked": 30, "closing": 10,
}  # fmt: skip


def stress(options: argparse.Namespace) -> dict[str, Any]:
    def opened() -> Any:
        return Subject(options.source, options.portable, options.threads).runtime

    opened().close()  # libraries open things of their own, once
    time.sleep(0.5)
    before = counted()
    subject = Subject(options.source, options.portable, options.threads)
    runtime, images = subject.runtime, subject.images
    full = float(np.median([runtime.timeline(images[0])[-1] for _ in range(50)]))
    counts, done, lock = Counter[str](), [0], threading.Lock()
    problems: list[str] = []
    memory = [resident()]
    began = time.monotonic()

    def caller(seed: int) -> None:
        asked = Asked(opened, runtime, images, full, seed)
        while True:
            with lock:
                if done[0] >= options.answers:
                    return
                done[0] += 1
                if done[0] % max(1, options.answers // 20) == 0:
                    memory.append(resident())
            [kind] = asked.chance.choices(list(KINDS), list(KINDS.values()))
            start = time.monotonic()
            try:
                getattr(asked, kind)()
            except Exception as error:
                problems.append(f"{kind}: {type(error).__name__}: {error}")
            if time.monotonic() - start > HUNG:
                problems.append(f"{kind}: took {time.monotonic() - start:.0f} s")
            counts[kind] += 1

    threads = [threading.Thread(target=caller, args=(seed,), daemon=True) for seed in range(options.callers)]
    for thread in threads:
        thread.start()
    counts["signalled"] = signalled(runtime, images, full, threads, problems)
    seconds = time.monotonic() - began
    at_once = together(runtime, images, options.callers)
    runtime.close()
    time.sleep(0.5)
    threads_left, files_left = (now - then for now, then in zip(counted(), before, strict=True))
    return {
        "what": "stress", "network": runtime.spec.name, "engine": runtime.engine.name, "answers": done[0] + counts["signalled"],
        "callers": options.callers, "seconds": seconds, "kinds": dict(counts), "problems": problems[:10],
        "memory_mb": memory, "growth_mb": memory[-1] - memory[len(memory) // 4],
        "threads_left": threads_left, "files_left": files_left, "together": at_once,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def counted() -> tuple[int, int]:
    """Threads and open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def signalled(runtime: Any, images: Any, full: float, others: Sequence[threading.Thread], problems: list[str]) -> int:
    """Ask in the main thread until the others are done, a signal being the deadline; returns how often."""
    questions: list[Any] = []
    old = signal.signal(signal.SIGALRM, lambda number, frame: questions[-1].stop())
    chance, asked = random.Random(-1), 0
    try:
        while any(thread.is_alive() for thread in others):
            questions[:] = [runtime.ask(images[0])]
            signal.setitimer(signal.ITIMER_REAL, full * chance.uniform(0.1, 4))
            began = time.monotonic()
            questions[-1].result()
            if time.monotonic() - began > HUNG:
                problems.append(f"signalled: took {time.monotonic() - began:.0f} s")
            signal.setitimer(signal.ITIMER_REAL, 0)
            asked += 1
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, old)
    return asked


def together(runtime: Any, images: Any, callers: int) -> dict[str, Any]:
    """All ask at the same moment, with so many times what stage 1 usually takes."""
    firsts = [runtime.timeline(images[0])[0] for _ in range(200)]
    deadline = callers * float(np.quantile(firsts, IN_TIME))
    start, found, lates = threading.Barrier(callers), Counter[int](), []

    def ask() -> None:
        for _ in range(ROUNDS):
            start.wait()
            began = time.monotonic()
            answer = runtime.answer(images[0], deadline=deadline)
            lates.append(time.monotonic() - began - deadline)
            found[answer.stage] += 1  # one thread at a time: the interpreter's lock

    threads = [threading.Thread(target=ask) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = float(np.mean(np.array(lates) > 0.0005))
    shares = {str(stage): found[stage] for stage in range(runtime.spec.stages + 1)}
    return {"rounds": ROUNDS, "deadline_ms": 1e3 * deadline, "answered_by_stage": shares, "late_share": late}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", nargs="?", default="width-digits", help="a run's folder, a network's name, or an export"
    )
    parser.add_argument(
        "--portable", action="store_true", help="the source is an exported folder; torch is not imported"
    )
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--callers", type=int, default=8, help="threads that ask")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    parser.add_argument("--json", nargs="?", const="-", help="a file, or stdout")
    options = parser.parse_args()
    if options.portable:
        sys.modules["torch"] = None  # type: ignore[assignment]  # importing it fails from here on
    result = stress(options)
    result |= {"provenance": where(options.portable)}
    text = json.dumps(result, indent=2)
    if options.json and options.json != "-":
        Path(options.json).write_text(text + "\n")
    print(text)
    return int(bool(result["problems"]) or max(result["threads_left"], result["files_left"]) > 0)


if __name__ == "__main__":
    sys.exit(main())
