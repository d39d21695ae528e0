"""What a model needs and gives on a GPU, by arithmetic alone: no GPU, no weights, no torch."""
