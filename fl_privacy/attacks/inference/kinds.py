"""What can be inferred from updates beside images."""

from enum import StrEnum


class About(StrEnum):
    """The question of an inference attack.

    Attributes:
        MEMBERSHIP: was this example among what that client trains on?
        SOURCE: which client's is this example?
        ATTRIBUTE: what is the example behind this update like, beside its class?
        PROPERTY: which share of a client's examples is of each class?
        CANARIES: which canaries took part, each inserted with probability 1/2?
    """

    MEMBERSHIP = "membership"
    SOURCE = "source"
    ATTRIBUTE = "attribute"
    PROPERTY = "property"
    CANARIES = "canaries"
