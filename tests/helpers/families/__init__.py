"""Small checkpoints of each family, and what is checked of them."""
