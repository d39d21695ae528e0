"""Small tools that know nothing of models or requests."""
