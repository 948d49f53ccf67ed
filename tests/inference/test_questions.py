"""Source, property and attribute: what each tells of small clients, and what all three keep to."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks.inference import (
    AttributeInference,
    Inference,
    PropertyInference,
    ReadRound,
    Rehearsal,
    SourceInference,
)
from fl_privacy.attacks.inference.attribute import AdaptiveAttributeInference
from fl_privacy.data.datasets import coarse
from fl_privacy.data.examples import Examples
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import GradientClassifier, GradientSketch, loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Upload, VictimId
from tests.inference.rounds import CLASSES, CLIENTS, OWN, SHAPE, asked, network, public, rounds

ATTRIBUTES = 2

QUESTIONS: dict[str, tuple[Inference, tuple[int, int]]] = {
    "source": (SourceInference(), (len(CLIENTS) * OWN + 32, len(CLIENTS))),
    "property": (PropertyInference(shadows=32, shadow_rounds=9), (len(CLIENTS), CLASSES)),
    "attribute": (AttributeInference(public=80), (12, ATTRIBUTES)),
}

every_question = pytest.mark.parametrize("name", QUESTIONS)


def marked(number: int, seed: int) -> tuple[Batch, torch.Tensor]:
    """Examples whose left half is dark if their attribute is 1, and whose class is another matter."""
    rng = derive_generator(seed, "marked")
    images = torch.rand(number, *SHAPE, generator=rng)
    attributes = torch.randint(ATTRIBUTES, (number,), generator=rng)
    images[..., :4] *= 1 - 0.8 * attributes.view(-1, 1, 1, 1)
    return Batch(images, torch.randint(CLASSES, (number,), generator=rng)), attributes


def victims(read: ReadRound) -> tuple[tuple[int, Observation], ...]:
    batch, _ = marked(12, 1)
    sent, found = read.observations[0].sent, []
    for row in range(12):
        one = Batch(batch.inputs[row : row + 1], batch.labels[row : row + 1])
        upload = Upload(tensors=loss_gradients(network(), sent, one).gradients, num_examples=1)
        found.append(
            (row, replace(read.observations[0], id=VictimId(read.round, 0, row), upload=upload, plan=LocalPlan()))
        )
    return tuple(found)


def reads(name: str, number: int) -> list[ReadRound]:
    if name != "attribute":
        return rounds(number)
    known, attributes = marked(80, 2)
    return [
        replace(read, observations=(), public=known, public_attributes=attributes, victims=victims(read))
        for read in rounds(number)
    ]


def answers(name: str, number: int) -> dict[str, torch.Tensor]:
    inference, (rows, columns) = QUESTIONS[name]
    watch = inference.begin(rows, CLIENTS, CLASSES if name != "attribute" else columns)
    for read in reads(name, number):
        watch.add(read)
    assert watch.titles().keys() == watch.answers().keys()
    return dict(watch.answers())


@every_question
def test_answers_have_their_shape_and_repeat(name: str) -> None:
    found, again = answers(name, 2), answers(name, 2)
    for method, answer in found.items():
        assert answer.shape == QUESTIONS[name][1] and bool(answer.isfinite().all())
        assert torch.equal(answer, again[method])


@every_question
def test_who_was_never_read_has_no_answer(name: str) -> None:
    inference, (rows, columns) = QUESTIONS[name]
    watch = inference.begin(rows, (*CLIENTS, 9), columns)
    assert all(bool(answer.isnan().all()) for answer in watch.answers().values())


def test_the_source_is_found() -> None:
    owners = torch.arange(len(CLIENTS)).repeat_interleave(OWN)
    for method, answer in answers("source", 4).items():
        right = float((answer[: len(owners)].argmax(1) == owners).double().mean())
        assert right > 0.4, f"{method}, where guessing has 0.25"


def test_shares_are_nearer_than_the_mean() -> None:
    labels = asked().labels[: len(CLIENTS) * OWN].reshape(len(CLIENTS), OWN)
    shares = torch.stack([row.bincount(minlength=CLASSES) / OWN for row in labels])
    found = answers("property", 3)["shadows"]
    torch.testing.assert_close(found.sum(1), torch.ones(len(CLIENTS)))
    assert (found - shares).abs().mean() < 0.8 * (shares.mean(0) - shares).abs().mean()


def test_the_attribute_is_told_from_the_gradient() -> None:
    """Not by a linear classifier: the gradient of one class is turned round for another."""
    _, attributes = marked(12, 1)
    assert (answers("attribute", 2)["mlp"].argmax(1) == attributes).sum() >= 11


def test_an_update_that_is_not_finite_says_nothing_of_an_attribute() -> None:
    read = reads("attribute", 1)[0]
    (row, first), *others = read.victims
    broken = {name: torch.full_like(t, torch.nan) for name, t in first.upload.tensors.items()}
    upload = replace(first.upload, tensors=broken)
    watch = AttributeInference(public=80).begin(12, CLIENTS, ATTRIBUTES)
    watch.add(replace(read, victims=((row, replace(first, upload=upload)), *others)))
    answered = watch.answers()["linear"].isfinite().all(1)
    assert answered.tolist() == [False] + 11 * [True]


def mirrored(observation: Observation) -> Observation:
    """Defended: signs of the elements are turned as a fixed draw says."""
    tensors, rng = observation.upload.tensors, derive_generator(8, "signs")
    turned = {n: t * (2.0 * torch.randint(2, t.shape, generator=rng) - 1) for n, t in tensors.items()}
    return replace(observation, upload=replace(observation.upload, tensors=turned))


def test_who_knows_the_defense_learns_from_defended_uploads() -> None:
    read = reads("attribute", 1)[0]
    known, attributes = marked(80, 2)

    def uploads(sent: ModelState, number: int) -> Iterator[Observation]:
        for row in range(number):
            one = Batch(known.inputs[row : row + 1], known.labels[row : row + 1])
            tensors = loss_gradients(network(), sent, one).gradients
            yield mirrored(replace(read.victims[0][1], upload=Upload(tensors=tensors, num_examples=1)))

    defended = replace(
        read,
        victims=tuple((row, mirrored(observation)) for row, observation in read.victims),
        rehearsal=Rehearsal(attributes=attributes, uploads=uploads),
    )
    right = {}
    for attacker in (AttributeInference, AdaptiveAttributeInference):
        watch = attacker(public=80).begin(12, CLIENTS, ATTRIBUTES)
        watch.add(defended)
        assert watch.titles().keys() == watch.answers().keys()
        right |= {name: int((a.argmax(1) == marked(12, 1)[1]).sum()) for name, a in watch.answers().items()}
    assert right["mlp_adaptive"] >= 11 and right["mlp"] <= 9
    with pytest.raises(UserError, match="Public examples with attributes"):
        AdaptiveAttributeInference().begin(12, CLIENTS, ATTRIBUTES).add(read)


def rehearsed(read: ReadRound, known: Batch, attributes: torch.Tensor, broken: range) -> ReadRound:
    """Where the attacker tries a defense, uploads of the ``broken`` rows are not finite."""

    def uploads(sent: ModelState, number: int) -> Iterator[Observation]:
        for row in range(number):
            one = Batch(known.inputs[row : row + 1], known.labels[row : row + 1])
            tensors = loss_gradients(network(), sent, one).gradients
            if row in broken:
                tensors = {name: torch.full_like(t, torch.inf) for name, t in tensors.items()}
            yield replace(read.victims[0][1], upload=Upload(tensors=tensors, num_examples=1))

    return replace(read, rehearsal=Rehearsal(attributes=attributes, uploads=uploads))


def test_a_tried_upload_that_is_not_finite_is_none_to_learn_from() -> None:
    """Of the others' attributes, in their order, no less is learned than of them alone."""
    read, (known, attributes) = reads("attribute", 1)[0], marked(80, 2)
    watch = AdaptiveAttributeInference(public=80).begin(12, CLIENTS, ATTRIBUTES)
    watch.add(rehearsed(read, known, attributes, range(0, 30)))
    alone = AdaptiveAttributeInference(public=50).begin(12, CLIENTS, ATTRIBUTES)
    left = Batch(known.inputs[30:], known.labels[30:])
    alone.add(rehearsed(read, left, attributes[30:], range(0)))
    for name, answer in watch.answers().items():
        torch.testing.assert_close(answer, alone.answers()[name])
    with pytest.raises(UserError, match="1 of 80"):
        watch.add(rehearsed(read, known, attributes, range(1, 80)))


def test_what_an_attack_lacks_is_told() -> None:
    with pytest.raises(UserError, match="all 4 classes"):
        PropertyInference().begin(1, CLIENTS, CLASSES).add(replace(rounds(1)[0], public=public().first(1)))
    read = replace(reads("attribute", 1)[0], public_attributes=None)
    with pytest.raises(UserError, match="Public examples with attributes"):
        AttributeInference().begin(12, CLIENTS, 2).add(read)
    for wrong in (
        lambda: SourceInference(methods=("x",)),
        lambda: PropertyInference(alpha=0),
        lambda: AttributeInference(public=1),
    ):
        with pytest.raises(UserError, match="inference"):
            wrong()


def test_a_sketch_keeps_inner_products_and_its_transpose_is_the_derivative() -> None:
    rng = derive_generator(0)
    one, other = (
        {"a": torch.randn(1, 90, 60, generator=rng), "b": torch.randn(1, 70, generator=rng)} for _ in range(2)
    )
    shapes = {n: t[0] for n, t in one.items()}
    sketch = GradientSketch.of(shapes, derive_generator(1))
    exact = GradientSketch.of(shapes, derive_generator(1), size=10_000)
    assert sketch.size < exact.size == 5470
    for left, right in ((one, one), (one, other)):
        near, true = float(sketch(left) @ sketch(right).T), float(exact(left) @ exact(right).T)
        assert near == pytest.approx(true, abs=0.06 * float(exact(one) @ exact(one).T))
    leaf = {n: t.clone().requires_grad_() for n, t in one.items()}
    weights = torch.randn(sketch.size, generator=rng)
    (sketch(leaf) @ weights).sum().backward()
    for name, back in sketch.back(weights, shapes).items():
        torch.testing.assert_close(back, leaf[name].grad[0])


def test_a_classifier_of_gradients_looks_at_directions_alone() -> None:
    rng = derive_generator(0)
    labels = torch.arange(60) % 3
    sketched = torch.randn(60, 40, generator=rng) + 3 * torch.nn.functional.one_hot(labels, 40)
    for hidden in (0, 16):
        head = GradientClassifier.fit(sketched, labels, 3, derive_generator(1), hidden=hidden)
        assert float((head(sketched).argmax(1) == labels).double().mean()) > 0.95
        torch.testing.assert_close(head(7 * sketched), head(sketched), rtol=1e-3, atol=1e-4)


def test_a_coarse_task_keeps_the_class_as_attribute() -> None:
    examples = Examples(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 2, 1]), ("a", "b", "c"))
    found = coarse(examples, {"vowel": ["a"], "other": ["c", "b"]})
    assert found.labels.tolist() == [0, 1, 1, 1] and found.class_names == ("vowel", "other")
    assert found.attributes.tolist() == [0, 1, 2, 1] and found.attribute_names == ("a", "b", "c")
    assert found.subset(torch.tensor([2])).attributes.tolist() == [2]
    for wrong, got in (
        ({"x": ["a", "b"], "y": ["b", "c"]}, "b 2 times"),
        ({"x": ["a"], "y": ["b"]}, "c 0 times"),
        ({"x": ["a", "b", "c"]}, "fewer lists"),
        ({"x": ["a", "b"], "y": ["c", "d"]}, "d, which is no class"),
    ):
        with pytest.raises(
            UserError, match=f"data.task is expected .* but got {got}; put each of a, b, c into one list"
        ):
            coarse(examples, wrong)
