"""Weights of quantised checkpoints, as the numbers they stand for."""
