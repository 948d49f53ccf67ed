"""Data: loading any set of images, texts or rows into memory, and sharing it out between clients."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.data.attributes import load_with_attribute
    from fl_privacy.data.datasets import Dataset, load_data
    from fl_privacy.data.examples import (
        Examples,
        LabelledExamples,
        TableExamples,
        TextExamples,
        Vocabulary,
        expect_images,
        images_of,
        texts_of,
    )
    from fl_privacy.data.partition import (
        ClassShares,
        Dirichlet,
        EvenClasses,
        Iid,
        Natural,
        Partition,
        Pathological,
        partition_table,
    )
    from fl_privacy.data.tables import load_table, table_of
    from fl_privacy.data.texts import load_text

_HOMES = {
    "fl_privacy.data.attributes": ("load_with_attribute",),
    "fl_privacy.data.datasets": (
        "Dataset",
        "load_data",
    ),
    "fl_privacy.data.examples": (
        "Examples",
        "LabelledExamples",
        "TableExamples",
        "TextExamples",
        "Vocabulary",
        "expect_images",
        "images_of",
        "texts_of",
    ),
    "fl_privacy.data.partition": (
        "ClassShares",
        "Dirichlet",
        "EvenClasses",
        "Iid",
        "Natural",
        "Partition",
        "Pathological",
        "partition_table",
    ),
    "fl_privacy.data.tables": (
        "load_table",
        "table_of",
    ),
    "fl_privacy.data.texts": ("load_text",),
}

__all__ = [
    "ClassShares",
    "Dataset",
    "Dirichlet",
    "EvenClasses",
    "Examples",
    "Iid",
    "LabelledExamples",
    "Natural",
    "Partition",
    "Pathological",
    "TableExamples",
    "TextExamples",
    "Vocabulary",
    "expect_images",
    "images_of",
    "load_data",
    "load_table",
    "load_text",
    "load_with_attribute",
    "partition_table",
    "table_of",
    "texts_of",
]

__getattr__ = on_demand(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
