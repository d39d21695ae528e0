"""The decoder and the tower on a GPU: which kernel runs each part of a layer."""
