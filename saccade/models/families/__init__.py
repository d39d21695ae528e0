"""What each family computes: a file for each, named like its `model_type`."""
