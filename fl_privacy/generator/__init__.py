"""Generators of images, trained on public ones: what attacks look for their reconstructions among."""

from fl_privacy.generator.find import expect_generator, find_generator
from fl_privacy.generator.network import GeneratorShape, ImageDiscriminator, ImageGenerator
from fl_privacy.generator.provenance import Provenance, image_fingerprints
from fl_privacy.generator.store import (
    TrainedGenerator,
    load_generator,
    load_training,
    read_generator_header,
    save_generator,
    save_training,
)
from fl_privacy.generator.training import GeneratorPlan, GeneratorTraining

__all__ = [
    "GeneratorPlan",
    "GeneratorShape",
    "GeneratorTraining",
    "ImageDiscriminator",
    "ImageGenerator",
    "Provenance",
    "TrainedGenerator",
    "expect_generator",
    "find_generator",
    "image_fingerprints",
    "load_generator",
    "load_training",
    "read_generator_header",
    "save_generator",
    "save_training",
]
