"""Helper processes: work on clients' bytes that must be able to end without ending anything else."""
