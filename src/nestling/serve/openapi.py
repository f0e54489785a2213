"""The HTTP interface as an OpenAPI document, for people and for programs that try it.

Out: a dict. What it says of paths and bodies is what http.py does; tests/test_serve_bad.py asks every path as described here.
"""

from typing import Any

from nestling import __version__
from nestling.serve.refusal import REASONS
from nestling.serve.service import OUTPUTS

NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}, "description": "a network"}
DEADLINE = {
    "name": "Nestling-Deadline-Ms",
    "in": "header",
    "required": False,
    "schema": {"type": "number", "minimum": 0},
    "description": "milliseconds in which the answer must be back; the smaller of this and the parameter timeout counts",
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "timeout": {"type": "integer", "minimum": 0, "description": "the deadline, in microseconds; 0 is none"},
        "confident": {
            "type": "number",
            "minimum": 0,
            "maximum": 1,
            "description": "a probability that is sure enough to stop",
        },
        "prior": {"type": "boolean", "description": "without any stage by the deadline, send the prior instead of 504"},
        "refine": {
            "description": "true: send a token; a token: go on from there (where it is not kept, from the images beside it)",
            "type": ["boolean", "string"],
        },
        "binary_data_output": {"type": "boolean"},
    },
}
TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"const": "input"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}},
        "datatype": {"enum": ["UINT8", "FP32"]},
        "data": {"type": "array"},
        "parameters": {"type": "object", "properties": {"binary_data_size": {"type": "integer", "minimum": 0}}},
    },
}
WANTED = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"enum": list(OUTPUTS)}, "parameters": {"type": "object"}},
}
INFER = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "parameters": PARAMETERS,
        "inputs": {"type": "array", "maxItems": 1, "items": TENSOR},
        "outputs": {"type": "array", "items": WANTED},
    },
}
QUERY = [
    {
        "name": name,
        "in": "query",
        "required": False,
        "schema": PARAMETERS["properties"][name],
        "description": "as in the JSON of a request; of a picture, which has none",
    }
    for name in ("timeout", "confident", "prior", "refine")
]
ANSWER = {
    "type": "object",
    "required": ["model_name", "parameters", "outputs"],
    "properties": {
        "model_name": {"type": "string"},
        "parameters": {
            "type": "object",
            "required": ["stage", "final", "confidence", "elapsed_ms"],
            "properties": {
                "stage": {"type": "integer"},
                "final": {"type": "boolean"},
                "confidence": {"type": "number"},
                "elapsed_ms": {"type": "number"},
                "refine": {"type": "string"},
            },
        },
        "outputs": {"type": "array", "items": {"type": "object", "required": ["name", "datatype", "shape"]}},
    },
}


def refusals(*codes: int) -> dict[str, Any]:
    words = {reason.http: why for why, reason in REASONS.items()}
    schema = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    return {
        str(code): {"description": words[code], "content": {"application/json": {"schema": schema}}} for code in codes
    }


def got(what: str, *codes: int, schema: Any = None, **more: Any) -> dict[str, Any]:
    content = {"content": {"application/json": {"schema": schema}}} if schema else {}
    return {
        "get": {"summary": what, "responses": {"200": {"description": what, **content}, **refusals(*codes)}, **more}
    }


def document() -> dict[str, Any]:
    infer = {
        "summary": "Answer images by a deadline",
        "parameters": [NAME, DEADLINE, *QUERY],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": INFER},
                "image/png": {"schema": {"type": "string", "format": "binary"}},
                "image/jpeg": {"schema": {"type": "string", "format": "binary"}},
            },
        },
        "responses": {
            "200": {
                "description": "the best answers by the deadline; with Accept: text/event-stream one message per stage",
                "content": {
                    "application/json": {"schema": ANSWER},
                    "text/event-stream": {"schema": {"type": "string"}},
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                },
            },
            **refusals(400, 401, 404, 408, 413, 415, 429, 503, 504),
        },
    }
    objects = {"type": "object"}
    ready = got("Whether requests are taken")
    ready["get"]["responses"]["503"] = {"description": "not any more: the server is ending"}
    paths = {
        "/v2": got("What this server is", 401, schema=objects),
        "/v2/health/live": got("Whether it lives"),
        "/v2/health/ready": ready,
        "/v2/models/{name}": got("What a network takes and gives", 401, 404, schema=objects, parameters=[NAME]),
        "/v2/models/{name}/ready": got("Whether a network answers", 401, 404, parameters=[NAME]),
        "/v2/models/{name}/infer": {"post": infer},
        "/metrics": got("Prometheus' counters", 401),
    }
    title = {"title": "nestling", "version": __version__, "description": "Open Inference Protocol v2, with deadlines"}
    bearer = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
    anybody: list[dict[str, list[str]]] = [{}, {"token": []}]  # {}: where the server was given no token
    return {"openapi": "3.1.0", "info": title, "paths": paths, "components": bearer, "security": anybody}
