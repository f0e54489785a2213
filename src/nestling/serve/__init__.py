"""A model server whose overload costs accuracy, not errors: an answer for everybody, on time.

scheduler.py decides which images go through which stage next; stages.py runs that in a thread; model.py is one network under
a name, request.py who waits for it, and server.py all of them, for Python: nestling.Server. Behind sockets (the extra
`serve`): service.py is what the protocols share, http.py and grpc.py speak them, with tensors.py and messages.py, listen.py
listens, ending.py hears signals, journal.py tells, way.py knows what the way takes, metrics.py counts, openapi.py describes,
trypage.py is the page at /. On many machines: replicas.py is an application of Ray Serve, proxied.py its proxies' messages.
"""
