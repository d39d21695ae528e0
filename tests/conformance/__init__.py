"""Whether every family answers as Transformers does: all in `make conformance`, a few in `make test`."""
