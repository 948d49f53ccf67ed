"""Small generators for tests."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from fl_privacy.models.pretrained.generator import (
    GeneratorShape,
    ImageGenerator,
    Provenance,
    image_fingerprints,
    save_generator,
)


def network(shape: GeneratorShape, seed: int = 0) -> ImageGenerator:
    """Untrained, with weights large enough that its images differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = ImageGenerator(shape)
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1 and "classes" not in name:
                torch.nn.init.normal_(parameter, 0, (0.5 if "layers.0" in name else 1.5) / parameter.shape[0] ** 0.5)
    return made.eval().requires_grad_(False)


@cache
def generator_file(*, channels: int = 3, size: int = 8, classes: int = 5, seed: int = 0) -> str:
    """Make a file with a generator; the same for the same arguments."""
    shape = GeneratorShape(channels=channels, size=size, latent=6, width=4, num_classes=classes, embedding=3)
    seen = torch.randint(256, (20, channels, size, size), generator=torch.Generator().manual_seed(7)).to(torch.uint8)
    about = Provenance(data="noise", split="train", images=20, fingerprints=image_fingerprints(seen))
    file = Path(mkdtemp(prefix="generator-")) / "g.safetensors"
    save_generator(network(shape, seed), about, file, {})
    return str(file)
