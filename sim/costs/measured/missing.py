"""What is raised where the measured operations do not cover a set-up."""


class NotMeasured(Exception):
    """A model, GPU or option without measured operations; the text says what is missing."""
