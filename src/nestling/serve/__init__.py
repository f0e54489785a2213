"""A model server whose overload costs accuracy, not errors: an answer for everybody, on time.

scheduler.py decides which images go through which stage next; stages.py runs that in a thread; model.py is one network under
a name, and server.py all of them, for Python.
"""
