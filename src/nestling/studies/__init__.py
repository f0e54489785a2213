"""Studies of trained runs: profile.py measures how long stages take, deadline.py what they are worth under a deadline."""
