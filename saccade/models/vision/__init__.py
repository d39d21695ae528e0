"""The vision tower: patches, blocks, positions, and where its work runs."""
