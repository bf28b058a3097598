from .algorithm import BiGFed as BiGFed
from .cosine import Cosine as Cosine
