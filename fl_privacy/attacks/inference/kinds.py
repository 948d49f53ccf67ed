"""Questions that inference attacks answer, other than reconstruction."""

from enum import StrEnum


class About(StrEnum):
    """The question of an inference attack."""

    MEMBERSHIP = "membership"  # did that client train on this example?
    SOURCE = "source"  # whose is this example?
    ATTRIBUTE = "attribute"  # what is the example behind this update like, apart from its class?
    PROPERTY = "property"  # which share of a client's examples is of each class?
    CANARIES = "canaries"  # which canaries, each inserted with probability 1/2, took part?
