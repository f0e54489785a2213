"""The command line: cli.py parses, runs and refuses; the other files are commands."""
