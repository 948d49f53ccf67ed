"""Images, evaluation networks, weights, policies and grids in files that are bombs, damaged, or something else."""

import io
import json
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fl_privacy.data import images, load_data
from fl_privacy.data.images import decode_images
from fl_privacy.data.transformations import read_policies
from fl_privacy.errors import UserError
from fl_privacy.models import LeNet
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork
from fl_privacy.models.pretrained.evaluator_files import load_evaluator, save_evaluator
from fl_privacy.models.pretrained.generator import load_generator
from fl_privacy.runs.config.study import load_grid
from fl_privacy.runs.weights import load_weights
from fl_privacy.types import ModelState
from tests.fuzz.judge import Case, cases, refused
from tests.fuzz.test_folders import DEEP, NOT_JSON, header
from tests.generator.makers import generator_file


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *, rows: int = 1) -> bytes:
    """Make a grey PNG that claims a size and holds ``rows`` rows."""
    about = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = zlib.compress(b"\0" * min(10**7, rows * (width + 1)))
    return b"\x89PNG\r\n\x1a\n" + about + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def saved(format: str, size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 90)).save(file, format)
    return file.getvalue()


def unpacked() -> bytes:
    return png(8, 8)[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 10**8)) + png(8, 8)[33:45]


def cut(format: str, share: float) -> bytes:
    content = saved(format)
    return content[: int(len(content) * share)]


def pictures() -> Iterator[tuple[str, Callable[[], bytes]]]:
    for width, height in ((10**5, 10**5), (2**31 - 1, 1), (1, 2**31 - 1), (9000, 9000), (60_000, 2), (2, 60_000)):
        yield f"PNG of {width}x{height}", partial(png, width, height)
    yield "PNG of text that unpacks to much", unpacked
    yield "nothing", lambda: b""
    yield "text", lambda: b"no image at all"
    for format in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        for share in (0.1, 0.5):
            yield f"{format} cut at {share}", partial(cut, format, share)


@pytest.mark.parametrize("case", cases(pictures(), sampled=4))
def test_an_image(case: Case) -> None:
    cells = [{"bytes": case.content(), "path": None}] * 2
    message = refused(lambda: decode_images(cells, 2, image_size=8, channels=None, fit="resize", name="bombs"))
    assert "Image 0 of data set bombs" in message


def test_large_images_are_shrunk_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    own = images._stack

    def stack(chunk: list[torch.Tensor], *settings: Any) -> torch.Tensor:
        held.append(sum(image.numel() for image in chunk))
        return own(chunk, *settings)

    monkeypatch.setattr(images, "_stack", stack)
    cells = [{"bytes": saved("PNG", (2400, 2400)), "path": None}] * 9
    shrunk = images.decode_images(cells, 9, image_size=8, channels=3, fit="resize", name="large")
    assert shrunk.shape == (9, 3, 8, 8)
    assert len(held) > 1 and max(held) < 100e6, "all at once are 156 MB"


def test_a_set_that_does_not_fit_into_memory_is_refused_at_its_first_image() -> None:
    cells = iter([{"bytes": saved("PNG", (100, 100)), "path": None}])
    message = refused(lambda: decode_images(cells, 10**9, image_size=None, channels=3, fit="resize", name="endless"))
    assert "half of the memory" in message


def folders() -> Iterator[tuple[str, Callable[[Path], object]]]:
    yield "an empty folder", lambda root: None
    yield "a pipe for an image", lambda root: ((root / "a").mkdir(), os.mkfifo(root / "a" / "x.png"))
    yield "text for parquet", lambda root: (root / "train.parquet").write_bytes(b"PAR1 no PAR1")
    yield "nothing for parquet", lambda root: (root / "train.parquet").write_bytes(b"")
    yield "a folder for parquet", lambda root: (root / "train.parquet").mkdir()
    yield "a file for a folder", lambda root: (root / "train").write_bytes(b"")
    yield "an image of no class", lambda root: (root / "x.png").write_bytes(saved("PNG"))


@pytest.mark.parametrize("case", cases(folders(), sampled=3))
def test_a_folder_of_images(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "images"
    root.mkdir()
    case.content(root)
    refused(lambda: load_data("image_folder", root=str(root), image_size=8))


def evaluators() -> Iterator[tuple[str, dict[str, str]]]:
    """Metadata that is none, or asks for more than the file holds."""
    shapes = ("[1,16,16,16]", "[]", "5", "{}", '"x"', "[1,16,true]", "[1,16,1.5]", "[0,16,16]", "[1,-1,16]", "", "NaN")
    for shape in (*shapes, "[1, 99999999, 99999999]", DEEP):
        yield f"shape {shape[:14]}", {"input_shape": shape}
    for widths in ("[30000, 30000, 30000]", "[]", "5", '["x"]', "[0]", "[1e3]", "[2,2,2,2]", f"[{'1,' * 500}1]", DEEP):
        yield f"widths {widths[:14]}", {"widths": widths}


@pytest.mark.parametrize("case", cases(evaluators(), sampled=5))
def test_an_evaluation_network(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "evaluator.safetensors"
    network = EvaluationNetwork(input_shape=(1, 16, 16), widths=(2, 2))
    about = {"input_shape": "[1, 16, 16]", "widths": "[2, 2]", **case.content}
    save_file(network.state_dict(), file, about)
    refused(lambda: load_evaluator(file))


def values(model: Any) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first = next(iter(state))
    yield "halved", {name: value.half() for name, value in state.items()}
    yield "no number", {name: torch.full_like(value, float("nan")) for name, value in state.items()}
    yield "fewer", {name: value for name, value in state.items() if name != first}
    yield "other names", {f"{name}x": value for name, value in state.items()}
    yield "other shapes", {name: value[None].contiguous() for name, value in state.items()}


@pytest.mark.parametrize("case", cases(values(EvaluationNetwork(input_shape=(1, 16, 16), widths=(2, 2))), sampled=3))
def test_the_weights_of_an_evaluation_network(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "evaluator.safetensors"
    save_file(case.content, file, {"input_shape": "[1, 16, 16]", "widths": "[2, 2]"})
    refused(lambda: load_evaluator(file))


def raw() -> Iterator[tuple[str, bytes]]:
    yield from ((f"content {content[:8]!r}", content) for content in NOT_JSON)
    yield "an endless header", (1 << 62).to_bytes(8, "little") + b"{}"
    about = {"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
    yield "a terabyte", header(json.dumps(about).encode())


@pytest.mark.parametrize("case", cases(raw(), sampled=4))
@pytest.mark.parametrize("reads", ["evaluator", "generator", "weights", "policies"])
def test_a_file_of_something_else(reads: str, case: Case, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(case.content)
    state = ModelState.of(LeNet(in_channels=1, image_size=28, num_classes=10))
    readers: dict[str, Callable[[], object]] = {
        "evaluator": lambda: load_evaluator(file),
        "generator": lambda: load_generator(file),
        "weights": lambda: load_weights(file, state),
        "policies": lambda: read_policies(str(file)),
    }
    refused(readers[reads])


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", "5", '{"policies": []}', '{"policies": "3-43"}', '{"policies": [[1]]}', '{"policies": ["x"]}',
     '{"policies": [null]}', '{"policies": ["99-99"]}', '{"policies": ["\\u00b2"]}', '{"policies": [true]}',
     '{"policies": [1e300]}'],
)  # fmt: skip
def test_policies(content: str, tmp_path: Path) -> None:
    (tmp_path / "policies.json").write_text(content)
    refused(lambda: read_policies(str(tmp_path)))


SECTIONS = {
    "settings": ["data=mnist_mini"],
    "train": ["evaluate_every=3"],
    "attack": ["victims=2"],
    "attacks": {"one": ["attack=idlg"]},
    "weights": "initial",
    "defenses": {"P": ["defense=pruning", "defense.rate=0.5,0.9"]},
}


def grids() -> Iterator[tuple[str, str]]:
    for key in SECTIONS:
        yield f"without {key}", json.dumps({name: value for name, value in SECTIONS.items() if name != key})
        for wrong in (5, "x", [1], {"x": 1}, None, [["x"]]):
            yield f"{key}={wrong}", json.dumps({**SECTIONS, key: wrong})
    for override in (
        "model._target_=subprocess.getoutput",
        "+model={_target_: subprocess.getoutput}",
        "data.root=${oc.env:HOME}",
        "++hydra.searchpath=[file:///tmp]",
        "trust=subprocess",
        "seed",
        "seed=range(0,1e9)",
        "seed=0,1",
    ):
        yield f"override {override}", json.dumps({**SECTIONS, "defenses": {"P": ["defense.rate=0.1,0.2", override]}})
    yield "aliases", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]"
    yield "tags", "settings: !!python/object/apply:os.getcwd []"
    yield "deep", DEEP
    yield "large", "settings: [" + "a," * 200_000 + "a]"


@pytest.mark.parametrize("case", cases(grids(), sampled=6))
def test_a_grid(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(case.content)
    refused(lambda: load_grid(str(file)))


def test_bytes_flipped_at_random_never_end_in_a_traceback(tmp_path: Path) -> None:
    """Not all of these are wrong; what is wrong is said in a line."""
    draw = random.Random(0)
    file = tmp_path / "evaluator.safetensors"
    save_evaluator(EvaluationNetwork(input_shape=(1, 16, 16), widths=(2, 2)), file, {})
    readers = {"evaluator": load_evaluator, "generator": load_generator}
    made = Path(generator_file()).read_bytes()
    contents = {
        "evaluator": file.read_bytes(),
        "generator": made,
        **{format: saved(format) for format in ("PNG", "JPEG", "GIF", "TIFF")},
    }
    for k in range(200):
        kind = draw.choice(list(contents))
        content = bytearray(contents[kind])
        for _ in range(draw.randint(1, 8)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        try:
            if kind in readers:
                file.with_name(f"{k}").write_bytes(content)
                readers[kind](file.with_name(f"{k}"))
            else:
                cell = {"bytes": bytes(content), "path": None}
                decode_images([cell], 1, image_size=8, channels=None, fit="resize", name="flipped")
        except UserError as error:
            assert "\n" not in str(error)
