"""What a checkpoint's files say: shapes, defaults, quantisation, the tokenizer. No weights, no torch."""
