"""What holds for every defense. One without a row in ``DEFENSES`` has its defaults and a check by its hooks."""

from pathlib import Path

import pytest
import torch
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from fl_privacy import defenses
from fl_privacy.defenses import (
    Defense,
    ats,
    compose,
    dc,
    dm,
    dp_merf,
    dp_noise,
    dp_sgd,
    dsa,
    fdl_pp,
    gs_wgan,
    instahide,
    local_dp,
    none,
    ppdl,
    pruning,
    quantization,
    recup_fl,
    refiner,
    selective_sharing,
    soteria,
    soteria_mixing,
    split_fed,
    spn,
)
from fl_privacy.effects import Withheld
from fl_privacy.errors import UserError
from fl_privacy.models import ViT
from fl_privacy.rng import derive_generator
from fl_privacy.runs.config import options
from fl_privacy.runs.config.compose import compose_file
from fl_privacy.types import Batch

from .clients import CLASSES, local_data, own_batch
from .harness import clean_gradient, flat, local_step, run, small_evaluator

CONF = Path(__file__).parents[2] / "conf" / "defense"


def unchanged(clean, defended):
    return torch.equal(clean, defended)


def all_moved(clean, defended):
    return bool((clean != defended).all())


def subset_of(share):
    """Return a check that the defended update is the clean one at about ``share`` of elements, else zero."""

    def check(clean, defended):
        kept = defended != 0
        return torch.equal(defended[kept], clean[kept]) and abs(kept.double().mean().item() - share) < 0.01

    return check


def columns_of_head_zero(share):
    """Only whole columns of the head of ``small_model`` (144 features, 5 classes) are zero."""

    def check(clean, defended):
        before, head, bias = clean.split([len(clean) - 725, 720, 5])
        d_before, d_head, d_bias = defended.split([len(clean) - 725, 720, 5])
        zero = (d_head.view(5, 144) == 0).all(0)
        return (
            torch.equal(before, d_before)
            and torch.equal(bias, d_bias)
            and torch.equal(d_head.view(5, 144), head.view(5, 144) * ~zero)
            and zero.sum() == round(share * 144)
        )

    return check


def all_but_head_moved(clean, defended):
    """Check that all but the head of ``small_model``, 725 elements outside the private loss, has moved."""
    before, head = clean.split([len(clean) - 725, 725])
    d_before, d_head = defended.split([len(clean) - 725, 725])
    return torch.allclose(head, d_head, atol=1e-7) and bool((before != d_before).all())


def moved_within(share):
    """Return a check that the gradient moves as far as it may, a share of its norm."""

    def check(clean, defended):
        moved = (defended.double() - clean.double()).norm()
        return 0.5 * share * clean.norm() <= moved <= share * clean.norm() * (1 + 1e-5)

    return check


def within(radius):
    """Every element moves, but one of 1,000 that rounds to itself, and the whole gradient by at most ``radius``."""

    def check(clean, defended):
        moved = (clean != defended).double().mean() > 0.999
        return moved and (defended.double() - clean.double()).norm() <= radius * (1 + 1e-6)

    return check


def as_hooked(defense):
    """Return a check that the update moves if, and only if, a hook of ``defense`` acts on it."""
    acts = bool(defense.gradient or defense.upload or defense.loss)
    return lambda clean, defended: torch.equal(clean, defended) != acts


def informed(defense):
    """Which learns from public examples, as those of ``local_step`` but for their colors."""
    images = torch.rand(40, 3, 16, 16, generator=derive_generator(2, "public"))
    attributes = torch.arange(40) % 2
    images[:, 0] *= attributes.view(-1, 1, 1)
    for inform in defense.informed:
        inform(Batch(images, torch.arange(40) % 5), attributes)
    return defense


CONDENSED = {"images_per_class": 2, "width": 4, "real_batch": 4}

DEFENSES: dict[str, tuple[Defense, object]] = {
    "none": (none(), unchanged),
    "ats": (ats(), unchanged),
    "dc": (dc(**CONDENSED, networks=1, outer_steps=1, inner_steps=1, lr=50), unchanged),
    "dm": (dm(**CONDENSED, iterations=2), unchanged),
    "dp_merf": (dp_merf(images_per_class=2, iterations=2, features=16, width=4), unchanged),
    "gs_wgan": (gs_wgan(images_per_class=2, iterations=2, critics=2, width=4), unchanged),
    "dsa": (dsa(**CONDENSED, networks=1, outer_steps=1, inner_steps=1, lr=50), unchanged),
    "instahide": (instahide(), unchanged),
    "dp_noise": (dp_noise(scale=0.1), all_moved),
    "dp_noise, first layer": (dp_noise(scale=0.1, layers=[1]), lambda clean, d: torch.equal(clean[912:], d[912:])),
    "dp_noise, laplace, clipped": (dp_noise(noise="laplace", scale=0.1, clip_norm=0.5, at="gradient"), all_moved),
    "dp_noise, clipped, no noise": (
        dp_noise(scale=0, clip_norm=0.5),
        lambda clean, d: torch.allclose(d, 0.5 * clean / clean.norm()) and clean.norm() > 0.5,
    ),
    "local_dp": (local_dp(), all_moved),
    "dp_sgd": (dp_sgd(), all_moved),
    "dp_sgd, no clip reached, no noise": (
        dp_sgd(clip_norm=1e3, noise_multiplier=0),
        lambda clean, d: torch.allclose(d, clean, atol=1e-6),
    ),
    "pruning": (pruning(rate=0.9), subset_of(0.1)),
    "pruning, global": (pruning(rate=0.5, scope="global"), subset_of(0.5)),
    "pruning by weight": (pruning(rate=0.7, by="weight"), subset_of(0.3)),
    "pruning by product": (pruning(rate=0.7, by="product"), subset_of(0.3)),
    "pruning by integrated gradients": (pruning(rate=0.7, by="integrated_gradients"), subset_of(0.3)),
    "pruning by neurons": (pruning(rate=0.7, by="shapley"), subset_of(0.3)),
    "pruning at random": (pruning(rate=0.7, by="random"), subset_of(0.3)),
    "selective_sharing": (selective_sharing(share=0.05), subset_of(0.05)),
    "selective_sharing, at random": (selective_sharing(share=0.3, by="random", scope="layer"), subset_of(0.3)),
    "selective_sharing, noise": (
        selective_sharing(share=0.3, noise_scale=0.1),
        lambda clean, d: not set(d[d != 0].tolist()) & set(clean.tolist()) and 0.29 < (d != 0).double().mean() < 0.31,
    ),
    "ppdl": (ppdl(share=0.3, scale=0.1), lambda clean, d: abs((d != 0).double().mean().item() - 0.3) < 0.01),
    "recup_fl": (informed(recup_fl(budget=0.3, iterations=3, substitutes=2, public=40)), moved_within(0.3)),
    "refiner": (refiner(epsilon=0.01, evaluator=small_evaluator()), within(0.01)),
    "refiner, integrated gradients": (
        refiner(epsilon=0.01, weights="integrated_gradients", evaluator=[small_evaluator(), small_evaluator()]),
        within(0.01),
    ),
    "refiner, by example": (refiner(match="example", evaluator=small_evaluator()), within(0.1)),
    "soteria": (soteria(rate=0.75), columns_of_head_zero(0.75)),
    "soteria, estimated": (soteria(rate=0.75, scores="estimated"), columns_of_head_zero(0.75)),
    "soteria_mixing": (soteria_mixing(rate=0.5), lambda clean, d: 0 < (d != clean).double().mean() < 1),
    "spn": (spn(alpha2=0.5), all_but_head_moved),
    "spn without its loss": (spn(alpha2=0), unchanged),
    "spn, dp_sgd that does not clip": (
        compose(spn(alpha2=0.5), dp_sgd(clip_norm=1e3, noise_multiplier=0)),
        all_but_head_moved,
    ),
    "split_fed": (split_fed(), unchanged),
    "fdl_pp": (fdl_pp(), unchanged),
    "fdl_pp, penalized": (fdl_pp(form="penalized"), unchanged),
    "quantization, 1 bit": (
        quantization(bits=1, rounding="nearest"),
        lambda clean, d: torch.equal(d.sign(), clean.sign()),
    ),
    "quantization": (quantization(bits=4), lambda clean, d: len(d.unique()) <= 6 * 15 and (d - clean).norm() > 0),
    "quantization, 28 bits": (
        quantization(bits=28, rounding="nearest"),
        lambda clean, d: torch.allclose(d, clean, rtol=0, atol=1e-8 * clean.abs().max().item()),
    ),
}
for name in sorted(set(options("defense")) & set(defenses.__all__) - DEFENSES.keys()):
    DEFENSES[name] = (own := getattr(defenses, name)(), as_hooked(own))

every_defense = pytest.mark.parametrize("defense, specified", DEFENSES.values(), ids=DEFENSES.keys())


@every_defense
def test_update_differs_as_specified(defense, specified):
    step = local_step()
    clean = clean_gradient(step)
    assert specified(flat(clean), flat(run(defense, clean, step)))


@every_defense
def test_names_shapes_and_dtypes_stay_and_the_input_too(defense, specified):
    step = local_step()
    clean = clean_gradient(step)
    before = {name: t.clone() for name, t in clean.items()}
    sent = {name: p.clone() for name, p in step.sent.parameters.items()}
    defended = run(defense, clean, step)
    withholds = any(isinstance(part.effect, Withheld) for part in defense.parts)
    assert list(defended) == [name for name in before if name in defended or not withholds]
    for name, t in defended.items():
        assert (t.shape, t.dtype, t.requires_grad) == (before[name].shape, before[name].dtype, False)
        assert torch.equal(clean[name], before[name])
        assert torch.equal(step.sent.parameters[name], sent[name])


@every_defense
def test_reproducible_by_the_generator_alone(defense, specified):
    clean = clean_gradient(local_step())
    torch.manual_seed(1)
    first = flat(run(defense, clean, local_step(seed=5)))
    step = local_step(seed=5)
    torch.manual_seed(2)
    assert torch.equal(first, flat(run(defense, clean, step)))


@every_defense
def test_composes(defense, specified):
    step = local_step()
    clean = clean_gradient(step)
    together = compose(defense, dp_noise(scale=0.0), none())
    assert torch.equal(flat(run(together, clean, step)), flat(run(defense, clean, local_step())))
    assert together.parts[: len(defense.parts)] == defense.parts


@every_defense
def test_acts_on_a_model_with_attention(defense, specified):
    """Whose fast operations can be differentiated once only, and backward only."""
    torch.manual_seed(0)
    model = ViT(in_channels=3, image_size=16, num_classes=5, depth=2, token_width=12, mlp_width=24, heads=2)
    step = local_step(model.eval())
    defended = run(defense, clean_gradient(step), step)
    assert defended
    assert all(t.isfinite().all() for t in defended.values())


@pytest.mark.parametrize("wrong", [3, pruning, None])
def test_what_is_no_defense_composes_to_one_line(wrong):
    with pytest.raises(UserError, match=r"compose is expected to get defenses, .*; call a function such as pruning"):
        compose(dp_noise(), wrong)


OF_DATA = {name: defense for name, (defense, _) in DEFENSES.items() if defense.examples or defense.data}

every_defense_of_data = pytest.mark.parametrize("defense", OF_DATA.values(), ids=OF_DATA.keys())


def exchanged(defense, batch, seed):
    """All that the client trains on in one step, and what the model sees of it."""
    data = local_data(seed)
    for examples_hook in defense.examples:
        batch = examples_hook(batch, data)
    seen, rng = batch, derive_generator(seed, "data")
    for data_hook in defense.data:
        seen = data_hook(seen, data.state, rng)
    return batch, seen


@every_defense_of_data
def test_data_is_exchanged_by_the_generators_alone(defense):
    torch.manual_seed(1)
    _, first = exchanged(defense, own_batch(), 5)
    torch.manual_seed(2)
    _, again = exchanged(defense, own_batch(), 5)
    _, other = exchanged(defense, own_batch(), 6)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.inputs, other.inputs)


@every_defense_of_data
def test_the_originals_stay_as_they_are_and_are_not_what_is_seen(defense):
    given, before = own_batch(), own_batch()
    _, seen = exchanged(defense, given, 0)
    assert torch.equal(given.inputs, before.inputs)
    assert torch.equal(given.labels, before.labels)
    assert seen.inputs.shape[1:] == given.inputs.shape[1:]
    assert 0 <= seen.inputs.min() <= seen.inputs.max() <= 1
    originals = {tuple(image.flatten().tolist()) for image in before.inputs}
    assert not originals & {tuple(image.flatten().tolist()) for image in seen.inputs}


@every_defense_of_data
def test_as_many_examples_in_their_order(defense):
    trained, seen = exchanged(defense, own_batch(), 0)
    expected = own_batch().labels
    for outcome in defense.outcome:
        expected = outcome(expected, CLASSES)
    assert torch.equal(trained.labels, expected)
    assert len(seen) == len(trained)
    shares = seen.labels if seen.labels.dim() == 2 else torch.nn.functional.one_hot(seen.labels, CLASSES)
    assert (shares[torch.arange(len(seen)), trained.labels] > 0).all()


SHIPPED = [path for path in sorted(CONF.glob("*.yaml")) if path.stem != "custom"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_configuration_builds_and_holds_only_what_differs(path):
    assert path.read_text().startswith("# "), "the first line says what the defense does"
    config = compose_file("config", [f"defense={path.stem}"])["defense"]
    defaults = get_object(config["_target_"]).__kwdefaults__ or {}
    assert set(config) - {"_target_"} == set(defaults)
    written = OmegaConf.load(path)
    assert not [key for key in set(written) & set(defaults) if written[key] == defaults[key]]
    defense = instantiate(config, _convert_="all")
    assert isinstance(defense, Defense)
    assert bool(defense.parts) == (path.stem != "none")
    assert all(part.settings for part in defense.parts)
