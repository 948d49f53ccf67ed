"""Data sets by their usual names, from the Hugging Face hub."""

from dataclasses import dataclass
from functools import cache

from fl_privacy.data.source import ROOT_VARIABLE, Tables, file_stamps, require
from fl_privacy.errors import UserError


@dataclass(frozen=True)
class HubData:
    """A data set on the hub; downloaded once, then read from the hub's own cache."""

    path: str
    config: str | None = None

    def identity(self) -> list[str]:
        """Paths, times and sizes of the downloaded files."""
        files = sorted(file["filename"] for table in self.tables().values() for file in table.cache_files)
        return [self.path, str(self.config), *file_stamps(files)]

    def tables(self) -> Tables:
        """Download and open all splits."""
        return _open(self.path, self.config)


KNOWN: dict[str, HubData] = {
    "celeba": HubData("flwrlabs/celeba"),
    "cifar10": HubData("uoft-cs/cifar10"),
    "cifar100": HubData("uoft-cs/cifar100"),
    "fashion_mnist": HubData("zalando-datasets/fashion_mnist"),
    "femnist": HubData("flwrlabs/femnist"),
    "lfw": HubData("logasja/lfw", "default"),
    "mnist": HubData("ylecun/mnist"),
    "svhn": HubData("ufldl-stanford/svhn", "cropped_digits"),
    "tiny_imagenet": HubData("zh-plus/tiny-imagenet"),
}
"""Name in this package -> where it is on the hub."""


def hub_source(name: str) -> HubData:
    """A known data set, or any ``owner/name`` of the hub.

    Raises:
        UserError: ``name`` is neither.
    """
    if name in KNOWN:
        return KNOWN[name]
    if name.count("/") == 1:
        return HubData(name)
    raise UserError(
        f"data.name is expected to be mnist_mini, photograph, image_folder, one of {', '.join(KNOWN)}, an owner/name of"
        f" the Hugging Face hub, or a folder in data.root or {ROOT_VARIABLE}, but got {name!r}."
    )


@cache
def _open(path: str, config: str | None) -> Tables:
    hf = require("datasets")
    try:
        tables: Tables = hf.load_dataset(path, config)
    except (OSError, ValueError, hf.exceptions.DatasetsError) as error:
        raise UserError(
            f"Data set {path} can't be had from the Hugging Face hub: {str(error).splitlines()[0].rstrip('.')};"
            f" check the network, or put <split>.parquet files into a folder and set data.root or {ROOT_VARIABLE}."
        ) from error
    return tables
