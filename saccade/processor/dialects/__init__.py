"""Tool calls in the dialects of the families: grammars to write them, parsers to read them."""
