"""Metrics of texts against values worked out by hand."""

import torch

from fl_privacy.measure import evaluate_all
from fl_privacy.measure.texts import exact_match, rouge_2, rouge_l, token_f1, token_precision, token_recall
from fl_privacy.types import Batch, Reconstruction, VictimId


def test_each_metric_by_hand() -> None:
    truth = torch.tensor([[1, 2, 3, 4, -1], [1, 2, 3, 4, -1], [5, 5, 6, -1, -1]])
    guess = torch.tensor([[1, 2, 3, 4, -1], [4, 3, 2, 9, -1], [5, 6, 6, 6, 6]])
    assert token_precision(guess, truth).tolist() == [1, 0.75, 0.4]
    assert torch.allclose(token_recall(guess, truth), torch.tensor([1, 0.75, 2 / 3], dtype=torch.float64))
    assert torch.allclose(token_f1(guess, truth), torch.tensor([1, 0.75, 0.5], dtype=torch.float64))
    assert torch.allclose(rouge_2(guess, truth), torch.tensor([1, 0, 1 / 3], dtype=torch.float64))
    assert torch.allclose(rouge_l(guess, truth), torch.tensor([1, 0.25, 0.5], dtype=torch.float64))
    assert exact_match(guess, truth).tolist() == [1, 0, 0]


def test_guesses_are_matched_to_their_texts_and_labels_go_with_them() -> None:
    truth = Batch(torch.tensor([[1, 2, 3], [4, 5, -1]]), torch.tensor([0, 1]))
    found = Reconstruction(id=VictimId(0, 0, 0), batch=Batch(truth.inputs.flip(0), truth.labels.flip(0)))
    lost = Reconstruction(id=VictimId(0, 0, 1), batch=None, failure="noise")
    scores = evaluate_all([found, lost], [truth, truth])
    assert [image.values["exact_match"] for image in scores[0].images] == [1, 1]
    assert [image.values["label_correct"] for image in scores[0].images] == [1, 1]
    assert torch.equal(scores[0].guesses, truth.inputs)
    assert [image.failure for image in scores[1].images] == ["noise", "noise"]


class _Parts:
    """Token 2 goes on with the word before it, token 0 is special."""

    special = frozenset({0})

    def word_numbers(self, tokens: torch.Tensor) -> torch.Tensor:
        words = []
        for row in tokens.tolist():
            joined: list[int] = []
            for token in row:
                if token == 2 and joined:
                    joined[-1] = 10 * joined[-1] + 2
                elif token > 0:
                    joined.append(token)
            words.append(joined + [-1] * (len(row) - len(joined)))
        return torch.tensor(words)


def test_special_tokens_count_as_none_and_words_are_of_their_parts() -> None:
    truth = Batch(torch.tensor([[0, 1, 2, 3]]), torch.tensor([0]))
    guess = Batch(torch.tensor([[0, 1, 3, 2]]), torch.tensor([0]))
    found = Reconstruction(id=VictimId(0, 0, 0), batch=guess)
    values = evaluate_all([found], [truth], language=_Parts())[0].images[0].values
    assert values["token_f1"] == 1 and values["rouge_1"] == 0 and values["exact_match"] == 0
