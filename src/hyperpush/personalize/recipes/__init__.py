"""Recipes for personal parts of a model, one file each."""

from hyperpush.personalize.recipes.clean import Clean as Clean
from hyperpush.personalize.recipes.da import DA as DA
from hyperpush.personalize.recipes.head import Head as Head
from hyperpush.personalize.recipes.interpolation import Interpolation as Interpolation
from hyperpush.personalize.recipes.l2rates import L2Rates as L2Rates
from hyperpush.personalize.recipes.mtl import MTL as MTL
from hyperpush.personalize.recipes.pl import PL as PL
from hyperpush.personalize.recipes.shared import Shared as Shared
