from .fit import LinearModel as LinearModel
from .fit import fit as fit
from .read import Tables as Tables
from .read import read as read
from .task import TableTask as TableTask
