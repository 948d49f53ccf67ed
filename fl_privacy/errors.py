"""The one exception that a user is meant to read."""


class UserError(Exception):
    """Wrong input, said in one line: what was expected, what was given, what to do about it.

    The command line prints the line and exits with status 2; it never shows a traceback for it.
    """
