"""How long stages take here and now: profiled latencies times one slow-down, how far that was off lately, and interruptions.

In: the latency of each stage on the quiet device (from a profile, or from the first runs), and every latency observed
since. Out: what the next stage will take, and quantiles of it. The slow-down is one number, filtered in the logarithm, so that
twice as slow and twice as fast weigh the same. Quantiles are those of the last runs over what had been predicted for them:
what the stages that are run tell about the machine goes for the others, too. Waiting for a processor is no part of that: it
takes as long whatever is interrupted, and comes the oftener the longer one works. How sure one must be is promise.py's business.
"""

import math
import threading
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence

GAIN = 0.2  # how much a new observation counts; a busy machine is noticed within about five stages
LIMIT = 4.0  # one observation counts as at most so many times slower or faster than expected: stalls are rare, not news
KEPT = 256  # runs of each stage that quantiles are taken from: one in a hundred decides between stages that differ by a point
CAUGHT = 512  # by which it is known how often it is interrupted
RUNS = 512  # of all stages together, by which interruptions are known: they are rare
TIMES = 3  # that one stage is interrupted, at most, as far as is reckoned
LENGTHS = 4  # quantiles that stand for how long they are
NOTICED = 0.2e-3  # seconds; who waits less has not been interrupted
BEFORE = 8  # runs that went as predicted, as it were, before the first
LONGER = 1.5  # times as long as it was given, a stage would have taken that was given more time than any took
ENDS = 16  # stages that were told to end, by which it is known how long that takes
ENDED = 6  # of them are ended to see that, when a runtime is made
ENDING = 0.3e-3  # seconds, until then
MOST = 0.9  # of them
MOST_ENDING = 1e-3  # seconds, or half of what the first stage takes: who takes longer was stopped by others
FORGET = 2  # times that a stage was not begun after which one more run counts as having gone as predicted,
FORGET_CAUGHT = 64  # and as not interrupted: to find out by trying costs an answer
GUESS = 1.0  # interruptions that the guess from all stages counts for, where a stage's own runs tell how often it is interrupted


class Pace:
    """Predicts stage latencies. Seconds everywhere; stages count from 1. `straight`: D_stage at once, from the image."""

    def __init__(self, latencies: Sequence[float] = (), stages: int = 0, jumps: Sequence[float] = ()) -> None:
        """`latencies` are those of each stage by itself, `jumps` those of D_2, D_3, ... at once; unknown ones (none given) are
        learnt from what is observed."""
        self.steps = [Timing(latency) for latency in latencies or [0.0] * stages]
        self.jumps = [self.steps[0], *(Timing(latency) for latency in jumps or [0.0] * (len(self.steps) - 1))]
        for step, jump in zip(
            self.steps, self.jumps, strict=True
        ):  # after the stages before one has worked as long as at once
            jump.caught = step.caught
        self.crowded = False  # whether others wanted the processor when the question came that is answered now
        self.waits = {False: Waits(), True: Waits()}
        self.ends = {crowded: deque([ENDING], maxlen=ENDS) for crowded in (False, True)}
        self.endings = dict.fromkeys((False, True), ENDING)  # what most of them took
        self.slowdown = 1.0  # as profiled; 2.0 = everything takes twice as long
        self._log = self._log_drag = 0.0

    @property
    def base(self) -> list[float]:
        """Each stage by itself, on the quiet device."""
        return [timing.base for timing in self.steps]

    def timing(self, stage: int, straight: bool) -> "Timing":
        return (self.jumps if straight else self.steps)[stage - 1]

    @property
    def drag(self) -> float:
        """How much longer stages take than the fastest ones seen here; 1.0 on a machine that does nothing else."""
        return math.exp(self._log_drag)

    def observe(self, stage: int, latency: float, images: int = 1, straight: bool = False, wait: float = 0.0) -> None:
        """A stage took this long on so many images, of which it waited for a processor. Batches only tell what a further image
        adds."""
        latency -= wait
        if latency <= 0:
            return
        timing = self.timing(stage, straight)
        predicted = timing.base * self.slowdown
        if images != 1:
            added = max(0.0, latency - predicted) / (images - 1)
            timing.more = added if math.isnan(timing.more) else timing.more + GAIN * (added - timing.more)
            return
        self.waits[self.crowded].add(latency, wait)
        timing.recent.add(latency / (predicted or latency))
        timing.caught[self.crowded].add(wait > NOTICED)
        timing.fastest = min(timing.fastest, latency)
        drag = math.log(latency / timing.fastest) - self._log_drag
        self._log_drag += GAIN * min(math.log(LIMIT), drag)
        if not timing.base:
            timing.base = latency
            return
        ratio = math.log(latency / timing.base) - self._log
        self._log += GAIN * max(-math.log(LIMIT), min(math.log(LIMIT), ratio))
        self.slowdown = math.exp(self._log)

    def gave_up(self, stage: int, after: float, straight: bool = False, wait: float = 0.0) -> None:
        """A stage on one image was told to end after so long. It counts as what those took that were not done by then either."""
        worked, timing = after - wait, self.timing(stage, straight)
        recent, predicted = timing.recent, timing.base * self.slowdown
        self.waits[self.crowded].add(worked, wait)
        timing.caught[self.crowded].add(wait > NOTICED)
        if predicted:
            recent.add(recent.beyond(worked / predicted) or LONGER * worked / predicted)

    def ended(self, after: float) -> None:
        """From when a guard was to tell a stage to end until its caller went on, so many seconds passed."""
        after = min(after, max(MOST_ENDING, self.predict(1) / 2))
        for crowded, seen in self.ends.items():
            if crowded == self.crowded or len(seen) <= ENDED:  # until more is known of the other
                seen.append(after)
                self.endings[crowded] = sorted(seen)[int(MOST * len(seen))]

    @property
    def ending(self) -> float:
        """Seconds in which most stages that are told to end have ended, and the caller has what there is."""
        return self.endings[self.crowded]

    def skip(self, stage: int, straight: bool = False) -> None:
        """A stage was not begun, because it would hardly have been in time. Nobody learns then that it has become faster: so
        what made it look slow is forgotten little by little, and it is tried again."""
        timing = self.timing(stage, straight)
        timing.skipped += 1
        if timing.skipped % FORGET == 0:
            timing.recent.add(1.0)
        if timing.skipped % FORGET_CAUGHT == 0:
            timing.caught[self.crowded].add(False)

    def predict(self, stage: int, images: int = 1, straight: bool = False) -> float:
        """What this stage will take. For a batch, until one was seen, an upper estimate: as if its images came one by one."""
        timing = self.timing(stage, straight)
        one = timing.base * self.slowdown
        return one + (images - 1) * (one if math.isnan(timing.more) else timing.more)

    def quantile(self, stage: int, share: float, straight: bool = False) -> float:
        """The time in which this share of runs of a stage on one image is done, by the last of them; NaN if nothing is known."""
        timing = (self.jumps if straight else self.steps)[stage - 1]
        return timing.base * self.slowdown * timing.recent.quantile(share)

    def overruns(self, stage: int, left: float, straight: bool = False) -> tuple[float, float]:
        """The chances that a stage on one image is not done in time: by its own work, and because it is interrupted."""
        timing, waits = (self.jumps if straight else self.steps)[stage - 1], self.waits[self.crowded]
        predicted, caught, over = timing.base * self.slowdown, timing.caught[self.crowded], timing.recent.over
        if not predicted:
            return 0.0, 0.0
        slow = over(left / predicted)
        if slow == 1.0 or not (waits.times or caught.times):
            return slow, 0.0
        # Who has just got the processor keeps it for a while, so long stages are interrupted more often than by their length:
        # what all runs together say is a guess, and a stage's own runs say how far it is off.
        work, rate = predicted * timing.recent.quantile(0.5), waits.rate
        guess = 1 - math.exp(-rate * work) if rate else caught.times / len(caught.runs)
        once = min(1.0, guess * (caught.times + GUESS) / (guess * len(caught.runs) + GUESS))
        chance, before, interrupted = once, 0.0, 0.0  # of so many interruptions; to be late after one less; of all
        own = slow * (1 - once)
        for times in range(1, TIMES + 1):
            if times > 1:
                more = work - (times - 1) * waits.between
                if more <= 0:
                    break
                chance *= 1 - math.exp(-rate * more)
            longer = sum([over((left - times * length) / predicted) for length in waits.lengths]) / LENGTHS
            interrupted += chance * (longer - before)
            before = longer
        return own, interrupted

    def may_be_in_time(self, stage: int, early: float, left: float, straight: bool, price: float) -> bool:
        """Of runs that are not done early, whether so many are done in the time left that it is worth the others' being late."""
        over, predicted = self.timing(stage, straight).recent.over, self.predict(stage, straight=straight)
        return bool(predicted) and (1 + price) * over(left / predicted) <= over(early / predicted)


class Timing:
    """What is known of one stage, or of one beginning."""

    __slots__ = ("base", "caught", "fastest", "more", "recent", "skipped")

    def __init__(self, base: float) -> None:
        self.base, self.fastest, self.skipped = base, math.inf, 0
        self.more = math.nan  # what each further image of a batch adds; NaN = not seen yet
        self.recent = Recently(BEFORE if base else 0)
        self.caught = {False: Caught(), True: Caught()}


class Caught:
    """How many of the last runs were interrupted."""

    __slots__ = ("runs", "times")

    def __init__(self) -> None:
        self.runs: deque[bool] = deque()
        self.times = 0

    def add(self, interrupted: bool) -> None:
        self.runs.append(interrupted)
        self.times += interrupted - (self.runs.popleft() if len(self.runs) > CAUGHT else 0)


class Waits:
    """How often those who worked had to wait for a processor lately, and how long each time."""

    __slots__ = ("lengths", "lock", "runs", "seen", "times", "worked")

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of who writes; whoever reads needs none
        self.runs: deque[tuple[float, bool]] = deque()  # seconds worked, and whether they waited
        self.worked, self.times = 0.0, 0  # of all these
        self.seen: deque[float] = deque(maxlen=KEPT)  # seconds: how long turns are changes seldom
        self.lengths: list[float] = []  # some of them, in order

    @property
    def rate(self) -> float:
        """How often in a second of work."""
        return self.times / self.worked if self.times else 0.0

    @property
    def between(self) -> float:
        """Seconds of work after which one may be interrupted again: programs take turns, each for as long as the other."""
        return self.lengths[0]

    def add(self, worked: float, waited: float) -> None:
        caught = waited > NOTICED
        with self.lock:
            old = self.runs.popleft() if len(self.runs) >= RUNS else (0.0, False)
            self.runs.append((worked, caught))
            if caught:  # first: whoever finds that it happens looks how long it takes
                self.seen.append(waited)
                order = sorted(self.seen)
                self.lengths = [order[(2 * place + 1) * len(order) // (2 * LENGTHS)] for place in range(LENGTHS)]
            self.worked, self.times = self.worked + worked - old[0], self.times + caught - old[1]


class Recently:
    """The last runs of a stage as multiples of what was predicted, in order of time and of length. Read without a lock."""

    __slots__ = ("lock", "order", "seen")

    def __init__(self, before: int) -> None:
        self.lock = threading.Lock()  # of who writes
        self.seen: deque[float] = deque([1.0] * before)
        self.order = array(
            "d", self.seen
        )  # next to each other in memory: on a busy machine every line must be fetched anew

    def add(self, multiple: float) -> None:
        with self.lock:
            order = self.order[:]  # whoever reads meanwhile finds a whole one
            if len(self.seen) >= KEPT:
                del order[bisect_left(order, self.seen.popleft())]
            self.seen.append(multiple)
            insort(order, multiple)
            self.order = order

    def quantile(self, share: float) -> float:
        order = self.order
        return order[int(share * len(order))] if order else math.nan

    def beyond(self, multiple: float) -> float:
        """The middle of those that took longer than that; 0 if none did."""
        order = self.order
        first = bisect_right(order, multiple)
        return order[(first + len(order)) // 2] if first < len(order) else 0.0

    def over(self, multiple: float) -> float:
        """The share of runs that took longer than that."""
        order = self.order
        if not order or multiple >= order[-1]:  # the usual cases first
            return 0.0
        return 1.0 if multiple < order[0] else 1 - bisect_right(order, multiple) / len(order)
