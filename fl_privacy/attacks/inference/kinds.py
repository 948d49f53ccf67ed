"""Questions that inference attacks answer, other than reconstruction."""

from enum import StrEnum


class About(StrEnum):
    """The question of an inference attack.

    Attributes:
        MEMBERSHIP: "Did that client train on this example?"
        SOURCE: "Whose is this example?"
        ATTRIBUTE: "What is the example behind this update like, apart from its class?"
        PROPERTY: "Which share of a client's examples is of each class?"
        CANARIES: "Which canaries, each inserted with probability 1/2, took part?"
    """

    MEMBERSHIP = "membership"
    SOURCE = "source"
    ATTRIBUTE = "attribute"
    PROPERTY = "property"
    CANARIES = "canaries"
