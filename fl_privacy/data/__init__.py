"""Data: loading any image data set into memory, and sharing it out between clients."""

from fl_privacy.data.attributes import load_with_attribute
from fl_privacy.data.examples import Examples
from fl_privacy.data.loader import Dataset, load_data
from fl_privacy.data.partition import (
    Dirichlet,
    Iid,
    Natural,
    Partition,
    Pathological,
    partition_table,
)

__all__ = [
    "Dataset",
    "Dirichlet",
    "Examples",
    "Iid",
    "Natural",
    "Partition",
    "Pathological",
    "load_data",
    "load_with_attribute",
    "partition_table",
]
