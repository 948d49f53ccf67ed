"""Provide what apps lack here: moved names of Flower, packages that only report, and the CPU in place of a GPU."""

import ast
import importlib
import importlib.util
import inspect
import json
import linecache
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from importlib import metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from itertools import islice, product
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch

from fl_privacy.auditing.app.scripts import EARLIER, SourceFile
from fl_privacy.auditing.instrument.keras_layers import keras_on_torch, owner_of
from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.federation.replies import Failure, attempt

_OURS = re.escape(str(Path(__file__).parents[2]) + os.sep)

MOST_READ = 2000  # files of an app that are searched for Keras
_COMPAT, _OF_RECORD = "flwr.compat.common", "_check_mapping_from_recordscalartype_to_scalar"
_MOST_OBJECTS, _MOST_NUMBERS = 1000, 100_000  # that are kept for the messages that name them, and shown of one


def lent_in_words(lent: list[str]) -> str:
    """Return a sentence on outdated names and options (``lent``) that an app used and that were restored for it."""
    return (
        f"The app needs {', '.join(lent)}, which the packages installed here, such as Flower"
        f" {metadata.version('flwr')}, do not have in this form. The audit supplied it: the app alone would fail here."
    )


@contextmanager
def moved_names_lent() -> Iterator[list[str]]:
    """Provide Flower's earlier names (see ``EARLIER``) until the block ends; yield a list of the names used."""
    asked: list[str] = []
    with ExitStack() as stack:
        proxy = importlib.import_module("flwr.server.compat.grid_client_proxy").GridClientProxy
        servers = importlib.import_module("flwr.server.server")
        grouped = partial(_with_present_arguments, "", {"group_id": ["builtins.None"]}, [])
        asks = [(proxy, name) for name in ("get_properties", "get_parameters", "fit", "evaluate")]
        for owner, name in (*asks, (servers, "fit_clients"), (servers, "evaluate_clients")):
            stack.enter_context(replaced(owner, name, grouped))
        for kind in vars(importlib.import_module("flwr.server.strategy")).values():
            if "__init__" in getattr(kind, "__dict__", ()):
                stack.enter_context(replaced(kind, "__init__", _with_present_options))
        compat, objects = importlib.import_module(f"{_COMPAT}.recorddict_compat"), dict[str, Any]()
        stack.enter_context(replaced(compat, "ConfigRecord", partial(_as_texts, objects, asked)))
        stack.enter_context(replaced(compat, _OF_RECORD, partial(_as_objects, objects)))
        common: Any = importlib.import_module("flwr.common")
        lend = partial(_with_present_fields, common.Status(common.Code.OK, ""), asked)
        for kind in (common.GetParametersRes, common.FitRes, common.EvaluateRes):
            stack.enter_context(replaced(kind, "__init__", lend))
        for place in sorted(EARLIER["homes"]):
            module = _module(stack, place)
            _lends(stack, module, partial(_present, place, asked))
        yield asked


def _module(stack: ExitStack, place: str) -> Any:
    """Return the module or class ``place``; if missing, make an empty module that lasts until ``stack`` closes."""
    if not isinstance(found := attempt(partial(resolve_name, place)), Failure):
        return found
    made = sys.modules[place] = ModuleType(place)
    made.__path__ = []
    stack.callback(sys.modules.pop, place, None)
    parent, _, leaf = place.rpartition(".")
    if not hasattr(owner := _module(stack, parent), leaf):
        setattr(owner, leaf, made)
        stack.callback(delattr, owner, leaf)
    return made


def _lends(stack: ExitStack, module: Any, find: Callable[[str], Any]) -> None:
    """Let ``find(name)`` provide attributes that ``module`` lacks, until ``stack`` closes; ``None`` if it has none."""
    before = vars(module).get("__getattr__")

    def lend(name: str) -> Any:
        if before is not None:
            with suppress(AttributeError):
                return before(name)
        if name.startswith("__") or (found := find(name)) is None:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return found

    module.__getattr__ = lend
    stack.callback(*((setattr, module, "__getattr__", before) if before else (delattr, module, "__getattr__")))


def _as_texts(objects: dict[str, Any], asked: list[str], original: Any, values: Any) -> Any:
    """Make Flower's config record (class ``original``) of ``values``; those that it can't hold become JSON texts.

    ``objects`` collects the replaced values by the first characters of their text, and ``asked`` sentences on them.
    """
    texts = dict(values)
    for key, value in texts.items():
        if not isinstance(value, int | float | str | bytes):
            name = f"object {id(value)}"
            shown = attempt(lambda: json.dumps({name: value}, default=numbers_of, skipkeys=True))  # noqa: B023
            texts[key] = f'{{"{name}": {value!r:.{_MOST_NUMBERS}}' if isinstance(shown, Failure) else shown
            objects[texts[key].partition(":")[0]] = value
            if len(objects) > _MOST_OBJECTS:
                del objects[next(iter(objects))]
            asked += [said] if (said := f"objects in place of numbers and texts ({key})") not in asked else []
    return original(texts)


def _as_objects(objects: Mapping[str, Any], original: Any, record: Any) -> dict[str, Any]:
    return {key: objects.get(str(value).partition(":")[0], value) for key, value in original(record).items()}


def numbers_of(value: Any) -> Any:
    """Return at most the first ``_MOST_NUMBERS`` numbers of an array, flattened, or the text of another object."""
    found = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    return found.reshape(-1)[:_MOST_NUMBERS].tolist() if found.ndim else repr(value)[:_MOST_NUMBERS]


def _with_present_options(original: Any, strategy: Any, *args: Any, eval_fn: Any = None, **kwargs: Any) -> None:
    evaluate = kwargs.get("evaluate_fn") if eval_fn is None else eval_fn
    if callable(evaluate) and isinstance(attempt(lambda: inspect.signature(evaluate).bind(1, [], {})), Failure):
        kwargs["evaluate_fn"] = lambda server_round, weights, config: evaluate(weights)
    if isinstance(given := kwargs.get("initial_parameters"), list):
        kwargs["initial_parameters"] = importlib.import_module("flwr.common").ndarrays_to_parameters(given)
    original(strategy, *args, **{EARLIER["options"].get(name, name): value for name, value in kwargs.items()})


def _with_present_fields(fine: Any, asked: list[str], original: Any, reply: Any, *args: Any, **kwargs: Any) -> None:
    if not args and "status" not in kwargs:  # before Flower 1.0, replies had no status, and further figures
        asked.extend({f"flwr.common.{type(reply).__name__} without status"} - {*asked})
        fields = inspect.signature(original).parameters.keys()
        early = {"num_examples_ceil", "fit_duration", "accuracy", "metrics"} - fields
        kwargs = {"status": fine, "metrics": {}, **kwargs}
        kwargs = {name: value for name, value in kwargs.items() if name not in early}
    original(reply, *args, **kwargs)


def _present(place: str, asked: list[str], name: str) -> Any:
    for home in EARLIER["homes"][place]:
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError:  # of another version of Flower
            continue
        plain = name.replace("recordset", "recorddict").replace("parametersrecord", "arrayrecord")
        present = EARLIER["renamed"].get(name, plain)
        found = vars(module).get(present) if home == place else getattr(module, present, getattr(module, name, None))
        if found is not None and not isinstance(found, ModuleType):
            asked.extend({f"{place}.{name}"} - {*asked})
            return found
    return None


def loaded_here(original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
    """Construct a PyTorch ``loader`` without worker processes: sandboxes forbid them, and hooks do not reach them."""
    given = inspect.signature(original).bind(loader, *args, **kwargs)
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
        given.arguments.pop(name, None)
    original(*given.args, **given.kwargs)


@contextmanager
def cpu_lent() -> Iterator[list[str]]:
    """Let code that names a missing GPU run on the CPU; yield the list of devices that it names."""
    asked: list[str] = []

    def on_cpu(value: Any) -> Any:
        if not isinstance(value, str | torch.device) or not str(value).startswith("cuda"):
            return value
        asked.extend([] if str(value) in asked else [str(value)])
        return torch.device("cpu")

    def moved(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    def loaded(original: Any, f: Any, map_location: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        return original(f, on_cpu(map_location or "cpu"), *args, **kwargs)

    if torch.cuda.is_available():
        yield asked
        return
    plain = torch.Tensor.to
    torch.Tensor.to = lambda *args, **kwargs: moved(plain, *args, **kwargs)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.cpu()  # type: ignore[method-assign]
    hooks = [(torch.cuda, each, lambda *_, **__: "CPU") for each in ("get_device_name", "set_device", "synchronize")]
    with ExitStack() as stack:
        for owner, name, hook in (*hooks, (torch.nn.Module, "to", moved), (torch, "load", loaded)):
            stack.enter_context(replaced(owner, name, hook))
        try:
            yield asked
        finally:
            del torch.Tensor.to, torch.Tensor.cuda  # of their base again


_OF_KERAS = re.compile(r"\b(tf|tensorflow)\.keras\b|^[ \t]*from keras\b|\bimport keras\b", re.MULTILINE)
_OF_TENSORFLOW = re.compile(
    r"GradientTape|\btf_keras\b|tensorflow_(privacy|federated|model_optimization)|\btf\.(function|Module)\b"
    r"|\btf\.compat\.v1\b(?!\.(ConfigProto|GPUOptions|(Interactive)?Session|keras|logging)\b)|tensorflow\.python"
    r"|KERAS_BACKEND"
)


def keras_lent(code: str, reached: Callable[[], Iterable[SourceFile]]) -> bool:
    """Choose PyTorch as the backend of the app's Keras, so that its steps can be observed; return ``True`` on success.

    ``code``: text of all files. TensorFlow stays if files that clients import (``reached()``) use its own gradients.
    """
    wanted = bool(_OF_KERAS.search(code)) and not (
        _OF_TENSORFLOW.search(code) and any(_OF_TENSORFLOW.search(ast.unparse(each.tree)) for each in reached())
    )
    if wanted and "keras" not in sys.modules and importlib.util.find_spec("keras") is not None:
        os.environ.setdefault("KERAS_BACKEND", "torch")
        if not torch.cuda.is_available():
            sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # its LLVM and TensorFlow's exclude each other
        importlib.import_module("keras")
    return wanted and keras_on_torch() is not None


@contextmanager
def older_names_lent(code: str, asked: list[str] | None = None) -> Iterator[list[str]]:
    """Restore outdated names and options (``EARLIER``) that ``code`` uses and installed libraries lack, in the block.

    Yield a list of those used so far, which is ``asked`` if given.
    """
    asked = [] if asked is None else asked

    def dropped(original: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() & {"columns", "index"} and "axis" in kwargs:  # which says the same, and pandas 3.1 refuses
            asked.extend({"pandas.DataFrame.drop(axis=)"} - {*asked})
            del kwargs["axis"]
        return original(table, *args, **kwargs)

    with ExitStack() as stack:
        # as before pandas 3, columns of texts take other values
        if "pandas" in code and importlib.util.find_spec("pandas") is not None:
            with warnings.catch_warnings(), suppress(KeyError):
                warnings.simplefilter("ignore")
                stack.enter_context(importlib.import_module("pandas").option_context("future.infer_string", False))
            stack.enter_context(replaced(importlib.import_module("pandas").DataFrame, "drop", dropped))
        for place, present in EARLIER["modules"].items():
            if place in code and not isinstance(found := attempt(partial(resolve_name, present)), Failure):
                sys.modules[place] = found
                stack.callback(sys.modules.pop, place, None)
                asked.extend({place} - {*asked})
        for package, names in EARLIER["older"].items():
            for home, name, whole in _homes(code, package, names):
                _lend_name(stack, home, name, names[whole], asked)
        for function, options in EARLIER["arguments"].items():
            package, _, rest = function.partition(".")
            for home, name, _ in _homes(code, package, [rest]):
                owner: Any = attempt(partial(resolve_name, home))
                found = getattr(owner, name, None)
                owner, called = (found, "__init__") if isinstance(found, type) else (owner, name)
                if found is not None:
                    lend = partial(_with_present_arguments, function, options, asked)
                    owner = owner_of(owner, called) if isinstance(owner, type) else owner
                    stack.enter_context(replaced(owner, called, lend))
        yield asked


def _homes(code: str, package: str, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Find what to patch in ``package``: yield (object's path, attribute, name) for ``names`` that ``code`` uses."""
    if not re.search(rf"\b{package}\b", code) or importlib.util.find_spec(package) is None:
        return
    saved = "layers." if "load_model" in code else "?"  # whose layers the code does not name
    used = [each for each in names if saved in each or re.search(rf"\b{re.escape(each.rpartition('.')[2])}\b", code)]
    tops = [f"{package}._tf_keras.keras", *(each for each in ("tensorflow.keras", *EARLIER["modules"]) if each in code)]
    for root, each in product([package, *tops * (package == "keras")], used):
        if not isinstance(attempt(partial(resolve_name, root)), Failure):
            home, _, name = f"{root}.{each}".rpartition(".")
            yield home, name, each


def _lend_name(stack: ExitStack, home: str, name: str, stands: str, asked: list[str]) -> None:
    found = attempt(partial(resolve_name, stands))
    if isinstance(found, Failure):  # of a package that can't be imported, such as Keras without a backend
        return
    owner = _module(stack, home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = getattr(owner, name, None)
    if getattr(there, "__name__", "") == "LegacyOptimizerWarning":  # which Keras 3 has instead
        stack.callback(setattr, owner, name, there)
        delattr(owner, name)
    elif there is not None:
        return

    def used() -> Any:
        if not is_installed(caller("importlib")):
            asked.extend({f"{home}.{name}"} - {*asked})
        return found

    def lent(*args: Any, **kwargs: Any) -> Any:
        return used()(*args, **kwargs)

    if isinstance(owner, ModuleType):
        _lends(stack, owner, lambda wanted: used() if wanted == name else None)
    else:
        setattr(owner, name, lent if callable(found) else found)
        stack.callback(delattr, owner, name)


def pickles_loaded(asked: list[str]) -> AbstractContextManager[None]:
    """Let ``torch.load``, called by an app, unpickle any object, as before PyTorch 2.6; note the use in ``asked``."""

    def loaded(original: Any, *args: Any, **kwargs: Any) -> Any:
        file: Any = args[0] if args else kwargs.get("f")
        place = file.tell() if hasattr(file, "tell") else 0
        try:
            return original(*args, **kwargs)
        except pickle.UnpicklingError as error:
            chosen = kwargs.get("weights_only") is not None or is_installed(caller(r"\btorch\b"))
            if chosen or "weights_only" not in str(error):
                raise
            asked.extend({"torch.load of more than weights"} - {*asked})
            if hasattr(file, "seek"):
                file.seek(place)
            return original(*args, **{**kwargs, "weights_only": False})

    return replaced(torch, "load", loaded)


def _with_present_arguments(
    name: str, options: Mapping[str, Any], asked: list[str], original: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Call ``original``, the function ``name``, with outdated options converted; note them in ``asked``.

    ``options`` maps an outdated option to its present name ("" drops it), or to {outdated value: present value}. If it
    maps to ``[path]``, the object at that dotted path is passed unless the option is given.
    """
    parameters = [*inspect.signature(original).parameters]
    own = int(parameters[:1] == ["self"])
    kwargs = {**dict(zip(parameters[own:], args[own:], strict=False)), **kwargs}
    for option, present in options.items():
        value = kwargs.get(option)
        if isinstance(present, list):
            new = {} if option in kwargs else {option: resolve_name(present[0])}
        elif isinstance(present, Mapping):
            new = {option: present[value]} if isinstance(value, str | bool) and value in present else {}
        else:
            new = {present: kwargs.pop(option)} if option in kwargs and option not in parameters else {}
        asked.extend({f"{name}({option}=)" for _ in new} - {*asked})
        kwargs |= new
    kwargs.pop("", None)
    return original(*args[:own], *args[len(parameters) :], **kwargs)


def _by_generator(name: str, *places: str) -> Callable[..., Any]:
    def answer(model: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(places, args, strict=False)), **kwargs}
        of_workers = {"max_queue_size", "workers", "use_multiprocessing"}
        return getattr(model, name)(generator, **{key: given[key] for key in given.keys() - of_workers})

    return answer


fit_generator = _by_generator("fit", "steps_per_epoch", "epochs", "verbose")
evaluate_generator, predict_generator = (_by_generator(name, "steps", "callbacks") for name in ("evaluate", "predict"))


def appended(table: Any, other: Any, ignore_index: bool = False, **kwargs: Any) -> Any:
    """Append ``other``, a table, a row or a list of tables, to a pandas ``table`` or column."""
    pandas = importlib.import_module("pandas")
    rows = pandas.DataFrame([other]) if table.ndim == 2 and isinstance(other, Mapping | pandas.Series) else other
    rows = rows if isinstance(rows, list) else [rows]
    return pandas.concat([table, *rows], ignore_index=ignore_index)


def code_of(app: Path) -> str:
    """Return the text of an app's Python files and notebooks."""
    files = (path for suffix in ("py", "ipynb") for path in sorted(app.rglob(f"*.{suffix}"))[:MOST_READ])
    return "\n".join(text for path in files if isinstance(text := attempt(partial(path.read_text, "utf-8")), str))


class _Silent(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silent(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if plain else self  # also as a decorator

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *args: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _NeverMade(type):
    """Metaclass of placeholders for an absent package's names: they can be subclassed, but fail if called."""

    def __getattr__(cls, name: str) -> "_NeverMade":
        if name in {"__code__", "__defaults__", "__globals__"}:  # which functions have
            return cls(name)
        if name.startswith("__"):
            raise AttributeError(name)
        return _NeverMade(f"{cls.__name__}.{name}", (), {"__module__": cls.__module__})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
        begun = linecache.getlines(code.co_filename) if code.co_name == "<module>" else []
        called = [n.value for n in ast.parse("".join(begun)).body if isinstance(n, ast.Expr) and n.lineno == line]
        if any(ast.unparse(getattr(n, "func", n)).endswith(cls.__name__.rpartition(".")[2]) for n in called):
            return None  # a statement such as `package.init()`
        package = next((each.__module__ for each in cls.__mro__[::-1] if isinstance(each, _NeverMade)), "")
        raise ModuleNotFoundError(f"{package} is not installed here, and {cls.__name__} is called", name=package)


class _Absent(_Silent):
    """Placeholder of a package that is not installed; calls of its names raise ``ModuleNotFoundError``."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NeverMade(f"{self.__name__}.{name}", (), {"__module__": self.__name__.partition(".")[0]})


def _is_codeless(spec: ModuleSpec | None) -> bool:
    if spec is None or spec.has_location or spec.submodule_search_locations is None:
        return spec is None
    return not any(file for each in spec.submodule_search_locations for file in islice(Path(each).rglob("*.py"), 1))


def caller(passed: str) -> FrameType | None:
    """Return the nearest calling frame outside of this package and of files whose path matches the regex ``passed``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and re.search(f"{_OURS}|{passed}", frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_installed(frame: FrameType | None) -> bool:
    """Return ``True`` if ``frame`` runs code of an installed package."""
    return frame is not None and "site-packages" in Path(frame.f_code.co_filename).parts


@contextmanager
def absent_left_out(missing: Collection[str] = ()) -> Iterator[list[str]]:
    """Replace experiment trackers and plotting packages that are not installed by modules that do nothing.

    Those that report to a server are replaced even if installed. Yield a list of those that the app imports. Anything
    called from ``missing`` packages raises ``ModuleNotFoundError``. Other libraries find trackers as they are.
    """
    names, served = (*EARLIER["trackers"], *missing), EARLIER["served"]
    absent = [n for n in names if n not in sys.modules and (n in served or _is_codeless(importlib.util.find_spec(n)))]
    asked = list[str]()

    class Finder(Loader):
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            top = name.partition(".")[0]
            known = top not in absent or (top not in missing and is_installed(caller("importlib")))
            found = None if known or name != top else PathFinder.find_spec(name, path)
            if known or not (_is_codeless(found) or "site-packages" in str(getattr(found, "origin", ""))):
                return None
            asked.extend([top] if top not in (*asked, *missing) else [])
            return ModuleSpec(name, Finder(), is_package=True)

        def create_module(self, spec: ModuleSpec) -> ModuleType:
            return (_Absent if spec.name.partition(".")[0] in missing else _Silent)(spec.name)

        def exec_module(self, module: ModuleType) -> None:
            return None

    sys.meta_path.insert(0, Finder)
    try:
        yield asked
    finally:
        sys.meta_path.remove(Finder)
        for name in [each for each in sys.modules if each.partition(".")[0] in absent]:
            del sys.modules[name]
