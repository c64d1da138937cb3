"""The one exception that users see."""


class MoesaicError(ValueError):
    """A mistake in the input: one line that names the file, key or flag and the way out.

    The command line prints the message without a traceback and exits with status 2.
    """
