"""The command line: one file for each command of `saccade`, and `main.py`, which finds them."""
