"""Runs: a run's folder and what made it, its network and the errors of its stages, and the networks that come with us.

folder.py keeps a run's files, provenance.py says where it came from, device.py where it runs, latency.py how long its stages
take; evaluate.py finds the errors of its stages; open.py opens a run by its path or, one of those in shipped/, by its name;
ship.py puts one there.
"""
