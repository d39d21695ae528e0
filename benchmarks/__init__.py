"""What `saccade bench` does not measure: docs/benchmarks.md lists each script, and what it has beyond that."""
