"""Personal models for every client: recipes that define the personal parts, baselines, and accuracies."""

from hyperpush.personalize.baselines import ClusteredFL as ClusteredFL
from hyperpush.personalize.baselines import FedAvgPlus as FedAvgPlus
from hyperpush.personalize.baselines import FedEM as FedEM
from hyperpush.personalize.baselines import FedProx as FedProx
from hyperpush.personalize.baselines import PFedMe as PFedMe
from hyperpush.personalize.fit import PersonalModel as PersonalModel
from hyperpush.personalize.fit import PersonalSolution as PersonalSolution
from hyperpush.personalize.fit import PersonalTraining as PersonalTraining
from hyperpush.personalize.fit import fit as fit
from hyperpush.personalize.recipe import Model as Model
from hyperpush.personalize.recipe import Product as Product
from hyperpush.personalize.recipe import Recipe as Recipe
from hyperpush.personalize.recipes import DA as DA
from hyperpush.personalize.recipes import MTL as MTL
from hyperpush.personalize.recipes import PL as PL
from hyperpush.personalize.recipes import Clean as Clean
from hyperpush.personalize.recipes import Head as Head
from hyperpush.personalize.recipes import Interpolation as Interpolation
from hyperpush.personalize.recipes import L2Rates as L2Rates
from hyperpush.personalize.recipes import Shared as Shared
from hyperpush.personalize.scores import Accuracy as Accuracy
from hyperpush.personalize.scores import Scores as Scores
from hyperpush.personalize.scores import accuracy as accuracy
from hyperpush.personalize.scores import scores as scores
