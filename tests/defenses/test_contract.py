"""What holds for every defense. A new defense is one row of ``DEFENSES``."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from fl_privacy import defenses
from fl_privacy.defenses import (
    Defense,
    compose,
    dp_noise,
    dp_sgd,
    fdl_pp,
    local_dp,
    none,
    pruning,
    quantization,
    refiner,
    selective_sharing,
    soteria,
    soteria_mixing,
    split_fed,
)

from .harness import clean_gradient, flat, local_step, run, small_evaluator

CONF = Path(__file__).parents[2] / "conf" / "defense"


def unchanged(clean, defended):
    return torch.equal(clean, defended)


def all_moved(clean, defended):
    return bool((clean != defended).all())


def subset_of(share):
    """The defended update is the clean one at about ``share`` of the elements and zero elsewhere."""

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


def within(radius):
    """Every element moves, and the whole gradient by no more than ``radius``."""

    def check(clean, defended):
        return all_moved(clean, defended) and (defended.double() - clean.double()).norm() <= radius * (1 + 1e-6)

    return check


DEFENSES: dict[str, tuple[Defense, object]] = {
    "none": (none(), unchanged),
    "gaussian": (dp_noise(scale=0.1), all_moved),
    "laplace, clipped": (dp_noise(noise="laplace", scale=0.1, clip_norm=0.5, at="gradient"), all_moved),
    "clipped, no noise": (
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
    "pruning at random": (pruning(rate=0.7, by="random"), subset_of(0.3)),
    "shared 5 %": (selective_sharing(share=0.05), subset_of(0.05)),
    "shared 30 % at random": (selective_sharing(share=0.3, by="random", scope="layer"), subset_of(0.3)),
    "shared 30 % with noise": (
        selective_sharing(share=0.3, noise_scale=0.1),
        lambda clean, d: not set(d[d != 0].tolist()) & set(clean.tolist()) and 0.29 < (d != 0).double().mean() < 0.31,
    ),
    "refiner": (refiner(epsilon=0.01, evaluator=small_evaluator()), within(0.01)),
    "refiner, by example": (refiner(match="example", evaluator=small_evaluator()), within(0.1)),
    "soteria": (soteria(rate=0.75), columns_of_head_zero(0.75)),
    "soteria, estimated": (soteria(rate=0.75, scores="estimated"), columns_of_head_zero(0.75)),
    "soteria, mixing": (soteria_mixing(rate=0.5), lambda clean, d: 0 < (d != clean).double().mean() < 1),
    "split_fed": (split_fed(), unchanged),
    "fdl_pp": (fdl_pp(), unchanged),
    "fdl_pp, penalized": (fdl_pp(form="penalized"), unchanged),
    "1 bit": (quantization(bits=1, rounding="nearest"), lambda clean, d: torch.equal(d.sign(), clean.sign())),
    "4 bits": (quantization(bits=4), lambda clean, d: len(d.unique()) <= 6 * 15 and (d - clean).norm() > 0),
    "28 bits": (
        quantization(bits=28, rounding="nearest"),
        lambda clean, d: torch.allclose(d, clean, rtol=0, atol=1e-8 * clean.abs().max().item()),
    ),
}

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
    assert list(defended) == list(before)
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
    assert all(f"{defense.name}.{key}" in together.public for key in defense.public)


SHIPPED = [path for path in sorted(CONF.glob("*.yaml")) if path.stem != "custom"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_configuration_builds_and_states_every_option(path):
    config = OmegaConf.load(path)
    assert path.read_text().startswith("# "), "the first line says what the defense does"
    target = config._target_.removeprefix("fl_privacy.defenses.")
    if "." not in target and target != "compose":
        assert set(config) - {"_target_"} == set(getattr(defenses, target).__kwdefaults__ or {})
    defense = instantiate(config, _convert_="all")
    assert isinstance(defense, Defense)
    assert defense.public or defense.name == "none"
