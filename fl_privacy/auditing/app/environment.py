"""Prepare the place where an app runs: data sets by hub name, its files, a working folder, moved names of Flower."""

import importlib
import importlib.util
import inspect
import math
import os
import random
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.serverapp.strategy import Strategy

from fl_privacy.auditing.app import lent
from fl_privacy.auditing.app.bundle import App, Config
from fl_privacy.auditing.app.check import TABLES, reached_by
from fl_privacy.auditing.app.defaults import keys_read
from fl_privacy.auditing.app.scripts import usual_for
from fl_privacy.auditing.app.stated import OptionsStated, filled
from fl_privacy.auditing.clear_text.findings import Loaded
from fl_privacy.auditing.instrument.fitted import Fitted, sklearn_lent
from fl_privacy.auditing.instrument.program import tensors_in
from fl_privacy.auditing.instrument.watch import Watched, replaced
from fl_privacy.auditing.strategy import AuditedStrategy
from fl_privacy.checks.packages import loaded_when_used
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.files import shipped
from fl_privacy.flower.inside.legacy import LegacyServer

KINDS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json", ".json": "json"}
"""File suffix -> format name of ``datasets``."""

FORMATS = {"parquet", "csv", "json", "imagefolder", "text", "arrow"}
"""Formats of ``datasets``, which are no names on the hub."""

MOST_BYTES, MOST_FILES = 128 << 20, 5000  # largest size in total and number of an app's files that are copied

CODE = (".py", ".pyc", ".fab")  # suffixes of files that are imported in place, or of no use to the app

LONGEST_WAIT, LONGEST_IDLE = 0.1, 30.0  # seconds that an app's code sleeps at most, and waits for a peer or in a loop

OTHERS = ("__pycache__", "node_modules", "venv")

_READ_ONLY = (
    *("pandas.core.internals.managers.BlockManager.as_array", "pandas.core.base.IndexOpsMixin.to_numpy"),
    *("pandas.core.internals.managers.SingleBlockManager.external_values", "pandas.Series.__array__"),
    "pandas.core.generic.NDFrame.__array__",
)
"""Functions of pandas whose arrays can't be written."""


@dataclass(frozen=True)
class Around:
    """Changes to the environment in which an app was run, and the files and packages left out of it."""

    data: set[str]  # names of data sets that the app loaded from the mirror
    missing: str  # sentence on files that were not copied, or ""
    audits: list[bool]  # an entry for each of the app's own calls of ``audit``, which are skipped
    lent: list[str]  # earlier names and options that the app used, and that were provided
    silent: list[str]  # packages that report to other services, and were replaced by placeholders
    devices: list[str]  # devices that the app names and this machine lacks
    keras: bool  # ``True`` if the app's Keras runs on PyTorch


@contextmanager
def around(
    app: App, files: Path, mirror: Path | None, inner: Path | None = None, absent: Collection[str] = ()
) -> Iterator[Around]:
    """Run the block in copies of the app's files, with missing packages and data sets replaced; yield the changes.

    ``files``: folder for the copies. ``inner``: subfolder to run in. ``mirror``: folder with copies of Hugging Face's
    data sets; ``UserError`` if it is no folder. Packages in ``absent`` can be imported, but fail when called.
    """
    with ExitStack() as stack:
        data = stack.enter_context(data_sets_of(mirror))
        before, path, place = Path.cwd(), list(sys.path), files / (inner or "")
        missing = copied_files(app.folder, files)
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)
        stack.callback(sys.path.__setitem__, slice(None), path)
        stack.callback(os.chdir, before)
        audits, loops = list[bool](), dict[tuple[int, int], tuple[Any, float, float]]()
        stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(LONGEST_IDLE)

        def start(original: Any, audited: AuditedStrategy, *args: Any, **kwargs: Any) -> Any:
            audits.append(True)
            return audited.strategy.start(*args, **kwargs)

        def slept(original: Any, seconds: float) -> None:  # what the app waits for, such as a server, is not run here
            frame = sys._getframe(2)
            if not Path(frame.f_code.co_filename).is_relative_to(app.folder):
                return original(seconds)
            now, used, here = time.monotonic(), time.process_time(), (threading.get_ident(), frame.f_lineno)
            asked, since, before = loops.get(here, (None, now, used))
            loops[here] = (frame, now, used) if asked is not frame else (frame, since, before)
            if asked is frame and now - since > LONGEST_IDLE and used - before < (now - since) / 10:
                raise TimeoutError("it waits in a loop for what does not come, such as a device or a connection")
            return original(min(seconds, LONGEST_WAIT))

        stack.enter_context(replaced(AuditedStrategy, "start", start))
        stack.enter_context(replaced(torch.utils.data.DataLoader, "__init__", lent.loaded_here))
        moved, silent = stack.enter_context(lent.moved_names_lent()), stack.enter_context(lent.absent_left_out(absent))
        keras = lent.keras_lent(code := lent.code_of(app.folder), partial(reached_by, app))
        if "USE_TF" not in os.environ and not re.search("tensorflow|keras", code):
            os.environ["USE_TF"] = "0"  # Transformers imports it otherwise, and fails by Keras 3
            stack.callback(os.environ.pop, "USE_TF", None)
            if app.scripts is not None and "tensorflow" not in sys.modules:  # Flower does without, which loads slowly
                sys.modules["tensorflow"] = None  # type: ignore[assignment]
                importlib.import_module("flwr.simulation")
                del sys.modules["tensorflow"]
        stack.enter_context(sklearn_lent(code))
        stack.enter_context(lent.older_names_lent(code, moved))
        stack.enter_context(arrays_writable(code))
        stack.enter_context(replaced(time, "sleep", slept))
        yield Around(data, missing, audits, moved, silent, stack.enter_context(lent.cpu_lent()), keras)


@contextmanager
def arrays_writable(code: str) -> Iterator[None]:
    """Give an app writable copies where pandas 3 returns read-only arrays, within the block; ``code``: app's text."""

    def writable(original: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if not isinstance(found, np.ndarray) or found.flags.writeable:
            return found
        near = sys._getframe(2), sys._getframe(3)  # the frame between is the hook's; pandas' own work needs no copies
        own = all(re.search(r"\bpandas\b", each.f_code.co_filename) for each in near)
        return found if own or lent.is_installed(lent.caller(r"\b(pandas|numpy)\b")) else found.copy()

    with ExitStack() as stack:
        for place in _READ_ONLY if "pandas" in code and importlib.util.find_spec("pandas") is not None else ():
            owner, _, name = place.rpartition(".")
            stack.enter_context(replaced(resolve_name(owner), name, writable))
        yield


@contextmanager
def data_sets_of(folder: Path | None) -> Iterator[set[str]]:
    """Redirect ``datasets.load_dataset`` from ``someone/NAME`` to ``folder/NAME``, and collect the requested names.

    A data set is a folder of files ``<split>.parquet``, ``.csv`` or ``.json(l)``; a missing one is an error.
    """
    asked: set[str] = set()
    if importlib.util.find_spec("datasets") is None:
        yield asked
        return
    if folder is not None and not folder.is_dir():
        raise UserError(f"--mirror is expected to be a folder, but got {folder}; name one that exists.")

    def redirected(original: Any, path: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs |= zip(("data_dir", "data_files", "split"), args, strict=False)
        if str(path) in FORMATS or Path(str(path)).exists():
            return original(path, name, **kwargs)
        asked.add(str(path))
        found = None if folder is None else find_mirrored(folder, str(path), name)
        if found is None:
            raise FileNotFoundError(f"{path} is not in the mirror {folder}")
        kept, files = [file for file in sorted(found.iterdir()) if file.suffix in KINDS], dict[str, list[str]]()
        for file in kept:
            files.setdefault(file.stem.partition("-")[0], []).append(str(file))
        return original(KINDS[kept[0].suffix], data_files=files, split=kwargs.get("split"))

    def alone(original: Any, self: Any, *args: Any, num_proc: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    def whole(original: Any, self: Any, key: Any) -> Any:  # as before datasets 4: an array of the set's format
        found = original(self, key)
        lazy = type(found).__name__ == "Column" and self.format["type"] not in {None, "custom"}
        return found[:] if lazy else found

    library = importlib.import_module("datasets")
    mirror = replaced(library, "load_dataset", redirected) if folder is not None else nullcontext()
    with mirror, replaced(library.Dataset, "map", alone), replaced(library.Dataset, "__getitem__", whole):
        yield asked


def find_mirrored(folder: Path, path: str, name: object) -> Path | None:
    """Return the copy in ``folder`` of Hugging Face's data set ``path``, or ``None``; ``name``: its configuration."""
    names = [path.replace("/", "__"), path, path.rpartition("/")[2]]
    names = [*(f"{each}-{name}" for each in names if isinstance(name, str)), *names]
    spellings = (folder / each for one in names for each in (one, one.lower(), one.replace("-", "_").lower()))
    held = (place for place in spellings if place.is_dir() and any(file.suffix in KINDS for file in place.iterdir()))
    return next(held, None)


def copied_files(app: Path, into: Path) -> str:
    """Copy the non-code files of the folder ``app`` to ``into``, without overwriting.

    Hidden files, links, and folders that hold an audit or ``into`` are skipped. Return a sentence on too large files.
    """

    def is_own(folder: Path) -> bool:
        if folder.name.startswith(".") or folder.name in OTHERS or folder.is_symlink():
            return False
        return not into.is_relative_to(folder) and not (folder / "audit.json").exists()

    files = room = 0
    for place, folders, names in os.walk(app):
        here = Path(place)
        folders[:] = sorted(name for name in folders if is_own(here / name))
        for name in sorted(names):
            source, target = here / name, into / here.relative_to(app) / name
            if name.startswith(".") or source.suffix in CODE or source.is_symlink() or not source.is_file():
                continue
            size = source.stat().st_size
            if room + size > MOST_BYTES or files >= MOST_FILES:
                return (
                    f"Copies of the app's files are where it works, but not {source.relative_to(app)} and what comes"
                    f" after, beyond {MOST_BYTES >> 20} MiB or {MOST_FILES} files; give the app whole paths."
                )
            files, room = files + 1, room + size
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    return ""


@contextmanager
def rounds_held(rounds: int | None) -> Iterator[dict[str, Any]]:
    """Let Flower's own strategies and servers train for at most ``rounds`` rounds, whatever an app says.

    Yield a mapping that is filled with the arguments of the last start; key ``self`` is the strategy or server.
    """
    taken: dict[str, Any] = {}

    def started(original: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        if rounds is not None and isinstance(number := given.arguments["num_rounds"], int):
            given.arguments["num_rounds"] = min(number, rounds)
        taken.update(given.arguments)
        return original(*given.args, **given.kwargs)

    with replaced(Strategy, "start", started), replaced(LegacyServer, "fit", started):
        yield taken


_DECIMAL = re.compile(r"\d*\.\d+")
_PLACES = (
    (re.compile(r"(^|[-_])(dir|directory|folder|root)([-_]|$)"), "data"),
    (re.compile(r"(^|[-_])(path|file)([-_]|$)"), "data.csv"),
)

_REPORTED: Mapping[str, Sequence[str]] = {
    "server": ("evaluate_metrics_serverapp", "losses_centralized", "metrics_centralized"),
    "clients' evaluation": ("evaluate_metrics_clientapp", "losses_distributed", "metrics_distributed"),
    "training": ("train_metrics_clientapp", "metrics_distributed_fit"),
}
"""Origin of figures -> their fields in results of strategies, and in histories of servers of the earlier interface."""


@contextmanager
def figures_noted(figures: dict[str, float]) -> Iterator[None]:
    """Collect in ``figures`` the last numbers that Flower reports, under keys such as ``accuracy (training)``."""

    def noted(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        known = result[0] if isinstance(result, tuple) else result
        for where, names in _REPORTED.items():
            for held in filter(None, (getattr(known, name, None) for name in names)):
                of_rounds = {"loss": held} if isinstance(held, list) else held
                last = {k: v[-1][1] for k, v in of_rounds.items() if isinstance(v, list) and v}
                last = last or dict(held[max(held)])
                reported = {f"{key} ({where})": v for key, v in last.items() if isinstance(v, int | float)}
                figures.update((key, float(value)) for key, value in reported.items() if math.isfinite(value))
        return result

    with replaced(Strategy, "start", noted), replaced(LegacyServer, "fit", noted):
        yield


def configure(context: Context, partition: int, config: Mapping[str, Any], node_config: Mapping[str, Any]) -> None:
    """Give a node the run config and its node config; ``{partition}`` in a text becomes ``partition``."""
    context.run_config = dict(config)
    for key, value in node_config.items():
        context.node_config[key] = filled(value, partition, 1) if isinstance(value, str) else value
        if value == "{partition}":
            context.node_config[key] = partition


def settled(app: App, config: Config, node_config: Config, nodes: int) -> tuple[Config, Config, list[str]]:
    """Add values for config keys that the app reads but nobody sets; return run config, node config, sentences on them.

    Values are those in the project's documents, or usual ones. ``nodes``: number of clients.
    """
    added, said, trees = [{**config}, {**node_config}], list[str](), [each.tree for each in reached_by(app)]
    for holder, given in zip(("run_config", "node_config"), added, strict=True):
        of_node, option = holder == "node_config", f"--{holder.replace('_', '-')}"
        stated = OptionsStated(app.folder, app.folder).configured(option)
        for key in sorted(keys_read(trees, holder) - given.keys() - {"partition-id", "num-partitions"}):
            values = [*dict.fromkeys(stated.get(key, ()))]
            text = f"{{partition:{'|'.join(values)}}}" if of_node and values[1:] else next(iter(values), None)
            text = (
                text
                or usual_for(key.lower(), of_client=of_node)
                or next((place for it, place in _PLACES if it.search(key)), None)
            )
            if text is not None:
                text = text.replace("{nodes}", str(nodes))
                given[key] = int(text) if text.isdecimal() else float(text) if _DECIMAL.fullmatch(text) else text
                said.append(f"Nothing sets {key} of its {holder.replace('_', ' ')}: {text} was taken")
    return added[0], added[1], said


def last_line_of(reply: Message, unknown: str = "an error") -> str:
    """Return the last line of the reason in an error reply, or ``unknown`` if it has none."""
    return ((reply.error.reason or "").strip().splitlines() or [unknown])[-1]


def seeded(seed: int) -> None:
    """Seed all random streams."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


MOST_ROWS, MOST_CLASSES = 20_000, 1000
"""Largest number of rows that are kept, and of different labels that count as classes."""

READERS = (*TABLES, "read_sql", "read_sql_table", "read_sql_query")  # loading functions of pandas


class LoadedBy:
    """Records in ``tables`` the ``flwr_datasets`` partitions and pandas tables that a client loads while it answers.

    The app's own logs are left out: files changed after the time ``since`` (seconds since 1970) with at most
    ``answered`` rows, the number of the client's replies.
    """

    def __init__(self, tables: dict[str, np.ndarray] | None = None, since: float = math.inf, answered: int = 0) -> None:
        self._since, self._answered = since, answered
        self._partitions: list[Any] = []
        self._tables: dict[str, np.ndarray] = {} if tables is None else tables

    @contextmanager
    def looking(self) -> Iterator[None]:
        with ExitStack() as stack:
            if importlib.util.find_spec("flwr_datasets") is not None:
                loaded_when_used("seaborn")  # imported by its plots
                owner = importlib.import_module("flwr_datasets").FederatedDataset
                stack.enter_context(replaced(owner, "load_partition", self.on_partition))
            if importlib.util.find_spec("pandas") is not None:
                pandas = importlib.import_module("pandas")
                for name in (name for name in READERS if hasattr(pandas, name)):
                    stack.enter_context(replaced(pandas, name, self.on_table))
            yield

    def on_table(self, read: Any, *args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        short = attempt(lambda: len(found) <= self._answered)  # a table in pieces has no length
        written = attempt(lambda: Path(args[0]).stat().st_mtime) if args and short is True else 0.0
        if not isinstance(written, Failure) and written > self._since:
            return found

        def numbers() -> dict[str, np.ndarray]:
            chosen = [name for name in found.columns if found[name].dtype.kind in "iuf"]
            return {str(name): found[name].to_numpy()[:MOST_ROWS] for name in chosen}

        self._tables.update(_or_else(numbers, {}))
        return found

    def on_partition(self, load: Any, *args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        self._partitions.append(found)
        return found

    def of(self, seen: Watched, fits: Sequence[Fitted] = ()) -> Loaded:
        columns, (rows, labels) = dict(self._tables), _rows(seen)
        for partition in self._partitions[-1:]:
            columns.update(_or_else(partial(_columns, partition), {}))
            labels = _or_else(partial(_classes, partition), None) if labels is None else labels
        # without a loader, count the examples that entered modules
        examples = seen.loaded or sum(len(next(iter(each), torch.empty(0))) for each in seen.inputs)
        for fit in fits[-1:] if labels is None else ():
            names, numbers = np.unique(fit.labels, return_inverse=True)
            plain = names.dtype.kind != "f" or bool((names == names.round()).all())
            numbers = fit.labels if fit.kind == "network" else numbers  # an output of its own for each number
            labels = numbers if plain and len(names) <= MOST_CLASSES else None
            rows, examples = [*rows, fit.rows[:MOST_ROWS]], examples or len(fit.rows)
        return Loaded(rows=rows, columns=columns, labels=labels, examples=examples)


def _or_else(found_by: Callable[[], Any], otherwise: Any) -> Any:
    found = attempt(found_by)
    return otherwise if isinstance(found, Failure) else found


def _columns(partition: Any) -> dict[str, np.ndarray]:
    kinds = {name: str(getattr(kind, "dtype", "")) for name, kind in partition.features.items()}
    kept = [name for name, kind in kinds.items() if re.fullmatch(r"(u?int|float)\d+", kind)]
    if not kept:
        return {}
    plain = partition.with_format("numpy", columns=kept)[:MOST_ROWS]
    return {name: np.asarray(plain[name]) for name in kept}


def _rows(seen: Watched) -> tuple[list[np.ndarray], np.ndarray | None]:
    groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for tensor in (tensor for batch in seen.batches or seen.inputs for tensor in tensors_in(batch)):
        if tensor.is_floating_point() and tensor.dim() >= 2:
            groups.setdefault(tuple(tensor.shape[1:]), []).append(tensor.flatten(1))
    rows = [torch.cat(parts).float().cpu().numpy() for parts in groups.values()]
    found = torch.cat(seen.labels).cpu().numpy() if seen.labels else None
    return rows, found if found is not None and len(found) == seen.loaded else None


def _classes(partition: Any) -> np.ndarray | None:
    names = [name for name, kind in partition.features.items() if hasattr(kind, "num_classes")]
    names = names or [name for name in ("label", "target", "species") if name in partition.features]
    return np.asarray(partition.with_format("numpy", columns=names)[:][names[0]]) if len(names) == 1 else None


def with_causes(why: str, drawn: Sequence[str], versions: Sequence[str]) -> str:
    """Return the error ``why``, followed by data ``drawn`` or package ``versions`` that may be its cause."""
    plain = r"'(str|int|float|dict|list|tuple|NoneType)' object has no attribute"  # whatever the version
    of_versions = re.search(r"has no attribute|argument|keyword|cannot import|\bKeyError\b", re.sub(plain, "", why))
    kinds = "Value|Key|Index|Runtime|ZeroDivision" + "|Attribute|Type" * (not of_versions)
    of_data = re.search(rf"\b({kinds})Error\b", why)
    shown = [*drawn[:3], *([f"{len(drawn) - 3} more"] if len(drawn) > 3 else [])] if of_data else []
    asked = {each: re.match(r"it asks for ([\w-]+)", each) for each in versions if of_versions}
    blamed = [each for each, name in asked.items() if name and re.search(rf"\b{name[1].replace('-', '_')}\b", why)]
    others = (blamed or [*asked])[:3]
    own = re.search(r"cannot import name .* \((.*\.py)\)", why)  # of the app's own module, whatever the versions
    others = others if own is None or "site-packages" in own[1] else []
    may: dict[str, Sequence[str]] = {
        f"Drawn data, in place of {', '.join(shown)}, may be why: put real data there": shown,
        f"Other versions may be why: {'; '.join(each.rstrip('.') for each in others)}": others,
    }
    said = [text for text, applies in may.items() if applies]
    return ". ".join([why.rstrip("."), *said, ""]).rstrip() if said else why


def remedies(problems: Iterable[str]) -> list[str]:
    """Return a sentence for each kind of ``problems`` that the sandbox may cause, with the remedy."""
    text = "\n".join(problems)
    return [sentence for sentence, words in _OF_THE_SANDBOX.items() if re.search(f"(?im){'|'.join(words)}", text)]


def with_remedies(problems: Iterable[str]) -> list[str]:
    """Return ``problems``, each followed by the remedies that apply to it and were not given before."""
    found, said = list[str](), set[str]()
    for problem in problems:
        new = [sentence for sentence in remedies([problem]) if sentence not in said]
        found.append(" ".join([f"{problem.rstrip('.')}.", *new]) if new else problem)
        said.update(new)
    return found


_OF_THE_SANDBOX: Mapping[str, Sequence[str]] = shipped(__file__, "remedies.yaml")
"""Remedy in a sandbox -> patterns of the words of errors that need it."""
