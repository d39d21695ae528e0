"""Families of the zoo beside Transformers: `python -m tests.helpers.conformance` says what each answers."""
