"""Runs' folders that were damaged, in every field of every file: refused in a line by what reads them."""

import json
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from fl_privacy.federation.interception.captures import load_observations
from fl_privacy.report import write_report
from fl_privacy.runs.attack import as_captured, expect_of
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.config.parse import select
from fl_privacy.runs.config.settings import captured_groups, captured_keys
from fl_privacy.runs.folder import read_run
from fl_privacy.runs.setup import build_setup
from tests.fuzz.conftest import SETTINGS
from tests.fuzz.judge import Case, cases, refused, wrong_for

DEEP = "[" * 5000 + "]" * 5000
NOT_JSON = (b"", b"{", b"\x00\xff\xfe", b"nothing", DEEP.encode(), b'{"a": ' + b"9" * 9000 + b"}")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value within ``value``, mappings and lists too, by the keys that lead there."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, (*path, key))


def put(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    *above, last = path
    inner = content
    for key in above:
        inner = inner[key]
    inner[last] = value
    return content


CONFIGURED = compose_run([*SETTINGS]).plain()


def configurations() -> Iterator[tuple[str, tuple[tuple[Any, ...], Any]]]:
    """Every setting that is taken from a captured configuration, of another type, or gone."""
    for key in (*captured_keys(), *(f"choices.{name}" for name in captured_groups())):
        for path, value in leaves(select(CONFIGURED, key), tuple(key.split("."))):
            for wrong in (*wrong_for(value), "${oc.env:HOME}", {"_target_": "os.getcwd"}):
                if not lenient(path, value, wrong):
                    yield f"{'.'.join(map(str, path))}={str(wrong)[:30]}", (path, wrong)


def lenient(path: tuple[Any, ...], value: object, wrong: object) -> bool:
    """Where that type is allowed as well."""
    names = {("intercept", "rounds"): int, ("intercept", "clients"): list}
    return isinstance(wrong, names.get(path[:2], ())) or (path[-1] == "widths" and wrong == [1])


@pytest.mark.parametrize("case", cases(configurations(), sampled=200))
def test_a_captured_configuration(case: Case, recorded: Path, tmp_path: Path) -> None:
    path, wrong = case.content
    (tmp_path / "captures").mkdir()
    content = OmegaConf.to_container(OmegaConf.load(recorded / "config.yaml"))
    text = json.dumps(put(content, path, wrong))  # which is YAML, and keeps interpolations as they are
    (tmp_path / "config.yaml").write_text(text)
    refused(lambda: build_setup(as_captured(compose_run(["attack=analytic", f"captured={tmp_path}"]))))


DESCRIPTION = {
    "format": 1,
    "id": "round-1/client-0/victim-0",
    "plan": {"shares": "gradient", "lr": 0.01, "steps": 1, "batch_size": 1, "optimizer": "sgd", "flip": False},
    "input_shape": [1, 28, 28],
    "num_classes": 10,
    "num_examples": 1,
    "sent": "0" * 64,
    "upload": "0" * 64,
    "knowledge": "0" * 64,
}


def descriptions() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Ways to damage the description of an update."""
    for path, value in leaves(DESCRIPTION):
        for wrong in (*wrong_for(value), -1, 10**30):
            yield f"{'.'.join(path)}={str(wrong)[:20]}", lambda file, p=path, w=wrong: rewritten(file, p, w)
    for content in NOT_JSON:
        yield f"content {content[:8]!r}", lambda file, c=content: file.write_bytes(c)
    for name in (
        "client-99",
        "client-\u00b2",
        "client-x",
        "client--1",
        "klient-1",
        "client-0-1",
        "client-99999999999999999999",
    ):
        yield f"folder {name}", lambda file, n=name: moved(file, file.parents[1] / n / file.name)
    for name in (
        "weird.json",
        "victim-\u00b2.json",
        "victim-999999.json",
        "victim-0.x.json",
        "victim-.json",
        "victim-\u0661.json",
    ):
        yield f"file {name}", lambda file, n=name: moved(file, file.with_name(n))
    for name in ("round-0", "round-99", "round-x", "rund-1"):
        yield f"folder {name}", lambda file, n=name: moved(file, file.parents[2] / n / file.parent.name / file.name)
    yield "a folder of its name", lambda file: (file.unlink(), file.mkdir())[1]
    yield "a link to nowhere", lambda file: (file.unlink(), file.symlink_to("/nowhere"))[1]
    yield "a link to a device", lambda file: (file.unlink(), file.symlink_to("/dev/zero"))[1]


def rewritten(file: Path, path: tuple[Any, ...], value: Any) -> None:
    file.write_text(json.dumps(put(json.loads(file.read_text()), path, value)))


def moved(file: Path, to: Path) -> None:
    """Under another name, which the description says too."""
    to.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(file.read_text())
    content["id"] = to.relative_to(to.parents[2]).with_suffix("").as_posix()
    file.unlink()
    to.write_text(json.dumps(content))


def tensors() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Ways to damage what the client uploaded."""

    def upload(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
        def act(file: Path) -> None:
            stored = file.parents[2] / "tensors" / f"{json.loads(file.read_text())['upload']}.safetensors"
            changed = file.parents[2] / "changed.safetensors"
            save_file(change(load_file(stored)), changed)
            named(file, changed.read_bytes())
            changed.unlink()

        return act

    def raw(content: bytes) -> Callable[[Path], None]:
        return lambda file: named(file, content)

    kinds = (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16)
    for kind in kinds:
        yield f"of {kind}", upload(lambda t, k=kind: {name: value.to(k) for name, value in t.items()})
    for number in (float("nan"), float("inf"), float("-inf")):
        yield f"of {number}", upload(lambda t, n=number: {name: torch.full_like(v, n) for name, v in t.items()})
    yield "of other names", upload(lambda t: {f"{name}x": value for name, value in t.items()})
    yield "of no prefix", upload(lambda t: {name.partition("/")[2]: value for name, value in t.items()})
    yield "of other shapes", upload(lambda t: {name: value[:1].contiguous() for name, value in t.items()})
    yield "transposed", upload(lambda t: {name: value[None].contiguous() for name, value in t.items()})
    yield "with more", upload(lambda t: {**t, "update/more": torch.zeros(1)})
    for content in (b"", b"x" * 100, b"\xff" * 8 + b"{}", (1 << 62).to_bytes(8, "little") + b"{}", header(b'{"a": 1}')):
        yield f"raw {content[:10]!r}", raw(content)
    for kind in ("F4", "X9", "I128"):
        about = {"update/a": {"dtype": kind, "shape": [1], "data_offsets": [0, 4]}}
        yield f"of type {kind}", raw(header(json.dumps(about).encode()) + b"\0" * 4)
    huge = {"update/a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
    yield "of a terabyte", raw(header(json.dumps(huge).encode()))
    yield "damaged after it was named", lambda file: next((file.parents[2] / "tensors").iterdir()).write_bytes(b"x")
    yield "gone", lambda file: shutil.rmtree(file.parents[2] / "tensors")


def header(about: bytes) -> bytes:
    return len(about).to_bytes(8, "little") + about


def named(file: Path, content: bytes) -> None:
    """Keep ``content`` under its own digest, as the upload that the description names."""
    digest = sha256(content).hexdigest()
    (file.parents[2] / "tensors" / f"{digest}.safetensors").write_bytes(content)
    rewritten(file, ("upload",), digest)


@pytest.mark.parametrize("case", cases([*descriptions(), *tensors()], sampled=25))
def test_a_captured_update(case: Case, copied: Callable[[], Path]) -> None:
    folder = copied()
    captures = folder / "captures"
    case.content(captures / "round-1" / "client-0" / "victim-0.json")

    def attacked() -> None:
        config = as_captured(compose_run(["attack=analytic", f"captured={folder}"]))
        federation = build_setup(config)
        for observation in load_observations(captures, federation.model):
            expect_of(federation, observation)

    refused(attacked)


FILES = (
    "run.json",
    "environment.json",
    "threat_model.json",
    "defense.json",
    "partition.json",
    "summary.json",
    "config.yaml",
)


def reported() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Ways to damage the files that a report reads."""
    for name in FILES:
        for content in (b"\x00\xff\xfe", *NOT_JSON[1:]) if name != "config.yaml" else (b"\x00\xff\xfe",):
            yield f"{name} of {content[:8]!r}", lambda folder, n=name, c=content: written(folder / n, c)
        if name != "config.yaml":
            for wrong in (b"5", b'"x"', b"[[1]]", b"true") if name != "threat_model.json" else (b"5", b"[[1]]", b"{}x"):
                yield f"{name} of {wrong!r}", lambda folder, n=name, c=wrong: written(folder / n, c)
    fields = {
        "run.json": ("format", "label", "hash", "training", "repeat", "undefended", "config"),
        "environment.json": ("packages", "gpus"),
        "partition.json": ("class_names", "counts"),
        "summary.json": ("undefended_accuracy", "seconds"),
    }
    for name, keys in fields.items():
        for key in keys:
            for wrong in ({"x": [1]}, [1, {"y": 2}], "x", 7.5):
                allowed = (
                    (key in ("label", "hash", "training", "repeat") and wrong == "x")
                    or (key == "undefended_accuracy" and wrong == 7.5)
                    or (key in ("config", "packages", "seconds") and isinstance(wrong, dict) and key != "packages")
                )
                if not allowed:
                    yield f"{name} {key}={wrong}", lambda f, n=name, k=key, w=wrong: rewritten(f / n, (k,), w)
    for section in ("data", "federation", "choices", "attack"):
        yield f"run.json config.{section}", lambda f, s=section: rewritten(f / "run.json", ("config", s), [1])
    for counts in ([], [[]], [[-1] * 10], [[10**20] * 10], [[1]], [["x"] * 10], [{}]):
        yield (
            f"partition.json counts={str(counts)[:12]}",
            lambda f, c=counts: rewritten(f / "partition.json", ("counts",), c),
        )


def written(file: Path, content: bytes) -> None:
    file.write_bytes(content)


@pytest.mark.parametrize("case", cases(reported(), sampled=10))
def test_a_file_of_a_report(case: Case, copied: Callable[[], Path]) -> None:
    folder = copied()
    case.content(folder)
    refused(lambda: read_run(folder))


KINDS = ("round", "image", "history", "update_distortion", "attack", "privacy")


def of_records() -> Iterator[tuple[str, tuple[str, str, Any]]]:
    """Each field of each kind of record, of another type."""
    fields = {
        "round": ("round", "clients", "excluded", "train_loss", "accuracy", "seconds", "upload_bytes"),
        "image": (
            *("id", "round", "client", "image", "psnr", "attack_loss", "failure"),
            *("label_source", "certainty", "member", "attacker"),
        ),
        "history": ("id", "round", "loss"),
        "update_distortion": ("id", "round", "client", "signal_to_distortion"),
        "attack": ("round", "victims", "seconds", "countermeasures"),
        "privacy": ("delta", "accountant", "missing"),
    }
    for kind, names in fields.items():
        for name in names:
            for wrong in ({"x": [1]}, [[1]], True):
                if not (wrong is True and name in ("psnr", "signal_to_distortion")):
                    yield f"{kind} {name}={wrong}", (kind, name, wrong)
        yield f"{kind} of another kind", (kind, "kind", [kind])


@pytest.mark.parametrize("case", cases(of_records()))
def test_a_record(case: Case, copied: Callable[[], Path]) -> None:
    folder, (kind, name, wrong) = copied(), case.content
    file = folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = next((record for record in records if record["kind"] == kind), None)
    if found is None:
        found = {"kind": kind, "id": "round-1/client-0", "round": 1, "loss": [1.0]}
        records.append(found)
    found[name] = wrong
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    refused(lambda: read_run(folder))


def pictured() -> Iterator[tuple[str, dict[str, Any]]]:
    """List contents that files of pictures should not hold."""
    yield "floats", {"originals": torch.zeros(2, 1, 4, 4)}
    yield "flat", {"originals": torch.zeros(2, 16, dtype=torch.uint8)}
    yield "empty", {"originals": torch.zeros(2, 1, 0, 0, dtype=torch.uint8)}
    yield "fewer", {"found": torch.ones(1, dtype=torch.bool)}
    yield "numbers for truth", {"found": torch.ones(2)}
    for ids in (
        "x",
        "{}",
        "[]",
        "[1, 2]",
        "[[1, 2], [3, 4]]",
        '[["a"], ["b"]]',
        '[["a", "b"], ["c", 1]]',
        DEEP,
        '[["a", {}], 1]',
    ):
        yield f"names {ids[:12]}", {"ids": ids}


@pytest.mark.parametrize("case", cases(pictured(), sampled=4))
def test_pictures_that_cannot_be_shown_are_left_out_and_said(case: Case, copied: Callable[[], Path]) -> None:
    folder = copied()
    for file in (folder / "reconstructions").iterdir():
        file.unlink()
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    content = {"originals": images, "reconstructions": images.clone(), "found": torch.ones(2, dtype=torch.bool)}
    ids = case.content.get("ids", '[["a", 0], ["b", 0]]')
    about = {"told": f'{{"round": 1, "attacker": "plain", "ids": {ids}}}'}
    changed = {name: value for name, value in case.content.items() if name != "ids"}
    save_file({**content, **changed}, folder / "reconstructions" / "round-0001.safetensors", about)
    pairs, problems = read_run(folder).read_pairs()
    assert not pairs and len(problems) == 1 and "\n" not in problems[0]


def test_the_undamaged_run_is_reported_and_its_captures_are_of_it(recorded: Path) -> None:
    config = as_captured(compose_run(["attack=analytic", f"captured={recorded}"]))
    federation = build_setup(config)
    observations = load_observations(recorded / "captures", federation.model)
    assert len(observations) == 4
    for observation in observations:
        expect_of(federation, observation)
    assert write_report([recorded]).is_file()
