"""Which column is which, and what the labels are called."""

import pytest
import torch

from fl_privacy.data.examples import IMAGE_COLUMNS, LABEL_COLUMNS, encode_labels, find_column
from fl_privacy.errors import UserError


@pytest.mark.parametrize(
    ("columns", "image", "label"),
    [
        (["img", "fine_label", "coarse_label"], "img", "fine_label"),
        (["image", "label"], "image", "label"),
        (["image", "writer_id", "hsf_id", "character"], "image", "character"),
    ],
)
def test_usual_names_are_found(columns, image, label):
    assert find_column(columns, None, IMAGE_COLUMNS, kind="image", name="some") == image
    assert find_column(columns, None, LABEL_COLUMNS, kind="label", name="some") == label
    assert find_column(columns, columns[1], LABEL_COLUMNS, kind="label", name="some") == columns[1]


def test_case_decides_only_between_two_columns():
    """The hub's CelebA has Smiling, other copies smiling."""
    assert find_column(["image", "smiling"], "Smiling", LABEL_COLUMNS, kind="label", name="celeba") == "smiling"
    both = ["image", "smiling", "Smiling"]
    assert find_column(both, "Smiling", LABEL_COLUMNS, kind="label", name="celeba") == "Smiling"


@pytest.mark.parametrize("chosen", [None, "labell"])
def test_missing_column_lists_what_there_is(chosen):
    with pytest.raises(UserError, match=r"image, kind; set data\.label_column") as error:
        find_column(["image", "kind"], chosen, LABEL_COLUMNS, kind="label", name="some")
    assert chosen is None or chosen in str(error.value)


def test_named_classes_keep_their_numbers():
    (train, test), names = encode_labels([[2, 0], [1]], ["a", "b", "c"], "label", "some")
    assert train.tolist() == [2, 0]
    assert test.tolist() == [1]
    assert names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("parts", "names", "codes"),
    [
        ([["dog", "cat"], ["dog"]], ("cat", "dog"), [1, 0, 1]),
        ([[70, 5, 5], [9]], ("5", "9", "70"), [2, 0, 0, 1]),
        ([[-1, 1], [1]], ("-1", "1"), [0, 1, 1]),
        ([[True, False], [True]], ("not Smiling", "Smiling"), [1, 0, 1]),
    ],
)
def test_other_values_are_classes_alike_in_both_parts(parts, names, codes):
    encoded, found = encode_labels(parts, None, "Smiling", "some")
    assert found == names
    assert torch.cat(encoded).tolist() == codes
    assert torch.cat(encoded).dtype == torch.int64


@pytest.mark.parametrize(
    ("parts", "names", "words"),
    [
        ([[0, -1]], ["a", "b"], "within 0..1, but got -1..0"),
        ([[0, 2]], ["a", "b"], "but got 0..2"),
        ([["a", None]], None, "missing"),
        ([[1, 1]], None, "at least 2 classes"),
        ([[0, 1, -1], [1]], None, "1 examples have -1, the usual mark"),
        ([[0.0, 1.0], [float("nan")]], None, "1 examples have NaN"),
        ([[0.0, 1.0], [float("nan")]], ["a", "b"], "1 examples have NaN"),
    ],
)
def test_labels_that_are_none(parts, names, words):
    with pytest.raises(UserError, match=words):
        encode_labels(parts, names, "label", "some")
