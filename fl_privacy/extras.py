"""Optional packages and the extras of this package that bring them; where one is missing, a line names its extra."""

from collections.abc import Mapping
from importlib.util import find_spec

from fl_privacy.errors import UserError

EXTRAS: Mapping[str, str] = {
    "flwr": "flower",
    "cryptography": "flower",
    "ray": "ray",
    "opacus": "dp",
    "tenseal": "crypto",
    "piq": "fsim",
    "cma": "cma",
    "tokenizers": "text",
}
"""What is imported -> the extra that installs it."""


def lacks(package: str, what: str, *, instead: str = "") -> UserError:
    """The error of ``what`` (``Epsilon``, ``backend=ray``) where ``package`` is missing.

    Args:
        package: as it is imported, one of ``EXTRAS``.
        what: needs it.
        instead: what else helps, "or leave it null".
    """
    other = f", {instead}" if instead else ""
    return UserError(
        f"{what} is expected to find the package {package}, but it is not installed; run"
        f" `pip install 'fl-privacy[{EXTRAS[package]}]'`{other}."
    )


def expect_package(package: str, what: str) -> None:
    """Refuse ``what`` (``backend=ray``) where ``package`` is missing, before it is imported.

    Raises:
        UserError: it is not installed.
    """
    if find_spec(package) is None:
        raise lacks(package, what)


def missing_extra(error: BaseException) -> UserError | None:
    """``error`` in a line where an import of a package that an extra brings caused it; ``None`` where none did."""
    cause: BaseException | None = error
    while cause is not None:
        package = (cause.name or "").partition(".")[0] if isinstance(cause, ImportError) else ""
        if package in EXTRAS:
            return lacks(package, "This")
        cause = cause.__cause__ or cause.__context__
    return None
