"""Data: loading any image data set into memory, and sharing it out between clients."""

from fl_privacy.data.examples import Examples
from fl_privacy.data.loader import Dataset, load_data, load_examples
from fl_privacy.data.overview import partition_picture, partition_table
from fl_privacy.data.partition import Dirichlet, Iid, Natural, Partition, Pathological

__all__ = [
    "Dataset",
    "Dirichlet",
    "Examples",
    "Iid",
    "Natural",
    "Partition",
    "Pathological",
    "load_data",
    "load_examples",
    "partition_picture",
    "partition_table",
]
