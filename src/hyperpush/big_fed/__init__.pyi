from .algorithm import BiGFed as BiGFed
from .clustered import FLHC as FLHC
from .clustered import FeSEM as FeSEM
from .cosine import Cosine as Cosine
from .structure import Graph as Graph
