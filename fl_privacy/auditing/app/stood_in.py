"""Hooks that answer what an app loads and is not here by drawn data, until a block ends."""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_privacy.auditing.app.bundle import App
from fl_privacy.auditing.app.check import TABLES, entries
from fl_privacy.auditing.app.environment import FORMATS, find_mirrored
from fl_privacy.auditing.app.scripts import parsed, reached
from fl_privacy.auditing.app.stand_in import (
    DRAWN,
    OF_KERAS,
    OF_MODEL,
    OF_TORCHVISION,
    TEST,
    TRAIN,
    Drawing,
    NoWeights,
    Shape,
    labels,
    numbers,
    pictures,
)
from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.federation.replies import Failure, attempt

_WRITTEN = re.compile(r"log|result|output|check|model|run|weight|saved?$|plot|figure|cache", re.IGNORECASE)


@contextmanager
def drawn_for(app: App, files: Path, mirror: Path | None, seed: int) -> Iterator[Drawing]:
    """Draw what ``app`` loads and is neither here nor in ``mirror``; see ``stood_in``."""
    code = parsed(app.folder)
    drawing = Drawing(reached(entries(app, code)[0] or list(code), code), files, seed)
    with stood_in(drawing, lambda path, name: mirror is not None and find_mirrored(mirror, path, name) is not None):
        yield drawing


@contextmanager
def stood_in(drawing: Drawing, mirror: Callable[[str, object], bool] = lambda path, name: False) -> Iterator[Drawing]:
    """Answer by ``drawing`` whatever the app loads and is not here, until the block ends.

    ``mirror`` says whether a folder has the data set of that name and configuration; then it is loaded as it is.
    """
    saved, lines = partial(_if_missing, drawing.saved), partial(_if_missing, drawing.lines)
    weights, folders = partial(_if_unreachable, drawing, _begun), partial(_filled, drawing)
    hooks: list[tuple[str, str, Any]] = [
        ("datasets", "load_dataset", partial(_of_hub, drawing, mirror)),
        ("datasets", "load_from_disk", saved),
        ("numpy", "load", partial(_if_missing, drawing.archive)),
        *(("numpy", name, lines) for name in ("loadtxt", "genfromtxt")),
        *(("pandas", name, partial(_of_table, drawing)) for name in TABLES),
        ("torch", "load", partial(_if_missing, drawing.saved_by_torch)),
        *((place, "load_state_dict_from_url", weights) for place in ("torch.hub", "torchvision.models._api")),
        ("torch.nn", "Module.load_state_dict", _unless_missing),
        ("torch.utils.data", "random_split", _in_proportion),
        *(("torchvision.datasets", f"{name}.__init__", partial(_of_vision, drawing)) for name in OF_TORCHVISION),
        ("torchvision.datasets", "ImageFolder.__init__", partial(_of_folder, drawing)),
        *(("sklearn.datasets", name, partial(_of_sklearn, drawing, name)) for name in _fetching()),
        ("flwr_datasets.partitioner", "DirichletPartitioner.__init__", _for_few),
        *(("os", name, folders) for name in ("listdir", "walk", "scandir")),
        ("builtins", "open", partial(_opened, drawing)),
        ("PIL.Image", "open", partial(_if_missing, drawing.picture)),
        *(("os.path", name, _is_there) for name in ("exists", "isfile")),
        *(("pathlib", f"Path.{name}", _is_there) for name in ("exists", "is_file")),
    ]
    if drawing.uses("keras", "tensorflow"):
        places = [("keras.datasets", "keras.src.datasets", "keras._tf_keras.keras.datasets")] * len(OF_KERAS)
        hooks += [
            (f"{place}.{name}", "load_data", partial(_if_unreachable, drawing, partial(_of_keras, drawing, name)))
            for name, every in zip(OF_KERAS, places, strict=True)
            for place in every
        ]
        hooks += [("keras.src.utils.file_utils", "get_file", partial(_if_unreachable, drawing, _got))]
        hooks += [("keras", "Model.load_weights", _unless_missing)]
    if drawing.uses("cv2"):
        hooks += [("cv2", "imread", partial(_if_missing, lambda path: np.asarray(drawing.picture(path))))]
    if drawing.uses("timm"):
        hooks += [("timm.models._builder", "load_pretrained", partial(_if_unreachable, drawing, _begun))]
    if drawing.uses("medmnist"):
        hooks += [("medmnist.dataset", "MedMNIST.download", lambda original, data: None)]
    if drawing.uses("kagglehub"):
        hooks += [("kagglehub", "dataset_download", partial(_if_unreachable, drawing, "{}-data".format))]
    # after Keras, which would take it for its own
    hooks += [("urllib.request", "urlretrieve", partial(_if_unreachable, drawing, _got))]
    with ExitStack() as stack:
        for module, name, hook in hooks:
            _replace(stack, module, name, hook)
        yield drawing


def _fetching() -> list[str]:
    learn = attempt(lambda: importlib.import_module("sklearn.datasets"))
    return [name for name in dir(learn) if name.startswith("fetch_")]


def _replace(stack: ExitStack, module: str, name: str, hook: Callable[..., Any]) -> None:
    """Let ``hook(original, ...)`` answer calls of ``name`` or ``Class.name`` of a module, if both are there."""
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return
    kind, _, last = name.rpartition(".")
    owner = getattr(owner, kind, None) if kind else owner
    if last in getattr(owner, "__dict__", ()):  # others inherit it
        stack.enter_context(replaced(owner, last, hook))


def _is_there(original: Any, path: Any, *args: Any, **kwargs: Any) -> bool:
    """Let a script that looks for data before it reads them go on: the reader draws them."""
    named = Path(str(path))
    tensors = named.suffix in {".pt", ".pth"} and not OF_MODEL.search(named.stem)
    return original(path, *args, **kwargs) or named.suffix.lower() in DRAWN or tensors


def _is_missing(path: object) -> bool:
    return isinstance(path, str | Path) and not os.access(path, os.F_OK)


def _of_hub(
    drawing: Drawing, mirror: Callable[[str, object], bool], original: Any, path: Any, name: Any = None, **kwargs: Any
) -> Any:
    if str(path) in FORMATS or os.access(str(path), os.F_OK) or mirror(str(path), name):
        return original(path, name, **kwargs)
    return drawing.hub(str(path), name, kwargs.get("split"))


def _if_missing(draw: Callable[[object], Any], original: Any, *args: Any, **kwargs: Any) -> Any:
    named = (value for key, value in kwargs.items() if "path" in key or key in {"file", "f"})
    path = args[0] if args else next(named, "")
    return draw(path) if _is_missing(path) else original(*args, **kwargs)


def _of_table(drawing: Drawing, original: Any, *args: Any, **kwargs: Any) -> Any:
    found = _if_missing(drawing.table, original, *args, **kwargs)
    if type(found).__name__ != "Table":
        return found
    found = found.head(kwargs.get("nrows") or len(found))
    return [found] if kwargs.get("chunksize") else found


def _begun(*args: Any, **kwargs: Any) -> NoWeights:
    return NoWeights()


def _if_unreachable(drawing: Drawing, made: Callable[..., Any], original: Any, *args: Any, **kwargs: Any) -> Any:
    found = attempt(lambda: original(*args, **kwargs))
    if not isinstance(found, Failure):
        return found
    stands = made(*args, **kwargs)
    what = "a network as it begins, without trained weights," if isinstance(stands, NoWeights) else "nothing"
    asked = args[0] if args else next(iter(kwargs.values()), "")
    drawing.note(asked if isinstance(asked, str) else type(asked).__name__, what)
    return stands


def _got(what: object = "", origin: object = "", *args: Any, **kwargs: Any) -> Any:
    """Stand for what Keras's ``get_file(name, address)`` or ``urlretrieve(address, file)`` returns."""
    if OF_MODEL.search(Path(str(what)).name) or str(what).endswith((".h5", ".keras")):
        return NoWeights()
    return (str(origin or Path(str(what)).name), None) if "://" in str(what) else str(what or Path(str(origin)).name)


def _unless_missing(original: Any, network: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(state, NoWeights):
        return torch.nn.modules.module._IncompatibleKeys([], [])
    return original(network, state, *args, **kwargs)


def _for_few(original: Any, partitioner: Any, *args: Any, **kwargs: Any) -> None:
    """Let a partitioner for large data sets divide a few drawn examples."""
    original(partitioner, *args, **kwargs)
    partitioner._min_partition_size = min(partitioner._min_partition_size, 4)


def _in_proportion(original: Any, dataset: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:
    """Divide few drawn examples in the proportions of the numbers that are asked for."""
    total, held = sum(lengths), len(dataset)
    if total > 1 and total != held:
        lengths = [each * held // total for each in lengths]
        lengths[0] += held - sum(lengths)
    return original(dataset, lengths, *args, **kwargs)


def _filled(drawing: Drawing, original: Any, path: Any = ".", *args: Any, **kwargs: Any) -> Any:
    if _is_missing(path) and Path(path).absolute().is_relative_to(Path.cwd()) and not _WRITTEN.search(Path(path).name):
        drawing.fill(Path(path))
    return original(path, *args, **kwargs)


def _opened(drawing: Drawing, original: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    drawn = not set(mode) & set("wax+") and Path(str(file)).suffix in {".csv", ".tsv", ".txt"}
    if drawn and _is_missing(file) and not Path(file).is_relative_to(sys.prefix):
        file = drawing.written(Path(file))
    return original(file, mode, *args, **kwargs)


def _of_keras(drawing: Drawing, name: str) -> Any:
    def part(number: int) -> tuple[np.ndarray, np.ndarray]:
        drawn, given = pictures(number, shape, drawing.rng(f"{name} {number}")), labels(number, shape.classes)
        return (drawn[..., 0], given) if shape.channels == 1 else (drawn, given[:, None])

    shape = OF_KERAS[name]
    return part(TRAIN), part(TEST)


def _of_vision(drawing: Drawing, original: Any, made: Any, root: Any = ".", *args: Any, **kwargs: Any) -> None:
    with suppress(RuntimeError, OSError):
        original(made, root, *args, **{**kwargs, "download": False})
        return
    name = next((each.__name__ for each in type(made).mro() if each.__name__ in OF_TORCHVISION), "MNIST")
    shape = OF_TORCHVISION[name]
    words = {"EMNIST": ("split", "train"), "SVHN": ("split",), "STL10": ("split",)}.get(name, ("train",))
    told = {**dict(zip((*words, "transform", "target_transform"), args, strict=False)), **kwargs}
    train = told.get("train", True) if "train" in words else told.get("split", "train") != "test"
    kept = {key: told.get(key) for key in ("transform", "target_transform")}
    importlib.import_module("torchvision.datasets").VisionDataset.__init__(made, root, **kept)
    number = TRAIN if train else TEST
    drawn, given = pictures(number, shape, drawing.rng(f"{name} {number}")), labels(number, shape.classes)
    made.train, made.split = train, told.get("split", "train")
    if shape.channels == 1:
        made.data, made.targets = torch.from_numpy(drawn[..., 0]), torch.from_numpy(given)
    elif name in {"SVHN", "STL10"}:
        made.data, made.labels = drawn.transpose(0, 3, 1, 2).copy(), given
    else:
        made.data, made.targets = drawn, given.tolist()
        made.classes = [f"class {n}" for n in range(shape.classes)]
        made.class_to_idx = {each: n for n, each in enumerate(made.classes)}
    drawing.note(f"torchvision's {name}", f"{TRAIN} drawn pictures")


def _of_folder(drawing: Drawing, original: Any, made: Any, root: Any, *args: Any, **kwargs: Any) -> None:
    there = Path(str(root)).is_dir() and any(each.is_dir() for each in Path(str(root)).iterdir())
    original(made, root if there else str(drawing.folder(root)), *args, **kwargs)


def _of_sklearn(drawing: Drawing, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
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
