"""Ready-made tasks, and what helps to make one."""

from hyperpush.data.sets import Clients
from hyperpush.tasks.cleaning import cleaning as cleaning
from hyperpush.tasks.logistic import logistic as logistic
from hyperpush.tasks.quadratic import quadratic as quadratic
from hyperpush.tasks.rates import rated as rated
from hyperpush.tasks.representation import representation as representation

clients = Clients
