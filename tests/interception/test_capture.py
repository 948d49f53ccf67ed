"""Captured updates: an exact round trip, private files, and no trust in what is read back."""

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from fl_privacy.effects import Clipped, Gaussian, Part, Quantized, Transformed, to_plain
from fl_privacy.errors import UserError
from fl_privacy.federation import plain_rounds
from fl_privacy.federation.interception import CaptureWriter, load_observations, save_observation
from fl_privacy.types import Knowledge, ModelState, Observation, VictimId
from tests.federation import harness

TOLD = (
    Part("noise", {"scale": 0.01}, Gaussian(std=0.01, clip=Clipped(norm=2.0, scope="layer")), strength="scale"),
    Part("ats", {"policies": ["3", "7-1"]}, Transformed(policies=("3", "7-1"))),
    Part("mine"),
)


def told_otherwise(**changes: object) -> list[dict[str, Any]]:
    (part,) = to_plain([Part("q", {}, Quantized(bits=4))])
    return [part | {"effect": part["effect"] | changes}]


@pytest.fixture(scope="module")
def observations() -> list[Observation]:
    recording = harness.Recording()
    recording.follow(
        plain_rounds(
            harness.server(),
            harness.clients(),
            rounds=1,
            audit=harness.probes(1, victims=3),
            interceptor=recording.interceptor(),
        )
    )
    labels = torch.tensor([0, 3])
    return [
        recording.observations[0].given(labels=labels, defense=TOLD, same_data="a"),
        *recording.observations[1:],
    ]


@pytest.fixture
def folder(tmp_path: Path, observations: list[Observation]) -> Path:
    writer = CaptureWriter(tmp_path / "captured")
    for observation in observations:
        writer(observation)
    return tmp_path / "captured"


def test_the_round_trip_is_exact(folder: Path, observations: list[Observation]) -> None:
    model = harness.small_net(seed=99)

    loaded = load_observations(folder, model)

    harness.assert_same_observations(loaded, observations)
    for before, after in zip(observations, loaded, strict=True):
        assert after.model is model
        assert (after.plan, after.input_shape, after.num_classes) == (
            before.plan,
            before.input_shape,
            before.num_classes,
        )
    assert loaded[0].knowledge.defense == TOLD
    assert [o.knowledge.same_data for o in loaded[:2]] == ["a", None]
    assert loaded[0].knowledge.labels is not None
    assert loaded[0].knowledge.labels.tolist() == [0, 3]
    assert loaded[1].knowledge.labels is None


def test_dtypes_and_withheld_names_survive(tmp_path: Path, observations: list[Observation]) -> None:
    upload = observations[1].upload
    tensors = {"conv.weight": upload.tensors["conv.weight"].bfloat16(), "out.bias": upload.tensors["out.bias"].double()}
    save_observation(replace(observations[1], upload=replace(upload, tensors=tensors, buffers={})), tmp_path)

    (loaded,) = load_observations(tmp_path, harness.small_net())

    assert {n: t.dtype for n, t in loaded.upload.tensors.items()} == {
        "conv.weight": torch.bfloat16,
        "out.bias": torch.float64,
    }
    assert torch.equal(loaded.upload.tensors["conv.weight"], tensors["conv.weight"])
    assert loaded.upload.buffers == {}


def test_the_model_as_sent_is_stored_and_loaded_once(folder: Path) -> None:
    loaded = load_observations(folder, harness.small_net())

    assert len({id(o.sent) for o in loaded}) == 1
    assert len(list((folder / "tensors").iterdir())) == 1 + 3 + 2  # sent, uploads, with and without knowledge


def test_ids_come_in_the_order_of_their_numbers(tmp_path: Path, observations: list[Observation]) -> None:
    ids = [VictimId(r, c, probe) for r in (1, 2, 10) for c in (0, 9, 11) for probe in (None, 0, 12)]
    for id in reversed(ids):
        save_observation(replace(observations[1], id=id), tmp_path)

    assert [o.id for o in load_observations(tmp_path, harness.small_net())] == ids


def test_only_the_owner_can_read(folder: Path) -> None:
    modes = {path: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}

    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, observations: list[Observation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_observation(observations[0], tmp_path)
    monkeypatch.undo()

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_description_that_is_no_json_is_refused(tmp_path: Path, observations: list[Observation]) -> None:
    with pytest.raises(UserError, match="public description"):
        save_observation(observations[0].given(defense=(Part("mine", {"model": nn.Linear(1, 1)}),)), tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are none; run with"):
        load_observations(tmp_path / "nowhere", harness.small_net())


def first_json(folder: Path) -> Path:
    return min(folder.rglob("*.json"))


def edit(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = first_json(folder)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def edit_plan(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        plan = json.loads(first_json(folder).read_text())["plan"]
        edit(plan=plan | changes)(folder)

    return apply


def swap_tensors(key: str, tensors: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    """Well-formed tensors that the description now names."""

    def apply(folder: Path) -> None:
        data = save(tensors)
        digest = sha256(data).hexdigest()
        (folder / "tensors" / f"{digest}.safetensors").write_bytes(data)
        edit(**{key: digest})(folder)

    return apply


def damage(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        digest = json.loads(first_json(folder).read_text())["upload"]
        path = folder / "tensors" / f"{digest}.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return apply


def remove_tensors(folder: Path) -> None:
    digest = json.loads(first_json(folder).read_text())["sent"]
    (folder / "tensors" / f"{digest}.safetensors").unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated JSON": lambda f: first_json(f).write_text(first_json(f).read_text()[:50]),
    "binary JSON": lambda f: first_json(f).write_bytes(b"\xff\xfe\x00"),
    "JSON of a list": lambda f: first_json(f).write_text("[1, 2]"),
    "empty JSON": lambda f: first_json(f).write_text("{}"),
    "another format": edit(format=2),
    "another id": edit(id="round-9/client-9"),
    "no plan": edit(plan=None),
    "unknown plan key": edit_plan(momentun=0.9),
    "wrong plan type": edit_plan(lr="fast"),
    "boolean step count": edit_plan(steps=True, epochs=None),
    "plan choice": edit_plan(shares="everything"),
    "plan range": edit_plan(lr=-1.0),
    "no examples": edit(num_examples=0),
    "fractional classes": edit(num_classes=4.5),
    "input shape": edit(input_shape=[1, -6, 6]),
    "path for a digest": edit(sent="../../etc/passwd"),
    "defense": edit(defense=["os.system"]),
    "part of a defense": edit(defense=[{"name": "q"}]),
    "effect nobody knows": edit(defense=told_otherwise(effect="os.system")),
    "effect with a setting more": edit(defense=told_otherwise(command="rm")),
    "effect with a setting out of range": edit(defense=told_otherwise(bits=10**9)),
    "effect with a setting of another type": edit(defense=told_otherwise(bits="4")),
    "effect within another": edit(defense=told_otherwise(bits={"effect": "Quantized", "bits": 4})),
    "truncated tensors": damage(lambda data: data[:-7]),
    "flipped bit": damage(lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "tensors missing": remove_tensors,
    "tensor of another model": swap_tensors("upload", {"update/conv9.weight": torch.zeros(1)}),
    "shape of another model": swap_tensors("upload", {"update/conv.bias": torch.zeros(7)}),
    "incomplete model": swap_tensors("sent", {"parameters/conv.bias": torch.zeros(3)}),
    "stray tensor": swap_tensors("upload", {"pickle": torch.zeros(3)}),
    "no parameter answered": swap_tensors("upload", {}),
    "more labels than images": swap_tensors("knowledge", {"labels": torch.zeros(500, dtype=torch.int64)}),
    "labels of no shape": swap_tensors("knowledge", {"labels": torch.zeros(())}),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_one_line_of_error(case: str, folder: Path) -> None:
    DAMAGES[case](folder)

    with pytest.raises(UserError) as error:
        load_observations(folder, harness.small_net())

    assert len(str(error.value).splitlines()) == 1


def test_a_capture_of_another_architecture_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no parameter 1.weight.*choose the model it was captured with"):
        load_observations(folder, nn.Sequential(nn.Flatten(), nn.Linear(36, 4)))


def test_a_plan_that_lacks_a_setting_is_refused(folder: Path) -> None:
    plan = json.loads(first_json(folder).read_text())["plan"]
    edit(plan={key: value for key, value in plan.items() if key != "flip"})(folder)
    with pytest.raises(UserError, match="has no flip in its plan"):
        load_observations(folder, harness.small_net())


def test_unfinished_files_are_passed_over(folder: Path, observations: list[Observation]) -> None:
    (folder / "round-1" / ".half.part").write_bytes(b"{")

    assert len(load_observations(folder, harness.small_net())) == len(observations)


def test_knowledge_of_images_is_kept(tmp_path: Path, observations: list[Observation]) -> None:
    images, classes, previous = torch.rand(2, 1, 6, 6), torch.tensor([3, 1]), torch.rand(1, 1, 6, 6)
    knowledge = Knowledge(public_images=images, public_labels=classes, previous=previous)
    save_observation(replace(observations[1], knowledge=knowledge), tmp_path)

    (loaded,) = load_observations(tmp_path, harness.small_net())

    for name, kept in (("public_images", images), ("public_labels", classes), ("previous", previous)):
        assert torch.equal(getattr(loaded.knowledge, name), kept)


def test_help_from_inside_survives_the_round_trip(tmp_path: Path, observations: list[Observation]) -> None:
    whole = observations[0].sent
    private = ModelState({"conv.weight": whole.parameters["conv.weight"]}, {"conv.extra": torch.ones(2)})
    rest = ModelState({n: p for n, p in whole.parameters.items() if n != "conv.weight"}, whole.buffers)
    told = replace(observations[0], sent=rest).given(
        private=private, colluder=2, features=torch.rand(1, 3), features_at="norm"
    )
    save_observation(told, tmp_path)
    inside = harness.small_net()
    inside.conv.extra = nn.Buffer(torch.zeros(2))

    (loaded,) = load_observations(tmp_path, harness.small_net(), inside=inside)

    assert loaded.model is inside
    assert (loaded.knowledge.colluder, loaded.knowledge.features_at) == (2, "norm")
    assert loaded.knowledge.private is not None
    harness.assert_same_state(loaded.knowledge.private, private)
    harness.assert_same_state(loaded.sent, rest)
    assert torch.equal(loaded.knowledge.features, told.knowledge.features)
    with pytest.raises(UserError, match=r"conv\.extra, which the model given lacks"):
        load_observations(tmp_path, harness.small_net())
