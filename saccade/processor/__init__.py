"""From messages to a prompt with its bill, and from tokens to text. No torch."""
