"""Engines and schedulers, driven step by step."""
