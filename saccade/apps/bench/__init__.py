"""Load on an OpenAI-compatible server, ours or another: `saccade bench`."""
