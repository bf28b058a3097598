from .fit import Model as Model
from .fit import fit as fit
from .read import Tables as Tables
from .read import read as read
from .task import TableTask as TableTask
