"""Why a request is not answered: one word for it, from which every protocol takes its own code, and a sentence."""

from dataclasses import dataclass

from nestling.errors import NestlingError


@dataclass(frozen=True)
class Reason:
    """A kind of refusal, as HTTP and gRPC call it."""

    http: int
    grpc: str


REASONS = {
    "wrong": Reason(400, "INVALID_ARGUMENT"),
    "unknown client": Reason(401, "UNAUTHENTICATED"),
    "another page": Reason(403, "PERMISSION_DENIED"),
    "not here": Reason(404, "NOT_FOUND"),
    "too slow": Reason(408, "CANCELLED"),
    "too large": Reason(413, "RESOURCE_EXHAUSTED"),
    "unknown form": Reason(415, "INVALID_ARGUMENT"),
    "full": Reason(429, "RESOURCE_EXHAUSTED"),
    "failed": Reason(500, "INTERNAL"),
    "ending": Reason(503, "UNAVAILABLE"),
    "no time": Reason(504, "DEADLINE_EXCEEDED"),
}


class Refusal(NestlingError):
    """A request that is not answered."""

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why, self.reason = why, REASONS[why]
