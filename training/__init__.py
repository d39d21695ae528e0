"""The recipe of Saccade's built-in model: data, tokenizer, training, evaluation. See README.md beside this file."""
