"""The generator of images: its shapes, its training, its file, and what it has seen."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fl_privacy.errors import UserError
from fl_privacy.models.pretrained.generator import (
    FACES,
    GeneratorShape,
    ImageDiscriminator,
    ImageGenerator,
    Provenance,
    find_generator,
    image_fingerprints,
    load_generator,
    load_training,
    read_generator_header,
    save_generator,
    save_training,
)
from fl_privacy.models.pretrained.generator_training import GeneratorPlan, GeneratorTraining
from tests.generator.makers import generator_file, network

PLAN = GeneratorPlan(latent=4, width=4, steps=6, batch_size=8, shift=1, flip=True, average=0.5)


def public(count: int = 20, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, 8, 8), generator=rng).to(torch.uint8)
    return images, torch.randint(5, (count,), generator=rng)


def training(plan: GeneratorPlan = PLAN, seed: int = 0) -> GeneratorTraining:
    return GeneratorTraining(*public(), 5, plan, seed=seed)


@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 28, 10), (3, 32, 0), (3, 64, 2), (1, 8, 5)])
def test_images_of_every_size(channels: int, size: int, classes: int) -> None:
    shape = GeneratorShape(channels=channels, size=size, width=2, num_classes=classes)
    made, labels = network(shape), torch.zeros(3, dtype=torch.long)
    latents = torch.randn(3, shape.latent)
    images = made(latents, labels)
    assert images.shape == (3, *shape.image)
    assert images.min() >= 0 and images.max() <= 1
    assert ImageDiscriminator(shape)(images, labels).shape == (3,)
    features = made.features(latents, labels)
    for layer in range(made.depth - 1):
        assert features.shape[1:] == made.features_shape(layer)
        torch.testing.assert_close(made.through(features, after=layer), images)
        features = made.through(features, after=layer, until=layer + 1)


def test_probabilities_mix_the_classes() -> None:
    made = network(GeneratorShape(channels=1, size=8, width=2, num_classes=3))
    latents, labels = torch.randn(4, 128), torch.tensor([2, 0, 1, 1])
    hot = torch.nn.functional.one_hot(labels, 3).double()
    torch.testing.assert_close(made(latents, hot), made(latents, labels))
    assert not torch.allclose(made(latents, labels), made(latents, (labels + 1) % 3))


def test_a_training_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = training().run().result().state_dict()
    stopped = training()

    def stop(done: int, total: int, discriminator: float, generator: float) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.run(stop)
    save_training(stopped.state(), tmp_path / "state", "key")
    assert load_training(tmp_path / "state", "other") is None
    state = load_training(tmp_path / "state", "key")
    assert state is not None
    torch.manual_seed(5)
    again = training()
    again.load(state)
    assert again.done == 3
    found = again.run().result().state_dict()
    assert all(torch.equal(value, found[name]) for name, value in whole.items())
    other = training(seed=1).run().result().state_dict()
    assert not torch.equal(whole["layers.0.0.weight"], other["layers.0.0.weight"])
    with pytest.raises(UserError, match="This training's state is expected"):
        training(GeneratorPlan(latent=5, width=4)).load(state)


def test_it_learns_what_images_look_like() -> None:
    """Two kinds of image, black and white: it makes these by their class, and no others."""
    images = torch.cat([torch.zeros(32, 1, 8, 8), torch.full((32, 1, 8, 8), 255.0)]).to(torch.uint8)
    labels = torch.arange(2).repeat_interleave(32)
    plan = GeneratorPlan(latent=4, width=8, steps=120, batch_size=32, lr=2e-3, average=0.9)
    made = GeneratorTraining(images, labels, 2, plan, seed=0).run().result()
    latents = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    dark, bright = (made(latents, torch.full((16,), kind)).mean() for kind in (0, 1))
    assert dark < 0.25 and bright > 0.75


def test_moved_images_are_those_images_elsewhere() -> None:
    images = torch.rand(3, 2, 8, 8)
    shifts = torch.tensor([[0, 0], [1, -1], [-1, 0]])
    moved = training()._moved(images, shifts)
    torch.testing.assert_close(moved[0], images[0])
    torch.testing.assert_close(moved[1, :, 1:, :-1], images[1, :, :-1, 1:])
    torch.testing.assert_close(moved[2, :, :-1], images[2, :, 1:])
    assert not moved[1, :, 0].any() and not moved[2, :, -1].any()


def test_a_file_brings_back_the_generator_and_what_it_was_trained_on(tmp_path: Path) -> None:
    file, images = tmp_path / "deep" / "g.safetensors", public()[0]
    shape = GeneratorShape(channels=3, size=8, width=2, num_classes=5)
    made, about = network(shape), Provenance(data="a/b", split="test", images=20, seed=3, steps=9)
    save_generator(made, about, file, {"key": "k"})
    found = load_generator(file)
    latents, labels = torch.randn(2, 128), torch.tensor([1, 4])
    assert torch.equal(found.network(latents, labels), made(latents, labels))
    assert (found.provenance.words(), found.provenance.steps) == ("a/b, split test, 20 images", 9)
    assert not found.provenance.seen(images).any()
    assert read_generator_header(file)["key"] == "k"
    assert load_generator(file, dtype=torch.float64).network(latents.double(), labels).dtype == torch.float64
    assert [one.name for one in file.parent.iterdir()] == ["g.safetensors"]


def test_wrong_files_are_one_line_that_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path))
    whole = load_generator(Path(generator_file()))
    values, header = dict(whole.network.state_dict()), dict(whole.about)
    seen = whole.provenance.fingerprints
    huge = header["architecture"].replace('"width": 4', '"width": 4000000')
    nan = {**values, "layers.0.0.weight": torch.full_like(values["layers.0.0.weight"], torch.nan)}
    wrong: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]] = {
        "huge": ({**values, "fingerprints": seen}, {**header, "architecture": huge}),
        "nan": ({**nan, "fingerprints": seen}, header),
        "unseen": (values, header),
        "no header": ({**values, "fingerprints": seen}, {}),
        "no number": ({**values, "fingerprints": seen}, {**header, "architecture": '{"size": true}'}),
        "list": ({**values, "fingerprints": seen}, {**header, "trained_on": "[1]"}),
        "lacking": ({"layers.0.0.weight": values["layers.0.0.weight"], "fingerprints": seen}, header),
    }
    for name, (tensors, said) in wrong.items():
        save_file({key: value.clone() for key, value in tensors.items()}, tmp_path / name, said)
    (tmp_path / "text").write_text("none")
    for name in (*wrong, "text", "missing"):
        with pytest.raises(UserError, match="fl-privacy train-generator") as error:
            find_generator(str(tmp_path / name), (3, 8, 8))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"makes 3x8x8; bring the data to its shape by data\.channels=3"):
        find_generator(generator_file(), (1, 28, 28))
    (tmp_path / "generator-mnist-train-3x8x8-0.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"attack.generator=FILE, such as .*generator-mnist-train-3x8x8-0"):
        find_generator(None, (3, 8, 8))


def test_images_are_recognized_after_compression(tmp_path: Path) -> None:
    """And others are not, even where they are alike: neighboring parts of one photograph, but for plain ones."""
    data = pytest.importorskip("skimage.data")
    picture = torch.from_numpy(data.astronaut().copy()).permute(2, 0, 1)
    parts = picture.unfold(1, 32, 32).unfold(2, 32, 32).permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous()
    parts = parts[parts.float().flatten(1).std(1) > 20]
    known, others = parts[::2], parts[1::2]
    compressed = []
    for image in known:
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "x.jpg", quality=75)
        with Image.open(tmp_path / "x.jpg") as read:
            compressed.append(torch.from_numpy(np.array(read)).permute(2, 0, 1))
    about = Provenance(data="parts", split="train", images=len(known), fingerprints=image_fingerprints(known))
    assert about.seen(known.float() / 255).all()
    assert about.seen(torch.stack(compressed)).float().mean() > 0.98
    assert about.seen(others).float().mean() < 0.02


def test_the_faces_of_the_package_are_refused_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install gan-face-generate"):
        find_generator(FACES, (3, 64, 64))


def test_the_faces_of_the_package() -> None:
    pytest.importorskip("gan_face_generate", reason="the extra faces is not installed")
    found = find_generator(FACES, (3, 64, 64))
    images = found.network(torch.randn(8, 100, generator=torch.Generator().manual_seed(0)))
    assert images.shape == (8, 3, 64, 64)
    center, corners = images[:, :, 24:40, 24:40].mean(), images[:, :, :6, :6].std()
    assert 0.2 < center < 0.9 and corners > 0.02
    assert images.std(0).mean() > 0.05
    assert "DigiFace" in found.provenance.words()


@pytest.mark.parametrize(
    "make",
    [
        lambda: GeneratorPlan(steps=0),
        lambda: GeneratorPlan(lr=-1.0),
        lambda: GeneratorPlan(average=1.0),
        lambda: GeneratorPlan(shift=-1),
        lambda: GeneratorShape(channels=0, size=32),
        lambda: GeneratorShape(channels=3, size=30),
        lambda: GeneratorPlan().shape(torch.zeros(2, 3, 8, 12), 2),
        lambda: GeneratorTraining(*public(1), 5, PLAN, seed=0),
        lambda: ImageGenerator(GeneratorShape(channels=1, size=8, num_classes=2))(torch.zeros(1, 128)),
    ],
)
def test_wrong_settings_are_one_line(make: Callable[[], object]) -> None:
    with pytest.raises(UserError, match="expected") as error:
        make()
    assert "\n" not in str(error.value)
