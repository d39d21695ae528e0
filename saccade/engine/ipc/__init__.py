"""The engine in a process of its own: its messages, its loop, and the client that speaks to it."""
