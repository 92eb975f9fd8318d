"""Error for what the measured operations do not cover."""


class NotMeasured(Exception):
    """A model, GPU or option without measured operations; the text says what is missing."""
