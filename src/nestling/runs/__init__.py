"""Runs: a run's folder and what made it, its network and the errors of its stages, and the networks that come with us.

folder.py keeps a run's files, provenance.py says where it came from, device.py where it runs, latency.py how long its stages
take; evaluate.py finds the errors of its stages; shelf.py opens the trained networks in shipped/ by name.
"""
