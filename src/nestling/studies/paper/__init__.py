"""The paper's experiments: grid.py knows which recipe stands behind each cell and trains it, everything.py in which order all of
them are worth their time, results.py turns run folders into rows beside the paper's own. report/paper/ writes them up."""
