"""Hooks that give an app drawn data in place of missing ones, until a block ends."""

import errno
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from fl_privacy.auditing.app import hub_models, odd_files, stand_in
from fl_privacy.auditing.app.bundle import App
from fl_privacy.auditing.app.check import TABLES, reached_by
from fl_privacy.auditing.app.environment import FORMATS, find_mirrored
from fl_privacy.auditing.app.odd_files import NoWeights, ends_without, is_missing
from fl_privacy.auditing.app.scripts import MOST_PLACES
from fl_privacy.auditing.app.stand_in import TEST, TRAIN, Drawing, labels, pictures
from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.federation.replies import Failure, attempt

_WRITTEN = re.compile(  # whole words, and no folder of data below
    r"(?i)((?<![a-z])|ml|py|(?-i:(?<=[a-z])(?=[A-Z])))((log|result|output|check(point)?|model|run|weight|plot|figure|cache)"
    r"(s|d|ging|dir)?(?![a-z])|saved?(?=/|$))(?!.*(data|set)s?(/|$))"
)

_WILD = re.compile(r"\*\*/|[*?]|\[[^]]*\]")  # a part of the names that a pattern fits

_LISTED = os.listdir  # also while it is replaced

_LEAST = 8  # number of drawn examples of a client that would have none

_SIZED = ("Size", "InnerDirichlet")
_PARTITIONERS = tuple(f"{kind}Partitioner" for kind in ("Dirichlet", "Distribution", "Iid", "Pathological", "Shard"))


@contextmanager
def drawn_for(
    app: App, files: Path, mirror: Path | None, seed: int, fitted: Mapping[str, int] = {}, *, also: Iterable[Path] = ()
) -> Iterator[Drawing]:
    """Replace missing data that ``app`` loads by random data, within the block; data in its folder or ``mirror`` stay.

    ``files``: folder for made-up files. ``fitted``: sizes by name, see ``hub_models.fit``. ``also``: further scripts.
    """
    drawing = Drawing(reached_by(app, *also), files, seed, app.config)
    drawing.fitted, drawing.classes = {**fitted}, fitted.get("classes", drawing.classes)
    with stood_in(drawing, lambda path, name: mirror is not None and find_mirrored(mirror, path, name) is not None):
        yield drawing


@contextmanager
def stood_in(drawing: Drawing, mirror: Callable[[str, object], bool] = lambda path, name: False) -> Iterator[Drawing]:
    """Replace data sets that are missing here by random data from ``drawing``, within the block.

    Those for which ``mirror(name, configuration)`` is ``True`` have a local copy, which is loaded instead.
    """
    with ExitStack() as stack:
        for module, name, hook in Hooks(drawing, mirror).all():
            try:
                owner: Any = importlib.import_module(module)
            except ImportError:
                continue
            kind, _, last = name.rpartition(".")
            owner = getattr(owner, kind, None) if kind else owner
            lazy = isinstance(owner, ModuleType) and hasattr(owner, last)  # such as MNE, which loads what is used
            if lazy or last in getattr(owner, "__dict__", ()):  # others inherit it
                stack.enter_context(replaced(owner, last, hook))
        yield drawing


class Hooks:
    """Functions ``hook(original, ...)`` that run in place of those that load data; they make up missing data."""

    def __init__(self, drawing: Drawing, mirror: Callable[[str, object], bool]) -> None:
        self.drawing, self.mirror = drawing, mirror
        self._elsewhere, self._removed = list[Path](), set[Path]()
        self._found: dict[str, list[Path]] = {}

    def all(self) -> Iterator[tuple[str, str, Any]]:
        drawing, drawn, fetched = self.drawing, partial(partial, self.read), partial(partial, self.fetched)
        learn = attempt(lambda: importlib.import_module("sklearn.datasets"))
        yield from (
            ("datasets", "load_dataset", self.hub),
            ("datasets", "load_from_disk", self.saved),
            ("numpy", "load", drawn(partial(odd_files.archive, drawing))),
            *(("numpy", name, drawn(partial(odd_files.lines, drawing))) for name in ("loadtxt", "genfromtxt")),
            *(("pandas", name, self.table) for name in TABLES),
            *(("pandas", name, fetched(self.query)) for name in ("read_sql", "read_sql_query", "read_sql_table")),
            ("torch", "load", drawn(partial(odd_files.saved_by_torch, drawing))),
            *((*to, self.placed) for to in (("sqlite3", "connect"), ("soundfile", "SoundFile.__init__"))),
            *((*to, self.kept) for to in (("torch", "save"), ("pandas.core.generic", "NDFrame.to_csv"))),
            *((at, "load_state_dict_from_url", fetched(NoWeights)) for at in ("torch.hub", "torchvision.models._api")),
            ("torch.nn", "Module.load_state_dict", odd_files.unless_missing),
            ("torch.nn", "Module.__call__", partial(hub_models.called, drawing)),
            *(("torch.utils.data", *each) for each in (("random_split", self.split), ("Subset.__init__", self.subset))),
            ("torch.utils.data", "DataLoader.__init__", self.loader),
            *(("torchvision.datasets", f"{name}.__init__", self.vision) for name in stand_in.SETS),
            ("torchvision.datasets", "ImageFolder.__init__", self.folder),
            ("sklearn.model_selection", "train_test_split", self.divided),
            *(("sklearn.datasets", name, partial(self.sklearn, name)) for name in dir(learn) if "fetch_" in name),
            *(("flwr_datasets.partitioner", f"{kind}.__init__", self.partitioner) for kind in _PARTITIONERS),
            *(("flwr_datasets.partitioner", f"{kind}Partitioner.load_partition", self.sized) for kind in _SIZED),
            ("datasets", "Dataset.select", self.selected),
            *(("os", name, self.listed) for name in ("listdir", "walk", "scandir")),
            *(("pathlib", f"Path.{name}", self.searched) for name in ("glob", "rglob")),
            ("glob", "iglob", self.searched),  # of all functions there
            *(("os", *each) for each in (("mkdir", self.made), ("remove", self.remove), ("unlink", self.remove))),
            *((place, "open", self.opened) for place in ("builtins", "io")),  # also of paths
            ("PIL.Image", "open", drawn(drawing.picture)),
            *(("os.path", name, self.there) for name in ("exists", "isfile")),
            *(("pathlib", f"Path.{name}", self.there) for name in ("exists", "is_file")),
            *((at, name, self.is_folder) for at, name in (("os.path", "isdir"), ("pathlib", "Path.is_dir"))),
        )
        if drawing.uses("keras", "tensorflow"):
            for place in ("keras.datasets", "keras.src.datasets", "keras._tf_keras.keras.datasets"):
                for name in stand_in.OF_KERAS:
                    yield f"{place}.{name}", "load_data", fetched(partial(self.keras, name))
            for place in ("src.utils.file_utils", "utils", "_tf_keras.keras.utils", "_tf_keras.keras.preprocessing"):
                yield f"keras.{place}", "get_file", fetched(odd_files.got)
                yield f"keras.{place}", "image_dataset_from_directory", self.folder
            yield "keras.src.legacy.preprocessing.image", "DirectoryIterator.__init__", self.folder
            yield "keras", "Model.load_weights", odd_files.unless_missing
            yield "keras", "Model.save", self.kept
            yield "keras", "Layer.__call__", partial(hub_models.called, drawing)
        yield from ((module, name, hook) for package, module, name, hook in (
            ("cv2", "cv2", "imread", drawn(lambda path: np.asarray(drawing.picture(path)))),
            ("timm", "timm.models._builder", "load_pretrained", fetched(NoWeights)),
            ("sqlalchemy", "sqlalchemy", "create_engine", fetched(_nothing)),
            ("evaluate", "evaluate", "load", fetched(odd_files.Score)),
            ("matplotlib", "matplotlib.style", "use", fetched(_nothing)),
            ("medmnist", "medmnist.dataset", "MedMNIST.download", _nothing),
            ("openml", "openml.datasets", "get_dataset", fetched(self.openml)),
            ("kagglehub", "kagglehub", "dataset_download", fetched("{}-data".format)),
        ) if drawing.uses(package))  # fmt: skip
        if drawing.uses("transformers"):
            yield from hub_models.hooks(drawing)
        yield from ((module, name, drawn(draw)) for module, name, draw in odd_files.hooks(drawing))
        yield "urllib.request", "urlretrieve", fetched(odd_files.got)  # after Keras, which would take it for its own

    def hub(self, original: Any, path: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs |= zip(("data_dir", "data_files", "split"), args, strict=False)
        files = kwargs.get("data_files") if str(path) in FORMATS else None
        if isinstance(files, str) and "://" not in files and is_missing(there := self._twin(files)):
            return self.drawing.hub(there, name, kwargs.get("split"))
        if str(path) in FORMATS or os.access(str(path), os.F_OK) or self.mirror(str(path), name):
            return original(path, name, **kwargs)
        return self.drawing.hub(str(path), name, kwargs.get("split"))

    @staticmethod
    def _path(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        named = (value for key, value in kwargs.items() if re.search("path|file|fname$|^fp?$|^io$", key))
        return args[0] if args else next(named, None)

    def read(self, draw: Callable[[object], Any], original: Any, *args: Any, **kwargs: Any) -> Any:
        path = self._path(args, kwargs)
        there = self._twin(path)
        if there is not path:
            return original(there, *args[1:], **{key: value for key, value in kwargs.items() if value is not path})
        if isinstance(path, odd_files.Pickle):
            return draw(path.path)
        return draw(path) if is_missing(path) else original(*args, **kwargs)

    def placed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*map(self._twin, args), **kwargs)

    def saved(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        there = self._twin(path)
        try:
            return original(there, *args, **kwargs)
        except FileNotFoundError:
            found = attempt(lambda: odd_files.stated(self.drawing, str(path), Path(there)))
            return self.drawing.saved(path) if isinstance(found, Failure) else found

    def table(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        found, drawing = self.read(self.drawing.table, original, *args, **kwargs), self.drawing
        path = self._path(args, kwargs)
        if isinstance(path, str | Path) and drawing.is_other(str(path), getattr(found, "columns", ())):
            found = drawing.table(path)
            drawing.asked[f"{path}, whose columns are others than the code names"] = drawing.asked.pop(str(path))
        return self._in_pieces(found, kwargs) if type(found).__name__ == "Table" else found

    @staticmethod
    def _in_pieces(drawn: Any, asked: Mapping[str, Any]) -> Any:
        drawn = drawn.head(asked.get("nrows") or len(drawn))
        return iter([drawn]) if asked.get("chunksize") else drawn

    def query(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_pieces(self.drawing.table(args[0] if args else next(iter(kwargs.values()))), kwargs)

    def fetched(self, made: Callable[..., Any], original: Any, *args: Any, **kwargs: Any) -> Any:
        found = attempt(lambda: original(*args, **kwargs))
        if not isinstance(found, Failure):
            return found
        stands = made(*args, **kwargs)
        if isinstance(stands, NoWeights):
            asked = args[0] if args else next(iter(kwargs.values()), "")
            asked = asked if isinstance(asked, str) else type(asked).__name__
            self.drawing.note(asked, odd_files.UNTRAINED, pretrained=True)
        return stands

    def partitioner(self, original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        original(made, *args, **kwargs)
        self.drawing.shares = max(self.drawing.shares, made._num_partitions)
        if hasattr(made, "_min_partition_size"):
            made._min_partition_size = min(made._min_partition_size, 4)

    def sized(self, original: Any, made: Any, *args: Any, **kwargs: Any) -> Any:
        if self.drawing.asked and sum(made._partition_sizes) > len(made.dataset):
            made._partition_sizes = np.array(_in_proportion(made._partition_sizes, len(made.dataset)))
        return original(made, *args, **kwargs)

    def split(self, original: Any, dataset: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:
        """Split made-up examples in proportion to ``lengths``."""
        whole = self.drawing.asked and len(dataset) and all(isinstance(each, int | np.integer) for each in lengths)
        if whole and not any(lengths):  # more clients than drawn examples: those far behind get some again
            ends = np.arange(len(lengths))[:, None] * _LEAST + np.arange(_LEAST)
            return [torch.utils.data.Subset(dataset, part.tolist()) for part in ends % len(dataset)]
        if whole and sum(lengths) != len(dataset):
            lengths = _in_proportion(lengths, len(dataset))
        return original(dataset, lengths, *args, **kwargs)

    def loader(self, original: Any, made: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        if self.drawing.asked and kwargs.get("drop_last") and isinstance(dataset, Sized) and len(dataset) < batch_size:
            kwargs["drop_last"] = False
        original(made, dataset, batch_size, *args, **kwargs)

    def subset(self, original: Any, made: Any, dataset: Any, indices: Any) -> None:
        original(made, dataset, self._few(indices, len(dataset)))

    def selected(self, original: Any, dataset: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        return original(dataset, self._few(indices, len(dataset)), *args, **kwargs)

    def _few(self, indices: Any, size: int) -> Any:
        """Return the indices of the ``size`` made-up examples; if none is one, some of them modulo it."""
        listed = isinstance(indices, Sized) and len(indices)  # an iterator would be used up
        if self.drawing.asked and size and listed and not -size <= min(indices) <= max(indices) < size:
            return [each for each in indices if 0 <= each < size] or [each % size for each in list(indices)[:size]]
        return indices

    def divided(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        found = attempt(lambda: original(*args, **kwargs))
        if isinstance(found, Failure):
            few = self.drawing.asked and "least populated" in found.reason
            return original(*args, **({**kwargs, "stratify": None} if few else kwargs))
        return found

    def listed(self, original: Any, path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        path = self._twin(path)
        if is_missing(path) and Path(path).is_absolute() and not (self._is_inside(path) or _is_of_packages(Path(path))):
            self._elsewhere += [Path(path)] if stand_in.OF_DATA.search(Path(path).name) else []
            path = self._twin(path)
        if self._is_inside(path) and not _WRITTEN.search(Path(path).name):
            kind, held = odd_files.suffix_sought(), [] if is_missing(path) else [Path(path, n) for n in _LISTED(path)]
            of_data = kind and stand_in.OF_DATA.search(str(path))
            if is_missing(path) or (of_data and not any(each.is_dir() or each.suffix == kind for each in held)):
                odd_files.fill(self.drawing, Path(path), suffix=kind)
        return original(path, *args, **kwargs)

    def searched(self, original: Any, *given: Any, **kwargs: Any) -> Iterator[Any]:
        """Search files by a pattern; if no table is found, yield the name of one that can be drawn."""
        place = Path(*map(str, given))
        root = Path(*takewhile(lambda part: not _WILD.search(part), place.parts))
        tables = place.suffix.lower() in stand_in.DRAWN and root != place
        tables = tables and not (_WRITTEN.search(root.name) or kwargs.get("root_dir"))
        empty = root.absolute().is_relative_to(Path.cwd()) and stand_in.OF_DATA.search(root.name)
        tables = tables and (is_missing(root) or bool(empty))
        found = [] if tables and is_missing(root) else list(original(*given, **kwargs))
        return iter(found or ([type(given[0])(_WILD.sub("1", str(place)))] if tables else []))

    def made(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if (twin := self._twin(path)) != path:
            return Path(twin).mkdir(parents=True, exist_ok=True)
        try:
            return original(path, *args, **kwargs)
        except OSError as error:
            if error.errno not in {errno.EROFS, errno.EACCES, errno.EPERM} or not Path(path).is_absolute():
                raise
            self._elsewhere.append(Path(path))
            return self.made(original, path)

    def _is_inside(self, path: object) -> bool:  # files are made nowhere else
        return isinstance(path, str | Path) and Path(path).resolve().is_relative_to(self.drawing.files.resolve())

    def _twin(self, path: Any, *, reads: bool = True) -> Any:
        """Return ``path`` or, if it is missing and to be read, a file of that name in another folder or case."""
        if not is_missing(path):
            return path
        plain = Path(str(path).replace("\\", "/"))
        if any(plain.is_relative_to(each) for each in self._elsewhere):
            return str(self.drawing.files / "elsewhere" / plain.relative_to("/"))
        own = tuple(part for part in plain.parts if part not in {"..", "."})
        of_data = stand_in.OF_DATA.search(plain.name) and not _WRITTEN.search(plain.name) and not _is_of_packages(plain)
        if plain.is_absolute() and not plain.suffix and of_data:  # a folder on the machine of its author
            inner = (self.drawing.files.joinpath(*own[place:]) for place in range(1, len(own)))
            return next((str(each) for each in inner if not is_missing(each)), path)
        if not reads or not own or not (plain.suffix or "\\" in str(path)) or _is_of_packages(plain):
            return path
        if plain.is_absolute() or re.match("[A-Za-z]:", own[0]):  # on the machine of its author
            hidden = any(part.startswith(".") for part in own)
            if hidden or plain.suffix.lower() not in {*stand_in.DRAWN, *odd_files.PICKLES, ".txt", ".data", ".mat"}:
                return path
            own = own[-1:]
        if own[-1] not in self._found:
            self._found[own[-1]] = []  # while the search below asks whether paths exist
            self._found[own[-1]] = list(islice(self.drawing.files.rglob(own[-1]), MOST_PLACES))
        near = (plain, *sorted(self._found[own[-1]], key=lambda each: len(each.parts)))
        alike = (each for each in near if [*map(str.lower, each.parts[-len(own) :])] == [*map(str.lower, own)])
        found = (each for each in alike if not is_missing(each))
        return next((str(each) for each in found if "stand-in" not in each.parts), path)

    def remove(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        plain = isinstance(path, str | Path) and kwargs.get("dir_fd") is None
        drawn = plain and not os.path.lexists(path) and self.there(lambda path: False, path)
        self._removed |= {Path(path)} if plain else set()
        return None if drawn else original(path, *args, **kwargs)

    def there(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> bool:
        named = Path(str(path))
        tensors = named.suffix in {".pt", ".pth"} and not stand_in.OF_MODEL.search(named.stem)
        written = not named.is_absolute() and _WRITTEN.search(os.path.normpath(named.parent))  # by the app itself
        drawn = (named.suffix.lower() in stand_in.DRAWN and not written) or tensors or self._twin(path) is not path
        needed = named.suffix.lower() in {*stand_in.DRAWN, *odd_files.PICKLES} and is_missing(path)
        drawn = drawn or (needed and bool(ends_without()))
        drawn = named not in self._removed and (drawn or self.is_folder(lambda path: False, path))
        return original(path, *args, **kwargs) or drawn

    def is_folder(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> bool:
        """Return ``True`` for a folder, or a missing data folder without which the app ends."""
        if original(path, *args, **kwargs):
            return True
        place = Path(path) if is_missing(path) and not Path(path).suffix else None
        if place is None or _WRITTEN.search(place.name):
            return False
        named = stand_in.OF_DATA.search(place.name)
        if named and (there := self._twin(path)) is not path and Path(there).is_dir():
            return True
        own = place.relative_to(self.drawing.files) if place.is_relative_to(self.drawing.files) else place
        return bool((named or stand_in.OF_DATA.search(str(own.parent))) and ends_without())

    def opened(self, original: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        written = bool(set(mode) & set("wax"))
        file = self._twin(file, reads=not written)
        if written:
            self._make_parent(file)
        if not set(mode) & set("wax+") and is_missing(file) and not _is_of_packages(Path(file)):
            kept = Path(file).suffix.lower() in {*odd_files.PICKLES, ".json"}
            if kept and ends_without() is False:
                return original(file, mode, *args, **kwargs)
            if (stands := odd_files.opened(self.drawing, Path(file), mode)) is not None:
                return stands
            write = odd_files.written if Path(file).suffix in {".csv", ".tsv", ".txt"} else odd_files.records
            file = write(self.drawing, Path(file)) or file
        return original(file, mode, *args, **kwargs)

    def kept(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._make_parent(self._path(args[1:], kwargs))
        return original(*args, **kwargs)

    def _make_parent(self, path: object) -> None:  # as on the machine of the app's author
        if self._is_inside(path):
            Path(str(path)).parent.mkdir(parents=True, exist_ok=True)

    def keras(self, name: str, *args: Any, **kwargs: Any) -> Any:
        def part(number: int) -> tuple[np.ndarray, np.ndarray]:
            drawn, given = pictures(number, shape, self.drawing.rng(f"{name} {number}")), labels(number, shape.classes)
            rows, given = drawn.view(odd_files.Few), given.view(odd_files.Few)
            return (rows[..., 0], given) if shape.channels == 1 else (rows, given[:, None])

        shape = stand_in.OF_KERAS[name]
        self.drawing.note(f"Keras's {name}", f"{TRAIN} drawn pictures")
        return part(TRAIN), part(TEST)

    def vision(self, original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        name = next((each.__name__ for each in type(made).mro() if each.__name__ in stand_in.SETS), "MNIST")
        shape, given = stand_in.SETS[name], inspect.signature(original).bind(made, *args, **kwargs)
        given.apply_defaults()
        arguments = {**given.arguments, **given.arguments.get("kwargs", {})}
        with suppress(RuntimeError, OSError):
            if "download" in given.arguments:
                given.arguments["download"] = False
            given.arguments.get("kwargs", {}).pop("download", None)
            original(*given.args, **given.kwargs)
            return
        train = bool(arguments.get("train", not str(arguments.get("split")).startswith(("test", "val"))))
        kept = {key: arguments.get(key) for key in ("transform", "target_transform")}
        importlib.import_module("torchvision.datasets").VisionDataset.__init__(made, arguments.get("root", "."), **kept)
        number = TRAIN if train else TEST
        drawn, targets = pictures(number, shape, self.drawing.rng(f"{name} {number}")), labels(number, shape.classes)
        made.train, made.split = train, getattr(made, "split", arguments.get("split", "train"))
        made.classes = [f"class {n}" for n in range(shape.classes)]
        with suppress(AttributeError):  # a property of some
            made.class_to_idx = {each: n for n, each in enumerate(made.classes)}
        if name in stand_in.OF_FILES:
            _of_pictures(made, drawn, targets, several=name == "CelebA")
        elif shape.channels == 1:
            made.data, made.targets = torch.from_numpy(drawn[..., 0]), torch.from_numpy(targets)
        elif name in {"SVHN", "STL10"}:
            made.data, made.labels = drawn.transpose(0, 3, 1, 2).copy(), targets
        else:
            made.data, made.targets = drawn, targets.tolist()
        self.drawing.note(f"torchvision's {name}", f"{TRAIN} drawn pictures")

    def folder(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        name = "root" if "root" in given.arguments else "directory"
        root = Path(str(given.arguments[name]))
        if root.is_dir():
            with suppress(FileNotFoundError):  # there is no folder of a class, or one without pictures
                return original(*args, **kwargs)
        given.arguments[name] = str(made := self.drawing.place(root))
        odd_files.fill(self.drawing, made, str(root), by_class=True)
        return original(*given.args, **given.kwargs)

    def openml(self, number: object, *args: Any, **kwargs: Any) -> Any:
        drawn = self.sklearn("openml", None, "mnist_784" if str(number) == "554" else str(number))

        def get_data(target: object = None, **options: Any) -> tuple[Any, ...]:
            rows, given = drawn.data, drawn.target.astype(float)
            return (rows if target else np.column_stack([rows, given]), given if target else None, None, None)

        return SimpleNamespace(get_data=get_data)

    def sklearn(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        asked = str(args[0] if args else kwargs.get("name") or kwargs.get("data_id") or name)
        pictured = "mnist" in asked.lower()
        classes = 10 if pictured else max(self.drawing.classes, 2)
        rng, number = self.drawing.rng(asked), TRAIN + TEST
        if pictured:
            drawn = pictures(number, stand_in.Shape(side=28, channels=1), rng)
        else:
            drawn = stand_in.numbers(number, self.drawing.features or 8, classes, rng)
        rows: Any = drawn.reshape(number, -1).astype(float).view(odd_files.Few)
        target: Any = labels(number, classes).astype(str if pictured else int).view(odd_files.Few)
        names = [f"feature_{n}" for n in range(rows.shape[1])]
        if kwargs.get("as_frame") is True:
            pandas = importlib.import_module("pandas")
            rows, target = pandas.DataFrame(rows, columns=names), pandas.Series(target, name="class")
        self.drawing.note(asked, f"{number} drawn {'pictures' if pictured else 'rows'}")
        if kwargs.get("return_X_y"):
            return rows, target
        return importlib.import_module("sklearn.utils").Bunch(data=rows, target=target, feature_names=names)


def _of_pictures(made: Any, drawn: np.ndarray, targets: np.ndarray, *, several: bool) -> None:
    """Let a torchvision data set that opens files return ``drawn`` and ``targets``, 40 attributes if ``several``."""
    pillow, plain = importlib.import_module("PIL.Image"), drawn[..., 0] if drawn.shape[-1] == 1 else drawn
    many = torch.from_numpy(np.arange(drawn.shape[0])[:, None] % np.arange(2, 42) == 0).long()
    made.targets = made.labels = made.y = made._labels = many if several else targets.tolist()
    made.samples = made.imgs = made._samples = [(f"{n}.png", target) for n, target in enumerate(targets.tolist())]

    def item(self: Any, index: int) -> tuple[Any, Any]:
        picture, target = pillow.fromarray(plain[index]), made.targets[index]
        picture = picture if self.transform is None else self.transform(picture)
        return picture, target if self.target_transform is None else self.target_transform(target)

    kind = type(made)
    inner: dict[str, Any] = {"__len__": lambda self: len(plain)}
    if kind.__getitem__.__module__.startswith("torchvision"):  # not the app's own
        inner["__getitem__"] = item
    made.__class__ = type(kind.__name__, (kind,), {**inner, "__module__": kind.__module__})


def _in_proportion(sizes: Iterable[int], total: int) -> list[int]:
    ends = np.cumsum([0, *sizes])
    return np.diff(ends * total // ends[-1]).tolist()


def _is_of_packages(path: Path) -> bool:
    return path.is_relative_to(sys.prefix) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _nothing(*args: Any, **kwargs: Any) -> None: ...
