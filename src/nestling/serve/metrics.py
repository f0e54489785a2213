"""What happened, in Prometheus' form: how long requests took and waited, which stage answered, what was late or refused.

In: one call per request. Out: text for `/metrics`. Base units (seconds); labels are the network and the stage. Knows no protocol.
"""

from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nestling.serve.request import ServedRequest
from nestling.serve.server import Server

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
RECENT = 10.0  # seconds of the summary


class Metrics:
    """The counters of one server. Called by its event loop only."""

    def __init__(self, server: Server) -> None:
        self.server, self.registry = server, CollectorRegistry()
        self.duration = Histogram(
            "nestling_request_duration_seconds",
            "From a request to its reply",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.queue = Histogram(
            "nestling_queue_seconds",
            "From a request to its first stage",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.answers = Counter(
            "nestling_answers", "Images answered, by stage (0: the prior)", ["model", "stage"], registry=self.registry
        )
        self.missed = Counter(
            "nestling_deadline_missed", "Requests without an answer in time", ["model"], registry=self.registry
        )
        self.below = Counter(
            "nestling_below_best",
            "Requests that got an earlier stage than their time allows where nobody else asks",
            ["model"],
            registry=self.registry,
        )
        self.refusals = Counter("nestling_refused", "Requests that were not taken", ["model"], registry=self.registry)
        self.open = Gauge("nestling_open_images", "Images being answered", ["model"], registry=self.registry)
        self.recent: deque[tuple[float, str, int, float, bool]] = deque(maxlen=20_000)  # when, model, stage, took, late
        self.short: deque[tuple[float, bool]] = deque(
            maxlen=20_000
        )  # when, and whether it got less than its time allows

    def answered(self, model: str, request: ServedRequest, took: float, late: bool) -> None:
        """A request got its reply, with or without an answer."""
        self.duration.labels(model).observe(took)
        begun = [  # since it came: work that is gone on with was begun before
            at
            for ticket in request.tickets
            for at in (ticket.began, *(began for _, began, _ in ticket.ran))
            if at is not None and at >= request.began
        ]
        if begun:
            self.queue.labels(model).observe(min(begun) - request.began)
        for stage in request.told:
            self.answers.labels(model, stage).inc()
        if late or not min(request.told):
            self.missed.labels(model).inc()
        self.recent.append((request.clock(), model, min(request.told), took, late))
        sure = all(ticket.final for ticket in request.tickets)
        self.fell_short(model, not (request.left or sure) and min(request.told) < request.allowed)

    def refused(self, model: str, full: bool = False) -> None:
        """A request was not taken; `full`: for want of room."""
        self.refusals.labels(model).inc()
        if full:
            self.fell_short(model, True)

    def fell_short(self, model: str, short: bool) -> None:
        self.short.append((self.server.clock(), short))
        if short:
            self.below.labels(model).inc()

    def below_best(self) -> float:
        """Of the last seconds' requests, the share that got less than their time allows where nobody else asks."""
        recent = [short for at, short in self.short if at > self.server.clock() - RECENT]
        return sum(recent) / len(recent) if recent else 0.0

    def count(self) -> int:
        """Requests that got a reply."""
        samples = (sample for metric in self.duration.collect() for sample in metric.samples)
        return int(sum(sample.value for sample in samples if sample.name.endswith("_count")))

    def text(self) -> bytes:
        for name, model in self.server.models.items():
            self.open.labels(name).set(model.stages.scheduler.open)
        return generate_latest(self.registry)

    def summary(self, name: str, now: float) -> dict[str, Any]:
        """The last seconds of one network: for a page that shows them."""
        rows = [row for row in self.recent if row[1] == name and row[0] > now - RECENT]
        model = self.server.models[name]
        shares = [sum(row[2] == stage for row in rows) for stage in range(model.spec.stages + 1)]
        times = sorted(row[3] for row in rows)
        return {
            "seconds": RECENT,
            "requests": len(rows),
            "stages": shares,
            "late": sum(row[4] for row in rows),
            "median_ms": 1e3 * times[len(times) // 2] if times else None,
            "p99_ms": 1e3 * times[int(0.99 * len(times))] if times else None,
            "open": model.stages.scheduler.open,
        }
