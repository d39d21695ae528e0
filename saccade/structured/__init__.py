"""Structured output: which schemas and grammars are taken, and how they are compiled."""
