"""What an app's images are told apart from: others of its own data, none of them attacked."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from fl_privacy.experiment.app_truth import KnownImages
from fl_privacy.experiment.candidates import shipped_others
from fl_privacy.experiment.unattacked import NO_CLASS, others_of_app
from fl_privacy.metrics import evaluate_all
from fl_privacy.metrics.outcome import READ, outcome_of
from fl_privacy.types import Batch, Reconstruction, VictimId

SHAPE, CLASSES = (1, 16, 16), 4
VICTIMS = [VictimId(1, 0, k) for k in range(4)]


def blobs(number, size, seed):
    coarse = torch.rand((number, 1, size, size), generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, SHAPE[1:], mode="bicubic", align_corners=True)


@pytest.fixture(scope="module")
def images():
    """300 images of four classes, each class of one look with small differences."""
    labels = torch.arange(300) % CLASSES
    return ((blobs(CLASSES, 5, 0)[labels] + 0.25 * (blobs(300, 6, 1) - 0.5)).clamp(0, 1), labels)


def known(images):
    given = {id: Batch(images[0][k : k + 1], images[1][k : k + 1]) for k, id in enumerate(VICTIMS)}
    return KnownImages(data=list(zip(images[0], images[1].tolist(), strict=True)), given=given)


def read(guesses, images, others):
    found = [Reconstruction(id=id, batch=Batch(g[None], images[1][:1])) for id, g in zip(VICTIMS, guesses, strict=True)]
    scores = evaluate_all(found, [known(images).batch(id) for id in VICTIMS], others=others)
    return sum(
        outcome_of({"failure": i.failure, "certainty": i.certainty, **i.values, **i.compared}) in READ
        for score in scores
        for i in score.images
    )


def test_what_a_class_has_in_common_is_not_read_and_what_shows_the_image_is(images):
    truth = known(images)
    others = others_of_app(truth, VICTIMS, truth, SHAPE, seed=0)
    assert others.candidates.name == "other images of the same data" and len(others.candidates.images) == 296
    means = [images[0][4:][images[1][4:] == images[1][k]].mean(0) for k in range(4)]
    assert read(means, images, shipped_others(SHAPE, 1000, seed=0)) >= 3, "cuts of photographs are no rivals"
    assert read(means, images, others) == 0
    assert read(list(1 - images[0][:4].flip(-1)), images, others) == 4


def test_the_half_that_no_client_trains_on_comes_first_and_few_are_filled_up_with_shipped_ones(images):
    pairs = list(zip(images[0], images[1].tolist(), strict=True))
    loaders = tuple(DataLoader(part, batch_size=8) for part in (pairs[:150], pairs[150:]))
    of_client = KnownImages(of_client=lambda partition: loaders, given=known(images).given)
    taken = others_of_app(of_client, VICTIMS, of_client, SHAPE, 150, seed=0).candidates
    assert torch.equal(taken.images.flatten(1).sum(1).sort().values, images[0][150:].flatten(1).sum(1).sort().values)
    assert len(others_of_app(of_client, VICTIMS, of_client, SHAPE, seed=0).candidates.images) == 296
    few = KnownImages(data=pairs[:30], given=known(images).given)
    mixed = others_of_app(few, VICTIMS, few, SHAPE, 200, seed=0).candidates
    assert (len(mixed.images), int((mixed.labels != NO_CLASS).sum())) == (200, 26)
    assert mixed.name.startswith("26 other images of the same data and ")
    nothing = KnownImages(given=known(images).given)
    assert "packages ship" in others_of_app(nothing, VICTIMS, nothing, SHAPE, seed=0).candidates.name


def test_other_draws_of_a_victims_own_image_are_no_candidates(images):
    class Drawn:
        """Each image shifted at random whenever it is asked for."""

        def __init__(self):
            self.asked = []

        def __len__(self):
            return 200

        def __getitem__(self, index):
            self.asked.append(index)
            return images[0][index].roll(int(torch.randint(3, ())), -1), int(images[1][index])

    data = Drawn()
    source = KnownImages(of_client=lambda partition: data, given=known(images).given)
    state = torch.get_rng_state()
    others_of_app(source, VICTIMS, source, SHAPE, seed=0)
    assert torch.equal(state, torch.get_rng_state()) and not set(data.asked) & {0, 1, 2, 3} and len(data.asked) == 196
