"""Read what a user gives with an update: the model, in code or a saved program, and a site's examples."""

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from fl_privacy.auditing.strategy_model import fitting_shapes
from fl_privacy.data.images import decode_images
from fl_privacy.data.sources import IMAGE_SUFFIXES
from fl_privacy.errors import UserError, blamed_on
from fl_privacy.files.foreign import expanded, read_text
from fl_privacy.files.updates import read_arrays
from fl_privacy.models import TextModel
from fl_privacy.models.huggingface import HuggingFaceClassifier
from fl_privacy.models.unwrap_model import made_of, once_each, unwrapped
from fl_privacy.rng import derive_generator
from fl_privacy.types.modality import IMAGES, ROWS, TEXTS, Modality

_INPUTS, _LABELS = ("inputs", "images", "x", "X", "data", "features"), ("labels", "y", "targets", "label")
MOST_EXAMPLES = 20_000

_ONE_NAME = re.compile(r"(\.modules_to_save)?\.default\.")  # part of adapters' names that peft leaves out of its files

_NUMBERED = re.compile(r"(arr_)?\d+")  # names that NumPy and Flower give to arrays without names


def network_of(place: str) -> nn.Module:
    """Make the model that a user names as ``file.py:Net``, or load a program of ``torch.export`` (``.pt2``).

    The file's code is run. ``UserError`` if there is no such file or name, or it makes no model.
    """
    file, _, name = place.rpartition(":")
    path = expanded(file or name)
    if not path.is_file() or (path.suffix != ".pt2" and not (file and name)):
        raise UserError(
            "--model is expected to be FILE.py:NAME, whose class or function makes the network without arguments, or a"
            f" program of torch.export (.pt2), but got {place!r}; name one that exists."
        )
    with blamed_on(f"--model {place}"):
        if path.suffix == ".pt2":
            return _with_layers(torch.export.unflatten(torch.export.load(path)))
        spec = importlib.util.spec_from_file_location(f"audited_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise UserError(f"--model is expected to name a Python file, but {path} is not one; write FILE.py:NAME.")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where a dataclass looks for its own
        sys.path.insert(0, here := str(path.parent.absolute()))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(here)
        if not hasattr(module, name):
            raise UserError(f"--model is expected to name a class or function of {path}, but {name} is none; fix it.")
        network = made_of(getattr(module, name))
    words = getattr(network, "get_input_embeddings", None)
    if isinstance(network, TextModel) or words is None or not isinstance(words(), nn.Embedding):
        return network
    return HuggingFaceClassifier(network)


def _with_layers(program: nn.Module) -> nn.Module:
    """Replace the operations in a program of ``torch.export`` by modules of ``torch.nn`` that compute the same."""
    for module in list(program.modules()):
        graph = getattr(module, "graph", None)
        for node in graph.nodes if isinstance(graph, Graph) else ():
            node.meta.clear()  # symbolic sizes, which can't be copied
        for name, part in module.named_children():
            own, graph = dict(part.named_parameters()), getattr(part, "graph", None)
            calls = [n for n in graph.nodes if n.op == "call_function"] if isinstance(graph, Graph) else []
            if len(calls) != 1 or "weight" not in own or not own.keys() <= {"weight", "bias"}:
                continue
            outs, ins, *window = own["weight"].shape
            settings: Any = dict(zip(("stride", "padding", "dilation", "groups"), calls[0].args[3:], strict=False))
            layer: nn.Module
            if calls[0].target is torch.ops.aten.linear.default:
                layer = nn.Linear(ins, outs, bias="bias" in own)
            elif calls[0].target is torch.ops.aten.conv2d.default:
                ins *= settings.get("groups", 1)
                layer = nn.Conv2d(ins, outs, (window[0], window[1]), bias="bias" in own, **settings)
            elif calls[0].target is torch.ops.aten.embedding.default:
                layer = nn.Embedding(outs, ins)
            else:
                continue
            layer.load_state_dict(own, assign=True)
            module._modules[name] = layer
    return program


def entrance_of(network: nn.Module) -> tuple[Modality, int, str]:
    """Return the first layer's modality, input size (channels, features, tokens) and name; ``UserError`` if unknown."""
    for path, module in unwrapped(network).named_modules():
        if isinstance(module, nn.Embedding):
            return TEXTS, module.num_embeddings, path
        if isinstance(module, nn.Conv2d):
            return IMAGES, module.in_channels, path
        if isinstance(module, nn.modules.conv._ConvNd):
            kind = type(module).__name__
            raise UserError(
                f"--model is expected to take images, rows or texts, but {path} is a {kind}; audit another."
            )
        if isinstance(module, nn.Linear):
            return ROWS, module.in_features, path
    weight = next((name for name, p in network.named_parameters() if p.dim() > 1), None)
    if weight is None:
        raise UserError("--model is expected to have a layer with weights, but has none; name the network itself.")
    sizes = network.get_parameter(weight).shape  # a program's modules have no classes
    return (IMAGES if len(sizes) == 4 else ROWS), sizes[1], weight.rpartition(".")[0]


def shape_of(network: nn.Module, asked: tuple[int, ...] | None, of_data: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return an example's shape: as given, in the data, or the only one that fits the network; else ``UserError``."""
    if (known := asked or of_data) is not None:
        return known
    kind, size, path = entrance_of(network)
    if kind is ROWS:
        return (size,)
    if kind is TEXTS:
        raise UserError("--shape, the number of tokens of the longest text, is expected, but missing; try --shape 32.")
    fitting = [shape for shape in fitting_shapes(network) if shape[0] == size]
    if len(fitting) == 1:
        return fitting[0]
    takes = f"any of {', '.join('x'.join(map(str, shape)) for shape in fitting)}" if fitting else "none of the usual"
    raise UserError(
        f"--shape is expected, since images of {size} channel{'s' * (size != 1)} enter {path} and the network takes"
        f" {takes}; give --shape {size},HEIGHT,WIDTH."
    )


def named_as_in(network: nn.Module, arrays: Mapping[str, Tensor], what: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return a file's arrays under the names of the network's parameters and buffers, and notes on what differs.

    Arrays without names are taken in the order of ``state_dict()`` or of the parameters. ``what``: the file's name in
    messages. ``UserError`` if an array fits no parameter, or has another shape.
    """
    inner = unwrapped(network)
    named = dict(inner.named_parameters(remove_duplicate=False))
    own: dict[str, Tensor] = {**named, **dict(inner.named_buffers(remove_duplicate=False))}
    said = list[str]()
    if all(_NUMBERED.fullmatch(name) for name in arrays):
        orders = [list(inner.state_dict()), list(named)]
        names = next((order for order in orders if len(order) == len(arrays)), None)
        if names is None:
            raise UserError(
                f"{what} is expected to have {' or '.join(str(len(order)) for order in orders)} arrays, since they have"
                f" no names, but has {len(arrays)}; save the model's state_dict()."
            )
        arrays = dict(zip(names, arrays.values(), strict=True))
    names_in_files = _written_names(inner) | {name: name for name in own}
    known = {_ONE_NAME.sub(".", written): name for written, name in names_in_files.items()}
    given = {_ONE_NAME.sub(".", name).replace("_orig_mod.", ""): value for name, value in arrays.items()}
    cut, put = _prefixes(known, given)
    if cut or put:
        said += [f"Names in {what} begin with {cut}, unlike the model's."] if cut else []
        said += [f"Names in {what} lack {put}, with which the model's begin."] if put else []
    found = dict[str, Tensor]()
    for name, value in given.items():
        target = known.get(f"{put}{name.removeprefix(cut)}")
        if target is None:
            raise UserError(
                f"{what} is expected to hold the model's parameters, but has {name} {tuple(value.shape)}, which the"
                f" model lacks; its first are {', '.join(list(own)[:2])}: give the model that was trained, or save its"
                " state_dict()."
            )
        if value.shape != own[target].shape:
            raise UserError(
                f"{what} is expected to hold {target} of shape {tuple(own[target].shape)}, as the model has it, but"
                f" holds {tuple(value.shape)}; give the model that was trained."
            )
        if own[target].is_floating_point() and not value.is_floating_point():
            raise UserError(
                f"{what} is expected to hold weights, but {target} is of {str(value.dtype).removeprefix('torch.')};"
                " save it before it is quantized."
            )
        found[target] = value.to(own[target].dtype)
        if not bool(found[target].isfinite().all()):
            raise UserError(f"{what} is expected to hold finite numbers, but {target} holds others; save it anew.")
    if few := {str(v.dtype).removeprefix("torch.") for v in given.values() if v.is_floating_point() and v.itemsize < 4}:
        said.append(f"{what} is of {' and '.join(sorted(few))}: what it rounds away of the change is not attacked.")
    return once_each(inner, found), said


def _written_names(network: nn.Module) -> dict[str, str]:
    loading = sys.modules.get("transformers.core_model_loading")
    written = getattr(loading, "revert_weight_conversion", None)  # earlier versions write the model's names
    if written is None:
        return {}
    kind = sys.modules["transformers"].PreTrainedModel
    for path, part in network.named_modules():
        if isinstance(part, kind):
            start, own = f"{path}." if path else "", part.state_dict()
            names = {id(value): name for name, value in own.items()}  # values that are only renamed stay the same
            return {start + n: start + names[id(v)] for n, v in written(part, own).items() if id(v) in names}
    return {}


def _prefixes(known: Mapping[str, str], given: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return a prefix to cut from ``given`` names and one to add, so that most of them become ``known`` ones."""
    votes = Counter[tuple[str, str]]()
    ends = {name.split(".", place)[place]: name for name in known for place in range(1, name.count(".") + 1)}
    for name in given:
        cuts = [
            name[: len(name) - len(tail)]
            for k in range(name.count(".") + 1)
            if (tail := name.split(".", k)[k]) in known
        ]
        if cuts:
            votes[cuts[0], ""] += 1
        elif name in ends:
            votes["", ends[name].removesuffix(name)] += 1
    return votes.most_common(1)[0][0] if votes else ("", "")


def layers_in_words(missing: Sequence[str]) -> str:
    """Return up to three of the ``missing`` parameter names, and how many more there are."""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return ", ".join(missing[:3]) + more


def files_of(folder: Path) -> list[Path]:
    """List the files of a folder by name, with numbers in names in numerical order; hidden files are left out."""

    def place(path: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.stem)]

    return sorted((path for path in folder.iterdir() if path.is_file() and path.name[0] != "."), key=place)


@dataclass(frozen=True, eq=False)
class SiteExamples:
    """Images (N, C, H, W) in [0, 1], rows (N, F), or texts (N, L) padded with -1, and their classes (N,), if known."""

    inputs: Tensor
    labels: Tensor | None = None


def place_of(data: Path, update: str) -> Path:
    """Return the file or folder in ``data`` named like the ``update``; ``data`` itself if there is none."""
    return next((path for path in (data / update, *data.glob(f"{escape(update)}.*")) if path.exists()), data)


def read_examples(
    place: Path, *, kind: Modality, width: int, shape: tuple[int, ...] | None, seed: int | None = None
) -> SiteExamples:
    """Read a site's examples from an image, a folder of images, a table ``.csv``, or a file with the array ``inputs``.

    Subfolders of images are classes. A table's last column is the class if it has one column more than ``width``, the
    number that the network takes. Of more than 20,000 examples, a sample of that size is drawn with ``seed``.
    ``UserError`` if there are no examples, they do not fit the network, or they are too many and ``seed`` is ``None``.
    """
    if place.is_dir() or place.suffix.lower() in IMAGE_SUFFIXES:
        found = _images(place, kind, width, shape, seed)
    else:
        found = _table(place, width) if place.suffix.lower() == ".csv" else _arrays(place, kind)
    if shape is not None and tuple(found.inputs.shape[1:]) != shape:
        raise UserError(
            f"{place} is expected to hold examples of shape {shape}, but holds {tuple(found.inputs.shape[1:])}; give"
            " --shape, or the examples as they enter the network."
        )
    labels = found.labels
    if not bool(found.inputs.isfinite().all()) or (labels is not None and len(labels) != len(found.inputs)):
        raise UserError(f"{place} is expected to hold finite numbers and a class an example, but does not; correct it.")
    drawn = _drawn(place, len(found.inputs), seed)
    return SiteExamples(found.inputs[drawn], None if labels is None else labels[drawn])


def _drawn(place: Path, number: int, seed: int | None) -> list[int]:
    if number > MOST_EXAMPLES and seed is None:
        raise UserError(
            f"--data is expected to hold at most {MOST_EXAMPLES} examples, but {place} holds {number}; give those that"
            " may be behind the update."
        )
    rng = derive_generator(seed or 0, "examples")
    return sorted(torch.randperm(number, generator=rng)[:MOST_EXAMPLES].tolist())


def _images(
    place: Path, kind: Modality, channels: int, shape: tuple[int, ...] | None, seed: int | None
) -> SiteExamples:
    every = [place] if place.is_file() else place.rglob("*")
    files = sorted(path for path in every if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if kind is not IMAGES or not files:
        raise UserError(f"{place} is expected to hold {kind.data}, but holds none that are read; give one file.")
    files = [files[k] for k in _drawn(place, len(files), seed)]
    folders = sorted({path.parent for path in files} - {place})
    side = shape[1] if shape is not None and shape[1] == shape[2] else None
    cells = [{"bytes": None, "path": str(path)} for path in files]
    images = decode_images(cells, len(cells), image_size=side, channels=channels, fit="resize", name=place.name)
    labels = torch.tensor([folders.index(path.parent) for path in files]) if len(folders) > 1 else None
    return SiteExamples(images.float() / 255, labels)


def _arrays(place: Path, kind: Modality) -> SiteExamples:
    arrays = read_arrays(place).arrays
    inputs = next((arrays[name] for name in _INPUTS if name in arrays), None)
    if inputs is None or inputs.dim() < 2 or not len(inputs):
        raise UserError(
            f"{place} is expected to hold an array {_INPUTS[0]} (N, ...), but has {', '.join(arrays)[:80]}; rename it."
        )
    inputs = inputs.float() / 255 if inputs.dtype == torch.uint8 and kind is IMAGES else inputs
    labels = next((arrays[name].long().flatten() for name in _LABELS if name in arrays), None)
    return SiteExamples(inputs.float() if kind.continuous else inputs.long(), labels)


def _table(place: Path, width: int) -> SiteExamples:
    lines = [line.split(",") for line in read_text(place).splitlines()[1:] if line.strip()]
    try:
        found = torch.tensor([[float(cell) for cell in line] for line in lines])
    except ValueError as error:
        raise UserError(
            f"{place} is expected to hold numbers below a line of names, but {error}; encode it."
        ) from error
    if found.dim() != 2 or found.shape[1] not in (width, width + 1):
        raise UserError(
            f"{place} is expected to have {width} columns of features, and one of classes if they are known, but has"
            f" {len(lines[0]) if lines else 0}; give the columns that enter the network."
        )
    return SiteExamples(found[:, :width], found[:, width].long() if found.shape[1] > width else None)
