"""What an attack on defended data is measured against."""

import pytest
import torch

from fl_privacy.data import Examples
from fl_privacy.defenses import dc_dsa_dm as distribution_matching, defense as local_steps
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Probe
from fl_privacy.runs import ground_truth
from fl_privacy.runs.attack_stage import update_distortion
from fl_privacy.runs.attacker_knowledge import data_names
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.ground_truth import GroundTruth, sees_other_images
from fl_privacy.runs.setup import build_setup
from tests.experiment.runs import TINY, run
from tests.experiment.test_update_distortion import observations

pytest.importorskip("mlxtend")

AUDIT = Audit(probes=(Probe(0, 0), Probe(1, 3)), batch_size=2)
DM = ["defense=dm", "defense.images_per_class=2", "defense.iterations=1", "defense.width=2", "defense.real_batch=2"]


def federation(*options):
    return build_setup(compose_run(["federation.clients=4", "federation.plan.batch_size=32", *options]))


def truth_of(built):
    return GroundTruth(clients=built.clients, batch_size=2)


def test_transformed_images_lie_beside_their_originals():
    built = federation("defense=ats", "defense.policies=0")  # inverts
    truth = truth_of(built)
    for observation in observations(built, AUDIT):
        original, seen = truth.batch(observation.id), truth.replay(observation).transformed
        assert torch.allclose(seen.inputs, 1 - original.inputs)
        assert torch.equal(seen.labels, original.labels)


def test_updates_from_augmented_images_are_measured_against_these_and_not_joined_over_rounds():
    settings = ("federation=fedavg", "federation.plan.batch_size=null", "federation.plan.flip=true")
    built = federation(*settings, "intercept.uploads=update")
    plan, updates = built.clients[0].plan, Audit(uploads="update", clients=frozenset({0}))
    (observation,) = observations(built, updates)
    original = truth_of(built).batch(observation.id).inputs
    seen = truth_of(built).replay(observation).transformed.inputs
    flipped = (seen != original).flatten(1).any(1)
    assert torch.equal(seen[flipped], original[flipped].flip(-1))
    assert 0.3 < flipped.float().mean() < 0.7
    assert sees_other_images(built.defense, plan, "update")
    assert not sees_other_images(built.defense, plan, "probe")
    assert data_names(built.clients)(observation.id) is None
    assert data_names(federation(*settings[:2]).clients)(observation.id) == "client-0"


def test_probes_that_are_augmented_are_measured_against_what_they_became_and_not_joined_over_rounds():
    settings = ("federation.plan.flip=true", "federation.plan.augment_probes=true")
    built = federation("federation=fedavg", *settings)
    assert sees_other_images(built.defense, built.clients[0].plan, "probe")
    truth = truth_of(built)
    found = observations(built, AUDIT)
    pairs = [(truth.batch(o.id).inputs, truth.replay(o).transformed.inputs) for o in found]
    original, seen = (torch.cat(images) for images in zip(*pairs, strict=True))
    flipped = (seen != original).flatten(1).any(1)
    assert flipped.any() and not flipped.all()
    assert torch.equal(seen[flipped], original[flipped].flip(-1))
    assert all(data_names(built.clients)(o.id) is None for o in found)


def test_the_truth_of_a_condensed_image_is_the_nearest_of_the_client_s_own():
    built = federation(*DM)
    truth = truth_of(built)
    for observation in observations(built, AUDIT):
        client = built.clients[observation.id.client]
        seen, nearest = truth.replay(observation).transformed, truth.batch(observation.id)
        own = client.examples.batch(client.indices)
        for image, label, found in zip(seen.inputs, seen.labels, nearest.inputs, strict=True):
            rivals = own.inputs[own.labels == label]
            distances = (rivals - image).square().sum((1, 2, 3))
            assert torch.equal(rivals[distances.argmin()], found)


def test_only_images_of_the_same_class_are_looked_at_for_the_nearest(monkeypatch):
    built, looked = federation(*DM), []
    truth, batch = truth_of(built), Examples.batch
    seen = observations(built, AUDIT)
    before = truth.batch(seen[0].id)
    monkeypatch.setattr(
        Examples, "batch", lambda self, rows, *more: looked.append(len(rows)) or batch(self, rows, *more)
    )
    monkeypatch.setattr(ground_truth, "_AT_ONCE", 7)
    found = truth.batch(seen[0].id)
    assert torch.equal(found.inputs, before.inputs)
    client = built.clients[seen[0].id.client]
    rivals = sum(int((client.examples.labels[client.indices] == label).sum()) for label in found.labels.unique())
    exchanged, *searched = looked
    assert exchanged == len(client.indices)  # what the defense makes its images of
    assert max(searched) <= 7 and sum(searched) == rivals + len(found) < len(client.indices)


def test_condensed_images_are_made_once_for_all_who_look(monkeypatch):
    built, made = federation(*DM), []
    train = distribution_matching.fresh_network
    monkeypatch.setattr(distribution_matching, "fresh_network", lambda *a, **k: made.append(a) or train(*a, **k))
    seen = observations(built, AUDIT)
    made.clear()
    truth = truth_of(built)
    for observation in seen:
        truth.batch(observation.id), truth.replay(observation).transformed, update_distortion(truth, observation)
    assert len(made) == 2  # clients, each with one iteration


def test_victims_are_as_many_as_there_are_condensed_images():
    """Two of each of the ten classes on each of four clients."""
    assert len(federation(*DM, "victims=40", "batch_size=2").audit.probes) == 40
    with pytest.raises(UserError, match="only 40"):
        federation(*DM, "victims=41", "batch_size=2")


def test_mixtures_are_repeated_for_the_evaluation():
    built = federation("defense=instahide")
    truth = truth_of(built)
    for observation in observations(built, AUDIT):
        one, two = truth.replay(observation).transformed, truth_of(built).replay(observation).transformed
        assert torch.equal(one.inputs, two.inputs)
        assert one.labels.shape == (2, 10)


@pytest.mark.long
def test_known_labels_are_those_of_the_mixture(tmp_path):
    settings = ("attack", "defense=instahide", "victims=1", "attack.iterations=30", "threat_model.knows_defense=false")
    known, inferred = (run(*settings, f"threat_model.knows_labels={k}", out=tmp_path / k) for k in ("true", "false"))
    assert known.status == inferred.status == 0
    ((one,), (two,)) = known.records("image"), inferred.records("image")
    assert one["label_source"] == "known"
    assert one["attack_loss"] < two["attack_loss"]


@pytest.mark.long
@pytest.mark.parametrize("defense", ["ats", "instahide", "soteria"])
def test_a_victim_trains_once_defended_and_once_undefended(defense, tmp_path, monkeypatch):
    """However many ask what the model saw: for the labels, the scores of both attackers, the update's distortion."""
    gradients = []
    real = local_steps.loss_gradients
    monkeypatch.setattr(local_steps, "loss_gradients", lambda *a, **k: gradients.append(a) or real(*a, **k))
    told = ("threat_model.knows_labels=true", "threat_model.knows_defense=true")
    settings = ("attack", f"defense={defense}", "model=lenet", "attack=idlg", "attack.iterations=1", "victims=3", *told)
    assert run(*settings, out=tmp_path).status == 0
    assert len(gradients) == 3 * 2


def test_a_run_records_both_distances(tmp_path):
    done = run("run", *TINY, "defense=ats", "baseline=false", out=tmp_path)
    assert done.status == 0
    victims = done.records("image")
    assert all(v["transformed_psnr"] != v["psnr"] for v in victims)
    assert {"transformed_psnr", "transformed_ssim"} <= done.json("summary.json")["metrics"].keys()
    page = (done.path / "report.html").read_text()
    assert "PSNR to transformed" in page
    assert "<span>Transformed</span>" in page


@pytest.mark.long
def test_undefended_runs_have_no_transformed_images(undefended):
    assert all("transformed_psnr" not in v for v in undefended.records("image"))
    assert "<span>Transformed</span>" not in (undefended.path / "report.html").read_text()


@pytest.mark.long
def test_condensation_runs_on_every_backend_alike(tmp_path):
    settings = (*TINY, *DM, "baseline=false", "federation=fedavg")
    loop, flower = (run("run", *settings, f"backend={b}", out=tmp_path / b) for b in ("loop", "flower"))
    assert loop.status == flower.status == 0
    assert loop.records("image") == flower.records("image")
    assert (loop.path / "model.safetensors").read_bytes() == (flower.path / "model.safetensors").read_bytes()


def test_the_undefended_update_of_a_condensed_victim_is_the_same():
    built = federation(*DM)
    truth = truth_of(built)
    for observation in observations(built, AUDIT):
        perturbation, _ = update_distortion(truth, observation)
        assert perturbation.signal_to_distortion == float("inf")
