"""The loop of steps: plan, run, commit, and the same one step ahead of a GPU."""
