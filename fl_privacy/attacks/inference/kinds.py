"""Questions that inference attacks answer."""

from enum import StrEnum


class About(StrEnum):
    """Kind of fact that an inference attack infers."""

    MEMBERSHIP = "membership"  # did that client train on this example?
    SOURCE = "source"  # whose is this example?
    ATTRIBUTE = "attribute"  # which attribute, other than the class, has the example behind this update?
    PROPERTY = "property"  # which share of a client's examples is of each class?
    CANARIES = "canaries"  # which canaries, each inserted with probability 1/2, took part?
