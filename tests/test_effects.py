"""What defenses declare: whole, consistent with their settings, and the same after a file."""

import json
from dataclasses import dataclass, fields

import pytest

from fl_privacy.effects import Effect, Part, PostProcessing, Quantized, from_plain, to_plain
from fl_privacy.errors import UserError

from .defenses.test_contract import DEFENSES

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
            assert part.settings[f.name] == (list(value) if isinstance(value, tuple) else value), f.name


@every_part
def test_a_description_survives_a_file(part):
    assert from_plain(json.loads(json.dumps(to_plain([part])))) == (part,)


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
