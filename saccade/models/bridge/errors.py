"""Why the bridge cannot run a model."""


class Unfit(Exception):
    """Why a model cannot be served, as the end of a sentence that starts with its name."""
