"""The endpoints, and the shapes of what they answer."""
