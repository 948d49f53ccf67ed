"""What an app's images are told apart from: others of its own data, none of them attacked."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from fl_privacy.data import Examples
from fl_privacy.measure import evaluate_all
from fl_privacy.measure.identification import PublicImages
from fl_privacy.measure.outcome import READ
from fl_privacy.runs.app_truth import KnownImages
from fl_privacy.runs.distractors import NO_CLASS, others_of_app, shipped_others, unattacked_others
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
    return sum(i.outcome in READ for score in scores for i in score.images)


def test_what_a_class_has_in_common_is_not_read_and_what_shows_the_image_is(images):
    truth = known(images)
    others = others_of_app(truth, VICTIMS, truth, SHAPE, seed=0)
    others_of_it = others.of(VICTIMS[0]).candidates
    assert others_of_it.name == "other images of the same data" and len(others_of_it.images) == 296
    means = [images[0][4:][images[1][4:] == images[1][k]].mean(0) for k in range(4)]
    assert read(means, images, shipped_others(SHAPE, 1000, seed=0)) >= 3, "cuts of photographs are no rivals"
    assert read(means, images, others) == 0
    assert read(list(1 - images[0][:4].flip(-1)), images, others) == 4


def test_the_half_that_no_client_trains_on_comes_first_and_few_are_filled_up_with_shipped_ones(images):
    pairs = list(zip(images[0], images[1].tolist(), strict=True))
    loaders = tuple(DataLoader(part, batch_size=8) for part in (pairs[:150], pairs[150:]))
    of_client = KnownImages(of_client=lambda partition: loaders, given=known(images).given)
    taken = others_of_app(of_client, VICTIMS, of_client, SHAPE, 150, seed=0).of(VICTIMS[0]).candidates
    assert torch.equal(taken.images.flatten(1).sum(1).sort().values, images[0][150:].flatten(1).sum(1).sort().values)
    both = others_of_app(of_client, VICTIMS, of_client, SHAPE, seed=0).of(VICTIMS[0]).candidates
    assert len(both.images) == 296
    few = KnownImages(data=pairs[:30], given=known(images).given)
    mixed = others_of_app(few, VICTIMS, few, SHAPE, 200, seed=0).of(VICTIMS[0]).candidates
    assert (len(mixed.images), int((mixed.labels != NO_CLASS).sum())) == (200, 26)
    assert mixed.name.startswith("26 other images of the same data and ")
    nothing = KnownImages(given=known(images).given)
    assert "packages ship" in others_of_app(nothing, VICTIMS, nothing, SHAPE, seed=0).of(VICTIMS[0]).candidates.name


class Drawn:
    """Each image shifted at random whenever it is asked for."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return self.images[0][index].roll(int(torch.randint(3, ())), -1), int(self.images[1][index])


def of_images(candidates, images):
    """Find the images that ``candidates`` are shifts of."""
    shifts = torch.stack([images[0].roll(by, -1) for by in range(3)])
    return {int((shifts - each).abs().flatten(2).amax(-1).amin(0).argmin()) for each in candidates.images}


def test_other_draws_of_a_victims_own_image_are_no_candidates(images):
    data = Drawn(images)
    source = KnownImages(of_client=lambda partition: data, given=known(images).given)
    state = torch.get_rng_state()
    candidates = others_of_app(source, VICTIMS, source, SHAPE, seed=0).of(VICTIMS[0]).candidates
    assert torch.equal(state, torch.get_rng_state())
    assert of_images(candidates, images) == set(range(4, 200)) and len(candidates.images) == 196


def test_what_is_said_of_one_client_s_images_changes_no_other_client_s_candidates(images):
    """Whatever a liar names as its own, of whatever partition."""
    parts = [list(zip(images[0][k::3], images[1][k::3].tolist(), strict=True)) for k in range(3)]

    def of_client(partition):
        return parts[partition]  # there is no fourth

    honest, liar = VICTIMS, [VictimId(1, 7, k) for k in range(40)]
    own = {id: Batch(parts[0][k][0][None], torch.tensor([parts[0][k][1]])) for k, id in enumerate(honest)}
    theirs = {id: Batch(parts[1][k][0][None], torch.tensor([parts[1][k][1]])) for k, id in enumerate(liar)}
    alone = KnownImages(of_client=of_client, given=own)
    wanted = others_of_app(alone, honest, alone, SHAPE, seed=0, nodes=3)
    for claimed in (0, 1, 10**8):
        both = KnownImages(of_client=of_client, given=own | theirs, partitions={7: claimed})
        others = others_of_app(both, [*liar, *honest], both, SHAPE, seed=0, nodes=3)
        for one, other in ((others.of(honest[0]), wanted.of(honest[0])), (others, wanted)):
            assert torch.equal(one.candidates.images, other.candidates.images)
            assert torch.equal(one.candidates.labels, other.candidates.labels)
        assert len(others.of(honest[0]).candidates.images) == 296, "of all partitions, without its own attacked ones"


def test_places_where_no_data_are_give_no_candidates(images):
    def of_client(partition):
        if partition:
            raise KeyError(partition)
        return list(zip(images[0], images[1].tolist(), strict=True))

    source = KnownImages(of_client=of_client, given=known(images).given)
    others = others_of_app(source, VICTIMS, source, SHAPE, seed=0, nodes=2)
    assert 100 < len(others.candidates.images) <= 300


def test_jobs_of_a_process_share_public_images_of_the_same_content() -> None:
    def taken(images: torch.Tensor, name: str = "digits") -> PublicImages | None:
        labels = torch.arange(len(images)) % 2
        examples = Examples(images, labels, ("a", "b"))
        return unattacked_others(examples, len(images), seed=0, name=name).candidates

    images = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    first = taken(images)
    assert first is not None and taken(images.clone()) is first
    assert taken(images, "letters") is not first
    assert taken(images.flip(-1)) is not first
    taken(images.flip(-2)), taken(images.transpose(-1, -2))
    again = taken(images)
    assert again is not None and again is not first, "only the last few are kept"
    assert torch.equal(again.images, first.images)
