"""What defenses declare: whole, consistent with their settings, and the same after a file."""

import json
from dataclasses import MISSING, dataclass, fields, replace

import pytest

from fl_privacy.attacks.adaptive import AttackSetting, Countermeasure, countermeasures_against
from fl_privacy.effects import Effect, Part, PerExample, PostProcessing, Quantized, from_plain, to_plain
from fl_privacy.errors import UserError
from fl_privacy.types import LocalPlan

from .defenses.test_contract import DEFENSES

CIRCUMSTANCES = AttackSetting(
    head="out.weight",
    batch_size=1,
    plan=LocalPlan(),
    unrolls=False,
    matched_per_uploaded=1.0,
    scales=True,
    complete=True,
    smooths=False,
    pixels=True,
    learnable=("out.weight",),
)

every_part = pytest.mark.parametrize(
    "part",
    [part for defense, _ in DEFENSES.values() for part in defense.parts],
    ids=lambda part: part.name,
)


@every_part
def test_every_defense_declares_an_effect_and_tells_all_of_it(part):
    assert part.effect != Part("x").effect
    untold = {f.name for f in fields(part.effect) if getattr(part.effect, f.name) is None}
    assert untold <= {"clip", "layer", "bound"}, "None means something else than untold only there"
    assert part.strength is None or part.strength in part.settings


@every_part
def test_effect_and_settings_agree(part):
    for f in fields(part.effect):
        value = getattr(part.effect, f.name)
        if f.name in part.settings:
            assert part.settings[f.name] == (list(value) if isinstance(value, tuple) else value), (
                f"the setting {f.name} of {part.name} is named like a field of its effect {type(part.effect).__name__},"
                " but has another value: rename the setting, or give the effect that value"
            )


@every_part
def test_a_description_survives_a_file(part):
    assert from_plain(json.loads(json.dumps(to_plain([part])))) == (part,)


UNCOUNTERED = {"dc", "dm", "dsa", "dp_merf", "gs_wgan", "instahide"}
"""Nothing is known to do against them."""


@every_part
def test_countermeasures_read_what_there_is_also_where_little_is_told(part):
    untold = {
        f.name: None
        for f in fields(part.effect)
        if f.default is MISSING and type(part.effect).__name__ != "PrivateRelease"
    }
    for circumstances in (CIRCUMSTANCES, replace(CIRCUMSTANCES, head=None, learnable=(), unrolls=True, smooths=True)):
        for effect in (part.effect, replace(part.effect, **untold)):
            found = countermeasures_against(effect, circumstances)
            assert (found is None) == (part.name in UNCOUNTERED), (
                "say what an attacker does about it in attacks/adaptive/known_defense.py, or name it in UNCOUNTERED"
            )
            assert all(taken.sentence for taken in found or ())


def test_a_countermeasure_against_an_effect_of_another_package_is_registered():
    @dataclass(frozen=True, kw_only=True)
    class Mirrored(PerExample):
        pass

    assert countermeasures_against(Mirrored(), CIRCUMSTANCES) is None

    @countermeasures_against.register
    def against_mirroring(effect: Mirrored, circumstances: AttackSetting) -> list[Countermeasure]:
        return [Countermeasure(sentence="It mirrors the guess.", transforms=(lambda images: images.flip(-1),))]

    (found,) = countermeasures_against(Mirrored(), CIRCUMSTANCES)
    assert found.sentence == "It mirrors the guess."


def test_effects_of_other_packages_are_told_by_their_name():
    @dataclass(frozen=True, kw_only=True)
    class Shuffled(PostProcessing):
        seed: int | None

    parts = (Part("shuffle", {}, Shuffled(seed=3)),)
    assert from_plain(json.loads(json.dumps(to_plain(parts)))) == parts
    with pytest.raises(UserError, match="has the effect Quantized already"):
        type("Quantized", (Effect,), {})


def test_what_no_imported_module_declares_is_refused():
    plain = to_plain([Part("q", {}, Quantized(bits=4))])
    plain[0]["effect"]["effect"] = "Teleported"
    with pytest.raises(UserError, match=r"one of .*Quantized.*but got 'Teleported'"):
        from_plain(plain)
