"""Attacks that solve equations for the inputs behind a gradient."""

from fl_privacy.attacks.exact.attack import ExactInversion
from fl_privacy.attacks.exact.cocktail_party import CocktailParty
from fl_privacy.attacks.exact.first_layer import AnalyticInversion

__all__ = ["AnalyticInversion", "CocktailParty", "ExactInversion"]
