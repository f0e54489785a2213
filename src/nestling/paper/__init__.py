"""The paper's experiments: its grid of runs, its tables and figures, our numbers beside its numbers.

grid.py knows which recipe stands behind each cell and trains it, everything.py in which order all of them are worth their
time; results.py turns run folders into rows and compares; tables.py, deadlines.py and pictures.py show them, and figures.py
writes them up.
"""
