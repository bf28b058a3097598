"""Ready-made tasks, and a loader for the data of a task.

`logistic` and `quadratic` generate their data from a number of clients and a seed. `cleaning` takes data with the
clients on axis 0. `clients(load, n)` loads data by client, so that a process can hold only a part.
"""

from hyperpush.data.sets import Clients
from hyperpush.tasks.cleaning import cleaning as cleaning
from hyperpush.tasks.logistic import logistic as logistic
from hyperpush.tasks.quadratic import quadratic as quadratic

clients = Clients
