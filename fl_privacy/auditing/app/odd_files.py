"""Placeholders for an app's missing pickles, certificates, arrays and metrics."""

import ast
import importlib
import json
import linecache
import os
import re
import stat
import wave
from collections.abc import Iterator, Sequence
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fl_privacy.auditing.app.lent import caller, is_installed
from fl_privacy.auditing.app.stand_in import (
    DRAWN,
    IMAGE,
    LABEL,
    MOST_DRAWN,
    OF_DATA,
    OF_MODEL,
    SOUND,
    TABLES,
    TEST,
    TRAIN,
    Drawing,
    Shape,
    labels,
    numbers,
    pictures,
    sounds,
    texts,
)
from fl_privacy.federation.replies import Failure, attempt

PICKLES = {".pkl", ".pickle", ".joblib", ".sav"}
CERTIFICATES = {".crt", ".cert", ".pem", ".key", ".pub"}
"""Files of connections, which are not needed if all run in one process."""

RATE = 256  # values a second of a drawn recording, unless the network takes another number

UNTRAINED = "a network as it begins, without trained weights,"

_RECORDINGS, _POINTER = {".edf", ".bdf", ".nii", ".mha"}, 200
"""Suffixes of drawn files that are no tables, and largest size of a Git LFS pointer, in bytes."""

_SHARES = ("precision", "recall", "f1")
_ENCODER = re.compile(r"(?<!auto)(?<!auto_)encoder|binari[sz]er|label_?enc", re.IGNORECASE)
_VECTORIZER = re.compile(r"vectori[sz]er|tf-?_?idf", re.IGNORECASE)
_SHARED_OUT, _PARTS = re.compile(r"partition|(client|node)s?[-_](ind|split)", re.IGNORECASE), 10
"""Name of a file that divides examples among clients, and least number of them."""

_SCALER = re.compile(r"scaler|normali[sz]er|imputer|transformer|preprocess", re.IGNORECASE)


class NoWeights(dict[str, Any]):
    """Placeholder of missing weights; networks that would load it, or a part of it, keep their values."""

    def __init__(self, *asked: Any, **options: Any) -> None:
        super().__init__()

    def __missing__(self, key: str) -> "NoWeights":
        return self

    def __fspath__(self) -> str:
        return "no-weights"


class Pickle(BytesIO):
    """Stands in for the open file of a missing pickle; loading it returns made-up data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path


class Few(np.ndarray):
    """Array of few made-up examples in place of many: larger shapes or indices give fewer or repeated examples."""

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        try:
            return super().reshape(*shape, **kwargs)
        except ValueError:
            wanted = shape[0] if isinstance(shape[0], Sequence) else shape
            if wanted[0] <= len(self):
                raise
            return super().reshape((-1, *wanted[1:]), **kwargs)

    def __getitem__(self, key: Any) -> Any:
        first, *rest = key if isinstance(key, tuple) and key else (key,)
        if isinstance(first, slice) and isinstance(first.start, int) and self.ndim and first.start >= len(self):
            first = slice(-max(len(self) // 6, 1), None)
        elif isinstance(first, np.ndarray) and first.dtype.kind in "iu" and first.max(initial=0) >= len(self) > 0:
            first = first[: len(self)] % len(self)
        else:
            return super().__getitem__(key)
        return super().__getitem__((first, *rest))


class Saved(list[dict[str, Any]]):
    """Made-up data set: examples as mappings from column to value."""


class Score:
    """Accuracy and macro averages of predicted classes, in place of a metric of Hugging Face's hub."""

    asked: ClassVar[set[str]] = set()  # names of the metrics that this process made

    def __init__(self, *names: Any, **kwargs: Any) -> None:
        self.asked.add(" ".join(map(str, names)))
        self._pairs: list[tuple[Any, Any]] = []

    def add_batch(self, *, predictions: Any, references: Any, **kwargs: Any) -> None:
        self._pairs += zip(np.ravel(predictions).tolist(), np.ravel(references).tolist(), strict=True)

    def compute(self, *, predictions: Any = (), references: Any = (), **kwargs: Any) -> dict[str, float]:
        self.add_batch(predictions=predictions, references=references)
        guesses, truths = zip(*self._pairs, strict=True)
        self._pairs, learn = [], importlib.import_module("sklearn.metrics")
        means = learn.precision_recall_fscore_support(truths, guesses, average="macro", zero_division=0)[:3]
        return {"accuracy": learn.accuracy_score(truths, guesses), **dict(zip(_SHARES, means, strict=True))}


class FittedStandIn:
    """Placeholder of a fitted encoder or scaler: it numbers the labels in ``classes``, if given, or changes nothing."""

    def __init__(self, classes: int = 0) -> None:
        self.classes_ = np.arange(classes)

    def transform(self, given: Any) -> np.ndarray:
        if not self.classes_.size:
            return np.asarray(given)
        return np.unique(np.asarray(given), return_inverse=True)[1].reshape(-1) % self.classes_.size

    fit_transform = transform

    def inverse_transform(self, given: Any) -> np.ndarray:
        return np.asarray(given)


def hooks(drawing: Drawing) -> Iterator[tuple[str, str, Any]]:
    """Yield (module, loading function's name, replacement); replacements make up missing pickles and recordings."""
    for package, module, name in (
        *((each, each, "load") for each in ("pickle", "joblib")),
        ("scipy", "scipy.io", "loadmat"),
        *(("mne", "mne.io", f"read_raw_{kind}") for kind in ("edf", "bdf")),
        ("nibabel", "nibabel", "load"),
        ("SimpleITK", "SimpleITK", "ReadImage"),
    ):
        recorded = package in {"mne", "nibabel", "SimpleITK"}
        if drawing.uses(package):
            yield module, name, partial(_recorded, drawing, package) if recorded else partial(unpickled, drawing)


def is_missing(path: object) -> bool:
    """Return ``True`` if there is no file, or an empty table or Git LFS's pointer in its place."""
    if not isinstance(path, str | Path):
        return False
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return True
    if not stat.S_ISREG(found.st_mode) or found.st_size > _POINTER:
        return False
    if found.st_size == 0:
        return Path(path).suffix.lower() in DRAWN - _RECORDINGS
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:  # such as for want of rights in a sandbox
        return False
    try:
        return os.read(file, _POINTER).startswith(b"version https://git-lfs")
    finally:
        os.close(file)


def _recorded(drawing: Drawing, package: str, path: str | Path) -> Any:
    """Make up a 32-channel recording (``mne``) or a 32-slice scan, of 0 and 1 if ``path`` names labels."""
    library, rate, rng = importlib.import_module(package), drawing.fitted.get("rate", RATE), drawing.rng(str(path))
    scan = "a drawn scan of 32 slices, 64 x 64 each"
    drawing.note(str(path), f"a drawn recording, {rate} values a second" if package == "mne" else scan)
    if package == "mne":
        info = library.create_info(32, rate, "eeg")
        return library.io.RawArray(1e-5 * rng.normal(size=(32, 60 * rate)), info, verbose=False)
    volume = pictures(1, Shape(side=64, channels=32, classes=1), rng)[0].astype(np.float32) / 255
    volume = volume.round() if re.search("seg|mask|label", Path(path).name, re.IGNORECASE) else volume
    return library.Nifti1Image(volume, np.eye(4)) if package == "nibabel" else library.GetImageFromArray(volume.T)


def unpickled(drawing: Drawing, path: str | Path) -> Any:
    """Return what its name suggests for the pickle ``path``: a vectorizer, encoder, scaler, weights or arrays."""
    path = Path(path)
    if _VECTORIZER.search(path.stem):
        drawing.note(str(path), "a vectorizer of drawn texts")
        learn = importlib.import_module("sklearn.feature_extraction.text")
        return learn.TfidfVectorizer().fit(texts(TRAIN, drawing.classes or 2, drawing.rng(str(path))))
    if _ENCODER.search(path.stem):
        drawing.note(str(path), "an encoder of labels")
        return FittedStandIn(max(drawing.classes, 2))
    if _SCALER.search(path.stem):
        drawing.note(str(path), "a scaler that leaves rows as they are")
        return FittedStandIn()
    if OF_MODEL.search(path.stem):
        return saved_by_torch(drawing, path)
    return archive(drawing, path)


def archive(drawing: Drawing, path: object) -> Any:
    """Make up arrays in place of the file ``path``; an array's name decides whether it has labels or inputs.

    Return one array for ``.npy``, a tuple for a pickle that the app's code unpacks, and a mapping otherwise.
    """
    size = " x ".join(map(str, array(drawing, "x", path).shape[1:]))
    drawing.note(str(path), f"drawn arrays, {size} numbers an example, and their labels")

    class Archive(dict[str, np.ndarray]):
        def __missing__(self, key: str) -> np.ndarray:
            return self.setdefault(key, array(drawing, key, path))

        def __enter__(self) -> "Archive":
            return self

        def __exit__(self, *args: object) -> None:
            return None

    if str(path).endswith(".npy"):
        return array(drawing, Path(str(path)).stem, path)
    named = (name for name in drawing.names if LABEL.search(name) or IMAGE.search(name))
    if drawing.unpacked and Path(str(path)).suffix.lower() in PICKLES:  # of NumPy, too
        return tuple(array(drawing, name, path) for name in drawing.unpacked[0])
    return Archive({key: array(drawing, key, path) for key in ("x_train", "y_train", "x_test", "y_test", *named)})


def array(drawing: Drawing, name: str, path: object) -> np.ndarray:
    """Make up labels or inputs, such as pictures or rows, by an array's ``name``; ``path`` seeds the draws."""
    number, classes = TEST if re.search("test|val", name) else TRAIN, drawing.classes or 10
    rng = drawing.rng(f"{path} {name}")
    if LABEL.search(name) or re.search(r"(^|_|train|test|val|data)y(_|$)", name, re.IGNORECASE):
        drawn = rng.integers(2, size=(TEST, drawing.features or 10))
        return drawn if name in drawing._wide else labels(number, classes)
    pictured = drawing.entry or drawing.colors or (drawing.features in (0, 784, 1024, 3072) and not drawing._wide)
    if len(entry := drawing.entry) in (1, 2) or not pictured:
        size = entry or ((drawing.features or 10) + drawing.fitted.get("columns", 0),)
        return numbers(number, int(np.prod(size)), classes, rng).reshape(number, *size)
    known = re.search("path|derma|blood|retina", str(path))
    colors = 3 if known else drawing.fitted.get("channels", drawing.colors or 1)
    usual = 28 if known or drawing.colors != 3 else 32, colors
    side, *_, colors = entry if len(entry) == 3 and entry[-1] in (1, 3) else usual
    drawn = pictures(number, Shape(side=drawing.fitted.get("side", side), channels=colors, classes=classes), rng)
    return drawn[..., 0] if colors == 1 and not entry else drawn


def lines(drawing: Drawing, path: object) -> np.ndarray:
    """Let ``drawing`` make up rows of numbers (N, columns + 1), label last, in place of the missing file ``path``."""
    classes = max(drawing.classes, 2)
    drawing.note(str(path), f"{TRAIN + TEST} drawn rows of numbers")
    drawn = numbers(TRAIN + TEST, drawing.features or 10, classes, drawing.rng(str(path)))
    return np.concatenate([drawn, labels(len(drawn), classes)[:, None]], axis=1)


def written(drawing: Drawing, path: Path) -> Path:
    """Let ``drawing`` make up a table or text in place of the missing file ``path``; return the new file's path."""
    made = drawing.place(path)
    if not made.exists():
        split = re.search(r"""\.split\((["'])([,;| ]+|\\t)\1\)""", "".join(_next_lines()))  # of the lines it reads
        if path.suffix == ".txt" and split and re.search("label|annot|list", path.stem, re.IGNORECASE):
            drawing.note(str(path), f"{TRAIN} drawn lines with a file and its label")
            classes, separator = labels(TRAIN, max(drawing.classes, 2)), split[2].replace(r"\t", "\t")
            made.write_text(
                "".join(f"{n}.png{separator}{label}\n" for n, label in enumerate(classes)), encoding="utf-8"
            )
        elif path.suffix == ".txt":
            drawing.note(str(path), f"{TRAIN} drawn lines of text")
            made.write_text("\n".join(texts(TRAIN, 1, drawing.rng(str(path)))), encoding="utf-8")
        else:
            drawing.table(path).to_csv(made, sep="\t" if path.suffix == ".tsv" else ",", index=False)
    return made


def opened(drawing: Drawing, path: Path, mode: str) -> Any:
    """If ``path`` is a missing pickle or certificate, return an open file with made-up content, else ``None``."""
    if path.suffix.lower() in PICKLES and "b" in mode:
        return Pickle(path)
    if path.suffix.lower() not in CERTIFICATES:
        return None
    drawing.note(str(path), "an empty file, since nothing is connected here,")
    return BytesIO() if "b" in mode else StringIO()


def saved_by_torch(drawing: Drawing, path: object) -> Any:
    """Make up what ``torch.load(path)`` returns: placeholder weights if ``path`` names weights, else examples.

    Examples are a mapping if the app's code gets labels from a loaded file by their key.
    """
    if OF_MODEL.search(Path(str(path)).stem):
        drawing.note(str(path), UNTRAINED, pretrained=True)
        return NoWeights()
    torch, part = importlib.import_module("torch"), "test" if re.search("test|val", str(path)) else "train"
    rows = torch.tensor(array(drawing, part, path)).float()
    given = torch.tensor(labels(len(rows), max(drawing.classes, 2))).long()
    if drawing.colors and rows.dim() > 2:
        rows = rows.reshape(*rows.shape[:3], -1).movedim(3, 1) / 255
    drawing.note(str(path), f"{len(rows)} drawn examples")
    if any(map(LABEL.search, drawing.keyed)):
        own = (key for key in drawing.keyed if not OF_MODEL.search(key))
        held = ((key, torch.tensor(array(drawing, f"{part} {key}", path))) for key in own)
        found = NoWeights()  # a network may take it, too
        found.update((key, drawn.float() if drawn.is_floating_point() else drawn) for key, drawn in held)
        return found
    keys = [min(filter(kind.search, drawing.names), key=len, default="") for kind in (IMAGE, LABEL)]
    if all(keys) and drawing.uses("datasets", "flwr_datasets"):  # whose examples were saved, each by its columns
        return Saved(dict(zip(keys, each, strict=True)) for each in zip(rows, given.tolist(), strict=True))
    return torch.utils.data.TensorDataset(rows, given)


def stated(drawing: Drawing, path: str, there: Path) -> Any:
    """Let ``drawing`` make up the data set ``path`` with the features that ``there``/dataset_info.json lists."""
    hf, kept = importlib.import_module("datasets"), (there / "dataset_info.json").read_text(encoding="utf-8")
    kinds, rng = hf.Features.from_dict(json.loads(kept)["features"]), drawing.rng(path)
    classes = next((kind.num_classes for kind in kinds.values() if hasattr(kind, "num_classes")), drawing.classes or 2)

    def drawn(name: str, kind: Any) -> Any:
        inner, classed = getattr(kind, "feature", kind), hasattr(kind, "num_classes")
        if isinstance(kind, hf.Image):
            return drawing.as_images(TRAIN, Shape(classes=classes), rng)
        if getattr(kind, "dtype", "") == "string":
            return texts(TRAIN, classes, rng)
        if inner is not kind:
            found = numbers(TRAIN, max(kind.length, 0) or drawing.features or 10, classes, rng)
        else:
            found = np.asarray(labels(TRAIN, classes) if classed else drawing.column_of(name, TRAIN, classes, rng))
        return (found.round().astype(int) if "int" in inner.dtype else found).tolist()

    drawing.note(path, f"{TRAIN} drawn examples with columns {', '.join(kinds)}")
    return hf.Dataset.from_dict({name: drawn(name, kind) for name, kind in kinds.items()}, features=kinds)


def records(drawing: Drawing, path: Path) -> Path | None:
    """Let ``drawing`` make up records in place of the missing JSON file ``path``, and return the new file's path.

    A file that divides examples has their numbers by client; other keys are those of another JSON file of the folder.
    ``None`` if there is none.
    """
    if path.suffix == ".json" and _SHARED_OUT.search(path.stem):
        parts = max(_PARTS, drawing.shares)
        drawing.note(str(path), f"equal shares of {TRAIN} examples for {parts} clients")
        (made := drawing.place(path)).write_text(json.dumps({n: [*range(n, TRAIN, parts)] for n in range(parts)}))
        return made
    near = sorted(path.parent.glob("*.json")) if path.suffix == ".json" else []
    held = (attempt(partial(lambda place: json.loads(place.read_text(encoding="utf-8")), each)) for each in near)
    firsts = (each[0] for each in held if isinstance(each, list) and each)
    keys = next(([*each] for each in firsts if isinstance(each, dict)), [])
    classes, made = max(drawing.classes, 2), drawing.place(path)
    drawn = [drawing.column_of(key, TRAIN, classes, drawing.rng(f"{path} {key}")) for key in keys]
    rows = zip(*(np.asarray(each).tolist() for each in drawn), strict=True)
    if not keys:
        return None
    made.write_text(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]), encoding="utf-8")
    drawing.note(str(path), f"{TRAIN} drawn records with {', '.join(keys)}")
    return made


def got(what: object = "", origin: object = "", *args: Any, **kwargs: Any) -> Any:
    """Return the path, like Keras's ``get_file(name, address)`` or ``urlretrieve(address, file)``, without a download.

    If the file's name suggests weights, return placeholder weights. ``what``, ``origin``: first and second argument.
    """
    if OF_MODEL.search(Path(str(what)).name) or str(what).endswith((".h5", ".keras")):
        return NoWeights()
    return (str(origin or Path(str(what)).name), None) if "://" in str(what) else str(what or Path(str(origin)).name)


def unless_missing(original: Any, network: Any, *args: Any, **kwargs: Any) -> Any:
    """Load weights into ``network`` by the function ``original``, unless an argument is a placeholder for weights."""
    torch = importlib.import_module("torch")
    stands = NoWeights, Saved, torch.utils.data.TensorDataset  # by a name that may not speak of weights
    if any(isinstance(each, stands) for each in (*args, *kwargs.values())):
        return torch.nn.modules.module._IncompatibleKeys([], [])
    return original(network, *args, **kwargs)


def fill(drawing: Drawing, made: Path, asked: str = "", *, by_class: bool = False, suffix: str = "") -> None:
    """Write made-up pictures or sounds to the folder ``made``, unless it exists.

    Subfolders are classes if ``by_class`` (pictures) or if the name suggests a data set. ``asked``: path that
    the app asked for. ``suffix``: kind of tables to name there instead.
    """
    if suffix:
        made.mkdir(parents=True, exist_ok=True)
        for number in range(TABLES):
            (made / f"{number:02}{suffix}").touch()
        return
    names = drawing.class_names or [f"class_{n}" for n in range(drawing.classes or 2)]
    classes, rng, asked = len(names), drawing.rng(asked or str(made)), asked or str(made)
    heard, by_class = drawing.suffix == ".wav" and not by_class, by_class or bool(OF_DATA.search(made.name))
    if made.is_dir():
        return
    many = min(24 * classes, MOST_DRAWN // (10 if heard else 1))
    drawn = sounds(many, classes, rng) if heard else drawing.as_images(many, Shape(side=64, classes=classes), rng)
    for number, each in enumerate(drawn):
        place = made / names[number % classes] if by_class else made
        place.mkdir(parents=True, exist_ok=True)
        if not heard:
            each.save(place / f"{number}{drawing.suffix.replace('wav', 'png')}")
            continue
        with wave.open(str(place / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, SOUND, 0, "NONE", ""))
            file.writeframes(each.tobytes())
    kind = "sounds of a second" if heard else "pictures"
    drawing.note(asked, f"{many} drawn {kind}{f' in {min(classes, many)} folders' * by_class}")


def suffix_sought() -> str:
    """Return the file suffix, such as .csv, that the app's code looks for in a folder; empty if none."""
    found = _SUFFIX.search("".join(_next_lines()[:_NEAR]))
    return found[0] if found and found[0] in DRAWN else ""


def _next_lines() -> list[str]:
    frame = caller(r"\bpathlib\b")
    return [] if frame is None else linecache.getlines(frame.f_code.co_filename)[frame.f_lineno - 1 :]


_SUFFIX, _NEAR = re.compile(r"\.(csv|tsv|xlsx?|parquet|feather|np[yz]|png|jpe?g|bmp)\b"), 8
"""Suffix of a table or picture, and number of lines in which it is looked for."""


def ends_without() -> bool | None:
    """Return whether the app ends if the file that it is looking for is missing; ``None`` if its code does not say."""
    frame = caller(r"\bpathlib\b")
    if frame is None or is_installed(frame):
        return None
    line, lines = frame.f_lineno, linecache.getlines(frame.f_code.co_filename)
    tree = attempt(lambda: ast.parse("".join(lines)))
    nodes = [] if isinstance(tree, Failure) else [*ast.walk(tree)]
    kept = (node for node in nodes if isinstance(node, ast.Assign) and node.lineno == line)
    answers = {ast.unparse(name): ast.unparse(node.value) for node in kept for name in node.targets}
    for node in reversed(nodes):  # the innermost first
        if isinstance(node, ast.Try) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
            caught = (each for each in node.handlers if each.type and _MISSING.search(ast.unparse(each.type)))
            if (handler := next(caught, None)) is not None:
                return _leaves(handler.body)
        later = isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("not ") in answers
        if isinstance(node, ast.If | ast.Assert) and (later or node.test.lineno <= line <= (node.test.end_lineno or 0)):
            asked = ast.unparse(node.test)
            negated = ("not " in asked) != ("not " in answers.get(asked.removeprefix("not "), ""))  # or a list of those
            return not negated if isinstance(node, ast.Assert) else _leaves(node.body if negated else node.orelse)
    return None


_MISSING = re.compile(r"\b(FileNotFoundError|OSError|IOError)\b")


def _leaves(statements: list[ast.stmt]) -> bool:
    return any(isinstance(each, ast.Raise) or "exit(" in ast.unparse(each) for each in statements[-1:])
