"""Engines and encoder workers on the machines of a Ray cluster."""
