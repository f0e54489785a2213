"""Studies of trained runs: profile.py measures how long stages take, deadline.py what they are worth under a deadline, paper/
trains the paper's experiments and compares them with its own numbers, sweep/ trains one recipe in many variants."""
