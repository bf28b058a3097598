"""The assumption behind every claimed ε; results that report an ε carry it."""

ASSUMPTION = (
    "ε assumes ideal real-valued noise. Noise is drawn as float32 or float64. "
    "An attacker who lists the representable draws can tell two data sets apart from one released number. "
    "Hardened samplers are not there yet."
)
