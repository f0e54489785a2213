"""Ray Serve with the full network, for benchmarks/serve.py: the same requests, the same engine, one replica with one thread.

    PYTHON benchmarks/serve_ray.py DEADLINE        (an interpreter with nestling's packages and pip install 'ray[serve]')

Prints its port when it answers. What Ray Serve offers against overload is used: a request ends after the deadline (408), and a
short queue refuses what would wait longer than that (503).
"""

import signal
import socket
import sys
import threading

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

ONGOING = 2  # one is computed while the next is handed over
QUEUED = 1  # 7 ms each: a fourth would be late


def independent_full() -> type:
    from nestling.runtime.engine import Stop
    from nestling.serve.http import from_json

    class Full:
        def __init__(self) -> None:
            from serve import independent  # benchmarks/serve.py

            from nestling.serve.model import Model

            self.model = Model("net", independent(3))
            self.engine = self.model.stages.engine
            self.stop = Stop

        async def __call__(self, request: Request) -> JSONResponse:
            body = await request.body()
            asked = from_json(body, request.headers.get("inference-header-content-length"), self.model)
            logits, _ = self.engine.step(1, self.engine.start(self.model.intake.prepare(asked.images)), self.stop())
            outputs = [{"name": "label", "data": [int(logits[0].argmax())]}]
            return JSONResponse({"model_name": "net", "parameters": {"stage": 1}, "outputs": outputs})

    return Full


def main() -> None:
    deadline = float(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": deadline})
    deployment = serve.deployment(max_ongoing_requests=ONGOING, max_queued_requests=QUEUED)(independent_full())
    serve.run(deployment.bind(), route_prefix="/v2/models/net/infer")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print(port, flush=True)
    while not ended.wait(0.2):
        pass
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
