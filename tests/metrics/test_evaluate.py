import itertools

import pytest
import torch

from fl_privacy.errors import UserError
from fl_privacy.measure import METRICS, evaluate, evaluate_all, noise_ratio, unjudged
from fl_privacy.measure.matching import assign, match, pair_labels
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork
from fl_privacy.models.pretrained.evaluator_files import save_evaluator
from fl_privacy.types import Batch, Certainty, Reconstruction, VictimId


@pytest.fixture(autouse=True)
def without_lpips(monkeypatch):
    monkeypatch.setitem(METRICS, "lpips", METRICS["mse"])


def truth(n=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(n, 1, 12, 12, generator=rng), torch.randint(10, (n,), generator=rng))


def guess_of(batch, order, noise=0.1, seed=1, **fields):
    inputs = batch.inputs[order] + noise * torch.randn(
        batch.inputs.shape, generator=torch.Generator().manual_seed(seed)
    )
    return Reconstruction(id=VictimId(1, 0), batch=Batch(inputs, batch.labels[order]), **fields)


def test_assignment_is_the_best_of_all_permutations():
    rng = torch.Generator().manual_seed(0)
    guesses, truths = torch.rand(5, 1, 3, 3, generator=rng), torch.rand(5, 1, 3, 3, generator=rng)

    def cost(order):
        return (guesses[list(order)] - truths).square().sum().item()

    best = min(itertools.permutations(range(5)), key=cost)
    assert assign(guesses, truths).tolist() == list(best)


def test_a_shuffled_batch_scores_like_an_ordered_one():
    batch = truth()
    shuffled, ordered = guess_of(batch, [2, 0, 1], noise=0), guess_of(batch, [0, 1, 2], noise=0)
    score = evaluate(shuffled, batch)
    assert [image.guess for image in score.images] == [1, 2, 0]
    assert [i.values for i in score.images] == [i.values for i in evaluate(ordered, batch).images]
    assert all(image.values["label_correct"] == 1 for image in score.images)
    assert torch.equal(score.guesses, batch.inputs)


def test_many_victims_at_once_score_like_each_alone():
    batches = [truth(n, seed=n) for n in (1, 3, 2)]
    guesses = [guess_of(b, torch.arange(len(b)).flip(0), seed=len(b)) for b in batches]
    together = evaluate_all(guesses, batches)
    for score, guess, batch in zip(together, guesses, batches, strict=True):
        alone = evaluate(guess, batch)
        for a, b in zip(score.images, alone.images, strict=True):
            assert a.guess == b.guess and a.values == pytest.approx(b.values, rel=1e-6)


def test_guesses_are_clamped_to_the_range_of_a_pixel():
    batch = Batch(torch.ones(1, 1, 12, 12), torch.tensor([0]))
    assert (
        evaluate(Reconstruction(id=VictimId(1, 0), batch=Batch(batch.inputs * 7, batch.labels)), batch)
        .images[0]
        .values["mse"]
        == 0
    )


def test_soft_labels_count_by_their_largest_entry():
    batch = Batch(truth(2).inputs, torch.tensor([[0.1, 0.9], [0.8, 0.2]]))
    score = evaluate(
        Reconstruction(id=VictimId(1, 0), batch=Batch(batch.inputs, torch.tensor([[3.0, 4.0], [0.0, 1.0]]))), batch
    )
    assert [image.values["label_correct"] for image in score.images] == [1, 0]


def test_labels_of_a_batch_count_as_often_as_they_occur():
    truths = torch.tensor([3, 1, 3, 0])
    assert pair_labels(torch.tensor([3, 3, 1, 2]), truths).tolist() == [3, 1, 3, 2]
    assert pair_labels(torch.tensor([5, 1, 3, 5]), truths).tolist() == [5, 1, 3, 5]
    assert pair_labels(torch.tensor([1, 1, 1, 1]), truths).tolist() == [1, 1, 1, 1]


def test_label_accuracy_does_not_depend_on_the_matching_of_pixels():
    batch = Batch(truth(3).inputs, torch.tensor([4, 4, 7]))
    guess = Reconstruction(
        id=VictimId(1, 0), batch=Batch(batch.inputs[[2, 0, 1]], torch.tensor([4, 4, 7])), label_source="optimized"
    )
    score = evaluate(guess, batch)
    assert [image.values["label_correct"] for image in score.images] == [1, 1, 1]
    assert score.label_source == "optimized"


def test_failed_victims_get_no_values():
    batch = truth(2)
    broken = batch.inputs.clone()
    broken[1, 0, 0, 0] = torch.nan
    scores = evaluate_all(
        [
            Reconstruction(id=VictimId(1, 0), batch=None, failure="the loss became NaN"),
            Reconstruction(id=VictimId(1, 0), batch=Batch(broken, batch.labels)),
            Reconstruction(id=VictimId(1, 0), batch=Batch(torch.zeros(2, 3, 12, 12), batch.labels)),
            Reconstruction(id=VictimId(1, 0), batch=Batch(batch.inputs[1:], batch.labels[1:])),
        ],
        [batch] * 4,
    )
    failed = [[image.failure is not None for image in score.images] for score in scores]
    assert failed == [[True, True], [False, True], [True, True], [True, False]]
    assert scores[0].images[0].failure == "the loss became NaN"
    assert all(bool(image.values) == (image.failure is None) for score in scores for image in score.images)


def test_wrong_input_is_refused():
    with pytest.raises(UserError, match="truths are expected to be as many"):
        evaluate_all([], [truth()])
    other = Batch(torch.zeros(1, 3, 12, 12), torch.tensor([0]))
    with pytest.raises(UserError, match="truths are expected to have one shape"):
        evaluate_all([guess_of(truth(1), [0]), guess_of(other, [0])], [truth(1), other])


def test_noise_ratio_is_measured_where_an_evaluation_network_is_given(tmp_path):
    network = EvaluationNetwork(input_shape=(1, 12, 12), widths=(2, 2, 2))
    save_evaluator(network, tmp_path / "d", {})
    batch = truth()
    guess = guess_of(batch, torch.arange(3))
    assert "noise_ratio" not in evaluate(guess, batch).images[0].values
    functions = {"noise_ratio": noise_ratio(str(tmp_path / "d"), (1, 12, 12))}
    score = evaluate(guess, batch, functions=functions)
    expected = network(guess.batch.inputs.clamp(0, 1)).tolist()
    assert [i.values["noise_ratio"] for i in score.images] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UserError, match="1x8x8"):
        noise_ratio(str(tmp_path / "d"), (1, 8, 8))


def test_without_the_truth_the_attacker_s_certainty_stays():
    id, batch = VictimId(1, 0, 0), Batch(torch.rand(2, 1, 4, 4), torch.zeros(2).long())
    each = (Certainty.PROVEN, Certainty.APPROXIMATE)
    found = [Reconstruction(id=id, batch=batch, certainties=each), Reconstruction(id=id, batch=None)]
    sure, none = [unjudged(one, (2, 1, 4, 4)) for one in found]
    assert tuple(image.certainty for image in sure.images) == each and not any(image.failure for image in sure.images)
    assert {image.failure for image in none.images} == {"The attack made no guess."}


def test_guesses_beyond_the_range_are_matched_as_they_are_compared():
    truth = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).view(2, 1, 1, 2)
    guess = torch.tensor([[0.0, 0.5], [1.5, 2.5]]).view(2, 1, 1, 2)
    labels = torch.zeros(2, dtype=torch.long)
    found = match(Reconstruction(id=VictimId(1, 0), batch=Batch(guess, labels)), Batch(truth, labels))
    assert found.order.tolist() == [0, 1], "in the other order they are farther apart once they are clamped"
    assert float((found.guesses - truth).square().sum()) == pytest.approx(1.25)
    guess[1] = torch.inf
    found = match(Reconstruction(id=VictimId(1, 0), batch=Batch(guess, labels)), Batch(truth, labels))
    assert found.order.tolist() == [0, -1], "what is not finite is no guess"
