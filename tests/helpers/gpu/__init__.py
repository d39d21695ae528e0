"""Checks that are run on a GPU."""
