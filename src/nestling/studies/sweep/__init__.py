"""A sweep: one recipe with several values of some fields, each a run of its own. axes.py names the runs, driver.py sees to it
that all of them end, processes.py trains them on this machine (child.py is such a process),
cluster.py on others by Ray; tune.py is for searches by Ray Tune."""
