"""Random examples in place of an app's missing data, in the form that its code expects."""

import ast
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.ndimage import zoom

from fl_privacy.auditing.app.defaults import assigned
from fl_privacy.auditing.app.scripts import SourceFile, called, constant, dotted
from fl_privacy.files import shipped

TRAIN, TEST, MOST_ROWS, OF_SHARE, MOST_DRAWN, TABLES, SOUND = 600, 200, 10_000, 20, 20_000, 12, 16_000
"""Numbers of drawn training and test examples, largest row index in code for which more rows are drawn, number for each
of many clients, largest number for all of them, number of tables in a folder, and values a second of a sound."""

LABEL = re.compile(
    r"^(label|target|class|outcome|diagnosis|y|species|category|attack|fraud|churn|income|survived|default|result"
    r"|sentiment|output|character)s?$|[-_ ](label|target|class|y|type|flag)$|^(fine|coarse|is)[-_]|^y_|label",
    re.IGNORECASE,
)
IMAGE = re.compile(r"^(x|img|image|pixel|picture|photo|scan|slide)s?$|image|pixel|img|^x_", re.IGNORECASE)
TEXT = re.compile(
    r"text|sentence|content|review|comment|prompt|message|tweet|email|document|question|premise|hypothesis",
    re.IGNORECASE,
)
TIME = re.compile(r"date|time", re.IGNORECASE)
FILE = re.compile(
    r"(^|[-_ ])(file|path|(file|image|img|picture|photo|slide|scan)[-_ ]?(name|path|file|id))s?$", re.IGNORECASE
)
RATED, OF_SOME = re.compile(r"(^|[-_ ])([Rr]ating|stars?)s?$"), re.compile(r"(.[-_ ]|[a-z](?=I))(id|Id|ID)s?$")
"""Names of columns of ratings, and of numbers of users or items, which stand in several rows."""

_DATA_SETS = shipped(__file__, "data_sets.yaml")
WORDS: Sequence[str] = _DATA_SETS["words"].split()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Form of examples: a picture's side in pixels and its channels, or the number of a row's columns."""

    side: int = 32
    channels: int = 3
    classes: int = 10  # number of classes
    features: int = 10  # number of columns of a row


PICTURES: tuple[tuple[re.Pattern[str], Shape, str, str], ...] = tuple(
    (re.compile(entry["pattern"]), Shape(**entry["shape"]), *entry["columns"]) for entry in _DATA_SETS["images"]
)
"""Name of a data set -> its pictures, and the names of its columns."""


def _shape_of(name: str) -> Shape:
    return next(shape for pattern, shape, *_ in PICTURES if pattern.search(name.lower()))


TEXTS: tuple[tuple[re.Pattern[str], str, int], ...] = tuple(
    (re.compile(pattern), column, classes) for pattern, column, classes in _DATA_SETS["texts"]
)
"""Name of a data set -> its column of texts, and its number of classes."""

_ARRAYS = ("MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100", "SVHN", "STL10")
OF_TORCHVISION = {name: _shape_of(name) for name in _ARRAYS} | {"EMNIST": Shape(side=28, channels=1, classes=47)}
"""Sets that keep arrays of their pictures."""

OF_FILES = {name: Shape(**shape) for name, shape in _DATA_SETS["files"].items()}
"""Further sets of torchvision with one label for each picture (of CelebA, 40 attributes)."""

SETS = OF_TORCHVISION | OF_FILES

OF_KERAS = {name: _shape_of(name) for name in ("mnist", "fashion_mnist", "cifar10", "cifar100")}

DRAWN = {".csv", ".tsv", ".xlsx", ".xls", ".parquet", ".feather", ".npz", ".npy", ".edf", ".bdf", ".nii", ".mha"}
"""Suffixes of files that are drawn where they are missing."""

OF_DATA = re.compile(r"data|set$|train|test|val|client|images?$|part|split|site|hospital|raw|input|\d$", re.IGNORECASE)
"""Name of a folder of data, not of one class."""

OF_MODEL = re.compile(r"model|weight|best|check|ckpt|net|global|pretrain|state|encoder|backbone|notop", re.IGNORECASE)
"""Name of a file of weights."""

_PICTURE = re.compile(r"\.(png|jpe?g|bmp|wav)$", re.IGNORECASE)
_CLASSES = re.compile(r"^(num|n|number_of)_?(clas{1,2}es|labels|outputs?|categories)$", re.IGNORECASE)
_LABELED = re.compile(r"(target|label|class|outcome)_?(col|name|field|var)", re.IGNORECASE)
_COLUMN = re.compile(r"(feature|col(umn)?|label|target|text|image)([-_](name|key|field))?$", re.IGNORECASE)
_NO_TABLE = re.compile(r"(config|cfg|args|params|settings|metrics?|history|environ)$", re.IGNORECASE)
_EXAMPLE = re.compile(r"(row|example|sample|item|record|entry)$")
_INPUTS = re.compile(r"(x|features?|inputs?)(_|$)", re.IGNORECASE)
_COUNTS = {"unique", "nunique", "value_counts"}
_OF_TEXTS = "lower|upper|strip|split|replace|startswith|endswith"
_FEATURES = re.compile(r"^(num|n|number_of)_?(features|inputs?)$|^(input|in)_?(dim|size|features)$", re.IGNORECASE)


def labels(number: int, classes: int) -> np.ndarray:
    """Return ``number`` labels (N,), each class in turn."""
    return np.arange(number) % max(classes, 1)


def pictures(number: int, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Draw smooth uint8 images (N, H, W, C); each is the sum of a pattern of its class and a random one."""

    def smooth(many: int) -> np.ndarray:
        coarse = rng.normal(size=(many, 6, 6, shape.channels))
        factor = shape.side / 6
        return zoom(coarse[:number], (1, factor, factor, 1), order=1)[:, : shape.side, : shape.side]

    patterns, found, kinds = smooth(max(shape.classes, 1)), list[np.ndarray](), labels(number, shape.classes)
    for chosen in np.array_split(kinds, max(-(-number // TRAIN), 1)):  # few at once, of small memory
        own = smooth(len(chosen))
        values = 0.5 + 0.15 * (patterns[chosen] + own) + 0.02 * rng.normal(size=own.shape)
        found.append((values.clip(0, 1) * 255).astype(np.uint8))
    return np.concatenate(found)


def numbers(number: int, columns: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Draw rows (N, columns) of numbers, whose means depend on the class."""
    means = rng.normal(size=(max(classes, 1), columns))
    return (means[labels(number, classes)] + rng.normal(size=(number, columns))).round(3)


def sounds(number: int, classes: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Draw ``number`` recordings (SOUND,), int16, one at a time: a tone of the class in noise."""
    for label in labels(number, classes):
        tone = np.sin(np.pi * (1 + label) / (classes + 1) * np.arange(SOUND))
        yield (6000 * (tone + 0.3 * rng.normal(size=SOUND))).astype(np.int16)


def texts(number: int, classes: int, rng: np.random.Generator) -> list[str]:
    """Draw texts of 8 to 24 common words; each class prefers other words."""
    weights = 1 / np.arange(1, len(WORDS) + 1)
    found = []
    for label in labels(number, classes):
        drawn = rng.choice(len(WORDS), size=rng.integers(8, 25), p=weights / weights.sum())
        found.append(" ".join(WORDS[(n + 7 * int(label)) % len(WORDS)] for n in drawn))
    return found


def column(name: str, number: int, classes: int, rng: np.random.Generator) -> Sequence[object] | np.ndarray:
    """Draw a column (N,) of the kind that ``name`` suggests: labels, files, texts, ratings, days, or numbers."""
    if LABEL.search(name):
        return labels(number, classes)
    if FILE.search(name):
        return [f"{n}.png" for n in range(number)]
    if TEXT.search(name):
        return texts(number, classes, rng)
    if (rated := RATED.search(name)) or OF_SOME.search(name):
        return rng.integers(1, 6 if rated else 41, number)
    if TIME.search(name):
        return np.datetime_as_string(np.datetime64("2024-01-01") + np.arange(number)).tolist()
    drawn = numbers(number, 1, classes, rng)[:, 0]
    return (drawn - drawn.min() + 0.1).round(3)  # most quantities are positive


class Drawing:
    """Makes up random data for an app, with the columns and classes that its code names.

    ``folder``: place of the files that are written. ``asked``: requested name -> phrase on the data made up for it.
    ``shares``: largest number of clients among which the app divides a data set. ``fitted``: pictures' ``channels`` and
    ``side``, or further ``columns`` of rows, that its network needs. ``unfit``: network and shape of an input that it
    does not take. ``outputs``: number of outputs of the network called last. ``suffix``: of pictures or recordings.
    """

    def __init__(
        self, files: Sequence[SourceFile], folder: Path, seed: int = 0, config: Mapping[str, object] = {}
    ) -> None:
        self.fitted, self.unfit, self.outputs = dict[str, int](), tuple[Any, ...](), 0
        self.files, self._seed = folder, seed
        columns = {key: value for key, value in config.items() if _COLUMN.search(key)}
        self.asked, self.class_names, self.others = dict[str, str](), list[str](), list[str]()
        self.shares, self._pretrained = 0, set[str]()
        self.colors, self._ids, self._classed, self._dropped = 0, set[str](), set[str](), set[str]()
        self._classed |= {*_names([value for key, value in columns.items() if re.search("label|target", key)])}
        self._removed, self._made, self._parts, self._wide = set[str](), set[str](), set[str](), set[str]()
        self.entry, self._least, self.unpacked = tuple[int, ...](), 0, list[list[str]]()
        self._around, self._of_example, self._worded, self._counted = 0, set[str](), set[str](), set[str]()
        self.names = _names([*columns.values()])
        sets = (value for key, value in config.items() if re.match(r"data[-_]?set([-_](name|id))?$", key))
        self.set_named = next(sets, None)
        sizes = [(key.replace("-", "_"), value) for key, value in config.items() if type(value) is int]
        named = [value for key, value in sizes if _CLASSES.match(key)]
        features, layers = [value for key, value in sizes if _FEATURES.match(key)], list[list[Any]]()
        self.values: dict[str, list[str]] = {}
        nodes = [node for file in files for node in ast.walk(file.tree)]
        given = [(dotted(one), node.value) for node in nodes if isinstance(node, ast.Assign) for one in node.targets]
        times = Counter(name for name, _ in given)
        once = {name for name, value in given if times[name] == 1 and isinstance(constant(value), str)}
        once |= {name for name, value in given if name.isupper() or isinstance(value, ast.Dict)}
        self._constants = {name: value for name, value in given if name in once}
        listed = defaultdict[str, list[ast.expr]](list)
        for name, value in given:
            if isinstance(value, ast.List) and all(isinstance(each, ast.Constant) for each in value.elts):
                listed[name] += value.elts
        self._constants |= {name: ast.List(elts=elts) for name, elts in listed.items() if elts}
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        self._imported = {name.partition(".")[0] for name in modules}
        loads = {name for name, value in given if isinstance(value, ast.Call) and called(value) == "load"}
        taken = (node for node in nodes if isinstance(node, ast.Subscript) and dotted(node.value) in loads - {""})
        self.keyed = [*dict.fromkeys(key for node in taken for key in _names(constant(node.slice)))]
        self._functions = {each.name: each for each in nodes if isinstance(each, ast.FunctionDef)}
        for node in nodes:
            self._look(node, named, features, layers)
            self._look_for_columns(node)
        widths = [(first, last) for first, last in layers if isinstance(last, int)]
        outer = [last for _, last in widths if 1 <= last <= 200]
        self.classes = max(named[0] if named else min(outer) if outer else 0, 0)
        firsts = [first for first, _ in widths if isinstance(first, int)]
        self.features = (features or firsts or [0])[0]
        texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
        self.suffix = next((found[0].lower() for found in map(_PICTURE.search, texts) if found), ".png")

    def uses(self, *packages: str) -> bool:
        return not self._imported.isdisjoint(packages)

    def _value(self, node: ast.AST | None, *within: str) -> object:
        if isinstance(node, ast.Name) and node.id not in within:
            within = (*within, node.id)
            node = self._constants.get(node.id, node)
        if isinstance(node, ast.ListComp) and dotted(node.elt) == dotted(node.generators[0].target) != "":
            return self._value(node.generators[0].iter, *within)  # such as those columns that are there
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self._value(each, *within) for each in node.elts]
        return constant(node)

    def _look(self, node: ast.AST, named: list[int], features: list[int], layers: list[list[Any]]) -> None:
        pairs: list[tuple[str, object]] = []
        if isinstance(node, ast.Subscript):
            self.names += [] if _NO_TABLE.search(dotted(node.value)) else _names(self._value(node.slice))
            self._of_example |= {*_names(self._value(node.slice))} if _EXAMPLE.match(dotted(node.value)) else set()
            of, _, attribute = dotted(node.value).rpartition(".")
            self._wide |= {of} if attribute == "shape" and constant(node.slice) == 1 and LABEL.search(of) else set()
            part = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
            first = constant(part.lower) if isinstance(part, ast.Slice) else None
            self._least = max(self._least, first if isinstance(first, int) and first < MOST_ROWS else 0)
        elif isinstance(node, ast.Assign):
            pairs = self._look_at_assign(node)
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Subscript):
            self._note_values(node.left, map(self._value, node.comparators))
        elif isinstance(node, ast.Call):
            pairs = self._look_at_call(node, layers)
        else:
            pairs = [(name, self._value(value)) for name, value in assigned(node)][::-1]
        for key, value in pairs:
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                named += [value] if _CLASSES.match(key) and value <= 1000 else []
                features += [value] if _FEATURES.match(key) and value <= 100_000 else []
            elif key == "input_shape" and isinstance(value, list) and all(type(n) is int for n in value):
                self.entry = self.entry or tuple(value)
                features += value if len(value) == 1 else []
            elif (isinstance(value, list) and re.search(r"col|feature", key, re.IGNORECASE)) or _LABELED.search(key):
                self.names += _names(value)

    def _look_at_assign(self, node: ast.Assign) -> list[tuple[str, object]]:
        pairs = [(dotted(target).rpartition(".")[2], self._value(node.value)) for target in node.targets]
        for key, value in pairs:
            names = _names([*value]) if isinstance(value, list | dict) else []
            listed = isinstance(value, list) and re.search(r"class|categor|label_?names", key, re.IGNORECASE)
            numbered = isinstance(value, dict) and [*value.values()] == [*range(len(value))]
            if (listed or numbered) and len(names) > 1:
                self.class_names = self.class_names or names
        if isinstance(node.value, ast.Call) and called(node.value) == "load":
            several = [each for each in node.targets if isinstance(each, ast.Tuple)]
            self.unpacked += [[dotted(part) for part in each.elts] for each in several]
        filled = [each for each in node.targets if isinstance(each, ast.Subscript)]
        read = [each for each in ast.walk(node.value) if isinstance(each, ast.Subscript)]
        own = {dotted(each.value) for each in filled}
        if own.isdisjoint(dotted(each.value) for each in read) and read and filled:  # a part of something else
            self._parts |= {name for each in read for name in _names(self._value(each.slice))}
        else:
            made = {name for each in filled for name in _names(self._value(each.slice))}
            self._made |= {name for name in made if name not in ast.unparse(node.value)}
        answers = any(re.match(r"(y|labels?|targets?)(_|$)", key) for key, _ in pairs)
        self._classed |= {name for each in read[:answers] for name in _names(self._value(each.slice))[:1]}
        return pairs

    def _look_at_call(self, node: ast.Call, layers: list[list[Any]]) -> list[tuple[str, object]]:
        pairs = [(each.arg or "", self._value(each.value)) for each in node.keywords]
        for key, value in [*pairs, *(("", self._value(each)) for each in node.args if called(node) == "drop")]:
            if called(node) == "DataFrame" and key == "columns" and len(_names(value)) == 1:  # such as predictions
                self._made |= {*_names(value)}
            elif key in {"columns", "usecols", "names", "feature_cols", "subset"} or not key:
                self.names += _names(value)
            if isinstance(value, dict) and key == "columns":  # renamed
                self.names += _names([*value])
                self._made |= {*_names([*value.values()])}
            self._ids |= {*_names(value)} if key == "partition_by" else set()
            self._removed |= {*_names(value)} if key == "remove_columns" else set()
            self._dropped |= {*_names(value)} if called(node) == "drop" else set()
        first = self._value(node.args[0]) if node.args else None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "issubset" and "columns" in ast.dump(node):
            self.names += _names(self._value(node.func.value))
        if called(node) == "rename_column" and len(node.args) == 2:
            self.names += _names(first)
            self._made |= {*_names(constant(node.args[1]))}
        if called(node) in {"Input", "InputLayer"}:
            pairs += [("input_shape", value) for value in (*map(self._value, node.args[:1]), *(v for _, v in pairs))]
        elif called(node) in {"Linear", "LazyLinear"} and len(node.args) >= 2:
            layers.append([first, self._value(node.args[1])])
        elif called(node) == "Dense" and ("activation", "softmax") in pairs:
            pairs.append(("num_classes", first or dict(pairs).get("units")))
        elif called(node) == "Conv2d" and first in (1, 3):
            self.colors = self.colors or int(str(first))
        elif called(node) in {"map", "replace"} and isinstance(node.func, ast.Attribute) and isinstance(first, dict):
            self._note_values(node.func.value, first)
        return pairs

    def _note_values(self, of: ast.AST, values: Iterable[object]) -> None:
        name = self._value(of.slice) if isinstance(of, ast.Subscript) else None
        if isinstance(name, str) and (strings := [each for each in values if isinstance(each, str)]):
            self.values[name] = list(dict.fromkeys([*self.values.get(name, []), *strings]))

    def _look_for_columns(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign) and any(_INPUTS.match(dotted(target)) for target in node.targets):
            cut = re.search(r"\[:, (\d*):(?:-(\d+))?\]", ast.unparse(node.value))
            self._around = max(self._around, int(cut[1] or 0) + int(cut[2] or 1) - 1 if cut else 0)
        attribute = node.attr if isinstance(node, ast.Attribute) else ""
        of = node.value if isinstance(node, ast.Attribute) and attribute in {"str", *_COUNTS} else None
        if isinstance(node, ast.Call) and called(node) in {"apply", "map"} and node.args:
            run = each if isinstance(each := node.args[0], ast.Lambda) else self._functions.get(dotted(each))
            first = run.args.args[0].arg if run is not None and run.args.args else ""
            of_text = rf"\b{first}( \+ ['\"]|\.({_OF_TEXTS})\()|['\"] \+ {first}\b"
            if first and run is not None and re.search(of_text, ast.unparse(run)):
                of = getattr(node.func, "value", None)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(constant(node.right), str):
            of = node.left
        name = self._value(of.slice) if isinstance(of, ast.Subscript) else None
        found, known = self._counted if attribute in _COUNTS else self._worded, (TEXT, TIME, FILE)
        found |= {name} if isinstance(name, str) and not any(each.search(name) for each in known) else set()

    def column_of(self, name: str, number: int, classes: int, rng: np.random.Generator) -> Any:
        if strings := self.values.get(name, ["north", "south", "east"] if name in self._worded else []):
            strings = strings if len(strings) > 1 else [*strings, "other"]
            return [strings[n] for n in labels(number, len(strings))]
        few = name in self._counted and not (LABEL.search(name) or OF_SOME.search(name))
        return (
            labels(number, 2 if few else classes)
            if few or name in self._classed
            else column(name, number, classes, rng)
        )

    def note(self, asked: str, drawn: str, *, pretrained: bool = False) -> None:
        self.asked[asked] = drawn
        self._pretrained |= {asked} if pretrained else set()

    def rng(self, asked: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, *asked.encode()])

    def of_clients(self) -> list[str]:
        return [each for each in self.asked if each not in self._pretrained]

    def in_words(self) -> str:
        firsts, times = {drawn: asked for asked, drawn in reversed(self.asked.items())}, Counter(self.asked.values())
        each = (f"{drawn} in place of {firsts[drawn]}" + f" and {n - 1} more" * (n > 1) for drawn, n in times.items())
        kinds = {"clients' data": self.of_clients(), "pretrained parts": self._pretrained}
        what = " and ".join(kind for kind, found in kinds.items() if found)
        return f"The {what} were not here and were made up: {'; '.join(each)}." if self.asked else ""

    def saved(self, path: object) -> Any:
        named = re.search(r"(test|val)|part|client|node|train|\d", Path(str(path)).name)
        return self.hub(str(path), self.set_named, ("test" if named[1] else "train") if named else None)

    def hub(self, path: str, name: object, split: object) -> Any:
        """Make up data in place of the Hugging Face data set, or saved folder, ``path``.

        Columns are those of the known data set of that name, or of the app's code. ``name``: the
        data set's configuration. ``split``: name or list of names of parts; ``None`` returns a dictionary of all.
        """
        hf = importlib.import_module("datasets")
        known = f"{path} {name if isinstance(name, str) else ''}".lower().strip()
        parts = {"train": max(TRAIN, min(self.shares * OF_SHARE, MOST_DRAWN)), "test": TEST}
        made = {part: hf.Dataset.from_dict(*self._columns(hf, known, number)) for part, number in parts.items()}
        for part, number in parts.items():
            for each in sorted(self._ids - {*made[part].column_names}):
                made[part] = made[part].add_column(each, [str(n // 40) for n in range(number)])
            for each in self._removed - {*made[part].column_names}:
                made[part] = made[part].add_column(each, [*range(number)])
        kind = "pictures" if any(str(f).startswith("Image") for f in made["train"].features.values()) else "examples"
        self.note(path, f"{parts['train']} drawn {kind} with columns {', '.join(made['train'].column_names)}")
        if isinstance(split, str):
            asked = re.match(r"\w+", split)
            return made["test" if asked and asked[0] in {"test", "valid", "validation"} else "train"]
        if isinstance(split, list):
            return [made.get(str(each), made["train"]) for each in split]
        return hf.DatasetDict(made)

    def _columns(self, hf: Any, known: str, number: int) -> tuple[dict[str, Any], Any]:
        rng = self.rng(f"{known} {number}")
        for pattern, shape, image, label in PICTURES:
            if pattern.search(known):
                kinds = {image: hf.Image(), label: hf.ClassLabel(num_classes=shape.classes)}
                drawn = {image: self.as_images(number, shape, rng), label: labels(number, shape.classes)}
                return self._with_flags(hf, drawn, kinds, rng)
        names = list(dict.fromkeys(self.names))
        pictured = [name for name in names if IMAGE.search(name) and not LABEL.search(name)][:1]
        worded = [name for name in names if TEXT.search(name) and not LABEL.search(name)]
        for text, column_name, classes in TEXTS:
            if text.search(known):  # such as the two sentences of a pair
                columns = worded if len(worded) > 1 else [column_name]
                kinds = {**{each: hf.Value("string") for each in columns}, "label": hf.ClassLabel(num_classes=classes)}
                drawn = {each: texts(number, classes, rng) for each in columns}
                return {**drawn, "label": labels(number, classes)}, hf.Features(kinds)
        label = next((name for name in names if LABEL.search(name) or name in self._classed), "label")
        classes = self.classes or (10 if pictured else 2)
        kinds = {label: hf.ClassLabel(num_classes=max(classes, 2))}
        drawn = {label: labels(number, max(classes, 2))}
        if pictured or not names:
            image = pictured[0] if pictured else "image"
            shape = Shape(classes=classes, channels=self.colors or 3)
            kinds, drawn[image] = {image: hf.Image(), **kinds}, self.as_images(number, shape, rng)
        elif worded:
            kinds, drawn[worded[0]] = {worded[0]: hf.Value("string"), **kinds}, texts(number, classes, rng)
        else:
            usual = self.features + self._around + 1 if self.features else max(len(names), 10)
            rest = [f"feature_{n}" for n in range(len(names), usual + self.fitted.get("columns", 0))]
            for each in [*rest, *names]:
                drawn.setdefault(each, self.column_of(each, number, classes, rng))
            return {**{each: drawn.pop(each) for each in rest}, **drawn}, None
        return self._with_flags(hf, drawn, kinds, rng) if pictured else (drawn, hf.Features(kinds))

    def _with_flags(self, hf: Any, drawn: dict[str, Any], kinds: dict[str, Any], rng: np.random.Generator) -> Any:
        for name in sorted(self._of_example - self._made - drawn.keys()):
            if not any(each.search(name) for each in (IMAGE, LABEL, TEXT)):
                kinds[name], drawn[name] = hf.Value("int64"), rng.integers(2, size=len(drawn[next(iter(drawn))]))
        return drawn, hf.Features(kinds)

    def as_images(self, number: int, shape: Shape, rng: np.random.Generator) -> list[Any]:
        pillow = importlib.import_module("PIL.Image")
        side, channels = self.fitted.get("side", shape.side), self.fitted.get("channels", shape.channels)
        drawn = pictures(number, replace(shape, side=side, channels=channels), rng)
        return [pillow.fromarray(each[..., 0] if channels == 1 else each) for each in drawn]

    def table(self, path: object) -> Any:
        """Make up a pandas table with the columns that the code names; others are added on first access."""
        rng, classes = self.rng(str(path)), max(self.classes, 2)
        ids = [name for name in sorted(self._ids) if name not in self.names]
        unlisted = self._made | self._parts
        names = [name for name in dict.fromkeys(self.names) if not name.isdigit() and name not in unlisted]
        label = [*filter(LABEL.search, names), *(name for name in names if name in self._classed), "label"][:1]
        rest = [name for name in names if name not in label]
        kept = [name for name in rest if name not in self._dropped]
        usual = max(self.features + self._around if self.features else 10, len(kept))
        usual += self.fitted.get("columns", 0)
        rest = [name for name in rest if name not in kept[usual:]]  # some may be of other tables
        rest += [f"feature_{n}" for n in range(len(kept), usual)]
        number = max(TRAIN + TEST, 2 * self._least)
        drawn: dict[str, Any] = {name: [str(n // 40) for n in range(number)] for name in ids}
        drawn |= {name: self.column_of(name, number, classes, rng) for name in [*rest, *label]}
        self.note(str(path), f"{number} drawn rows with {len(drawn)} columns")
        kind = importlib.import_module("fl_privacy.auditing.app.drawn_tables")
        made = kind.table_of(drawn, lambda name, rows: self.column_of(name, rows, classes, rng))
        return made.iloc[rng.permutation(number)].reset_index(drop=True)

    def is_other(self, path: str, columns: Iterable[object]) -> bool:
        """Return whether made-up data replace the table at ``path``, since the code names none of its ``columns``."""
        held = {str(each).strip().lower() for each in columns}
        if not held or not self.names or not held.isdisjoint(map(str.lower, self.names)):
            return False
        self.others.append(path)
        return "tables" in self.fitted

    def place(self, path: object) -> Path:
        """Return the path at which made-up data replace the missing file or folder ``path``."""
        (folder := self.files / "stand-in").mkdir(parents=True, exist_ok=True)
        return folder / re.sub(r"\W+", "_", str(path))

    def picture(self, path: object) -> Any:
        self.note(str(Path(str(path)).parent), "drawn pictures")
        return self.as_images(1, Shape(side=64, classes=1), self.rng(str(path)))[0]


def _names(value: object) -> list[str]:
    found = value if isinstance(value, list | tuple) else [value]
    return [each for each in found if isinstance(each, str) and 0 < len(each) <= 60 and "/" not in each]
