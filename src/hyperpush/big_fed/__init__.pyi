from .algorithm import BiGFed as BiGFed
from .cosine import Cosine as Cosine
from .fesem import FeSEM as FeSEM
from .flhc import FLHC as FLHC
from .structure import Graph as Graph
