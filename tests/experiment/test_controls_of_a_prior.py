"""Where an attack searches among a generator's images, its guesses at other clients' updates are controls."""

import pytest
import torch

from fl_privacy.data import load_data
from fl_privacy.measure.distractors import Distractors, other_updates
from fl_privacy.measure.identification import PublicImages
from fl_privacy.measure.outcome import Outcome, outcome_of
from fl_privacy.runs.attack_stage import Judge
from fl_privacy.types import Batch, Reconstruction, VictimId


class Truth:
    """Two clients with a digit each."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def batch(self, victim):
        return Batch(self.images[victim.client, None], self.labels[victim.client, None])


@pytest.mark.parametrize(("prior", "expected"), [(False, Outcome.IDENTIFIED), (True, Outcome.NOTHING)])
def test_a_generator_that_always_makes_the_same_image_reads_nobody(prior, expected):
    train = load_data("mnist_mini").train
    pair, public = train.batch(torch.tensor([0, 900])), train.batch(torch.arange(5, 4000, 19))
    others = Distractors(candidates=PublicImages(images=public.inputs, labels=public.labels))
    noise = 0.1 * torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    made = [
        Reconstruction(id=VictimId(1, client), batch=Batch((pair.inputs[:1] + noise[client]).clamp(0, 1), label[None]))
        for client, label in enumerate(pair.labels)
    ]
    judge = Judge(truth=Truth(pair.inputs, pair.labels), others=others, prior=prior)
    first = judge._judged(made, [judge.truth.batch(each.id) for each in made], None)[0].images[0]
    record = {"failure": first.failure, "certainty": first.certainty, **first.values, **first.compared.as_record()}
    assert outcome_of(record) is expected
    assert ("control_lead" in record) is prior


@pytest.mark.parametrize("bad", [torch.full((1, 1, 28, 28), torch.nan), torch.zeros(1, 3, 8, 8)])
def test_a_guess_that_is_no_image_does_not_hide_another_control(bad):
    truths = [torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    victims = [VictimId(client, 1, 0) for client in range(3)]
    guesses = [truths[0], bad, (1.5 * truths[0] - 0.1).requires_grad_()]
    (control,) = other_updates(victims, guesses, truths)[victims[0]]
    assert torch.equal(control, guesses[2][0].detach().clamp(0, 1))


def test_an_update_of_nearly_the_same_image_is_no_control():
    image = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    truths = [image, (image + 0.01).clamp(0, 1), 1 - image]
    victims = [VictimId(client, 1, 0) for client in range(3)]
    controls = other_updates(victims, [torch.full_like(image, 0.1 * k) for k in range(3)], truths)
    assert controls[victims[0]].unique().tolist() == pytest.approx([0.2])
    assert controls[victims[2]].unique().tolist() == pytest.approx([0.0, 0.1])
