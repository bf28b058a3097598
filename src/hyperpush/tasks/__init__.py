"""Ready-made tasks, and what helps to make one.

`logistic` and `quadratic` generate their data from a number of clients and a seed. `cleaning` takes data with the
clients on axis 0. `clients(load, n)` loads data by client: nobody holds all.
"""

from hyperpush.data.sets import Clients
from hyperpush.tasks.cleaning import cleaning as cleaning
from hyperpush.tasks.logistic import logistic as logistic
from hyperpush.tasks.quadratic import quadratic as quadratic

clients = Clients
