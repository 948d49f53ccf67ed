"""Drawn examples where an app's data are missing: what it asks for is answered in the form it expects."""

import ast
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.ndimage import zoom

from fl_privacy.auditing.app.bundle import App
from fl_privacy.auditing.app.check import TABLES
from fl_privacy.auditing.app.environment import FORMATS, find_mirrored
from fl_privacy.auditing.app.scripts import SourceFile, called, constant, dotted, parsed, reached
from fl_privacy.auditing.instrument.watch import replaced

TRAIN, TEST = 600, 200
"""Numbers of drawn examples."""

LABEL = re.compile(
    r"^(label|target|class|outcome|diagnosis|y|species|category|attack|fraud|churn|income|survived|default|result"
    r"|sentiment|output|character)s?$|[-_ ](label|target|class|y|type|flag)$|^(fine|coarse|is)[-_]|^y_|label",
    re.IGNORECASE,
)
IMAGE = re.compile(r"^(x|img|image|pixel|picture|photo|scan|slide)s?$|image|pixel|img|^x_", re.IGNORECASE)
TEXT = re.compile(r"text|sentence|content|review|comment|prompt|message|tweet|email|document|question", re.IGNORECASE)
TIME = re.compile(r"date|time", re.IGNORECASE)

_TEXT = """
the patient was seen on monday with pain in left knee after a fall at home and no fever since two days doctor
found swelling gave ice rest asked for x ray which showed broken bone then plan to come back next week if it
gets worse people like this film because story is good actors play well but end too long music makes you feel
sad happy price of stock rose market closed team won game last night police said fire near river new study
shows coffee may help sleep school opens again children learn to read number of new cases fell
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What examples look like: pixels of a picture's side and its colors, or columns of rows without the label."""

    side: int = 32
    channels: int = 3
    classes: int = 10
    features: int = 10


PICTURES: tuple[tuple[re.Pattern[str], Shape, str, str], ...] = (
    (re.compile(r"fashion.?mnist|kmnist|(^|/)mnist|qmnist"), Shape(side=28, channels=1), "image", "label"),
    (re.compile(r"femnist|emnist"), Shape(side=28, channels=1, classes=62), "image", "character"),
    (re.compile(r"cifar.?100"), Shape(classes=100), "img", "fine_label"),
    (re.compile(r"cifar.?10|cinic"), Shape(), "img", "label"),
    (re.compile(r"svhn"), Shape(), "image", "label"),
    (re.compile(r"tiny.?imagenet"), Shape(side=64, classes=200), "image", "label"),
    (re.compile(r"stl.?10"), Shape(side=96), "image", "label"),
)
"""Name of a data set -> its pictures, and the names of its columns."""

TEXTS: tuple[tuple[re.Pattern[str], str, int], ...] = (
    (re.compile(r"imdb|yelp_polarity|rotten|amazon_polarity|sentiment140|spam"), "text", 2),
    (re.compile(r"sst|glue|cola"), "sentence", 2),
    (re.compile(r"ag.?news"), "text", 4),
    (re.compile(r"emotion"), "text", 6),
)
"""Name of a data set -> its column of texts, and its number of classes."""

OF_TORCHVISION: dict[str, Shape] = {
    **dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST"), Shape(side=28, channels=1)),
    "EMNIST": Shape(side=28, channels=1, classes=47),
    "CIFAR10": Shape(),
    "CIFAR100": Shape(classes=100),
    "SVHN": Shape(),
    "STL10": Shape(side=96),
}

_DRAWN = {".csv", ".tsv", ".xlsx", ".xls", ".parquet", ".feather", ".npz", ".npy"}
"""Suffixes of files that are drawn where they are missing."""

_CLASSES = re.compile(r"^(num|n|number_of)_?(classes|labels|outputs?|categories)$", re.IGNORECASE)
_FEATURES = re.compile(r"^(num|n|number_of)_?(features|inputs?)$|^(input|in)_?(dim|size|features)$", re.IGNORECASE)


def labels(number: int, classes: int) -> np.ndarray:
    """Return ``number`` labels (N,), each class in turn."""
    return np.arange(number) % max(classes, 1)


def pictures(number: int, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Draw smooth pictures (N, H, W, C) of bytes: of each class its own coarse pattern, with another one on top."""

    def smooth(many: int) -> np.ndarray:
        coarse = rng.normal(size=(many, 6, 6, shape.channels))
        factor = shape.side / 6
        return zoom(coarse, (1, factor, factor, 1), order=1)[:, : shape.side, : shape.side]

    patterns, own = smooth(max(shape.classes, 1)), smooth(number)
    values = 0.5 + 0.15 * (patterns[labels(number, shape.classes)] + own) + 0.02 * rng.normal(size=own.shape)
    return (values.clip(0, 1) * 255).astype(np.uint8)


def numbers(number: int, columns: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Draw rows (N, columns) of numbers, whose means depend on the class."""
    means = rng.normal(size=(max(classes, 1), columns))
    return (means[labels(number, classes)] + rng.normal(size=(number, columns))).round(3)


def texts(number: int, classes: int, rng: np.random.Generator) -> list[str]:
    """Draw texts of 8 to 24 common words, with words of their own for each class."""
    weights = 1 / np.arange(1, len(_WORDS) + 1)
    found = []
    for label in labels(number, classes):
        drawn = rng.choice(len(_WORDS), size=rng.integers(8, 25), p=weights / weights.sum())
        found.append(" ".join(_WORDS[(n + 7 * int(label)) % len(_WORDS)] for n in drawn))
    return found


def column(name: str, number: int, classes: int, rng: np.random.Generator) -> Sequence[object] | np.ndarray:
    """Draw a column of a table by what its name says: a label, a text, days, or numbers."""
    if LABEL.search(name):
        return labels(number, classes)
    if TEXT.search(name):
        return texts(number, classes, rng)
    if TIME.search(name):
        return np.datetime_as_string(np.datetime64("2024-01-01") + np.arange(number)).tolist()
    return numbers(number, 1, classes, rng)[:, 0]


class Drawing:
    """Draws what an app asks for, by the columns and numbers of classes in its code; ``folder`` is for its files.

    Attributes:
        asked: requested data -> drawn data in their place.
    """

    def __init__(self, files: Sequence[SourceFile], folder: Path, seed: int = 0) -> None:
        self._folder, self._seed = folder, seed
        self.asked: dict[str, str] = {}
        self.names, named, features, layers = list[str](), list[int](), list[int](), list[list[Any]]()
        for node in (node for file in files for node in ast.walk(file.tree)):
            self._look(node, named, features, layers)
        widths = [(first, last) for first, last in layers if isinstance(last, int)]
        outer = [last for _, last in widths if 1 <= last <= 200]
        self.classes = max(named[0] if named else min(outer) if outer else 0, 0)
        firsts = [first for first, _ in widths if isinstance(first, int)]
        self.features = features[0] if features else firsts[0] if firsts else 0

    def _look(self, node: ast.AST, named: list[int], features: list[int], layers: list[list[Any]]) -> None:
        pairs: list[tuple[str, object]] = []
        if isinstance(node, ast.Subscript):
            self.names += _names(constant(node.slice))
        elif isinstance(node, ast.Assign):
            pairs = [(dotted(target).rpartition(".")[2], constant(node.value)) for target in node.targets]
        elif isinstance(node, ast.Call):
            pairs = [(each.arg or "", constant(each.value)) for each in node.keywords]
            for key, value in [*pairs, *(("", constant(each)) for each in node.args if called(node) == "drop")]:
                if key in {"columns", "usecols", "names", "feature_cols", "subset"} or not key:
                    self.names += _names(value)
            if called(node) in {"Linear", "LazyLinear"} and len(node.args) >= 2:
                layers.append([constant(node.args[0]), constant(node.args[1])])
        elif isinstance(node, ast.FunctionDef):
            given = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            pairs = [(each.arg, constant(value)) for each, value in zip(given, node.args.defaults, strict=True)]
        for key, value in pairs:
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                named += [value] if _CLASSES.match(key) and value <= 1000 else []
                features += [value] if _FEATURES.match(key) and value <= 100_000 else []
            elif isinstance(value, list) and re.search(r"col|feature", key, re.IGNORECASE):
                self.names += _names(value)

    def note(self, asked: str, drawn: str) -> None:
        self.asked[asked] = drawn

    def rng(self, asked: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, *asked.encode()])

    def in_words(self) -> str:
        """Say what was drawn and what that makes of the figures; "" if nothing was."""
        if not self.asked:
            return ""
        told = "; ".join(f"{drawn} in place of {asked}" for asked, drawn in self.asked.items())
        return (
            f"The clients' data were not here and were drawn: {told}. What the network, its training and its uploads"
            " let through is the app's; how real examples look is not, so that counts and accuracy on them may differ."
        )

    def saved(self, path: object) -> Any:
        return self.hub(str(path), None, None)

    def hub(self, path: str, name: object, split: object) -> Any:
        """Draw a data set of the hub by its name or, of an unknown one, by the columns that the code names."""
        hf = importlib.import_module("datasets")
        known = f"{path} {name if isinstance(name, str) else ''}".lower().strip()
        parts = {"train": TRAIN, "test": TEST}
        made = {part: hf.Dataset.from_dict(*self._columns(hf, known, number)) for part, number in parts.items()}
        kind = "pictures" if any(str(f).startswith("Image") for f in made["train"].features.values()) else "examples"
        self.note(path, f"{TRAIN} drawn {kind} with {', '.join(made['train'].column_names)}")
        if isinstance(split, str):
            asked = re.match(r"\w+", split)
            return made["test" if asked and asked[0] in {"test", "valid", "validation"} else "train"]
        whole = hf.DatasetDict(made)
        if isinstance(split, list):
            return [whole[str(each)] if str(each) in whole else whole["train"] for each in split]
        return whole

    def _columns(self, hf: Any, known: str, number: int) -> tuple[dict[str, Any], Any]:
        rng = self.rng(f"{known} {number}")
        for pattern, shape, image, label in PICTURES:
            if pattern.search(known):
                kinds = {image: hf.Image(), label: hf.ClassLabel(num_classes=shape.classes)}
                drawn = {image: self._as_images(number, shape, rng), label: labels(number, shape.classes)}
                return drawn, hf.Features(kinds)
        for text, column_name, classes in TEXTS:
            if text.search(known):
                kinds = {column_name: hf.Value("string"), "label": hf.ClassLabel(num_classes=classes)}
                return {column_name: texts(number, classes, rng), "label": labels(number, classes)}, hf.Features(kinds)
        names = list(dict.fromkeys(self.names))
        pictured = [name for name in names if IMAGE.search(name) and not LABEL.search(name)][:1]
        worded = [name for name in names if TEXT.search(name) and not LABEL.search(name)][:1]
        label = next((name for name in names if LABEL.search(name)), "label")
        classes = self.classes or (10 if pictured else 2)
        kinds = {label: hf.ClassLabel(num_classes=max(classes, 2))}
        drawn = {label: labels(number, max(classes, 2))}
        if pictured or not names:
            image = pictured[0] if pictured else "image"
            kinds, drawn[image] = {image: hf.Image(), **kinds}, self._as_images(number, Shape(classes=classes), rng)
        elif worded:
            kinds, drawn[worded[0]] = {worded[0]: hf.Value("string"), **kinds}, texts(number, classes, rng)
        else:
            for each in names:
                drawn.setdefault(each, column(each, number, classes, rng))
            return drawn, None
        return drawn, hf.Features(kinds)

    def _as_images(self, number: int, shape: Shape, rng: np.random.Generator) -> list[Any]:
        pillow = importlib.import_module("PIL.Image")
        drawn = pictures(number, shape, rng)
        return [pillow.fromarray(each[..., 0] if shape.channels == 1 else each) for each in drawn]

    def table(self, path: object) -> Any:
        """Draw a table of pandas with the columns that the code names; further ones are drawn when it asks for them."""
        pandas, rng, classes = importlib.import_module("pandas"), self.rng(str(path)), max(self.classes, 2)
        names = [name for name in dict.fromkeys(self.names) if not name.isdigit()]
        label = [name for name in names if LABEL.search(name)][:1] or ["label"]
        rest = [name for name in names if name not in label]
        rest += [f"feature_{n}" for n in range(len(rest), self.features or max(len(rest), 10))]

        class Table(pandas.DataFrame):  # type: ignore[name-defined]
            @property
            def _constructor(self) -> Any:
                return Table

            def __getitem__(self, key: Any) -> Any:
                for each in key if isinstance(key, list) else [key]:
                    if isinstance(each, str) and each not in self.columns:
                        self[each] = column(each, len(self), classes, rng)
                return super().__getitem__(key)

            def drop(self, labels: Any = None, *args: Any, **kwargs: Any) -> Any:
                return super().drop(labels, *args, **{"errors": "ignore", **kwargs})

        number = TRAIN + TEST
        drawn = {name: column(name, number, classes, rng) for name in [*rest, *label]}
        self.note(str(path), f"{number} drawn rows with {len(drawn)} columns")
        order = rng.permutation(number)
        return Table(drawn).iloc[order].reset_index(drop=True)

    def archive(self, path: object) -> Any:
        """Draw the arrays of a NumPy file by their names: labels, or pictures."""
        rng, classes = self.rng(str(path)), self.classes or 10
        shape = Shape(side=28, channels=3 if re.search("path|derma|blood|retina", str(path)) else 1, classes=classes)
        self.note(str(path), f"drawn pictures of {shape.side} x {shape.side} pixels and their labels")

        def array(key: str) -> np.ndarray:
            number = TEST if re.search("test|val", key) else TRAIN
            if LABEL.search(key) or re.search(r"(^|_)y(_|$)", key):
                return labels(number, classes)
            drawn = pictures(number, shape, rng)
            return drawn[..., 0] if shape.channels == 1 else drawn

        if not str(path).endswith(".npz"):
            return array(Path(str(path)).stem)
        usual = ("x_train", "y_train", "x_test", "y_test")
        named = (name for name in self.names if LABEL.search(name) or IMAGE.search(name))
        return {key: array(key) for key in dict.fromkeys([*usual, *named])}

    def lines(self, path: object) -> np.ndarray:
        """Draw rows of numbers, the class in the last column."""
        classes = max(self.classes, 2)
        self.note(str(path), f"{TRAIN + TEST} drawn rows of numbers")
        drawn = numbers(TRAIN + TEST, self.features or 10, classes, self.rng(str(path)))
        return np.concatenate([drawn, labels(len(drawn), classes)[:, None]], axis=1)

    def folder(self, root: object) -> Path:
        """Write a folder of pictures for each class, and return it."""
        classes = self.classes or 2
        made = self._folder / "stand-in" / re.sub(r"\W+", "_", str(root))
        shape, rng = Shape(side=64, classes=classes), self.rng(str(root))
        if not made.is_dir():
            for number, image in enumerate(self._as_images(24 * classes, shape, rng)):
                place = made / f"class_{number % classes}"
                place.mkdir(parents=True, exist_ok=True)
                image.save(place / f"{number}.png")
        self.note(str(root), f"{24 * classes} drawn pictures in {classes} folders")
        return made


@contextmanager
def drawn_for(app: App, files: Path, mirror: Path | None, seed: int) -> Iterator[Drawing]:
    """Draw what ``app`` loads and is neither here nor in ``mirror``; see ``stood_in``."""
    code = parsed(app.folder)
    entries = [path for path in code if app.scripts is None or path in (app.scripts.server, *app.scripts.clients)]
    drawing = Drawing(reached(entries, code), files, seed)
    with stood_in(drawing, lambda path, name: mirror is not None and find_mirrored(mirror, path, name) is not None):
        yield drawing


@contextmanager
def stood_in(drawing: Drawing, mirror: Callable[[str, object], bool] = lambda path, name: False) -> Iterator[Drawing]:
    """Answer by ``drawing`` whatever the app loads and is not here, until the block ends.

    ``mirror`` says whether a folder has the data set of that name and configuration; then it is loaded as it is.
    """
    saved, lines = partial(_if_missing, drawing.saved), partial(_if_missing, drawing.lines)
    arrays = {"load": partial(_if_missing, drawing.archive), "loadtxt": lines, "genfromtxt": lines}
    hub = {"load_dataset": partial(_of_hub, drawing, mirror), "load_from_disk": saved}
    tables = dict.fromkeys(TABLES, partial(_if_missing, drawing.table))
    with ExitStack() as stack:
        for module, hooks in (("datasets", hub), ("numpy", arrays), ("pandas", tables)):
            if importlib.util.find_spec(module) is not None:
                library = importlib.import_module(module)
                for name in filter(partial(hasattr, library), hooks):
                    stack.enter_context(replaced(library, name, hooks[name]))
        if importlib.util.find_spec("torchvision") is not None:
            vision = importlib.import_module("torchvision.datasets")
            for name in OF_TORCHVISION:
                if "__init__" in vars(getattr(vision, name)):  # others inherit it
                    stack.enter_context(replaced(getattr(vision, name), "__init__", partial(_of_vision, drawing)))
            stack.enter_context(replaced(vision.ImageFolder, "__init__", partial(_of_folder, drawing)))
        if importlib.util.find_spec("sklearn") is not None:
            learn = importlib.import_module("sklearn.datasets")
            for name in (each for each in dir(learn) if each.startswith("fetch_")):
                stack.enter_context(replaced(learn, name, partial(_of_sklearn, drawing, name)))
        for owner, names in ((os.path, ("exists", "isfile")), (Path, ("exists", "is_file"))):
            for name in names:
                stack.enter_context(replaced(owner, name, _is_there))
        yield drawing


def _is_there(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a script that looks for a table or an array before it reads it go on: the reader draws it."""

    def looked(path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(path, *args, **kwargs) or Path(str(path)).suffix.lower() in _DRAWN

    return looked


def _names(value: object) -> list[str]:
    found = value if isinstance(value, list | tuple) else [value]
    return [each for each in found if isinstance(each, str) and 0 < len(each) <= 60 and "/" not in each]


def _of_hub(drawing: Drawing, mirror: Callable[[str, object], bool], original: Any) -> Any:
    def load(path: Any, name: Any = None, *args: Any, split: Any = None, **kwargs: Any) -> Any:
        if str(path) in FORMATS or os.access(str(path), os.F_OK) or mirror(str(path), name):
            return original(path, name, *args, split=split, **kwargs)
        return drawing.hub(str(path), name, split)

    return load


def _if_missing(draw: Callable[[object], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any, **kwargs: Any) -> Any:
        named = (value for key, value in kwargs.items() if "path" in key or key == "file")
        path = args[0] if args else next(named, "")
        there = not isinstance(path, str | Path) or os.access(path, os.F_OK)
        return original(*args, **kwargs) if there else draw(path)

    return read


def _of_vision(drawing: Drawing, original: Any) -> Any:
    def init(self: Any, root: Any = ".", *args: Any, **kwargs: Any) -> None:
        with suppress(RuntimeError, OSError):
            original(self, root, *args, **{**kwargs, "download": False})
            return
        name = next((each.__name__ for each in type(self).mro() if each.__name__ in OF_TORCHVISION), "MNIST")
        shape, torch = OF_TORCHVISION[name], importlib.import_module("torch")
        words = {"EMNIST": ("split", "train"), "SVHN": ("split",), "STL10": ("split",)}.get(name, ("train",))
        told = {**dict(zip((*words, "transform", "target_transform"), args, strict=False)), **kwargs}
        train = told.get("train", True) if "train" in words else told.get("split", "train") != "test"
        kept = {key: told.get(key) for key in ("transform", "target_transform")}
        importlib.import_module("torchvision.datasets").VisionDataset.__init__(self, root, **kept)
        number = TRAIN if train else TEST
        drawn, given = pictures(number, shape, drawing.rng(f"{name} {number}")), labels(number, shape.classes)
        self.train, self.split = train, told.get("split", "train")
        if shape.channels == 1:
            self.data, self.targets = torch.from_numpy(drawn[..., 0]), torch.from_numpy(given)
        elif name in {"SVHN", "STL10"}:
            self.data, self.labels = drawn.transpose(0, 3, 1, 2).copy(), given
        else:
            self.data, self.targets = drawn, given.tolist()
            self.classes = [f"class {n}" for n in range(shape.classes)]
            self.class_to_idx = {each: n for n, each in enumerate(self.classes)}
        drawing.note(f"torchvision's {name}", f"{TRAIN} drawn pictures")

    return init


def _of_folder(drawing: Drawing, original: Any) -> Any:
    def init(self: Any, root: Any, *args: Any, **kwargs: Any) -> None:
        there = Path(str(root)).is_dir() and any(each.is_dir() for each in Path(str(root)).iterdir())
        original(self, root if there else str(drawing.folder(root)), *args, **kwargs)

    return init


def _of_sklearn(drawing: Drawing, name: str, original: Any) -> Any:
    def fetch(*args: Any, **kwargs: Any) -> Any:
        asked = str(args[0] if args else kwargs.get("name") or kwargs.get("data_id") or name)
        pictured = "mnist" in asked.lower()
        classes = 10 if pictured else max(drawing.classes, 2)
        rng, number = drawing.rng(asked), TRAIN + TEST
        mnist = Shape(side=28, channels=1)
        drawn = pictures(number, mnist, rng) if pictured else numbers(number, drawing.features or 8, classes, rng)
        rows: Any = drawn.reshape(number, -1).astype(float)
        target: Any = labels(number, classes).astype(str if pictured else int)
        names = [f"feature_{n}" for n in range(rows.shape[1])]
        if kwargs.get("as_frame") is True:
            pandas = importlib.import_module("pandas")
            rows, target = pandas.DataFrame(rows, columns=names), pandas.Series(target, name="class")
        drawing.note(asked, f"{number} drawn {'pictures' if pictured else 'rows'}")
        if kwargs.get("return_X_y"):
            return rows, target
        return importlib.import_module("sklearn.utils").Bunch(data=rows, target=target, feature_names=names)

    return fetch
