"""The nouns that cross borders between packages. Small, frozen, standard library only.

The scheduler imports them and must run anywhere: no files, no model families, no array library.
"""
