"""Whether every family answers as Transformers does, in every way that a server computes.

`make conformance` runs all families of the zoo, `make test` a few of them.
"""
