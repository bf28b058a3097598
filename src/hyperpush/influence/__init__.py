"""Find training examples, groups and clients that help or hurt all clients: predicted, and checked by retraining."""

from hyperpush.influence.curvature import Curvature as Curvature
from hyperpush.influence.curvature import curvature as curvature
from hyperpush.influence.effects import Effects as Effects
from hyperpush.influence.groups import group_score as group_score
from hyperpush.influence.removal import agreement as agreement
from hyperpush.influence.removal import retrain as retrain
from hyperpush.influence.scores import Influence as Influence
from hyperpush.influence.scores import scores as scores
from hyperpush.influence.weights import Weights as Weights
from hyperpush.influence.weights import with_weights as with_weights
from hyperpush.influence.weights import without as without
