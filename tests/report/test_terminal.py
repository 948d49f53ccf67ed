"""What a command says at its end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fl_privacy.attacks import pixel_prior
from fl_privacy.attacks.likelihood import blind
from fl_privacy.report.headline import answers_of, approval, headline_of, run_in_words, to_do, tried_in_words
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.folder import read_run, verdict_of
from fl_privacy.runs.folder.identity import Identity
from fl_privacy.runs.folder.leakage import FEWEST_IMAGES, AttackedUploads, AttackFacts, described_facts
from fl_privacy.runs.folder.verdict import LEAK, Ground, Verdict, judged
from fl_privacy.types.modality import IMAGES, ROWS, TEXTS, Modality
from tests.report import kinds
from tests.results.runs import defended, record

MADE = "from uploads of one image each that were made for the attack"
CHOOSE = "This defense does not prevent it: make it stronger, or choose another by `fl-privacy trade-off"

LINES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "reconstructed": (
        kinds.attack,
        f"The server reconstructed 6 of 6 attacked images, {MADE}. {CHOOSE} quick`.",
    ),
    "nothing reconstructed": (
        lambda out: record(out, noise=0.9, victims=20),
        f"The attack inverting_gradients reconstructed none of 20 attacked images, {MADE}, not from training batches;"
        " up to 17 % of such images may leak. This describes the attack and is no proof of protection: try attack=auto"
        " attack.budget=thorough.",
    ),
    "by an attacker that knows the defense": (
        lambda out: record(out, changes=defended(scale=0.1), noise=0.9, adaptive=0.05),
        f"The server, knowing the defense, reconstructed 6 of 6 attacked images, {MADE}, not from training batches: 6"
        f" of 6 in round 1, 6 of 6 in round 12. {CHOOSE} quick`.",
    ),
    "by a malicious server": (
        kinds.malicious,
        f"A malicious server (imprint) reconstructed 6 of 6 attacked images, {MADE}. {CHOOSE} quick`.",
    ),
    "of the server itself": (
        kinds.audit,
        "No client's upload was attacked: the server reconstructed 4 of 4 attacked images, from undefended uploads of"
        " one image each that the server made itself. Add probe_mod to the clients, so that their own uploads are"
        " attacked.",
    ),
    "originals unknown": (
        lambda out: kinds.audit(out, known=False, rehearsed=False),
        f"The attack inverting_gradients guessed 4 images, {MADE}: are these yours? Give the audit the data that"
        " clients train on, to compare guesses with.",
    ),
    "texts": (
        kinds.texts,
        "The server reconstructed 6 of 6 attacked texts, from uploads of one text each that were made for the attack."
        f" {CHOOSE} text`.",
    ),
    "inferred": (
        kinds.inference,
        "The server can infer who took part and which client holds an example, by the best of 2 attacks, asked 110"
        " questions; no image was attacked. Put noise on what clients upload (defense=dp_sgd), or upload less often.",
    ),
    "failed": (
        lambda out: kinds.attack(out, failures=6),
        "The attack failed on all 6 images: nothing is known. Read why it failed on the page, and run it again.",
    ),
    "not attacked": (kinds.nothing, "No image was attacked: nothing is known. Attack examples: attack=auto."),
}
"""Kind of run -> how it is recorded, and its whole line; other tests look at figures and tones."""


@pytest.mark.parametrize(("loader", "kind"), [("load_table", "row"), ("load_text", "text"), ("load_data", "image")])
def test_a_run_without_an_attack_names_its_kind_of_examples(loader: str, kind: str, tmp_path: Path) -> None:
    run = read_run(kinds.nothing(tmp_path))
    verdict = judged(run.summary, AttackFacts(), loader=f"fl_privacy.data.{loader}")
    assert headline_of(verdict).text == f"No {kind} was attacked: nothing is known"


@pytest.mark.parametrize("case", LINES)
def test_a_run_ends_with_what_was_reconstructed_and_by_whom(tmp_path: Path, case: str) -> None:
    make, line = LINES[case]
    assert run_in_words(make(tmp_path)) == line


def test_the_first_line_names_attack_knowledge_and_odds_in_its_basis(tmp_path: Path) -> None:
    basis = headline_of(verdict_of(read_run(kinds.attack(tmp_path)))).basis
    assert basis == (
        "Reconstructed: 6 identified among 1,000 other images. Identified: the original is nearer to the guess than all"
        " other images are, as they are or blurred. The guess may look different. With 95 %"
        " confidence, this attack reconstructs 54 to 100 % of images attacked like this. Attack: inverting_gradients"
        " (4,800 iterations), run by an honest-but-curious server, on one upload per image, with an image prior (total"
        " variation)."
    )


NO_PRIOR, SMOOTH = "without an image prior", "with an image prior (total variation"
PRIORS = {
    "attack=dlg": NO_PRIOR,
    "attack=dlg attack.total_variation=1e-6": f"{SMOOTH})",
    "attack=dlg threat_model.public_images=9": NO_PRIOR,
    "attack=dlg attack.start=public_mean threat_model.public_images=9": "with an image prior (public images)",
    "attack=dlg attack.start=class_mean threat_model.public_images=9": "with an image prior (public images)",
    "attack=dlg attack.space=network": "with an image prior (an untrained network)",
    "attack=inverting_gradients": f"{SMOOTH})",
    "attack=inverting_gradients attack.total_variation=0": NO_PRIOR,
    "attack=refiner_solved": f"{SMOOTH})",
    "attack=refiner_solved attack.base=idlg": NO_PRIOR,
    "attack=refiner_aware attack.base=idlg attack.away_from_noise=1": "with an image prior (images unlike noise)",
    "attack=grad_inversion": f"{SMOOTH}, image norm)",
    "attack=ats_adam_l1": f"{SMOOTH})",
    "attack=ats_lbfgs_l2": NO_PRIOR,
    "attack=ats_lbfgs_l2_code": f"{SMOOTH})",
    "attack=auto": f"{SMOOTH})",
    "attack=auto threat_model.public_images=9": f"{SMOOTH}, public images)",
    "attack=auto data=sst2": "without a text prior",
    "attack=auto data=heart_disease threat_model.public_images=9": "with a row prior (public rows)",
    "attack=bag_of_words data=sst2": "without a text prior",
    "attack=bag_of_words data=sst2 threat_model.public_images=9": "with a text prior (public texts)",
    "attack=lamp data=sst2 threat_model.public_images=9": "with a text prior (public texts)",
    "attack=ggl": "with an image prior (a generator)",
    "attack=maximum_a_posteriori": "with an image prior (spectrum of photographs)",
    "attack=maximum_a_posteriori threat_model.public_images=49": "with an image prior (spectrum of photographs)",
    "attack=maximum_a_posteriori threat_model.public_images=50": "with an image prior (public images)",
    "attack=maximum_a_posteriori threat_model.public_images=null": "with an image prior (public images)",
    "attack=cocktail_party": NO_PRIOR,
    "attack=exact": f"{SMOOTH})",
    "attack=blind_deconvolution threat_model.public_images=9": NO_PRIOR,
    "attack=blind_deconvolution threat_model.public_images=50": "with an image prior (public images)",
}
"""Settings of an attack -> what the page says of its prior."""


@pytest.mark.parametrize("settings", PRIORS)
def test_a_page_names_what_an_attack_knows_of_how_examples_look(settings: str) -> None:
    config = compose_run(settings.split())
    identity = Identity.of("", config.plain(), undefended=True)
    modality = {"sst2": TEXTS, "heart_disease": ROWS}.get(config.called("data"), IMAGES)
    verdict = Verdict(tone=LEAK, ground=Ground.READ, modality=modality, facts=described_facts(identity, []))
    assert tried_in_words(verdict, modality.one).endswith(f"on one upload per {modality.one}, {PRIORS[settings]}.")


def test_a_normal_distribution_is_learned_from_as_many_images_as_attacks_ask_for() -> None:
    assert FEWEST_IMAGES == pixel_prior.FEWEST == blind._FEWEST


def test_smoothness_against_noise_is_a_prior_and_unknown_settings_name_none() -> None:
    said = "Among the images that fit, it prefers smooth ones (total variation)."
    records = [{"kind": "attack", "round": 1, "countermeasures": [said]}]
    known, own = ({"_target_": f"{module}.dlg", "lr": 1} for module in ("fl_privacy.attacks", "mine"))
    for attack, prior in ((known, f", {SMOOTH})"), (own, ""), ({"name": "mine"}, "")):
        settings = {"attack": attack, "choices": {"attack": "dlg"}}
        identity = Identity.of("", settings, undefended=False)
        verdict = Verdict(tone=LEAK, ground=Ground.READ, modality=IMAGES, facts=described_facts(identity, records))
        assert tried_in_words(verdict, "image").endswith(f"on one upload per image{prior}.")


def test_a_page_says_if_uploads_were_attacked_together_and_why_their_training_is_not_approved() -> None:
    alone = AttackFacts(attack="auto", budget="budget quick", uploads=2, trained=True)
    together = replace(alone, knowledge=("The attacker knows which updates of different rounds come from the same",))
    verdicts = [Verdict(tone=LEAK, ground=Ground.READ, modality=IMAGES, facts=facts) for facts in (alone, together)]
    said, other = (tried_in_words(verdict, "image") for verdict in verdicts)
    assert (
        "Attack: auto (several attacks, quick budget)" in said and "on 2 uploads per image, each attacked alone" in said
    )
    assert "alone" not in other and "on 2 uploads per image" in other
    assert approval(verdicts[0]).startswith("Not as it is: in training, a client with so little data may send such an")
    own = replace(alone, source=AttackedUploads.TRAINING)
    assert approval(replace(verdicts[0], facts=own)).startswith("Not as it is. ")


def test_several_runs_end_with_the_one_that_leaks_most(tmp_path: Path) -> None:
    quiet, failed = LINES["nothing reconstructed"][0](tmp_path / "quiet"), LINES["failed"][0](tmp_path / "failed")
    leaking = kinds.attack(tmp_path / "leaking")
    assert answers_of([quiet, leaking]).startswith(f"1 of 2 runs leak; most in {leaking.name}: the")
    said = answers_of([quiet, failed])
    assert said.startswith("None of 1 runs with a result reconstructed an example. This describes the attack")
    assert answers_of([failed, failed]) == "None of 2 runs has a result: this says nothing about privacy."
    inferred = kinds.inference(tmp_path / "inferred")
    assert answers_of([quiet, inferred]).startswith(f"1 of 2 runs leak; most in {inferred.name}: the server can infer")


@pytest.mark.parametrize(("modality", "grid"), [(IMAGES, "quick"), (TEXTS, "text"), (ROWS, "tables")])
@pytest.mark.parametrize("undefended", [False, True])
def test_reconstructed_examples_are_defended_by_a_grid_of_their_kind(
    modality: Modality, grid: str, undefended: bool
) -> None:
    verdict = Verdict(tone=LEAK, ground=Ground.READ, modality=modality, facts=AttackFacts(undefended=undefended))
    assert f"`fl-privacy trade-off {grid}`" in to_do(verdict)
