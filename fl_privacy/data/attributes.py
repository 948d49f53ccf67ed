"""Data sets with an attribute in addition to the class, the target of attribute inference."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fl_privacy.data.datasets import Dataset, load_data
from fl_privacy.data.examples import Examples, expect_images
from fl_privacy.errors import UserError


def load_with_attribute(
    name: str,
    *,
    task: Mapping[str, Sequence[str]] | None = None,
    attribute_column: str | None = None,
    label_column: str | None = None,
    root: str | None = None,
    image_size: int | None = None,
    channels: int | None = None,
) -> Dataset:
    """Load a data set whose examples have an attribute in addition to their class.

    Args:
        name: name of a data set, see ``load_data`` for other arguments.
        task: coarse classes, each a list of the data set's classes; an example's original class becomes its attribute.
        attribute_column: column of the attributes, instead of ``task``.

    Raises:
        UserError: there is no such data set or column, or ``task`` does not contain each class once.
    """
    if (task is None) == (attribute_column is None):
        raise UserError(
            "An attribute is expected to be that of data.attribute_column or the class within data.task, but got"
            f" {'neither' if task is None else 'both'}; set one of them."
        )
    data = load_data(
        name, root=root, image_size=image_size, channels=channels, label_column=label_column,
        group_column=attribute_column,
    )  # fmt: skip
    train, test = (expect_images(split, "An attribute") for split in (data.train, data.test))
    if task is not None:
        return replace(data, train=coarse(train, task), test=coarse(test, task))
    number = 1 + max(int(part.groups.max()) for part in (train, test) if part.groups is not None)
    names = tuple(map(str, range(number)))
    return replace(data, train=_by_group(train, names), test=_by_group(test, names))


def coarse(examples: Examples, task: Mapping[str, Sequence[str]]) -> Examples:
    """Return ``examples`` with the classes of ``task``, and their original class as attribute.

    Raises:
        UserError: ``task`` does not contain each class once.
    """
    listed = [str(own) for group in task.values() for own in group]
    wrong = [n for n in examples.class_names if listed.count(n) != 1]
    wrong += [n for n in listed if n not in examples.class_names]
    if wrong or len(task) < 2:
        raise UserError(
            "data.task is expected to be two lists or more that have each class once, but"
            f" {(wrong or ['it'])[0]} is not so; the classes are {', '.join(examples.class_names[:20])}."
        )
    place = {str(own): number for number, group in enumerate(task.values()) for own in group}
    labels = torch.tensor([place[name] for name in examples.class_names])[examples.labels]
    return replace(
        examples,
        labels=labels,
        class_names=tuple(map(str, task)),
        attributes=examples.labels,
        attribute_names=examples.class_names,
    )


def _by_group(examples: Examples, names: tuple[str, ...]) -> Examples:
    return replace(examples, attributes=examples.groups, attribute_names=names)
